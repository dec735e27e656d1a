"""Latency of one stream: time to first token and time per output token, by prompt length.

python -m benchmarks.latency [--quantization both] [--peer-python PATH --peer-model FOLDER]
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.common import (
    Request,
    arguments,
    describe,
    even_work,
    one_stream,
    print_environment,
    print_table,
    quiet,
    run_peer,
    steady_engine,
    write_json,
)

LENGTHS = (32, 256, 1024, 1900)
OUTPUT = 96


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in seconds: `per_token` is the median time between tokens, `slowest` the 99th percentile."""

    settings: str
    prompt_len: int
    first_token: float
    per_token: float
    slowest: float


def measure(engine: Any, settings: str, request: Request, label: str) -> Latency:
    from minivllm import SamplingParams

    params = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    engine.add_request(label, request.prompt, params)
    times = []
    while engine.has_unfinished_requests():
        if any(output.new_token_ids for output in engine.step()):
            times.append(time.perf_counter())
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    return Latency(
        settings,
        len(request.prompt),
        times[0] - started,
        statistics.median(gaps),
        gaps[int(0.99 * (len(gaps) - 1))],
    )


def run_ours(settings: dict[str, Any]) -> list[Latency]:
    """Returns the better of two runs per prompt length."""
    engine = steady_engine(enable_prefix_caching=False, **settings)
    measure(engine, "", even_work(1, 64, 8)[0], "warm")
    found = []
    for length in LENGTHS:
        request = even_work(1, length, OUTPUT)[0]
        runs = [measure(engine, describe(settings), request, f"{length}-{turn}") for turn in range(2)]
        found.append(min(runs, key=lambda run: run.per_token))
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--quantization", choices=["none", "int8", "both"], default="both")
    options = parser.parse_args()
    print_environment()
    found: list[Latency] = []
    for quantization in {"none": [None], "int8": ["int8"], "both": [None, "int8"]}[options.quantization]:
        settings: dict[str, Any] = {"dtype": "bfloat16"}
        if quantization:
            settings["quantization"] = quantization
        with quiet():
            found += run_ours(settings)
        gc.collect()
    rows = [
        (one.settings, one.prompt_len, f"{1000 * one.first_token:.1f}", f"{1000 * one.per_token:.2f}",
         f"{1000 * one.slowest:.2f}", f"{1 / one.per_token:.0f}")
        for one in found
    ]  # fmt: skip
    print_table(("settings", "prompt", "first token, ms", "per token, ms", "99 %", "tokens/s"), rows)
    results: list[Any] = list(found)
    if options.peer_python:
        peer = run_peer("vllm", options.peer_python, options.peer_model, "one", one_stream())
        print(f"{peer.engine} ({peer.settings}): {peer.tokens_per_second:.1f} tokens/s, prefill included")
        results.append(peer)
    write_json(options.json, "latency", results)


if __name__ == "__main__":
    main()
