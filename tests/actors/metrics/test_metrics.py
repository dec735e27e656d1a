"""Metrics: the snapshot store, the Prometheus text, and the publisher that feeds the store."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minivllm.actors.config import AppArgs
from minivllm.actors.metrics import deployment
from minivllm.actors.metrics.deployment import Metrics
from minivllm.actors.metrics.prometheus import render_prometheus
from minivllm.actors.metrics.publisher import publish_snapshots
from minivllm.actors.openai.serving import service as openai_service
from minivllm.actors.transport.messages import EngineSnapshot, Histogram, empty_histograms
from minivllm.actors.transport.output_router import Latencies
from minivllm.core.errors import EngineDeadError
from minivllm.core.stats import EngineStats
from tests.actors.helpers import until


def snapshot(number: int, *, engine: str = "a", started_at: float = 0.0, **stats: Any) -> EngineSnapshot:
    return EngineSnapshot(
        EngineStats(**stats), engine_id=engine, number=number, time=float(number), started_at=started_at
    )


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# ---- Metrics deployment


@pytest.fixture
def make_metrics(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Metrics]:
    """Returns the deployment's class, which leaves the CPU policy of this process as it is."""
    monkeypatch.setattr(deployment, "use_batch_cpu_policy", lambda: None)
    return Metrics


async def test_older_snapshot_does_not_replace_a_newer_one(make_metrics: Callable[[int], Metrics]) -> None:
    metrics = make_metrics(10)
    await metrics.record(snapshot(2, num_running=2))
    await metrics.record(snapshot(1, num_running=1))
    assert await metrics.current() == snapshot(2, num_running=2)
    assert len(await metrics.history()) == 1


async def test_snapshot_of_a_replaced_engine_is_ignored(make_metrics: Callable[[int], Metrics]) -> None:
    metrics = make_metrics(10)
    await metrics.record(snapshot(7, engine="old", started_at=1.0))
    await metrics.record(snapshot(1, engine="new", started_at=2.0))
    await metrics.record(snapshot(8, engine="old", started_at=1.0))
    current = await metrics.current()
    assert current is not None
    assert current.engine_id == "new"


async def test_history_is_bounded_and_keeps_the_newest_points(make_metrics: Callable[[int], Metrics]) -> None:
    metrics = make_metrics(5)
    for number in range(100):
        await metrics.record(snapshot(number, num_free_blocks=number))
    assert [point.num_free_blocks for point in (await metrics.history())] == [95, 96, 97, 98, 99]
    assert [point.num_free_blocks for point in (await metrics.history(2))] == [98, 99]
    assert (await metrics.history(0)) == []


async def test_run_of_equal_snapshots_takes_two_history_points(make_metrics: Callable[[int], Metrics]) -> None:
    metrics = make_metrics(5)
    await metrics.record(snapshot(0, num_free_blocks=1, rejections={"watermark": 3}))
    for number in range(1, 100):
        await metrics.record(snapshot(number, num_free_blocks=7))
    points = await metrics.history()
    assert [(point.time, point.num_free_blocks) for point in points] == [(0.0, 1), (1.0, 7), (99.0, 7)]
    assert points[0].rejections == {"watermark": 3}


async def test_one_snapshot_restores_all_totals(make_metrics: Callable[[int], Metrics]) -> None:
    sent = snapshot(900, rejections={"no_free_blocks": 41}, generated_tokens_total=12345)
    metrics = make_metrics(10)
    await metrics.record(pickle.loads(pickle.dumps(sent)))
    assert await metrics.current() == sent


# ---- Prometheus text


def test_prometheus_text_shows_the_values_of_the_snapshot() -> None:
    stats = EngineStats(
        num_free_blocks=90,
        num_used_blocks=10,
        num_total_blocks=100,
        num_cached_blocks=4,
        num_running=3,
        num_waiting=2,
        preemptions_total=5,
        prefix_cache_hit_tokens_total=64,
        rejections={"watermark": 7, "a new reason": 1},
        finished={"stop": 11},
    )
    values = read(render_prometheus(EngineSnapshot(stats, model='a "model"\n', engine_id="x")))
    assert values["minivllm_num_requests_running", ()] == 3
    assert values["minivllm_num_requests_waiting", ()] == 2
    states = {"free": 90, "used": 10, "total": 100, "cached": 4}
    assert {state: values["minivllm_kv_blocks", (("state", state),)] for state in states} == states
    rejections = "minivllm_block_admission_rejections_total"
    assert values[rejections, (("reason", "watermark"),)] == 7
    assert values[rejections, (("reason", "a new reason"),)] == 1
    assert values[rejections, (("reason", "no_free_blocks"),)] == 0
    assert values["minivllm_preemptions_total", ()] == 5
    assert values["minivllm_prefix_cache_hit_tokens_total", ()] == 64
    assert values["minivllm_samples_finished_total", (("reason", "stop"),)] == 11
    assert values["minivllm_engine_up", ()] == 1


def test_histogram_buckets_are_cumulative_with_exact_sums() -> None:
    histograms = empty_histograms()
    for arrival in (0.0, 0.04):
        latencies = Latencies(histograms, arrival)
        latencies.tokens_arrived(0, 1, 0.06)
        latencies.tokens_arrived(0, 3, 0.36)
        latencies.request_ended(0.36)
    values = read(render_prometheus(EngineSnapshot(EngineStats(), histograms=histograms)))
    first = "minivllm_time_to_first_token_seconds"
    assert values[f"{first}_bucket", (("le", "0.01"),)] == 0
    assert values[f"{first}_bucket", (("le", "0.025"),)] == 1
    assert values[f"{first}_bucket", (("le", "0.1"),)] == 2
    assert values[f"{first}_bucket", (("le", "+Inf"),)] == values[f"{first}_count", ()] == 2
    assert abs(values[f"{first}_sum", ()] - 0.08) < 1e-9
    assert values["minivllm_inter_token_latency_seconds_count", ()] == 6
    assert abs(values["minivllm_inter_token_latency_seconds_sum", ()] - 0.6) < 1e-9
    assert values["minivllm_request_latency_seconds_count", ()] == 2


def test_bucket_upper_bounds_are_inclusive() -> None:
    histogram = Histogram.empty((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1]


def test_engine_up_is_zero_for_a_dead_or_missing_engine() -> None:
    assert read(render_prometheus(None)) == {("minivllm_engine_up", ()): 0}
    assert read(render_prometheus(EngineSnapshot(EngineStats(), is_dead=True)))["minivllm_engine_up", ()] == 0


class Engine:
    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    async def info(self) -> str:
        return "ready"

    async def stats(self) -> EngineSnapshot:
        if self.failure is not None:
            raise self.failure
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("failure", [EngineDeadError("gone"), None], ids=["dead", "unresponsive"])
async def test_metrics_of_an_unreachable_engine_are_the_last_known(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    async def last_known() -> EngineSnapshot:
        return snapshot(3, generated_tokens_total=77)

    monkeypatch.setattr(openai_service, "METRICS_TIMEOUT_S", 0.1)
    tokenizer: Any = SimpleNamespace(vocab_size=0)
    engine: Any = Engine(failure)
    service = openai_service.GenerationService(engine, tokenizer, AppArgs(), last_known)
    await service.ready()
    values = read(render_prometheus(await service.last_snapshot()))
    assert values["minivllm_generated_tokens_total", ()] == 77
    assert values["minivllm_engine_up", ()] == 0


# ---- publisher


class Receiver:
    def __init__(self) -> None:
        self.got: list[int] = []
        self.under_way = 0
        self.attempts = 0
        self.most_under_way = 0
        self.open = asyncio.Event()
        self.open.set()
        self.broken = False

    async def send(self, sent: EngineSnapshot) -> None:
        self.under_way += 1
        self.attempts += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.open.wait()
            if self.broken:
                raise ConnectionError("the actor is dead")
            self.got.append(sent.number)
        finally:
            self.under_way -= 1


class Publisher:
    """Runs `publish_snapshots` with the snapshot of the newest `number`."""

    def __init__(self, receiver: Receiver, **times: float) -> None:
        self._number = 0
        self._changed = asyncio.Event()
        publishing = publish_snapshots(lambda: snapshot(self._number), self._changed, receiver.send, **times)
        self._task = asyncio.create_task(publishing)

    def publish(self, number: int) -> None:
        self._number = number
        self._changed.set()

    def change_silently(self, number: int) -> None:
        self._number = number

    def stop(self) -> None:
        self._task.cancel()


async def test_publisher_sends_one_snapshot_at_a_time_and_the_newest_last() -> None:
    receiver = Receiver()
    publisher = Publisher(receiver)
    receiver.open.clear()
    for number in range(50):
        publisher.publish(number)
        await asyncio.sleep(0)
    receiver.open.set()
    await asyncio.sleep(0.05)
    assert receiver.got[-1] == 49
    assert len(receiver.got) == 2
    assert receiver.most_under_way == 1
    publisher.stop()


async def test_publisher_retries_a_failed_delivery_without_new_snapshots() -> None:
    receiver = Receiver()
    publisher = Publisher(receiver, heartbeat_s=0.05)
    receiver.broken = True
    publisher.publish(1)
    await until(lambda: receiver.attempts > 1, "a second try")
    assert receiver.got == []
    publisher.change_silently(1000)
    receiver.broken = False
    await until(lambda: bool(receiver.got), "a delivery")
    assert set(receiver.got) == {1000}
    publisher.stop()


async def test_publisher_times_out_and_retries_a_hung_delivery() -> None:
    receiver = Receiver()
    publisher = Publisher(receiver, heartbeat_s=0.05, timeout_s=0.05)
    receiver.open.clear()
    publisher.publish(1)
    await until(lambda: receiver.attempts > 1, "a second try")
    publisher.change_silently(1000)
    receiver.open.set()
    await until(lambda: 1000 in receiver.got, "a delivery")
    assert receiver.most_under_way == 1
    publisher.stop()
