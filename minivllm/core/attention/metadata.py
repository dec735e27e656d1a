"""ModelInput and AttentionMetadata: the tensors of one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from minivllm.core.kv_cache import flat_slots

if TYPE_CHECKING:
    from minivllm.core.attention.kv_pool import KVCachePool

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Describes to an attention backend the T packed tokens of S sequences.

    The queries of a sequence are the last tokens of its context. What planning a step reads is on the host, so that it
    never waits for a device.

    Attributes:
        query_start_loc: (S + 1,) int64, host; the queries of sequence i are rows query_start_loc[i] .. [i + 1].
        seq_lens: (S,) int64, host, context length of each sequence, the tokens of this step included.
        block_tables: (S, max_blocks) int32, physical blocks in token order, padded with the padding block.
        slot_mapping: (T,) int64, flat slot of each token's K and V.
        kv_cache: the pool.
    """

    query_start_loc: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    kv_cache: KVCachePool
    _plans: dict[Hashable, Any] = field(default_factory=dict)

    def plan(self, make: Callable[..., Plan], *arguments: Hashable) -> Plan:
        """Returns `make(self, *arguments)`. Calls it once per step, so that layers share the result."""
        key = make, arguments
        if key not in self._plans:
            self._plans[key] = make(self, *arguments)
        return cast("Plan", self._plans[key])


@dataclass(frozen=True, slots=True, eq=False)
class ModelInput:
    """Input of one forward pass: T packed tokens.

    Attributes:
        input_ids: (T,) int64.
        positions: (T,) int64, position of each token in its sequence.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata

    @classmethod
    def build(
        cls,
        token_ids: Sequence[int],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        block_tables: npt.NDArray[np.int32],
        kv_cache: KVCachePool,
    ) -> ModelInput:
        """Packs tokens starts[i] .. ends[i] of each sequence i and copies the tensors to the pool's device.

        Args:
            token_ids: the T tokens, in the order of the sequences.
            block_tables: (S, max_blocks); row i covers ends[i] tokens.
        """
        query_lens = ends - starts
        query_start_loc = np.concatenate(([0], np.cumsum(query_lens)))
        positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], query_lens)
        rows = np.repeat(np.arange(len(starts)), query_lens)
        blocks = block_tables[rows, positions // kv_cache.block_size].astype(np.int64)
        slots = flat_slots(blocks, positions % kv_cache.block_size, kv_cache.block_size)
        device = kv_cache.device
        return cls(
            input_ids=to_device(np.array(token_ids, dtype=np.int64), device),
            positions=to_device(positions, device),
            attention=AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=ends,
                block_tables=to_device(block_tables, device),
                slot_mapping=to_device(slots, device),
                kv_cache=kv_cache,
            ),
        )

    @property
    def last_rows(self) -> npt.NDArray[np.int64]:
        """(S,) row of each sequence's last token, on the host."""
        return self.attention.query_start_loc[1:] - 1


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a tensor that shares the array's memory on a CPU, and an asynchronous copy on other devices."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
