"""Compiles the C++ sources for this machine's CPU once and caches the library on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from minivllm.core.native.bindings import declare
from minivllm.core.native.cache_folder import cache_folder
from minivllm.core.native.packing import check_amx

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-pthread", "-fPIC", "-shared", "-fno-math-errno", "-w")
_TIMEOUT_SECONDS = 300


class _CannotBuildError(Exception):
    """Why the library cannot be built, as a clause."""


def library() -> ctypes.CDLL | None:
    """Returns the library, which the first call builds and loads, or None and a log line if that fails."""
    return _load()[0]


def why_not() -> str | None:
    """Returns why `library()` is None, as a clause, or None if it is not."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        # torch is imported by now: the library then uses torch's OpenMP runtime, and both share its threads.
        loaded = declare(ctypes.CDLL(str(_library_path())))
    except (_CannotBuildError, OSError) as error:
        logger.info("the native CPU kernels are not used: %s", error)
        return None, str(error)
    check_amx(loaded)
    return loaded, None


def _library_path() -> Path:
    """Returns the path of the compiled library, compiled now if it is not in the cache."""
    compiler = _compiler()
    folder = cache_folder()
    if folder is None:
        logger.warning("there is no writable cache folder: the native CPU kernels are rebuilt at every start")
        folder = Path(tempfile.mkdtemp(prefix="minivllm-"))
    path = folder / f"kernels-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    _compile(compiler, path)
    return path


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise _CannotBuildError("there is no C++ compiler (g++, c++, clang++ or $CXX)")


def _fingerprint(compiler: str) -> str:
    """Returns a hash of what the build depends on: sources, flags, compiler, and CPU as the compiler sees it.

    The predefined macros name the compiler's version and the features of `-march=native`.
    """
    macros = [compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    digest = hashlib.sha256(repr(macros).encode())
    digest.update(subprocess.run(macros, capture_output=True, timeout=60, check=False).stdout)
    for source in sorted([*_SOURCES.glob("*.hpp"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: str, target: Path) -> None:
    started = time.monotonic()
    logger.info("building the native CPU kernels with %s (once for this CPU) ...", compiler)
    # Renames the finished file, so that a process that starts at the same time never loads a partial one.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = [compiler, *_FLAGS, str(_SOURCES / "library.cpp"), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise _CannotBuildError(f"the compiler took longer than {_TIMEOUT_SECONDS} s") from error
        if done.returncode != 0:
            raise _CannotBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")
        output.replace(target)
    logger.info("built the native CPU kernels in %.1f s: %s", time.monotonic() - started, target)
