"""What the operating system grants this process: memory, huge pages, cores."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 * 1024**2

# By controller, which version 2 leaves empty: root, limit, usage, and the name of the file cache in memory.stat.
_CGROUP_FILES = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Advises the kernel to back a CPU tensor with huge pages (madvise); call it before the first write."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    first = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    last = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if advice is None or tensor.device.type != "cpu" or last <= first:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(first, last - first, advice) != 0:
        logger.debug("no huge pages: %s", os.strerror(ctypes.get_errno()))


def available_bytes() -> int | None:
    """Returns the memory that this process can allocate before the kernel kills a process, or None if unknown.

    It is the minimum over the machine and the process's control groups. Their file caches count as available.
    """
    try:
        available = _numbers("/proc/meminfo")["MemAvailable"] * 1024
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _CGROUP_FILES:
                available = min([available, *_available_in_groups(path, *_CGROUP_FILES[controller])])
    return available


def usable_cores() -> int:
    """Returns the cores that this process may use, by its affinity and the CPU quotas of its control groups."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                for folder in (Path(path), *Path(path).parents):
                    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no quota
                        quota, period = _quota(folder, is_version_2=not controllers)
                        cores = min(cores, -(-quota // period)) if quota > 0 else cores
    return cores


def _quota(folder: Path, *, is_version_2: bool) -> tuple[int, int]:
    """Returns the microseconds of CPU time per period, and the period."""
    if is_version_2:
        quota, period = Path(f"/sys/fs/cgroup{folder}/cpu.max").read_text().split()
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = (Path(f"/sys/fs/cgroup/cpu{folder}/{name}").read_text() for name in names)
    return int(quota), int(period)


def _available_in_groups(path: str, root: str, limit_file: str, usage_file: str, cache_name: str) -> Iterator[int]:
    """Yields the available memory of the control group at `path` and of its parents.

    A container may see only its own group, mounted as the root.
    """
    for folder in (Path(path), *Path(path).parents):
        group = Path(f"{root}{folder}")
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit = int((group / limit_file).read_text())
            yield limit - int((group / usage_file).read_text()) + _numbers(group / "memory.stat").get(cache_name, 0)


def _numbers(path: str | Path) -> dict[str, int]:
    """Parses a file with lines such as `name: 123 kB`."""
    lines = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
