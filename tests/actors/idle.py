"""Reads running requests and free blocks from the engine, the Metrics deployment and `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from tests.processes import wait_until


@dataclass(frozen=True)
class Load:
    running: int
    waiting: int
    free: int
    total: int

    @property
    def is_none(self) -> bool:
        return self.running == 0 and self.waiting == 0 and self.free == self.total > 0


def _of(stats: Any) -> Load:
    return Load(stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.num_total_blocks)


def in_engine(app: str) -> Load:
    return _of(serve.get_deployment_handle("Engine", app).stats.remote().result(timeout_s=30).stats)


def in_metrics(app: str) -> Load:
    snapshot = serve.get_deployment_handle("Metrics", app).current.remote().result(timeout_s=30)
    return Load(-1, -1, -1, -1) if snapshot is None else _of(snapshot.stats)


def over_http(base_url: str) -> Load:
    values = read_metrics(base_url)
    return Load(
        int(values["minivllm_num_requests_running"]),
        int(values["minivllm_num_requests_waiting"]),
        int(values["minivllm_kv_blocks{free}"]),
        int(values["minivllm_kv_blocks{total}"]),
    )


def read_metrics(base_url: str) -> dict[str, float]:
    """Returns the samples of /metrics by name, with label values in braces."""
    text = httpx.get(f"{base_url}/metrics", timeout=30).raise_for_status().text
    return {
        sample.name + ("{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_for_no_load(app: str, base_url: str) -> None:
    """Waits until engine, Metrics deployment and `/metrics` report no load, without sending a request."""
    wait_until(lambda: in_engine(app).is_none, "the engine is idle", 10)
    wait_until(lambda: in_metrics(app).is_none, "the Metrics deployment reports no load", 10)
    assert over_http(base_url).is_none
