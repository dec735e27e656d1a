"""A step as the C++ library takes it."""

from __future__ import annotations

from typing import Any

from minivllm.core.attention.metadata import ModelInput
from minivllm.core.native.bindings import StepCall


def describe_step(model_input: ModelInput) -> tuple[StepCall, tuple[Any, ...]]:
    """The step, and what must stay alive as long as it is used."""
    layout = model_input.layout
    tables = model_input.block_tables.contiguous()
    slots = model_input.slot_mapping.contiguous()
    step = StepCall(
        layout.num_sequences,
        slots.shape[0],
        layout.query_starts.ctypes.data,
        layout.context_lens.ctypes.data,
        tables.data_ptr(),
        tables.stride(0),
        slots.data_ptr(),
    )
    return step, (layout, tables, slots)
