"""Builds of the native library for other CPUs."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

from minivllm.core.native import bindings, build


@functools.cache
def portable_library() -> ctypes.CDLL:
    """Returns a build for the baseline of the architecture, without the extensions of the fast paths."""
    return _built((*(flag for flag in build._FLAGS if flag != "-march=native"), "-O1"))


@functools.cache
def library_with_amx() -> ctypes.CDLL:
    """Returns a build with the AMX of this CPU, or with an emulated one."""
    found = build.library()
    assert found is not None
    return found if found.minivllm_has_amx() else _built((*build._FLAGS, "-DMINIVLLM_EMULATE_AMX"))


def _built(flags: tuple[str, ...]) -> ctypes.CDLL:
    """Compiles the library with `flags` into a temporary folder."""
    native_flags = build._FLAGS
    target = Path(tempfile.mkdtemp()) / "library.so"
    build._FLAGS = flags
    try:
        build._compile(build._compiler(), target)
    finally:
        build._FLAGS = native_flags
    return bindings.declare(ctypes.CDLL(str(target)))
