"""Memory of the machine: huge pages, and how much this process may still take."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_PAGE_BYTES = 2 * 1024**2


def prefer_huge_pages(tensor: torch.Tensor) -> bool:
    """Asks the system to back what lies within `tensor` by large pages; best before it is first written.

    Returns:
        Whether the system has accepted. It is advice: where large pages are off, nothing changes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or tensor.device.type != "cpu":
        return False
    first = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _PAGE_BYTES * _PAGE_BYTES
    if last <= first:
        return False
    try:
        system = ctypes.CDLL(None, use_errno=True)
        system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return bool(system.madvise(first, last - first, advice) == 0)
    except (OSError, AttributeError) as error:
        logger.debug("no large pages: %s", error)
        return False


def available_bytes() -> int | None:
    """Memory that this process may still take without anybody being killed; None where the system does not say.

    The least of what the machine and what its control groups have left (their caches of files can be given up).
    """
    try:
        left = _numbers("/proc/meminfo")["MemAvailable"] * 1024
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        left = min([left, *_left_in_groups(path, *files)])
    return left


def _left_in_groups(path: str, root: str, limit_file: str, usage_file: str, cache_name: str) -> Iterator[int]:
    """What the group at `path` has left, and those around it; a container may see only its own, as the root."""
    group = Path(root + path)
    while len(group.parts) >= len(Path(root).parts):
        with contextlib.suppress(OSError, ValueError):  # no limit says "max", which is no number
            limit = int((group / limit_file).read_text())
            yield limit - int((group / usage_file).read_text()) + _numbers(group / "memory.stat").get(cache_name, 0)
        group = group.parent


def _numbers(path: str | Path) -> dict[str, int]:
    """A file of lines such as `name: 123 kB`."""
    lines = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
