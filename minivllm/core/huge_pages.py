"""Memory in large pages: the CPU looks up far fewer addresses while it streams weights or jumps about in the pool."""

from __future__ import annotations

import ctypes
import logging
import mmap

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
