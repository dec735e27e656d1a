"""Metadata and memory-mapped tensors of a GGUF file, which may be split into several parts.

The header is parsed here and not by `gguf.GGUFReader`, which takes 4 numpy arrays per token of the vocabulary
(seconds; here 0.2 us per token) and reports a truncated file as an IndexError.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from minivllm.core.errors import ModelLoadError

_VERSIONS = (2, 3)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_TENSOR_TYPES = {int(kind): kind for kind in GGML_QUANT_SIZES}
_NUMBER_FORMATS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as it is in the file.

    Attributes:
        shape: outermost dimension first, as torch has it.
        data: the bytes of the blocks, shape `(*shape[:-1], bytes per row)`; a view of the mapped file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A whole model: all parts of a split file together.

    Attributes:
        paths: of all parts in order.
        metadata: numbers, strings and lists of them by key, without those that describe the split.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def error(self, reason: str) -> ModelLoadError:
        """Returns the error for this file; `reason` continues "the GGUF file ... "."""
        return ModelLoadError(f"the GGUF file {self.paths[0]} {reason}")

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Opens a file, and with any part of a split file all of its parts.

        Raises:
            ModelLoadError: no GGUF file, or it is truncated, damaged or incomplete; says which.
        """
        path = Path(path)
        opened = _Part(path)
        count = opened.metadata.get("split.count", 1)
        if count <= 1:
            return cls((path,), _without_split(opened.metadata), opened.tensors)
        paths = _part_paths(path, opened.number, count)
        parts = [opened if number == opened.number else _Part(part) for number, part in enumerate(paths)]
        metadata: dict[str, Any] = {}
        tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(parts):
            if (part.number, part.metadata.get("split.count")) != (number, count):
                raise ModelLoadError(f"{part.path} is not part {number + 1} of {count}, as its name says")
            for key, value in _without_split(part.metadata).items():
                if metadata.setdefault(key, value) != value:
                    raise ModelLoadError(f"{part.path} contradicts the part before it: {key!r} differs")
            if repeated := tensors.keys() & part.tensors.keys():
                raise ModelLoadError(f"{part.path} repeats tensors of the part before it: {min(repeated)!r}")
            tensors |= part.tensors
        expected = opened.metadata.get("split.tensors.count", len(tensors))
        if len(tensors) != expected:
            raise ModelLoadError(
                f"the parts of {path} have {len(tensors)} tensors, and split.tensors.count is {expected}"
            )
        return cls(tuple(part.path for part in parts), metadata, tensors)


def part_numbers(path: Path) -> tuple[str, int, int] | None:
    """Returns the common beginning of the names, the number (from 0) and the count of parts of a split file's name."""
    match = _PART.fullmatch(path.name)
    return match and (match["stem"], int(match["number"]) - 1, int(match["count"]))


def _part_paths(path: Path, number: int, count: int) -> list[Path]:
    named = part_numbers(path)
    if named is None or named[1:] != (number, count):
        raise ModelLoadError(
            f"{path} is part {number + 1} of {count} of a split file, and its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf so that the other parts are found"
        )
    paths = [path if i == number else path.with_name(f"{named[0]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if missing := [str(part) for part in paths if not part.is_file()]:
        raise ModelLoadError(f"{path} is part {number + 1} of {count} of a split file; missing: {', '.join(missing)}")
    return paths


def _without_split(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if not key.startswith("split.")}


class _Part:
    """One file: parses the header and maps the tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                start = file.read(1024)
                self._check_start(start)
                self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror or error}") from error
        self._size = len(self._file)
        self._offset = 8  # after the magic number and the version
        self._reading = "its header"
        try:
            self._parse()
        except (struct.error, OverflowError, EOFError) as error:
            raise self._error(f"is truncated: it ends within {self._reading}") from error
        except (ValueError, KeyError) as error:
            if isinstance(error, ModelLoadError):
                raise
            raise self._error(f"is damaged at {self._reading}: {error}") from error

    @property
    def number(self) -> int:
        return int(self.metadata.get("split.no", 0))

    def _error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"the GGUF file {self.path} {reason}")

    def _check_start(self, start: bytes) -> None:
        if not start:
            raise self._error("is empty")
        if start.startswith(b"version https://git-lfs"):
            raise self._error("is a Git LFS pointer, not the model: fetch it with `git lfs pull`")
        if start[:4] != b"GGUF":
            raise self._error(f"is not a GGUF file: it begins with {start[:4]!r}")
        if len(start) < 24:
            raise self._error("is truncated: it ends within its header")
        version = int.from_bytes(start[4:8], "little")
        if version & 0xFFFF == 0:
            raise self._error("is big-endian; only little-endian files can be read")
        if version not in _VERSIONS:
            raise self._error(f"has GGUF version {version}; only versions 2 and 3 can be read")

    def _parse(self) -> None:
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        for index in range(num_keys):
            self._reading = f"metadata key {index + 1} of {num_keys}"
            key = self._string()
            self._reading = f"metadata key {key!r}"
            if key in self.metadata:
                raise self._error(f"has the metadata key {key!r} twice")
            self.metadata[key] = self._value(GGUFValueType(self._number("<I")))
        infos = []
        for index in range(num_tensors):
            self._reading = f"the description of tensor {index + 1} of {num_tensors}"
            name = self._string()
            dimensions = [self._number("<Q") for _ in range(self._number("<I"))]
            infos.append((name, tuple(reversed(dimensions)), self._number("<I"), self._number("<Q")))
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"has a general.alignment of {alignment!r}")
        self._map_tensors(infos, alignment)

    def _map_tensors(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> None:
        start = -(-self._offset // alignment) * alignment
        expected = 0
        for name, shape, type_number, offset in infos:
            self._reading = f"tensor {name!r}"
            kind = _TENSOR_TYPES.get(type_number)
            if kind is None:
                raise self._error(f"has tensor {name!r} of type {type_number}, unknown to the installed gguf package")
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block_size:
                raise self._error(f"has tensor {name!r} of shape {list(shape)}, which {kind.name} blocks do not divide")
            if name in self.tensors:
                raise self._error(f"has tensor {name!r} twice")
            if offset != expected:
                raise self._error(f"is damaged: tensor {name!r} is at byte {offset} of the data, not at {expected}")
            row_bytes = shape[-1] // block_size * block_bytes
            num_bytes = prod(shape[:-1]) * row_bytes
            if start + offset + num_bytes > self._size:
                raise self._error(f"is truncated: it has {self._size} bytes and ends within tensor {name!r}")
            data = np.frombuffer(self._file, np.uint8, num_bytes, start + offset)
            self.tensors[name] = GGUFTensor(name, kind, shape, data.reshape(*shape[:-1], row_bytes))
            expected += -(-num_bytes // alignment) * alignment

    def _number(self, layout: str) -> int:
        value: int = struct.unpack_from(layout, self._file, self._offset)[0]
        self._offset += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Reads `count` strings, each after its length. The loop of a large vocabulary."""
        file, end, unpack = self._file, self._offset, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = end + 8
            end = start + unpack(file, end)[0]
            texts.append(file[start:end].decode())
        if end > self._size:
            raise EOFError
        self._offset = end
        return texts

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.ARRAY:
            of, count = GGUFValueType(self._number("<I")), self._number("<Q")
            if of is GGUFValueType.ARRAY:
                return [self._value(of) for _ in range(count)]
            return self._strings(count) if of is GGUFValueType.STRING else self._numbers(of, count)
        return self._string() if kind is GGUFValueType.STRING else self._numbers(kind, 1)[0]

    def _numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBER_FORMATS[kind])
        if self._offset + count * dtype.itemsize > self._size:
            raise EOFError
        values = np.frombuffer(self._file, dtype, count, self._offset) if count else np.empty(0, dtype)
        self._offset += values.nbytes
        return list(values.tolist())
