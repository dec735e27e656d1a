"""CPU scheduling policies of processes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import APP_NAME, Served
from tests.processes import actor_pids, replica_pid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies exist on Linux only")


def policies(pid: int) -> set[int]:
    """Returns the scheduling policies of all threads of a process."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.add(os.sched_getscheduler(int(thread.name)))
        except ProcessLookupError:
            continue  # it has ended
    return found


def test_batch_policy_applies_to_existing_and_new_threads() -> None:
    """Runs in a subprocess, since a thread cannot rely on leaving the batch policy again."""
    program = """
import os, threading
from minivllm.actors.process import use_batch_cpu_policy

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
use_batch_cpu_policy()
after = started()
print([os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in (0, before, after)])
"""
    assert printed_by(program) == "[True, True, True]"


def test_compute_thread_and_its_children_use_the_default_policy() -> None:
    program = """
import os, threading
from minivllm.actors.process import use_batch_cpu_policy, use_default_cpu_policy

found = []
def inner():
    found.append(os.sched_getscheduler(0))
def outer():
    use_default_cpu_policy()
    found.append(os.sched_getscheduler(0))
    thread = threading.Thread(target=inner)
    thread.start()
    thread.join()

use_batch_cpu_policy()
thread = threading.Thread(target=outer)
thread.start()
thread.join()
found.append(os.sched_getscheduler(0))
print(found == [os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_BATCH])
"""
    assert printed_by(program) == "True"


def test_step_thread_uses_the_default_policy_in_a_batch_process() -> None:
    """`make serve` starts all processes under the batch policy, which the step thread resets for itself."""
    program = """
import asyncio, os
from minivllm.actors.process import use_batch_cpu_policy
from tests.actors.fakes import PacedRunner, started_loop

async def main():
    loop = await started_loop(PacedRunner())
    computing = await loop.call(lambda engine: os.sched_getscheduler(0))
    print(computing == os.SCHED_OTHER, os.sched_getscheduler(0) == os.SCHED_BATCH)
    loop.stop()

use_batch_cpu_policy()
asyncio.run(main())
"""
    assert printed_by(program) == "True True"


def test_policy_chosen_by_the_user_is_kept() -> None:
    program = """
import os
from minivllm.actors.process import use_batch_cpu_policy, use_default_cpu_policy

os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
use_batch_cpu_policy()
use_default_cpu_policy()
print(os.sched_getscheduler(0) == os.SCHED_IDLE)
"""
    assert printed_by(program) == "True"


def printed_by(program: str) -> str:
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return answer.stdout.strip()


def test_missing_permission_or_batch_policy_is_ignored() -> None:
    program = """
import os
from minivllm.actors import process

def forbidden(*arguments):
    raise PermissionError
os.sched_setscheduler = forbidden
assert process.set_up_proxy() == []
del os.SCHED_BATCH
process.use_batch_cpu_policy()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_proxy_ingress_and_metrics_run_under_the_batch_policy(served: Served) -> None:
    [proxy] = actor_pids("ray::ProxyActor")
    for pid in (proxy, replica_pid(APP_NAME, "Ingress"), replica_pid(APP_NAME, "Metrics")):
        assert policies(pid) == {os.SCHED_BATCH}
    assert os.SCHED_OTHER in policies(replica_pid(APP_NAME, "Engine"))
    assert os.SCHED_BATCH not in policies(replica_pid(APP_NAME, "Engine"))
