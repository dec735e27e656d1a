"""The scratch memory and the number of threads of the C++ library's calls."""

from __future__ import annotations

import ctypes
import weakref

import torch


class Workspace:
    """One a model; used by one thread of Python at a time. Follows torch's number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._num_threads = 0
        self._handle: int | None = None
        self._release: weakref.finalize[..., Workspace] | None = None

    def handle(self) -> int:
        """What the library takes as `workspace`."""
        num_threads = torch.get_num_threads()
        if self._handle is None or num_threads != self._num_threads:
            if self._release is not None:
                self._release()
            self._num_threads = num_threads
            self._handle = int(self._library.minivllm_create(num_threads))
            self._release = weakref.finalize(self, self._library.minivllm_destroy, self._handle)
        return self._handle
