"""Prefaulter: has the memory of the KV pool handed out by the system before requests need it, when a core is idle."""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from typing import TYPE_CHECKING, Self

from minivllm.core.native.build import library
from minivllm.core.native.memory import available_bytes

if TYPE_CHECKING:
    from minivllm.core.attention.kv_pool import KVCachePool

logger = logging.getLogger(__name__)

MOST_OF_MEMORY = 0.8
"""A pool larger than this share of what is left is not taken ahead: somebody might be killed for it."""


class Prefaulter:
    """Goes through a pool in the background, first blocks first, and changes nothing in it. Lives no longer than it."""

    def __init__(self, found: ctypes.CDLL, pool: KVCachePool) -> None:
        num_layers, keys_and_values = pool.tensor.shape[:2]
        regions = num_layers * keys_and_values
        self._library = found
        self._handle = found.minivllm_touch_pages(pool.tensor.data_ptr(), regions, pool.num_bytes // regions)
        # A thread of C++, not of Python: at the lowest priority it might hold the interpreter while all wait for it.
        self._stop = weakref.finalize(pool, found.minivllm_stop_touching, self._handle)

    @classmethod
    def start(cls, pool: KVCachePool) -> Self | None:
        """None on a GPU, without the C++ library, and for a pool that would take nearly all the memory that is left, or
        where the system does not tell how much that is: pages then come as they are first written."""
        found = library() if pool.device.type == "cpu" else None
        left = None if found is None else available_bytes()
        if found is None or left is None:
            return None
        if pool.num_bytes > MOST_OF_MEMORY * left:
            logger.warning(
                "the KV pool has %.1f GiB and there are %.1f GiB of memory left: it gets them as it needs them",
                pool.num_bytes / 2**30,
                left / 2**30,
            )
            return None
        return cls(found, pool)

    def is_done(self) -> bool:
        """Whether the pool has all its pages, or is gone."""
        return not self._stop.alive or bool(self._library.minivllm_are_touched(self._handle))

    def wait(self) -> None:
        """Returns when `is_done`. For measurements that begin with a server in its steady state."""
        while not self.is_done():
            time.sleep(0.01)
