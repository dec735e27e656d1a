"""Plots throughput by concurrency and latency by arrival rate as PNG.

    python -m benchmarks.plots concurrency [--peer-python PATH --peer-model FOLDER]
    python -m benchmarks.plots rate [--peer-python PATH --peer-model FOLDER]

`concurrency` measures offline, `rate` over HTTP. Both write `benchmarks/results/*.png`.
"""

from __future__ import annotations

from benchmarks.common import (
    RESULTS,
    Measurement,
    arguments,
    even_work,
    print_environment,
    quiet,
    run_ours,
    run_peer,
    write_json,
)
from benchmarks.serving import Run, measure, model_name, our_server, percentile, vllm_server

CONCURRENCY = (1, 4, 16, 64)
RATES = (0.5, 1.0, 2.0, 3.0)


def throughput_by_concurrency(peer_python: str | None, peer_model: str) -> list[Measurement]:
    """Measures each concurrency with prompts of 256 tokens and outputs of 64."""
    found = []
    for count in CONCURRENCY:
        requests = even_work(count, 256, 64)
        for settings in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}):
            with quiet():
                found.append(run_ours(str(count), requests, 1, enable_prefix_caching=False, **settings))
        if peer_python:
            found.append(run_peer("vllm", peer_python, peer_model, str(count), requests))
    return found


def latency_by_rate(peer_python: str | None, peer_model: str, seconds: float) -> list[Run]:
    runs = []
    with our_server(None) as base_url:
        name = model_name(base_url)
        runs += [measure("minivllm", base_url, name, max(6, int(rate * seconds)), rate) for rate in RATES]
    if peer_python:
        with vllm_server(peer_python, peer_model) as base_url:
            name = model_name(base_url)
            runs += [measure("vllm serve", base_url, name, max(6, int(rate * seconds)), rate) for rate in RATES]
    return runs


def plot_concurrency(found: list[Measurement]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    names = dict.fromkeys((one.engine, "int8" if "int8" in one.settings else "bfloat16") for one in found)
    for engine, kind in names:
        points = [one for one in found if one.engine == engine and ("int8" in one.settings) == (kind == "int8")]
        axes.plot(
            [int(one.work) for one in points],
            [one.tokens_per_second for one in points],
            "o-",
            label=f"{engine}, {kind}",
        )
    axes.set(
        xscale="log",
        xlabel="concurrent requests (256 tokens in, 64 out)",
        ylabel="output tokens per second",
        ylim=(0, None),
    )
    axes.set_xticks(CONCURRENCY, [str(count) for count in CONCURRENCY])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "throughput_by_concurrency.png", dpi=120)


def plot_rates(runs: list[Run]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (first, token) = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for server in dict.fromkeys(run.server for run in runs):
        own = [run for run in runs if run.server == server]
        for axes, values in (
            (first, [run.first_token() for run in own]),
            (token, [run.per_token() for run in own]),
        ):
            line = axes.plot(RATES, [1000 * percentile(one, 0.5) for one in values], "o-", label=f"{server}, median")
            high = [1000 * percentile(one, 0.99) for one in values]
            axes.plot(RATES, high, "o:", color=line[0].get_color(), label=f"{server}, 99 %")
    for axes, name in ((first, "time to first token, ms"), (token, "time per token, ms")):
        axes.set(xlabel="requests per second (about 256 tokens in, 128 out)", ylabel=name, yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(RESULTS / "latency_by_rate.png", dpi=120)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("what", choices=["concurrency", "rate"])
    parser.add_argument("--seconds", type=float, default=15, help="duration of each rate")
    options = parser.parse_args()
    print_environment()
    RESULTS.mkdir(exist_ok=True)
    if options.what == "concurrency":
        found = throughput_by_concurrency(options.peer_python, options.peer_model or "")
        write_json(options.json, "concurrency", found)
        plot_concurrency(found)
    else:
        runs = latency_by_rate(options.peer_python, options.peer_model or "", options.seconds)
        write_json(options.json, "rate", runs)
        plot_rates(runs)


if __name__ == "__main__":
    main()
