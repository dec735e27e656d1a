"""Makes transformers read a GGUF file once, and its metadata in a third of the time.

Unaided, it parses the whole file (with every token of the vocabulary) for the configuration and again for the weights,
and builds the same table of tensor names for each module of the model: many times the work of the weights themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

_ARRAY_OF_TEXTS = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]


class _QuickReader(gguf.GGUFReader):  # type: ignore[misc]  # untyped
    """Cuts its pieces from a plain array. From a memory map each costs five times as much, and each token of the
    vocabulary is two of them."""

    @property
    def data(self) -> npt.NDArray[Any]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[Any]) -> None:
        self._data = np.asarray(mapped)


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Within it, a GGUF file is parsed once, however often it is opened."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (gguf, "GGUFReader", functools.cache(_QuickReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ]
    parse = getattr(transformers_gguf, "_gguf_parse_value", None)
    if parse is not None:
        replaced.append((transformers_gguf, "_gguf_parse_value", _with_quick_texts(parse)))
    originals = [getattr(module, name) for module, name, _ in replaced]
    for module, name, replacement in replaced:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


def _with_quick_texts(parse: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """transformers' own makes a list of numbers of each token first."""

    def parse_value(value: npt.NDArray[Any], types: Any) -> Any:
        return value.tobytes().decode() if types == _ARRAY_OF_TEXTS else parse(value, types)

    return parse_value
