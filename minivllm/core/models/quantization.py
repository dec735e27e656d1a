"""Projections in other numbers than the model's: packed for the C++ products, or by torch where there are none."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import Any

import torch
from torch import nn

from minivllm.core.errors import ModelLoadError
from minivllm.core.native import library
from minivllm.core.native.packing import NumberFormat, PackedLinear, apply, pack
from minivllm.core.native.workspace import Workspace

logger = logging.getLogger(__name__)


class PackedProjection(nn.Module):
    """Stands in for an `nn.Linear` of the model and computes the same in C++, in the number format it was packed in."""

    def __init__(self, linear: Any, number_format: NumberFormat) -> None:
        super().__init__()
        found = library()
        if found is None:
            raise RuntimeError("the native library is not there")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library: ctypes.CDLL = found
        self._packed: PackedLinear = pack(found, linear.weight, linear.bias, number_format)
        self._workspace = Workspace(found)
        # Some models ask their projections for the type of the weight.
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        self.bias = None
        self._key = len(_projections)
        _projections.append(self)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in the type of `states`."""
        if torch.compiler.is_compiling():
            output: torch.Tensor = torch.ops.minivllm.packed_projection(states, self._key, self.out_features)
            return output
        return self.multiply(states)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        flat = apply(self._library, self._workspace, self._packed, states.reshape(-1, self.in_features))
        return flat.to(states.dtype).view(*states.shape[:-1], self.out_features)


# An operator that a compiler takes as it is. It names the projection by number: it can hold tensors and numbers only.
_projections: list[PackedProjection] = []
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define("packed_projection(Tensor states, int key, int out_features) -> Tensor")
_library.impl(
    "packed_projection",
    lambda states, key, out_features: _projections[key].multiply(states),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "minivllm::packed_projection",
    lambda states, key, out_features: states.new_empty((*states.shape[:-1], out_features)),
    lib=_library,
)


def pack_projections(model: nn.Module, number_format: NumberFormat) -> int:
    """Replaces every `nn.Linear` of `model` whose inputs are a multiple of 4. Returns how many."""
    started = time.monotonic()
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.in_features % 4 == 0:
                setattr(parent, name, PackedProjection(child, number_format))
                count += 1
    logger.info("%d projections packed in %.1f s (%s)", count, time.monotonic() - started, number_format.name.lower())
    return count


class TorchInt8Projection(nn.Module):
    """Stands in for an `nn.Linear`: weights in 8 bits by column, activations in 8 bits on the fly, by torch."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        self.bias = None
        # torch's own knows no other activations than float32. The attribute is where it looks for what to do.
        linear.float()
        setattr(linear, "qconfig", torch.ao.quantization.per_channel_dynamic_qconfig)  # noqa: B010
        self._inner: nn.Module = torch.ao.nn.quantized.dynamic.Linear.from_float(linear)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._inner(states.float()).to(states.dtype)
        return output


def quantize_with_torch(model: Any) -> None:
    """Replaces every `nn.Linear` by torch's dynamic one: weights in 8 bits by column, activations on the fly.

    Raises:
        ModelLoadError: this build of torch has none for this CPU.
    """
    if "x86" in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = "x86"
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, TorchInt8Projection(child))
    except RuntimeError as error:
        raise ModelLoadError(f"quantization='int8': torch cannot do it on this CPU ({error})") from error
    logger.info("projections in 8 bits by torch (%s)", torch.backends.quantized.engine)
