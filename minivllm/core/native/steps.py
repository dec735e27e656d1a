"""A step as the C++ library takes it."""

from __future__ import annotations

from typing import Any

from minivllm.core.attention.metadata import AttentionMetadata
from minivllm.core.native.bindings import StepCall


def describe_step(metadata: AttentionMetadata) -> tuple[StepCall, tuple[Any, ...]]:
    """Returns the step, and the tensors that must outlive it besides `metadata`."""
    tables = metadata.block_tables.contiguous()
    slots = metadata.slot_mapping.contiguous()
    step = StepCall(
        metadata.num_sequences,
        slots.shape[0],
        metadata.query_start_loc_cpu.ctypes.data,
        metadata.seq_lens_cpu.ctypes.data,
        tables.data_ptr(),
        tables.stride(0),
        slots.data_ptr(),
    )
    return step, (tables, slots)
