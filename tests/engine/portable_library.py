"""The native library as a CPU would have it that has none of the extensions its fast paths use."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

from minivllm.core.native import bindings, build


@functools.cache
def portable_library() -> ctypes.CDLL:
    """Built once a test run, for the least that the architecture guarantees."""
    native_flags = build._FLAGS
    target = Path(tempfile.mkdtemp()) / "portable.so"
    build._FLAGS = (*(flag for flag in native_flags if flag != "-march=native"), "-O1")
    try:
        build._compile(build._compiler(), target)
    finally:
        build._FLAGS = native_flags
    return bindings.declare(ctypes.CDLL(str(target)))
