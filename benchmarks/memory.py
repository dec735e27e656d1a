"""Peak memory of the engine's process at a given size of the KV pool, compared with vLLM's.

    python -m benchmarks.memory [--peer-python PATH --peer-model FOLDER]

Each engine runs 16 requests in its own process. Reports the peak memory of that process and its children.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import (
    arguments,
    even_work,
    num_threads,
    print_environment,
    print_table,
    vllm_environment,
    write_json,
)

GIBIBYTE = 2**30


def resident_bytes(pid: int) -> int:
    """Returns the memory (PSS) of a process and its descendants; shared pages are divided among their users."""
    total, pending = 0, [pid]
    while pending:
        current = pending.pop()
        try:
            status = Path(f"/proc/{current}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:")) * 1024
            for thread in Path(f"/proc/{current}/task").iterdir():
                pending += [int(child) for child in (thread / "children").read_text().split()]
        except (OSError, StopIteration):
            continue
    return total


def peak_of(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command and returns its peak memory in bytes."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    if code != 0:
        raise RuntimeError(f"{command} exited with {code}")
    return peak


def run_engine(quantization: str | None, pool_bytes: int) -> None:
    """Runs the work in the measured process."""
    from benchmarks.common import measure_engine
    from minivllm import EngineConfig, LLMEngine

    config = EngineConfig(
        dtype="bfloat16", quantization=quantization, cpu_kv_cache_bytes=pool_bytes, enable_prefix_caching=False
    )
    measure_engine(LLMEngine(config), even_work(16, 256, 64))


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__ or "")
    parser.add_argument("--pool-gib", type=int, default=4, help="size of the KV pool")
    parser.add_argument("--inside", choices=["none", "int8"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_engine(None if options.inside == "none" else options.inside, options.pool_gib * GIBIBYTE)
        return
    print_environment()
    results = []
    for quantization in ("none", "int8"):
        command = [sys.executable, "-m", "benchmarks.memory", "--inside", quantization]
        command += ["--pool-gib", str(options.pool_gib)]
        results.append(("minivllm", quantization, peak_of(command, dict(os.environ))))
    if options.peer_python:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "work.json")
            requests = [asdict(request) for request in even_work(16, 256, 64)]
            job = {"engine": "vllm", "model": options.peer_model, "prefix_caching": False, "threads": num_threads()}
            source.write_text(json.dumps({**job, "requests": requests}))
            script = str(Path(__file__).parent / "peer_engines.py")
            command = [options.peer_python, script, str(source), str(Path(folder, "result.json"))]
            environment = {**os.environ, **vllm_environment(options.peer_python)}
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(options.pool_gib)
            results.append(("vllm", "none", peak_of(command, environment)))
    rows = [(engine, quantization, f"{peak / GIBIBYTE:.2f}") for engine, quantization, peak in results]
    print_table(("engine", "quantization", f"peak GiB with a KV pool of {options.pool_gib} GiB"), rows)
    write_json(options.json, "memory", results)


if __name__ == "__main__":
    main()
