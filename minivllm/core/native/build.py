"""Builds the C++ sources for this machine's CPU once, and keeps the result on disk between starts."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from minivllm.core.native.bindings import declare

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-pthread", "-fPIC", "-shared", "-fno-math-errno", "-w")
_TIMEOUT_SECONDS = 300


class _CannotBuildError(Exception):
    """Why there is no library; for the log and for whoever asked for it by name."""


def library() -> ctypes.CDLL | None:
    """The library with its functions declared, built when it is first asked for; None, and a line in the log, where
    there is no compiler or it fails."""
    return _load()[0]


def why_not() -> str | None:
    """None when `library()` has something to give, else the reason, as a clause."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        # Importing torch first brings in its OpenMP runtime; ours then resolves to the same, and one pool of threads
        # serves both.
        import torch  # noqa: F401

        from minivllm.core.native.packing import check_tiles

        found = declare(ctypes.CDLL(str(_built())))
        check_tiles(found)
        return found, None
    except (_CannotBuildError, OSError) as error:
        logger.info("the native CPU kernels are not used: %s", error)
        return None, str(error)


def _built() -> Path:
    compiler = _compiler()
    target = _cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(target.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning("%s cannot be written: the native CPU kernels are built anew at every start", target.parent)
        target = Path(tempfile.mkdtemp(prefix="minivllm-")) / target.name
    _compile(compiler, target)
    return target


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise _CannotBuildError("there is no C++ compiler (g++, c++, clang++ or $CXX)")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minivllm"


def _fingerprint(compiler: str) -> str:
    """Changes with whatever the result depends on: the sources, the flags, the compiler and the CPU."""
    digest = hashlib.sha256(repr((compiler, _FLAGS, platform.machine(), _cpu_features())).encode())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=False).stdout
    digest.update(version)
    for source in sorted([*_SOURCES.glob("*.hpp"), *_SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """What `-march=native` looks at, as far as the system tells. Where it does not, the CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model", "cpu family", "vendor_id")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first[name] for name in wanted if name in first)


def _compile(compiler: str, target: Path) -> None:
    started = time.monotonic()
    logger.info("building the native CPU kernels with %s (once for this CPU) ...", compiler)
    try:
        # Built aside and renamed: two processes that start at once must not see each other's half.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            output = Path(folder) / target.name
            command = [compiler, *_FLAGS, str(_SOURCES / "library.cpp"), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
            if done.returncode != 0:
                raise _CannotBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:2000]}")
            output.replace(target)
    except subprocess.TimeoutExpired as error:
        raise _CannotBuildError(f"the compiler took longer than {_TIMEOUT_SECONDS} s") from error
    logger.info("built the native CPU kernels in %.1f s: %s", time.monotonic() - started, target)
