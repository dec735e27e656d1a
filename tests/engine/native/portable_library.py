"""The native library as other CPUs would have it."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

from minivllm.core.native import bindings, build


@functools.cache
def portable_library() -> ctypes.CDLL:
    """For the least that the architecture guarantees: none of the extensions that fast paths use."""
    return _built((*(flag for flag in build._FLAGS if flag != "-march=native"), "-O1"))


@functools.cache
def library_with_tiles() -> ctypes.CDLL:
    """With a matrix unit, by this CPU if it has one, else emulated."""
    found = build.library()
    assert found is not None
    return found if found.minivllm_has_tiles() else _built((*build._FLAGS, "-DMINIVLLM_EMULATE_TILES"))


def _built(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Built once a test run."""
    native_flags = build._FLAGS
    target = Path(tempfile.mkdtemp()) / "library.so"
    build._FLAGS = flags
    try:
        build._compile(build._compiler(), target)
    finally:
        build._FLAGS = native_flags
    return bindings.declare(ctypes.CDLL(str(target)))
