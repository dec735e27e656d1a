"""render_prometheus: one engine snapshot as Prometheus text, format version 0.0.4."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import minivllm
from minivllm.actors.transport.messages import (
    INTER_TOKEN_LATENCY,
    REQUEST_LATENCY,
    TIME_TO_FIRST_TOKEN,
    EngineSnapshot,
    Histogram,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REJECTION_REASONS = ("no_free_blocks", "watermark", "max_num_seqs", "token_budget", "never_fits", "queue_full")
FINISH_REASONS = ("stop", "length", "abort", "error")

_GAUGES = {
    "num_requests_running": ("num_running", "Sequences that hold KV blocks and are computed in steps"),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for admission, preempted ones included"),
    "max_model_len": ("max_model_len", "Longest prompt and output together, in tokens"),
    "kv_block_size": ("block_size", "Tokens in one KV block"),
}
_BLOCK_STATES = {
    "free": "num_free_blocks",
    "used": "num_used_blocks",
    "cached": "num_cached_blocks",
    "total": "num_total_blocks",
}
_COUNTERS = {
    "engine_steps": ("steps_total", "Forward passes"),
    "requests": ("requests_total", "Requests that were accepted"),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of accepted requests"),
    "generated_tokens": ("generated_tokens_total", "Tokens sampled"),
    "computed_tokens": ("computed_tokens_total", "Tokens that went through the model: prefill, decode and recompute"),
    "recomputed_tokens": ("recomputed_tokens_total", "Tokens computed once more after a preemption"),
    "prefix_cache_query_tokens": ("prefix_cache_query_tokens_total", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hit_tokens": ("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache"),
    "preemptions": ("preemptions_total", "Running sequences whose blocks were taken back"),
    "integrity_violations": ("integrity_violations_total", "Violated invariants of the block ledger"),
}
_HISTOGRAMS = {
    TIME_TO_FIRST_TOKEN: "From the arrival at the engine to the first token",
    INTER_TOKEN_LATENCY: "Between two tokens of one sequence",
    REQUEST_LATENCY: "From the arrival at the engine to the end of the request",
}


def render_prometheus(snapshot: EngineSnapshot | None) -> str:
    """All that the snapshot says; without one, only that no engine is up.

    Names begin with `minivllm_`. Counters start at 0 with every new engine, as Prometheus expects of a restart.
    Reasons that have not occurred are there with 0, so that an alert on them works from the start.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, snapshot: EngineSnapshot | None) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        is_up = snapshot is not None and not snapshot.is_dead
        yield GaugeMetricFamily("minivllm_engine_up", "1 while the engine works", value=float(is_up))
        if snapshot is None:
            return
        info = GaugeMetricFamily("minivllm_engine", "What runs; always 1", labels=("model", "version", "engine_id"))
        info.name = "minivllm_engine_info"
        info.add_metric((snapshot.model, minivllm.__version__, snapshot.engine_id), 1)
        yield info
        yield GaugeMetricFamily(
            "minivllm_engine_start_time_seconds", "When the engine became ready", value=snapshot.started_at
        )
        yield GaugeMetricFamily(
            "minivllm_snapshot_age_seconds", "Age of these figures", value=max(0.0, time.time() - snapshot.time)
        )
        yield from _gauges(snapshot)
        yield from _counters(snapshot)
        for name, documentation in _HISTOGRAMS.items():
            if name in snapshot.histograms:
                yield _histogram(name, documentation, snapshot.histograms[name])


def _gauges(snapshot: EngineSnapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    for name, (attribute, documentation) in _GAUGES.items():
        yield GaugeMetricFamily(f"minivllm_{name}", documentation, value=getattr(stats, attribute))
    blocks = GaugeMetricFamily(
        "minivllm_kv_blocks", "KV blocks: free + used = total; cached ones are among the free", labels=("state",)
    )
    for state, attribute in _BLOCK_STATES.items():
        blocks.add_metric((state,), getattr(stats, attribute))
    yield blocks


def _counters(snapshot: EngineSnapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    for name, (attribute, documentation) in _COUNTERS.items():
        yield CounterMetricFamily(f"minivllm_{name}", documentation, value=getattr(stats, attribute))
    rejections = CounterMetricFamily(
        "minivllm_block_admission_rejections",
        "Refusals to admit a request, once for each request, wait and reason",
        labels=("reason",),
    )
    for reason in dict.fromkeys((*REJECTION_REASONS, *stats.rejections)):
        rejections.add_metric((reason,), stats.rejections.get(reason, 0))
    yield rejections
    finished = CounterMetricFamily("minivllm_samples_finished", "Samples that ended", labels=("reason",))
    for reason in dict.fromkeys((*FINISH_REASONS, *stats.finished)):
        finished.add_metric((reason,), stats.finished.get(reason, 0))
    yield finished


def _histogram(name: str, documentation: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(f"minivllm_{name}", documentation, buckets=buckets, sum_value=histogram.sum)
