"""Who may interrupt whom: where all cores compute, processes that carry messages do not stop the engine's threads.

A message for each of 64 streams after each step wakes the proxy and the ingress some hundred times, and a thread of the
engine that is put aside in the middle of a piece of work holds up the others of its stage (`core/native/stage.hpp`).
Under SCHED_BATCH a process gets the same share of the processor, but begins when a core is idle, or at the next tick of
the clock. Where there are idle cores nothing changes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.middleware import Middleware

_THREADS = Path("/proc/self/task")


def carry_messages() -> None:
    """From now on the threads of this process, and those that they start, wake up without interrupting others."""
    if not _THREADS.is_dir():
        return  # Linux only
    # Again until all are found as they should be: one that had not been reached yet may have started another.
    while any(_change(int(thread.name), "SCHED_OTHER", "SCHED_BATCH") for thread in _THREADS.iterdir()):
        pass


def compute() -> None:
    """The calling thread, and those that it starts from now on, may interrupt others. `make serve` starts its Ray
    under SCHED_BATCH, and all processes of it inherit that."""
    _change(0, "SCHED_BATCH", "SCHED_OTHER")


def proxy_carries_messages() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names: Serve's HTTP proxy calls it and expects middlewares."""
    carry_messages()
    return []


def _change(thread_id: int, from_policy: str, to_policy: str) -> bool:
    """Whether it was changed. Other policies than these two are the choice of whoever started us."""
    before, after = getattr(os, from_policy, None), getattr(os, to_policy, None)
    if before is None or after is None:
        return False  # Linux only
    try:
        if os.sched_getscheduler(thread_id) != before:
            return False
        os.sched_setscheduler(thread_id, after, os.sched_param(0))
    except OSError:
        return False  # a container may forbid it, and a thread may have ended meanwhile
    return True
