"""Quantized blocks to float32, by the `gguf` package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from minivllm.core.models.gguf.file import GGUFTensor

_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)


def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Returns whether the `gguf` package dequantizes this type."""
    quantization: Any = getattr(gguf.quants, kind.name, None)
    return kind in _PLAIN or "dequantize_blocks" in vars(quantization or object)


def dequantize_blocks(data: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Returns the values of contiguous blocks, one-dimensional.

    `gguf.dequantize` processes 16 rows at a time, and its Python code then dominates: all blocks are one row here.
    """
    values: npt.NDArray[np.float32] = gguf.dequantize(data.reshape(1, -1), kind)
    return values.reshape(-1)


def dequantize(tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """Returns the values of a small tensor."""
    return dequantize_blocks(tensor.data, tensor.type).reshape(tensor.shape)
