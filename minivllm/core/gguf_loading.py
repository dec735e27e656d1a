"""Makes transformers read a GGUF file once.

Unaided, it parses the whole file (with every token of the vocabulary) for the configuration and again for the weights,
and builds the same table of tensor names for each module of the model: many times the work of the weights themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import gguf


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Within it, a GGUF file is parsed once, however often it is opened."""
    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
