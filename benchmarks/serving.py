"""Benchmarks the OpenAI-compatible server over HTTP: latencies and throughput in closed and open loop.

    python -m benchmarks.serving --start [--quantization int8]           starts our server
    python -m benchmarks.serving --peer-python PATH --peer-model FOLDER  the same against `vllm serve`
    python -m benchmarks.serving --base-url http://127.0.0.1:8000 --model NAME

Closed loop: 64 requests at once, and a few one after the other. Open loop: Poisson arrivals at `--rate`. With --start
the closed loops also run on the engine alone, in this process: the difference is the overhead of serving. Prompts have
about 256 tokens, outputs 128. Reports percentiles of time to first token (TTFT), of the time between stream chunks, of
time per output token after the first (TPOT) and of end-to-end latency.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks import llama_cpp
from benchmarks.common import (
    VOCABULARY,
    Request,
    arguments,
    print_environment,
    print_table,
    quiet,
    steady_engine,
    vllm_environment,
    write_json,
)

ROOT = Path(__file__).parent.parent
START_SECONDS = 300
ONE_BY_ONE_COUNT = 8
SETTLE_SECONDS = 12
"""Pause between the first response of a server and the load, in which its one-time work after the start ends."""


@dataclass(slots=True)
class Answer:
    """The stream of one request: seconds from sending it to each chunk with text or tokens."""

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one server under one load."""

    server: str
    load: str
    seconds: float
    answers: list[Answer]

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.error and answer.arrivals]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.good) / self.seconds

    def first_token(self) -> list[float]:
        return sorted(answer.arrivals[0] for answer in self.good)

    def between(self) -> list[float]:
        return sorted(later - earlier for answer in self.good for earlier, later in itertools.pairwise(answer.arrivals))

    def per_token(self) -> list[float]:
        several = [answer for answer in self.good if answer.tokens > 1]
        return sorted((answer.arrivals[-1] - answer.arrivals[0]) / (answer.tokens - 1) for answer in several)

    def end_to_end(self) -> list[float]:
        return sorted(answer.arrivals[-1] for answer in self.good)


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def work(count: int, seed: int = 1) -> list[Request]:
    """Returns requests with prompts of 128 to 384 tokens and outputs of 128."""
    rng = random.Random(seed)
    return [Request([rng.choice(VOCABULARY) for _ in range(rng.randint(128, 384))], 128) for _ in range(count)]


# -- the client: plain sockets, because it shares the cores with the server -------------------------------------------


async def ask(base_url: str, model: str, request: Request) -> Answer:
    address = urlsplit(base_url)
    body = json.dumps(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.hostname}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    answer = Answer()
    started = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head.encode() + body)
        await read_stream(reader, answer, started)
        writer.close()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = repr(error)
    return answer


async def read_stream(reader: asyncio.StreamReader, answer: Answer, started: float) -> None:
    status = (await reader.readline()).split()
    if len(status) < 2 or status[1] != b"200":
        answer.error = (b" ".join(status) + b" " + await reader.read(2000)).decode(errors="replace")
        return
    # Parsed after the stream ends, because parsing would take CPU time from the server.
    pieces = []
    while data := await reader.read(65536):
        pieces.append((time.perf_counter() - started, data))
    rest = b""
    for arrival, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            take_line(line, arrival, answer)


def take_line(line: bytes, arrival: float, answer: Answer) -> None:
    """Records the arrival of an event. Parses only the one with the usage, which is the last."""
    if not line.startswith(b"data: {"):
        return
    if b'"usage":{' in line or b'"usage": {' in line:
        answer.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    else:
        answer.arrivals.append(arrival)


AT_ONCE, ONE_BY_ONE = "at once", "one by one"


async def load(
    base_url: str, model: str, requests: Sequence[Request], arrivals: float | str
) -> tuple[float, list[Answer]]:
    """Sends the requests at once, one by one, or as Poisson arrivals at a rate; returns seconds and answers."""
    rng = random.Random(2)
    started = time.perf_counter()
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(ask(base_url, model, request)))
        if arrivals == ONE_BY_ONE:
            await tasks[-1]
        elif isinstance(arrivals, float):
            await asyncio.sleep(rng.expovariate(arrivals))
    answers = await asyncio.gather(*tasks)
    return time.perf_counter() - started, list(answers)


@contextlib.contextmanager
def sched_batch() -> Iterator[None]:
    """Runs this thread under SCHED_BATCH, so that the client does not preempt the server, as if on another machine."""
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, policy, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def measure(server: str, base_url: str, model: str, count: int, arrivals: float | str) -> Run:
    with sched_batch():
        seconds, answers = asyncio.run(load(base_url, model, work(count), arrivals))
    run = Run(server, arrivals if isinstance(arrivals, str) else f"{arrivals:g} per second", seconds, answers)
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        print(f"{server}: {len(failed)} of {count} requests failed, the first with: {failed[0][:300]}")
    return run


# -- servers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], base_url: str) -> Iterator[None]:
    """Runs a server in its own process group; enters when it responds and stops it at the end."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_ready(process, base_url, output)
            yield
        finally:
            for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, kind)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                    break


def wait_until_ready(process: subprocess.Popen[bytes], base_url: str, output: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), urlopen(f"{base_url}/v1/models", timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    output.seek(0)
    raise RuntimeError(f"the server did not start: {output.read()[-3000:].decode(errors='replace')}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def batch_policy_prefix() -> list[str]:
    """Returns the command prefix of `make serve` that sets SCHED_BATCH, or nothing where that is not permitted."""
    prefix = ["chrt", "--batch", "0"]
    with contextlib.suppress(OSError):
        if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0:
            return prefix
    return []


@contextlib.contextmanager
def our_server(quantization: str | None) -> Iterator[str]:
    """Runs `serve run` with the shipped configuration on a free port. Yields its base URL."""
    import yaml

    port = free_port()
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    for application in config["applications"]:
        application["args"]["http_port"] = port
        application["args"]["enable_prefix_caching"] = False
        if quantization:
            application["args"]["quantization"] = quantization
    base_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "serve.yaml")
        path.write_text(yaml.safe_dump(config))
        command = [*batch_policy_prefix(), str(Path(sys.executable).parent / "serve"), "run", str(path)]
        environment = {**os.environ, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
        # Ray's workers run at a lower priority by default; a peer's server does not.
        environment["RAY_worker_niceness"] = "0"
        with running(command, environment, base_url):
            yield base_url


@contextlib.contextmanager
def vllm_server(python: str, model: str) -> Iterator[str]:
    """Runs `vllm serve` with its fastest settings. Yields its base URL."""
    port = free_port()
    script = str(ROOT / "benchmarks" / "peer_engines.py")
    command = [python, script, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    base_url = f"http://127.0.0.1:{port}"
    with running(command, {**os.environ, **vllm_environment(python)}, base_url):
        yield base_url


@contextlib.contextmanager
def llama_server(folder: Path, quantization: str | None) -> Iterator[str]:
    """Runs `llama-server`. Yields its base URL."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    with running(llama_cpp.server_command(folder, quantization, port), llama_cpp.environment(folder), base_url):
        yield base_url


def model_name(base_url: str) -> str:
    with urlopen(f"{base_url}/v1/models", timeout=30) as reply:
        return str(json.load(reply)["data"][0]["id"])


def run_loads(server: str, base_url: str, options: argparse.Namespace) -> list[Run]:
    model = options.model or model_name(base_url)
    measure(server, base_url, model, 4, AT_ONCE)
    time.sleep(SETTLE_SECONDS)
    loads: list[tuple[int, float | str]] = [(options.requests, AT_ONCE), (ONE_BY_ONE_COUNT, ONE_BY_ONE)]
    loads += [(max(8, int(rate * options.seconds)), rate) for rate in options.rate]
    return [measure(server, base_url, model, count, arrivals) for count, arrivals in loads]


# -- the engine alone -------------------------------------------------------------------------------------------------


def engine_alone(quantization: str | None, count: int) -> list[Run]:
    """The closed loops without HTTP, Ray and text."""
    engine = steady_engine(quantization=quantization, enable_prefix_caching=False)
    name = f"engine alone {quantization or 'bfloat16'}"
    run_on_engine(engine, work(4))
    started = time.perf_counter()
    answers = run_on_engine(engine, work(count))
    runs = [Run(name, AT_ONCE, time.perf_counter() - started, answers)]
    started = time.perf_counter()
    answers = [run_on_engine(engine, [request])[0] for request in work(ONE_BY_ONE_COUNT)]
    return [*runs, Run(name, ONE_BY_ONE, time.perf_counter() - started, answers)]


def run_on_engine(engine: Any, requests: Sequence[Request]) -> list[Answer]:
    from minivllm import SamplingParams

    answers = {str(index): Answer() for index in range(len(requests))}
    started = time.perf_counter()
    for index, request in enumerate(requests):
        params = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        engine.add_request(str(index), request.prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.new_token_ids:
                answers[output.request_id].arrivals.append(time.perf_counter() - started)
                answers[output.request_id].tokens += len(output.new_token_ids)
    return list(answers.values())


def report(runs: Sequence[Run]) -> None:
    rows = []
    for run in runs:
        cells: list[Any] = [run.server, run.load, len(run.good), f"{run.tokens_per_second:.0f}"]
        cells += [
            " / ".join(f"{1000 * percentile(values, share):.0f}" for share in (0.5, 0.9, 0.99))
            for values in (run.first_token(), run.between(), run.per_token(), run.end_to_end())
        ]
        rows.append(cells)
    print("times in ms: median / 90 % / 99 %")
    print_table(("server", "load", "answered", "tokens/s", "first token", "between", "per token", "end to end"), rows)


def as_results(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {
            "server": run.server,
            "load": run.load,
            "tokens_per_second": run.tokens_per_second,
            **{
                name: {str(share): percentile(values, share) for share in (0.5, 0.9, 0.99)}
                for name, values in (
                    ("first_token", run.first_token()),
                    ("between", run.between()),
                    ("per_token", run.per_token()),
                    ("end_to_end", run.end_to_end()),
                )
            },
        }
        for run in runs
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--base-url", help="URL of a running server")
    parser.add_argument("--model", help="model name on that server (default: the first it lists)")
    parser.add_argument("--start", action="store_true", help="start our own server")
    parser.add_argument("--quantization", choices=["none", "int8", "both"], default="none")
    parser.add_argument("--requests", type=int, default=64, help="number of requests in the closed loop")
    parser.add_argument(
        "--rate", type=float, action="append", default=None, help="requests per second of an open loop; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=20, help="duration of each open loop")
    options = parser.parse_args()
    options.rate = [2.0] if options.rate is None else [rate for rate in options.rate if rate > 0]
    print_environment()
    runs: list[Run] = []
    if options.base_url:
        runs += run_loads(options.base_url, options.base_url, options)
    if options.start:
        for quantization in {"none": [None], "int8": ["int8"], "both": [None, "int8"]}[options.quantization]:
            with our_server(quantization) as base_url:
                runs += run_loads(f"minivllm {quantization or 'bfloat16'}", base_url, options)
            with quiet():
                runs += engine_alone(quantization, options.requests)
    if options.peer_python:
        with vllm_server(options.peer_python, options.peer_model) as base_url:
            runs += run_loads("vllm serve", base_url, options)
    if options.llama:
        with llama_server(options.llama, None) as base_url:
            runs += run_loads("llama-server bfloat16", base_url, options)
    if not runs:
        parser.error("one of --start, --base-url, --peer-python and --llama is required")
    report(runs)
    write_json(options.json, "serving", as_results(runs))


if __name__ == "__main__":
    main()
