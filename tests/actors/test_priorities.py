"""Who may interrupt whom."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import APP_NAME, Served
from tests.processes import actor_pids, replica_pid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux's")


def policies(pid: int) -> set[int]:
    """Of all threads of a process."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.add(os.sched_getscheduler(int(thread.name)))
        except ProcessLookupError:
            continue  # it has ended
    return found


def test_threads_from_before_and_after_carry_messages() -> None:
    """In a process of its own, since there is no way back that a test should rely on."""
    program = """
import os, threading
from minivllm.actors.priorities import carry_messages

def started():
    begun, ends = threading.Event(), threading.Event()
    def run():
        begun.set()
        ends.wait()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    return thread.native_id

before = started()
assert os.sched_getscheduler(before) == os.sched_getscheduler(0) == os.SCHED_OTHER
carry_messages()
after = started()
print([os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in (0, before, after)])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[True, True, True]"


def test_a_system_that_forbids_it_is_left_as_it_is() -> None:
    program = """
import os
from minivllm.actors import priorities

def forbidden(*arguments):
    raise PermissionError
os.sched_setscheduler = forbidden
assert priorities.proxy_carries_messages() == []
del os.SCHED_BATCH
priorities.carry_messages()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_proxy_ingress_and_metrics_do_not_interrupt_the_engine(served: Served) -> None:
    [proxy] = actor_pids("ray::ProxyActor")
    for pid in (proxy, replica_pid(APP_NAME, "Ingress"), replica_pid(APP_NAME, "Metrics")):
        assert policies(pid) == {os.SCHED_BATCH}
    assert os.SCHED_OTHER in policies(replica_pid(APP_NAME, "Engine"))
    assert os.SCHED_BATCH not in policies(replica_pid(APP_NAME, "Engine"))
