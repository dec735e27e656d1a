"""Loads GGUF files through transformers, in a small part of the time that it takes unpatched.

transformers parses a file, with every token of the vocabulary, once for the configuration and again for the weights,
and builds the same table of tensor names for each module of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import transformers
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

_ROWS_AT_ONCE = 256
_ARRAY_OF_TEXTS = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]


class _QuickReader(gguf.GGUFReader):  # type: ignore[misc]  # untyped
    """Slices a plain array: slices of a memory map cost five times as much, and each token takes four."""

    @property
    def data(self) -> npt.NDArray[Any]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[Any]) -> None:
        self._data = np.asarray(mapped)


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Within it, transformers parses a GGUF file once, however often it opens it, and shows no progress bar for it."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (gguf, "GGUFReader", functools.cache(_QuickReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        # The one progress bar that does not use the hook of transformers.
        (transformers_gguf, "tqdm", functools.partial(transformers_gguf.tqdm, disable=True)),
    ]
    # Private functions: if a later version changes or removes them, loading only takes longer.
    parse = getattr(transformers_gguf, "_gguf_parse_value", None)
    if parse is not None:
        replaced.append((transformers_gguf, "_gguf_parse_value", _with_quick_texts(parse)))
    by_groups = getattr(gguf.quants, "_apply_over_grouped_rows", None)
    if by_groups is not None and [*signature(by_groups).parameters] == [*signature(_by_large_groups).parameters]:
        replaced.append((gguf.quants, "_apply_over_grouped_rows", _by_large_groups))
    originals = [getattr(module, name) for module, name, _ in replaced]
    for module, name, replacement in replaced:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


def gguf_weight_options() -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` that dequantize the weights."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    # Later versions of transformers keep the weights packed by default, for kernels of their own.
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _with_quick_texts(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Decodes strings directly; transformers first makes a list of numbers of each token."""

    def parse_value(value: npt.NDArray[Any], types: Any) -> Any:
        return value.tobytes().decode() if types == _ARRAY_OF_TEXTS else parse(value, types)

    return parse_value


def _by_large_groups(
    func: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], arr: npt.NDArray[Any], otype: Any, oshape: tuple[int, ...]
) -> npt.NDArray[Any]:
    """Applies `func` to many rows at a time. gguf applies it to 16, and its Python code then dominates."""
    if arr.size == 0:
        return np.empty(oshape, dtype=otype)
    rows = arr.reshape(-1, arr.shape[-1])
    groups = np.array_split(rows, len(rows) // _ROWS_AT_ONCE or 1)
    return np.concatenate([func(group).ravel() for group in groups], dtype=otype).reshape(oshape)
