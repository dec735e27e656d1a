"""Shared by the benchmarks: workloads, measurement of the engine and of peers, reports.

Every benchmark prints a table and writes JSON with its environment. A peer runs in its own Python (`--peer-python`)
with vLLM or transformers installed, on the same token ids.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
VOCABULARY = range(100, 49_000)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the exact number of tokens to generate."""

    prompt: list[int]
    output_len: int


def reference_work(count: int = 64, seed: int = 0) -> list[Request]:
    """Returns ragged requests: prompts of 16 to 512 tokens, outputs of 16 to 256."""
    rng = random.Random(seed)
    return [Request(_tokens(rng, rng.randint(16, 512)), rng.randint(16, 256)) for _ in range(count)]


def even_work(count: int = 64, prompt_len: int = 256, output_len: int = 128, seed: int = 0) -> list[Request]:
    """Returns requests of equal lengths."""
    rng = random.Random(seed)
    return [Request(_tokens(rng, prompt_len), output_len) for _ in range(count)]


def shared_work(count: int = 64, shared_len: int = 400, seed: int = 0) -> list[Request]:
    """Returns requests with a common prefix of `shared_len` tokens, 16 to 64 more, and outputs of 32 to 128."""
    rng = random.Random(seed)
    shared = _tokens(rng, shared_len)
    return [Request(shared + _tokens(rng, rng.randint(16, 64)), rng.randint(32, 128)) for _ in range(count)]


def one_stream(prompt_len: int = 32, output_len: int = 128, seed: int = 0) -> list[Request]:
    return even_work(1, prompt_len, output_len, seed)


WORKS = {"reference": reference_work, "even": even_work, "shared": shared_work, "one": one_stream}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(count)]


@dataclass(slots=True)
class Measurement:
    """One run of a workload by one engine. Times are in seconds, times to first token from the start of the run."""

    engine: str
    settings: str
    work: str
    output_tokens: int
    prompt_tokens: int
    seconds: float
    first_token: list[float]

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def measure_engine(engine: Any, requests: Sequence[Request], label: str = "r") -> tuple[int, float, list[float]]:
    """Runs all requests at once. Returns output tokens, seconds, and each request's seconds to its first token."""
    from minivllm import SamplingParams

    started = time.perf_counter()
    for index, request in enumerate(requests):
        params = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        engine.add_request(f"{label}-{index}", request.prompt, params)
    first: dict[str, float] = {}
    count = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.new_token_ids:
                first.setdefault(output.request_id, time.perf_counter() - started)
                count += len(output.new_token_ids)
    return count, time.perf_counter() - started, list(first.values())


def steady_engine(**settings: Any) -> Any:
    """Returns an engine with a prefaulted KV pool, as that of a server is after some seconds."""
    from minivllm import EngineConfig, LLMEngine

    engine = LLMEngine(EngineConfig(**settings))
    if engine.model_runner.prefaulter is not None:
        engine.model_runner.prefaulter.wait()
    return engine


def run_ours(work: str, requests: Sequence[Request], repeats: int = 1, **settings: Any) -> Measurement:
    """Returns the best of `repeats` runs on a warmed-up engine."""
    engine = steady_engine(max_num_seqs=64, **settings)
    measure_engine(engine, [Request(request.prompt[:32], 2) for request in requests[:8]], "warm")
    best: Measurement | None = None
    for repeat in range(repeats):
        engine.reset_prefix_cache()
        count, seconds, first = measure_engine(engine, requests, str(repeat))
        if best is None or seconds < best.seconds:
            prompt_tokens = sum(len(request.prompt) for request in requests)
            best = Measurement("minivllm", describe(settings), work, count, prompt_tokens, seconds, first)
    if best is None:
        raise ValueError("repeats must be at least 1")
    return best


def describe(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


# -- peers -------------------------------------------------------------------------------------------------------------


def run_peer(
    engine: str, python: str, model: str, work: str, requests: Sequence[Request], *, prefix_caching: bool = False
) -> Measurement:
    """Runs the same work with `engine` (a key of `peer_engines.ENGINES`) in another Python.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "work.json"), Path(folder, "result.json")
        job = {"engine": engine, "model": model, "prefix_caching": prefix_caching, "threads": num_threads()}
        source.write_text(json.dumps({**job, "requests": [asdict(request) for request in requests]}))
        environment = {**os.environ, **(vllm_environment(python) if engine == "vllm" else {})}
        environment["OMP_NUM_THREADS"] = str(num_threads())
        command = [python, str(Path(__file__).parent / "peer_engines.py"), str(source), str(target)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not target.exists():
            raise RuntimeError(f"{engine} failed: {(done.stdout + done.stderr)[-3000:]}")
        result = json.loads(target.read_text())
    prompt_tokens = sum(len(request.prompt) for request in requests)
    settings = f"bfloat16, {result['version']}, {result['settings']}"
    return Measurement(
        engine, settings, work, result["output_tokens"], prompt_tokens, result["seconds"], result["first_token"]
    )


def vllm_environment(python: str) -> dict[str, str]:
    """Returns the fastest settings for vLLM on CPUs: bound to all cores, tcmalloc and Intel's OpenMP if installed."""
    cores = sorted(os.sched_getaffinity(0))
    candidates = [
        Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
        Path(python).parent.parent / "lib" / "libiomp5.so",
    ]
    preload = ":".join(str(path) for path in candidates if path.exists())
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": preload} if preload else {}),
    }


# -- reports -----------------------------------------------------------------------------------------------------------


def num_threads() -> int:
    return len(os.sched_getaffinity(0))


def environment() -> dict[str, Any]:
    """Returns the facts about the machine and the packages that results depend on."""
    import torch

    names = ("torch", "transformers", "ray", "numpy")
    return {
        "cpu": _cpu_name(),
        "threads": num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "capability": torch.backends.cpu.get_cpu_capability(),
        "preload": os.environ.get("LD_PRELOAD", ""),
        "load_average": os.getloadavg()[0],
    }


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "absent"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def print_environment() -> None:
    facts = environment()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['cpu']}, {facts['threads']} threads, {facts['capability']}; Python {facts['python']}, {versions}")
    if facts["load_average"] > 0.5:
        print(f"note: other processes use this machine (load average {facts['load_average']:.1f})")


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints columns as wide as their widest cell; numbers are right-aligned."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    print("  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True)))
    for row in cells:
        numeric = [cell.replace(".", "").replace("-", "").isdigit() for cell in row]
        aligned = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(aligned))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.0f}"
    return str(value)


def write_json(path: str | None, name: str, results: Any) -> None:
    """Writes results and environment to `path`, by default under `benchmarks/results`."""
    target = Path(path) if path else RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"environment": environment(), "results": results}, indent=1, default=asdict))
    print(f"written: {target}")


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", help="file for the results (default: in benchmarks/results)")
    parser.add_argument("--peer-python", help="Python with vLLM, which runs the same work")
    parser.add_argument("--transformers-python", help="Python with transformers, which runs the same work")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs, which run the supported workloads")
    parser.add_argument("--peer-model", help="folder with the default model as safetensors, for vLLM and transformers")
    return parser


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides stderr of libraries; prints its end if the block raises."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        except BaseException:
            sink.seek(0)
            os.write(saved, sink.read()[-4000:])
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


if __name__ == "__main__":
    sys.exit("this module is a library for the benchmarks")
