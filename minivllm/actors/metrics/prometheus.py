"""render_prometheus: formats an engine snapshot as Prometheus text, version 0.0.4."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import minivllm
from minivllm.actors.transport.messages import HISTOGRAM_HELP, EngineSnapshot, Histogram
from minivllm.core.sequence import FinishReason
from minivllm.core.stats import RejectionReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAMILIES: dict[str, type[GaugeMetricFamily | CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


def render_prometheus(snapshot: EngineSnapshot | None) -> str:
    """Returns the snapshot as metrics named `minivllm_*`; without one, only that no engine is up.

    Counters start at 0 with every new engine, as Prometheus expects of a restart.
    """
    return generate_latest(_Families(snapshot)).decode()


@dataclass
class _Families(Collector):
    snapshot: EngineSnapshot | None

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        is_up = snapshot is not None and not snapshot.is_dead
        yield _family("gauge", "engine_up", "1 while the engine works", is_up)
        if snapshot is None:
            return
        info = GaugeMetricFamily("minivllm_engine", "What runs; always 1", labels=("model", "version", "engine_id"))
        info.name = "minivllm_engine_info"
        info.add_metric((snapshot.model, minivllm.__version__, snapshot.engine_id), 1)
        yield info
        yield _family("gauge", "engine_start_time_seconds", "When the engine became ready", snapshot.started_at)
        age = max(0.0, time.time() - snapshot.time)
        yield _family("gauge", "snapshot_age_seconds", "Age of these figures", age)
        stats = snapshot.stats
        for one in fields(stats):
            if one.metadata:
                metadata = one.metadata
                yield _family(metadata["type"], metadata["metric"], metadata["help"], getattr(stats, one.name))
        states = {state: getattr(stats, f"num_{state}_blocks") for state in ("free", "used", "cached", "total")}
        help_text = "KV blocks: free + used = total; cached ones are among the free"
        yield _family("gauge", "kv_blocks", help_text, states, "state")
        # Reasons that have not occurred are exported with 0, so that alerts on them work from the start.
        rejections = dict.fromkeys(RejectionReason, 0) | stats.rejections
        help_text = "Rejections at admission, once per request and wait, under the first reason"
        yield _family("counter", "block_admission_rejections", help_text, rejections, "reason")
        finished = dict.fromkeys(FinishReason, 0) | stats.finished
        yield _family("counter", "samples_finished", "Samples that ended", finished, "reason")
        for name, histogram in snapshot.histograms.items():
            yield _histogram(name, histogram)


def _family(kind: str, name: str, help_text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    """Returns a gauge or counter: one value, or one per value of `label`."""
    family = _FAMILIES[kind](f"minivllm_{name}", help_text, labels=(label,) if label else ())
    for label_value, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric((label_value,) if label else (), value)
    return family


def _histogram(name: str, histogram: Histogram) -> Metric:
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(f"minivllm_{name}", HISTOGRAM_HELP[name], buckets=buckets, sum_value=histogram.sum)
