"""render_prometheus: formats an engine snapshot as Prometheus text, version 0.0.4."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

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
from minivllm.core.sequence import FinishReason
from minivllm.core.stats import EngineStats, RejectionReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BLOCK_STATES = {
    "free": "num_free_blocks",
    "used": "num_used_blocks",
    "cached": "num_cached_blocks",
    "total": "num_total_blocks",
}
_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
_HISTOGRAMS = {
    TIME_TO_FIRST_TOKEN: "From the arrival at the engine to the first token",
    INTER_TOKEN_LATENCY: "Between two tokens of one sequence",
    REQUEST_LATENCY: "From the arrival at the engine to the end of the request",
}


def render_prometheus(snapshot: EngineSnapshot | None) -> str:
    """Returns the snapshot as metrics named `minivllm_*`; without one, only that no engine is up.

    Counters start at 0 with every new engine, as Prometheus expects of a restart.
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
        yield from _fields(snapshot.stats)
        yield _blocks(snapshot.stats)
        yield _by_reason(
            "block_admission_rejections",
            "Rejections at admission, once per request and wait, under the first reason",
            RejectionReason,
            snapshot.stats.rejections,
        )
        yield _by_reason("samples_finished", "Samples that ended", FinishReason, snapshot.stats.finished)
        for name, documentation in _HISTOGRAMS.items():
            if name in snapshot.histograms:
                yield _histogram(name, documentation, snapshot.histograms[name])


def _fields(stats: EngineStats) -> Iterator[Metric]:
    """Yields the gauges and counters that the metadata of EngineStats define."""
    for one in fields(stats):
        if one.metadata:
            family = _FAMILIES[one.metadata["type"]]
            yield family(f"minivllm_{one.metadata['metric']}", one.metadata["help"], value=getattr(stats, one.name))


def _blocks(stats: EngineStats) -> Metric:
    blocks = GaugeMetricFamily(
        "minivllm_kv_blocks", "KV blocks: free + used = total; cached ones are among the free", labels=("state",)
    )
    for state, attribute in _BLOCK_STATES.items():
        blocks.add_metric((state,), getattr(stats, attribute))
    return blocks


def _by_reason(name: str, documentation: str, known: Iterable[str], counts: Mapping[str, int]) -> Metric:
    """Reasons that have not occurred are exported with 0, so that alerts on them work from the start."""
    counter = CounterMetricFamily(f"minivllm_{name}", documentation, labels=("reason",))
    for reason in dict.fromkeys((*map(str, known), *counts)):
        counter.add_metric((reason,), counts.get(reason, 0))
    return counter


def _histogram(name: str, documentation: str, histogram: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(f"minivllm_{name}", documentation, buckets=buckets, sum_value=histogram.sum)
