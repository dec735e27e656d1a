"""Settings of a replica's process: CPU scheduling policy, garbage collection, log output.

CPU policy: message-passing processes run under SCHED_BATCH so that they do not preempt the engine's threads. With 64
streams, a step wakes the proxy and the ingress hundreds of times, and a preempted engine thread delays all others at
the next barrier (`native/csrc/barrier.hpp`). SCHED_BATCH keeps a process's share of the CPU but delays its wake-ups to
an idle core or the next scheduler tick. On machines with idle cores it changes nothing.
"""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.middleware import Middleware

YOUNG_OBJECTS = 20_000
"""New objects between two garbage collections. Python's default of 700 would run one every few steps."""


def use_batch_cpu_policy() -> None:
    """Puts all threads of this process, and those they start later, under SCHED_BATCH."""
    # Repeated until nothing changes: a thread that was not reached yet may have started another.
    threads = Path("/proc/self/task")
    while any(_change_policy(int(thread.name), "SCHED_OTHER", "SCHED_BATCH") for thread in threads.glob("*")):
        pass


def use_default_cpu_policy() -> None:
    """Puts the calling thread, and those it starts later, under SCHED_OTHER.

    `make serve` starts Ray under SCHED_BATCH, which every process of it inherits.
    """
    _change_policy(0, "SCHED_BATCH", "SCHED_OTHER")


def use_batch_cpu_policy_in_proxy() -> list[Middleware]:
    """Runs `use_batch_cpu_policy` in Serve's HTTP proxy and returns no middlewares.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
    """
    use_batch_cpu_policy()
    return []


def freeze_gc() -> None:
    """Exempts all objects that exist now from garbage collection: a pass over the model would pause every stream."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def log_to_stderr() -> None:
    """Sends minivllm's log records from INFO on to stderr, which Ray forwards. Serve does it for its own loggers."""
    logger = logging.getLogger("minivllm")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s -- %(message)s"))
        logger.addHandler(handler)


def _change_policy(thread_id: int, before: str, after: str) -> bool:
    """Returns whether the policy was changed. Keeps any policy other than `before`."""
    try:
        if os.sched_getscheduler(thread_id) != getattr(os, before):
            return False
        os.sched_setscheduler(thread_id, getattr(os, after), os.sched_param(0))
    except (OSError, AttributeError):
        return False  # not Linux, or not permitted in some containers; a thread may also have ended
    return True
