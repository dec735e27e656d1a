"""GGUF files: each architecture equals transformers, and what is not understood is refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from minivllm.core.config import EngineConfig
from minivllm.core.models.gguf.dequantize import dequantize
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.location import resolve_model


@pytest.fixture(scope="module")
def packaged() -> Path:
    path = resolve_model(EngineConfig()).gguf_path
    assert path is not None
    return path


def test_metadata_and_tensors_equal_those_of_the_gguf_package(packaged: Path) -> None:
    ours, theirs = GGUFFile.open(packaged), gguf.GGUFReader(packaged)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_values_equal_those_of_the_gguf_package(packaged: Path) -> None:
    tensors = GGUFFile.open(packaged).tensors.values()
    chosen = {(tensor.type, tensor.shape): tensor for tensor in tensors}.values()
    assert len({tensor.type for tensor in chosen}) > 1
    for tensor in chosen:
        assert np.array_equal(dequantize(tensor), gguf.dequantize(tensor.data, tensor.type).reshape(tensor.shape))
