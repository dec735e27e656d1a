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


def test_the_thread_that_computes_and_its_own_are_as_usual_again() -> None:
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


def test_the_engine_computes_where_all_of_ray_carries_messages() -> None:
    """As `make serve` starts it: what a process inherits, the engine's thread takes back."""
    program = """
import asyncio, os
from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.process import use_batch_cpu_policy
from tests.actors.fakes import PacedRunner, paced_engine

async def main():
    loop = EngineLoop(lambda: paced_engine(PacedRunner()))
    await loop.start()
    computing = await loop.call(lambda engine: os.sched_getscheduler(0))
    print(computing == os.SCHED_OTHER, os.sched_getscheduler(0) == os.SCHED_BATCH)
    loop.stop()

use_batch_cpu_policy()
asyncio.run(main())
"""
    assert printed_by(program) == "True True"


def test_another_choice_of_policy_is_respected() -> None:
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


def test_a_system_that_forbids_it_is_left_as_it_is() -> None:
    program = """
import os
from minivllm.actors import process

def forbidden(*arguments):
    raise PermissionError
os.sched_setscheduler = forbidden
assert process.use_batch_cpu_policy_in_proxy() == []
del os.SCHED_BATCH
process.use_batch_cpu_policy()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_proxy_ingress_and_metrics_do_not_interrupt_the_engine(served: Served) -> None:
    [proxy] = actor_pids("ray::ProxyActor")
    for pid in (proxy, replica_pid(APP_NAME, "Ingress"), replica_pid(APP_NAME, "Metrics")):
        assert policies(pid) == {os.SCHED_BATCH}
    assert os.SCHED_OTHER in policies(replica_pid(APP_NAME, "Engine"))
    assert os.SCHED_BATCH not in policies(replica_pid(APP_NAME, "Engine"))
