"""Prefaulting of the KV pool, so that requests do not wait for page faults."""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from typing import TYPE_CHECKING, Self

from minivllm.core.native.build import library
from minivllm.core.native.resources import available_bytes

if TYPE_CHECKING:
    from minivllm.core.attention.kv_pool import KVCachePool

logger = logging.getLogger(__name__)

MAX_PREFAULT_SHARE = 0.8
"""Share of the available memory above which a pool is not prefaulted: the kernel might kill a process to supply it."""


class Prefaulter:
    """Faults in the pages of a KV pool in the background, lowest blocks first, without changing their contents.

    It runs in a C++ thread at idle priority, since a Python thread of that priority would delay others while it holds
    the GIL. The thread ends when the pool is deleted.
    """

    def __init__(self, library: ctypes.CDLL, pool: KVCachePool) -> None:
        num_regions = pool.tensor.shape[0] * pool.tensor.shape[1]  # layers, K and V
        self._library = library
        self._handle = library.minivllm_prefault(pool.tensor.data_ptr(), num_regions, pool.tensor.nbytes // num_regions)
        self._stop = weakref.finalize(pool, library.minivllm_stop_prefault, self._handle)

    @classmethod
    def start(cls, pool: KVCachePool) -> Self | None:
        """Returns a running prefaulter, or None if the pool's pages are to be faulted in by the first writes.

        None on a GPU, without the C++ library, and if the available memory is unknown or scarce.
        """
        native = library() if pool.device.type == "cpu" else None
        available = None if native is None else available_bytes()
        if native is None or available is None:
            return None
        if pool.tensor.nbytes > MAX_PREFAULT_SHARE * available:
            sizes = (num_bytes / 2**30 for num_bytes in (pool.tensor.nbytes, available))
            logger.warning("the KV pool (%.1f GiB) is not prefaulted: only %.1f GiB of memory are available", *sizes)
            return None
        return cls(native, pool)

    def is_done(self) -> bool:
        """Returns whether all pages are resident, or the pool is deleted."""
        return not self._stop.alive or bool(self._library.minivllm_prefault_is_done(self._handle))

    def wait(self) -> None:
        """Waits until `is_done`, for benchmarks of the steady state."""
        while not self.is_done():
            time.sleep(0.01)
