"""Replaces the projections of a model: packed weights for the C++ products, or W8A16 in torch without the library."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from minivllm.core.native import library
from minivllm.core.native.bindings import Workspace
from minivllm.core.native.packing import NumberFormat, gemm, pack

logger = logging.getLogger(__name__)

_CHUNK_WEIGHTS = 2**17
"""Weights that `TorchInt8Projection` converts to float32 at a time: 512 KiB, which stays in a core's cache."""


class PackedProjection(nn.Module):
    """Replaces an `nn.Linear`: packed weights, multiplied in C++.

    NumberFormat.INT8 is W8A8: one weight scale per output channel, one activation scale per token.
    """

    def __init__(self, linear: Any, number_format: NumberFormat) -> None:
        super().__init__()
        found = library()
        if found is None:
            raise RuntimeError("the native library is not available")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library = found
        self._packed = pack(found, linear.weight, linear.bias, number_format)
        self._workspace = Workspace(found)
        # Some models read the dtype of their projections' weights.
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        self.bias = None
        self._key = id(self)
        _projections[self._key] = self

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns (..., out_features) of (..., in_features), in the dtype of `states`."""
        if torch.compiler.is_compiling():
            output: torch.Tensor = torch.ops.minivllm.packed_projection(states, self._key, self.out_features)
            return output
        flat = gemm(self._library, self._workspace, self._packed, states.reshape(-1, self.in_features))
        return flat.to(states.dtype).view(*states.shape[:-1], self.out_features)


# An operator that is opaque to torch.compile. It takes tensors and numbers only, so it names the projection by its id.
_projections: WeakValueDictionary[int, PackedProjection] = WeakValueDictionary()
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define("packed_projection(Tensor states, int key, int out_features) -> Tensor")
_library.impl("packed_projection", lambda states, key, _: _projections[key](states), "CompositeExplicitAutograd")
torch.library.register_fake(
    "minivllm::packed_projection",
    lambda states, key, out_features: states.new_empty((*states.shape[:-1], out_features)),
    lib=_library,
)


class TorchInt8Projection(nn.Module):
    """Replaces an `nn.Linear`: 8-bit weights with one scale per output, multiplied in float32 by torch.

    Activations keep their type: torch's 8-bit products either share one scale among all tokens of a call, so that the
    tokens of one request change the results of another, or overflow on CPUs without integer dot products.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        # As in PackedProjection.
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        self.bias = None
        weight = linear.weight.detach().float()
        self._scales = weight.abs().amax(dim=1).clamp_(min=1e-30).div_(127.0)
        self._quantized = (weight / self._scales.unsqueeze(1)).round_().to(torch.int8)
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in the type of `states`."""
        inputs = states.float()
        # In chunks: memory never holds all of the weights in float32.
        chunks = self._quantized.split(max(1, _CHUNK_WEIGHTS // inputs.shape[-1]))
        output = torch.cat([inputs @ chunk.float().T for chunk in chunks], dim=-1).mul_(self._scales)
        if self._bias is not None:
            output += self._bias
        return output.to(states.dtype)


def pack_projections(model: nn.Module, number_format: NumberFormat) -> None:
    """Replaces every `nn.Linear` of `model` whose in_features is a multiple of 4 by a `PackedProjection`."""
    started = time.monotonic()
    count = _replace_projections(model, lambda linear: PackedProjection(linear, number_format), multiple_of=4)
    logger.info("%d projections packed in %.1f s (%s)", count, time.monotonic() - started, number_format.name.lower())


def quantize_with_torch(model: nn.Module) -> None:
    """Replaces every `nn.Linear` of `model` by a `TorchInt8Projection`."""
    _replace_projections(model, TorchInt8Projection)
    logger.info("projections with 8-bit weights, multiplied by torch")


def _replace_projections(model: nn.Module, make: Callable[[nn.Linear], nn.Module], multiple_of: int = 1) -> int:
    """Replaces every `nn.Linear` whose in_features is such a multiple by what `make` returns. Returns their number."""
    count = 0
    # Without the projections, so that each is freed once it is replaced.
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.in_features % multiple_of == 0:
                setattr(parent, name, make(child))
                count += 1
    return count
