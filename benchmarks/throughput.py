"""Offline throughput: output tokens per second for a batch of requests.

    python -m benchmarks.throughput [--work reference] [--quantization int8] [--peer-python PATH --peer-model FOLDER]

Workloads: `reference` (64 ragged requests), `even` (64 of 256 tokens in and 128 out), `shared` (64 with a common prefix
of 400 tokens, prefix caching on), `one` (a single stream).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    WORKS,
    Measurement,
    Request,
    arguments,
    print_environment,
    print_table,
    quiet,
    run_ours,
    run_peer,
    write_json,
)
from benchmarks.llama_cpp import BATCHED_WORKS, run_batched


def measure(
    work: str,
    *,
    quantizations: Sequence[str | None],
    dtype: str,
    repeats: int,
    peers: Sequence[tuple[str, str]],
    model: str,
    llama: Path | None = None,
) -> list[Measurement]:
    """Measures our engine in each quantization, then the peers given as (engine, its Python), and llama.cpp."""
    requests: list[Request] = WORKS[work]()
    caching = work == "shared"
    found = []
    for quantization in quantizations:
        settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": caching}
        if quantization:
            settings["quantization"] = quantization
        with quiet():
            found.append(run_ours(work, requests, repeats, **settings))
    for engine, python in peers:
        found.append(run_peer(engine, python, model, work, requests, prefix_caching=caching))
    if llama is not None and work in BATCHED_WORKS:
        found += [run_batched(llama, quantization, work, *BATCHED_WORKS[work]) for quantization in quantizations]
    return found


def peers_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns (engine, its Python) of the peers in the options."""
    peers = [("vllm", options.peer_python)] if options.peer_python else []
    if options.transformers_python:
        peers += [(name, options.transformers_python) for name in ("transformers", "transformers-continuous")]
    return peers


def report(found: Sequence[Measurement]) -> None:
    rows = []
    peers = [one for one in found if one.engine != "minivllm"]
    for one in found:
        ratios = [
            f"{one.tokens_per_second / peer.tokens_per_second:.2f} x {peer.engine} {peer.settings.split(',')[0]}"
            for peer in peers
            if peer is not one
        ]
        first = sorted(one.first_token)
        median = f"{first[len(first) // 2]:.2f}" if first else "-"
        ratio = ", ".join(ratios) if one.engine == "minivllm" else ""
        rows.append((one.engine, one.settings, one.work, one.tokens_per_second, f"{one.seconds:.2f}", median, ratio))
    header = ("engine", "settings", "work", "tokens/s", "seconds", "median to first token", "ratio")
    print_table(header, rows)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--work", choices=WORKS, action="append", help="workload; may be repeated")
    parser.add_argument("--quantization", choices=["none", "int8", "both"], default="none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=2, help="runs of our engine, of which the best counts")
    options = parser.parse_args()
    chosen: dict[str, list[str | None]] = {"none": [None], "int8": ["int8"], "both": [None, "int8"]}
    print_environment()
    found = []
    for work in options.work or ["reference"]:
        measured = measure(
            work,
            quantizations=chosen[options.quantization],
            dtype=options.dtype,
            repeats=options.repeats,
            peers=peers_of(options),
            model=options.peer_model or "",
            llama=options.llama,
        )
        report(measured)
        found += measured
    write_json(options.json, "throughput", found)


if __name__ == "__main__":
    main()
