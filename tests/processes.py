"""Finds and kills processes of Serve replicas that this test run started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def replica_pid(app: str, deployment: str) -> int:
    """Returns the process id of a deployment with one replica."""
    [pid] = replica_pids(app, deployment)
    return pid


def replica_pids(app: str, deployment: str) -> list[int]:
    return actor_pids(f"ray::ServeReplica:{app}:{deployment}")


def actor_pids(title: str) -> list[int]:
    """Returns the processes with this Ray title, which may be followed by the current method."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            words = _read(folder / "cmdline").replace("\0", " ").split()
            if words and words[0].split(".")[0] == title and _is_ours(int(folder.name)):
                found.append(int(folder.name))
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Returns when the condition holds; raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def _is_ours(pid: int) -> bool:
    """Returns whether this process is an ancestor of `pid`."""
    while pid > 1:
        if pid == os.getpid():
            return True
        status = _read(Path(f"/proc/{pid}/status"))
        parents = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
        if not parents:
            return False
        pid = int(parents[0])
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
