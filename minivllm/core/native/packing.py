"""Weights as the C++ products take them, in the number format that suits the CPU."""

from __future__ import annotations

import ctypes
import enum
import logging
from dataclasses import dataclass

import torch

from minivllm.core.native.bindings import Linear
from minivllm.core.native.memory import prefer_huge_pages
from minivllm.core.native.workspace import Workspace

logger = logging.getLogger(__name__)

PANEL = 32
"""Columns a panel; packed matrices are filled up to whole panels."""

_ROWS_AT_ONCE = 4096
"""Rows of a weight that are turned to float32 at once."""


class NumberFormat(enum.IntEnum):
    """How weights and activations are multiplied; see `gemm.hpp`."""

    FLOAT = 0
    INT16 = 1
    INT8 = 2
    BFLOAT16 = 3  # by the matrix unit


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A projection (N, K), packed. `description` points into the tensors that stand beside it."""

    num_outputs: int
    description: Linear
    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class Arena:
    """Memory for many packed matrices, taken in large pieces: these can lie in large pages, single matrices not."""

    _ALIGNMENT = 64

    def __init__(self, piece_bytes: int = 32 * 1024**2) -> None:
        self._piece_bytes = piece_bytes
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> torch.Tensor:
        """`num_bytes` not yet written bytes, aligned to a line of the cache."""
        num_bytes = -(-num_bytes // self._ALIGNMENT) * self._ALIGNMENT
        if num_bytes > self._free.numel():
            self._free = torch.empty(max(num_bytes, self._piece_bytes), dtype=torch.uint8, device="cpu")
            prefer_huge_pages(self._free)
        taken, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return taken


def cpu_floats(*shape: int) -> torch.Tensor:
    """Memory for C++ to write to. Type and device must be said: the defaults belong to the process, and a caller of
    ours may have set others, or transformers while it loads a model in another thread."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def pack(
    library: ctypes.CDLL,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    number_format: NumberFormat,
    arena: Arena | None = None,
) -> PackedLinear:
    """Packs `weight` (N, K), K a multiple of 4, and `bias` (N,) or None. The bytes come from `arena`, if given."""
    num_outputs, depth = weight.shape
    panels = -(-num_outputs // PANEL)
    panel_bytes = library.minivllm_panel_bytes(number_format, depth)
    data = (arena or Arena(0)).take(panels * panel_bytes)
    scale = cpu_floats(panels * PANEL).zero_()
    stretches = library.minivllm_stretches(number_format, depth)
    offset = torch.zeros(panels * PANEL * stretches, dtype=torch.int32, device="cpu")
    norm = 0.0
    for first in range(0, num_outputs, _ROWS_AT_ONCE):
        rows = weight[first : first + _ROWS_AT_ONCE].float().contiguous()
        panel = first // PANEL
        pointers = (data[panel * panel_bytes :], scale[first:], offset[first * stretches :])
        found = library.minivllm_pack(
            number_format,
            rows.data_ptr(),
            rows.shape[0],
            depth,
            *(tensor.data_ptr() for tensor in pointers),
            torch.get_num_threads(),
        )
        norm = max(norm, found)
    padded_bias = None
    if bias is not None:
        padded_bias = cpu_floats(panels * PANEL).zero_()
        padded_bias[:num_outputs] = bias
    description = Linear(
        data.data_ptr(),
        scale.data_ptr(),
        offset.data_ptr(),
        padded_bias.data_ptr() if padded_bias is not None else None,
        panels * PANEL,
        depth,
        norm,
        number_format,
    )
    tensors = (data, scale, offset) + (() if padded_bias is None else (padded_bias,))
    return PackedLinear(num_outputs, description, tensors)


def apply(library: ctypes.CDLL, workspace: Workspace, linear: PackedLinear, states: torch.Tensor) -> torch.Tensor:
    """(R, K) to (R, N) in float32."""
    states = states.float().contiguous()
    output = cpu_floats(states.shape[0], linear.num_outputs)
    library.minivllm_linear(
        workspace.handle(),
        ctypes.byref(linear.description),
        states.data_ptr(),
        states.shape[0],
        output.data_ptr(),
        output.stride(0),
        linear.num_outputs,
    )
    return output


def format_of_16_bits(library: ctypes.CDLL) -> NumberFormat:
    """The products of weights in 16 bits that are fastest on this CPU."""
    if library.minivllm_has_tiles():
        return NumberFormat.BFLOAT16
    return NumberFormat.INT16 if library.minivllm_has_integer_dot() else NumberFormat.FLOAT


def check_tiles(library: ctypes.CDLL) -> None:
    """Does a few products by the CPU's matrix unit, if there is one, and forbids its use if they are wrong.

    A fast product that is wrong would be worse than a slow one, and nothing else would notice it.
    """
    if not library.minivllm_has_tiles():
        return
    generator = torch.Generator().manual_seed(0)
    weight, states = (cpu_floats(rows, 192).normal_(generator=generator) for rows in (70, 150))
    wanted = states @ weight.T
    for number_format, most in ((NumberFormat.BFLOAT16, 1e-2), (NumberFormat.INT8, 5e-2)):
        found = apply(library, Workspace(library), pack(library, weight, None, number_format), states)
        error = float((found - wanted).norm() / wanted.norm())
        if not error < most:
            logger.warning("this CPU's matrix unit multiplies wrongly (%s, error %.3g): not used", number_format, error)
            library.minivllm_forbid_tiles()
            return
