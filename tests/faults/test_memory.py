"""A process beside the server takes the memory of the machine: Ray kills the server's processes, and they come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.faults.test_serve_run import MAKE_SERVE, ROOT, configuration

GIB = 2**30
HOG = """
import resource, time
resource.setrlimit(resource.RLIMIT_AS, (7 * 2**30, 7 * 2**30))
held = []
for _ in range(60):
    held.append(bytearray(100 * 2**20))
    time.sleep(0.05)
time.sleep(600)
"""


def threshold() -> float:
    """Returns the share of the machine's memory at which Ray kills: 5 GiB more than is used now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    total, available = (int(line.split()[1]) * 1024 for line in lines if line.startswith(("MemTotal", "MemAvailable")))
    return (total - available + 5 * GIB) / total


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_server_comes_back_after_ray_killed_it_for_lack_of_memory(tmp_path: Path) -> None:
    config = configuration(tmp_path, num_blocks=64)
    port = config.read_text().split("port: ")[1].split()[0]
    server = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)

    def is_healthy() -> bool:
        try:
            return server.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    log = tmp_path / "log"
    with tempfile.TemporaryDirectory(prefix="mv-") as folder, log.open("w") as output:
        environment = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        memory = {"RAY_memory_usage_threshold": f"{threshold():.3f}", "RAY_memory_monitor_refresh_ms": "200"}
        command = [*MAKE_SERVE, str(config)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment | memory, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait_for(is_healthy, 120)
            hog = subprocess.Popen([sys.executable, "-c", HOG])
            try:
                wait_for(lambda: not is_healthy(), 60)
            finally:
                hog.kill()
                hog.wait()
            wait_for(is_healthy, 120)
            answer = server.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 4
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert "low on memory" in log.read_text()
