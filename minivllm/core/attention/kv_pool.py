"""KVCachePool: the memory of all K and V, allocated once at start."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from minivllm.core.errors import ModelLoadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and dtype of K and V, the same in all layers."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block, over all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_size
        return elements * self.dtype.itemsize


class KVCachePool:
    """One tensor for all layers, and a view of it per layer.

    Attributes:
        num_tokens: tokens that fit in the usable blocks.
        num_blocks: usable blocks, ids 0 .. num_blocks - 1. The padding block follows, which pads block tables and
            takes the writes of padding tokens; no query attends to it.
        tensor: (num_layers, 2, num_blocks + 1, num_kv_heads, block_size, head_size).
        key_cache, value_cache: per layer, (num_blocks + 1, num_kv_heads, block_size, head_size). The attention backend
            defines the order of the block_size * head_size elements within one block and head.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.num_blocks = self.padding_block_id = num_blocks
        self.num_tokens = num_blocks * spec.block_size
        self.device = device
        shape = (spec.num_layers, 2, num_blocks + 1, spec.num_kv_heads, spec.block_size, spec.head_size)
        try:
            # Not zeroed: slots are written before they are read.
            self.tensor = torch.empty(shape, dtype=spec.dtype, device=device)
        except RuntimeError as error:
            size = (num_blocks + 1) * spec.block_bytes
            raise ModelLoadError(f"no memory for a KV pool of {num_blocks} blocks ({size:,} bytes): {error}") from error
        self.key_cache = tuple(layer[0] for layer in self.tensor)
        self.value_cache = tuple(layer[1] for layer in self.tensor)
        blocks = f"{num_blocks} blocks of {spec.block_size} tokens = {self.num_tokens} tokens"
        dtype = str(spec.dtype).removeprefix("torch.")
        logger.info("KV pool: %s, %.1f MiB in %s on %s", blocks, self.tensor.nbytes / 2**20, dtype, device)
