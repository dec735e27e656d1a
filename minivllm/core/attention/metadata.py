"""ModelInput: one step as tensors, the only thing that a forward pass is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from minivllm.core.attention.kv_pool import KVCachePool


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each sequence's queries stand among the packed tokens, on the host (reading it never waits for a device).

    Attributes:
        query_starts: (S + 1,) int64; the queries of sequence i are packed rows query_starts[i] .. query_starts[i + 1].
        context_lens: (S,) int64; tokens that the last query of sequence i attends to, itself included.
    """

    query_starts: npt.NDArray[np.int64]
    context_lens: npt.NDArray[np.int64]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    @property
    def query_lens(self) -> npt.NDArray[np.int64]:
        """(S,) queries of each sequence in this step, each at least 1."""
        return np.diff(self.query_starts)


@dataclass(frozen=True)
class ModelInput:
    """T tokens of S sequences, packed in the order of the step. The queries of a sequence are the last of its context.

    Attributes:
        input_ids: (T,) int64.
        positions: (T,) int64, the place of each token in its sequence.
        block_tables: (S, max_blocks) int32, physical blocks in token order; rows are filled up with the padding block.
        slot_mapping: (T,) int64, the flat slot (block * block_size + offset) where each token's K and V go.
        context_lens: (S,) int32, tokens of each sequence that are written once this step is done.
        kv_cache: the pool.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    kv_cache: KVCachePool

    @cached_property
    def layout(self) -> PackedLayout:
        """Derived from `positions` and `context_lens`: the first query of sequence i stands at position p, and
        context_len - p queries follow. Whoever built the input on the host has set it (`remember_layout`)."""
        positions = self.positions.cpu().numpy()
        context_lens = self.context_lens.cpu().numpy().astype(np.int64)
        starts = np.zeros(len(context_lens) + 1, dtype=np.int64)
        for index, context_len in enumerate(context_lens):
            starts[index + 1] = starts[index] + context_len - positions[starts[index]]
        return PackedLayout(starts, context_lens)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """What an attention backend works out once a step and reuses in every layer, by a key of its own."""
        return {}

    def remember_layout(self, layout: PackedLayout) -> None:
        """Saves `layout` from reading the tensors back, which on CUDA would wait for the device."""
        self.__dict__["layout"] = layout
