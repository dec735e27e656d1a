"""Packed weights for the C++ GEMMs, in the number format that is fastest on the CPU."""

from __future__ import annotations

import ctypes
import enum
import logging

import torch

from minivllm.core.native import bindings
from minivllm.core.native.resources import prefer_huge_pages

logger = logging.getLogger(__name__)

PANEL_WIDTH = 32
"""Columns per panel, as in `gemm_packing.hpp`; N is padded to a multiple of it."""

_ROWS_PER_CALL = 4096
"""Rows of a weight that are converted to float32 at once; a multiple of PANEL_WIDTH."""


class NumberFormat(enum.IntEnum):
    """Types of weights and activations in a GEMM, as in `gemm_packing.hpp`."""

    FLOAT = 0
    INT16 = 1
    INT8 = 2
    BFLOAT16 = 3  # AMX


class Arena:
    """Allocates packed weights from large chunks, which the kernel can back with huge pages."""

    def __init__(self, chunk_bytes: int = 32 * 1024**2) -> None:
        self._chunk_bytes = chunk_bytes
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns `num_bytes` uninitialized bytes, aligned to a cache line."""
        num_bytes = -(-num_bytes // 64) * 64
        if num_bytes > self._free.numel():
            self._free = torch.empty(max(num_bytes, self._chunk_bytes), dtype=torch.uint8, device="cpu")
            prefer_huge_pages(self._free)
        allocated, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return allocated


def empty_float32(*shape: int) -> torch.Tensor:
    """Returns uninitialized CPU memory for C++, whatever torch's default dtype and device are set to."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def pack(
    library: ctypes.CDLL,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    number_format: NumberFormat,
    arena: Arena | None = None,
) -> bindings.PackedLinear:
    """Packs `weight` (N, K), K a multiple of 4, and `bias` (N,) or None, in memory of `arena` if given."""
    num_outputs, depth = weight.shape
    columns = -(-num_outputs // PANEL_WIDTH) * PANEL_WIDTH
    panel_bytes = library.minivllm_panel_bytes(number_format, depth)
    segments = library.minivllm_num_segments(number_format, depth)
    data = (arena or Arena(0)).allocate(columns // PANEL_WIDTH * panel_bytes)
    scale = empty_float32(columns).zero_()
    compensation = torch.zeros(columns * segments, dtype=torch.int32, device="cpu")
    max_norm = 0.0
    for first in range(0, num_outputs, _ROWS_PER_CALL):
        rows = weight[first : first + _ROWS_PER_CALL].float().contiguous()
        norm = library.minivllm_pack(
            number_format,
            rows.data_ptr(),
            rows.shape[0],
            depth,
            data[first // PANEL_WIDTH * panel_bytes :].data_ptr(),
            scale[first:].data_ptr(),
            compensation[first * segments :].data_ptr(),
            torch.get_num_threads(),
        )
        max_norm = max(max_norm, norm)
    tensors = [data, scale, compensation]
    if bias is not None:
        padded_bias = empty_float32(columns).zero_()
        padded_bias[:num_outputs] = bias
        tensors.append(padded_bias)
    pointers = [tensor.data_ptr() for tensor in tensors] + [None] * (4 - len(tensors))
    packed = bindings.PackedLinear(*pointers, columns, depth, max_norm, number_format)
    packed.num_outputs, packed.tensors = num_outputs, tensors
    return packed


def gemm(
    library: ctypes.CDLL, workspace: bindings.Workspace, linear: bindings.PackedLinear, states: torch.Tensor
) -> torch.Tensor:
    """Returns states (R, K) times the packed weight, plus its bias: (R, N) float32."""
    states = states.float().contiguous()
    output = empty_float32(states.shape[0], linear.num_outputs)
    library.minivllm_gemm(
        workspace.handle(),
        ctypes.byref(linear),
        states.data_ptr(),
        states.shape[0],
        output.data_ptr(),
        output.stride(0),
        linear.num_outputs,
    )
    return output


def fastest_16_bit_format(library: ctypes.CDLL) -> NumberFormat:
    """Returns the number format of bfloat16 models on this CPU."""
    if library.minivllm_has_amx():
        return NumberFormat.BFLOAT16
    return NumberFormat.INT16 if library.minivllm_has_integer_dot() else NumberFormat.FLOAT


def check_amx(library: ctypes.CDLL) -> None:
    """Compares AMX products with float32, and disables AMX with a warning if they are wrong."""
    if not library.minivllm_has_amx():
        return
    generator = torch.Generator().manual_seed(0)
    weight, states = (empty_float32(rows, 192).normal_(generator=generator) for rows in (70, 150))
    expected = states @ weight.T
    for number_format, max_error in ((NumberFormat.BFLOAT16, 1e-2), (NumberFormat.INT8, 5e-2)):
        found = gemm(library, bindings.Workspace(library), pack(library, weight, None, number_format), states)
        error = float((found - expected).norm() / expected.norm())
        if not error < max_error:
            logger.warning("AMX is disabled: its products are wrong (%s, relative error %.3g)", number_format, error)
            library.minivllm_disable_amx()
            return
