"""Killed, hung and failed processes: open requests end with an error, and service resumes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from ray import serve

from minivllm.actors.app import bind_app
from minivllm.actors.client import Client
from minivllm.actors.config import AppArgs
from minivllm.core.errors import EngineDeadError
from minivllm.core.stats import EngineStats
from tests.actors.idle import read_metrics, wait_for_no_load
from tests.conftest import RayCluster
from tests.faults.conftest import Broken
from tests.faults.faulty_engine import FAIL, HANG, fail_to_build
from tests.processes import kill, replica_pid, wait_until

STREAMS = 12


def body(broken: Broken, prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": broken.model, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, **fields}


async def read_stream(
    client: httpx.AsyncClient, broken: Broken, started: asyncio.Semaphore, max_tokens: int = 2000
) -> str:
    request = body(broken, stream=True, max_tokens=max_tokens)
    async with client.stream("POST", f"{broken.base_url}/v1/completions", json=request) as response:
        text = ""
        async for part in response.aiter_text():
            if not text:
                started.release()
            text += part
        return text


async def streams_through(broken: Broken, fault: Any) -> list[str | BaseException]:
    """Starts streams, runs `fault` once all have begun, and returns the text or exception of each."""
    started = asyncio.Semaphore(0)
    async with httpx.AsyncClient(timeout=60) as client:
        tasks = [asyncio.create_task(read_stream(client, broken, started)) for _ in range(STREAMS)]
        for _ in tasks:
            await started.acquire()
        await asyncio.to_thread(fault)
        return await asyncio.gather(*tasks, return_exceptions=True)


def assert_ended_with_an_error(results: list[str | BaseException]) -> None:
    for text in results:
        assert isinstance(text, str), text
        assert '"error"' in text
        assert text.rstrip().endswith("data: [DONE]")


def assert_serves(broken: Broken) -> None:
    def answers() -> bool:
        reply = httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, max_tokens=5), timeout=60)
        return reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 5

    wait_until(answers, "requests are answered")
    assert httpx.get(f"{broken.base_url}/health", timeout=60).status_code == 200
    wait_for_no_load(broken.app, broken.base_url)


def test_killed_engine_ends_its_streams_and_is_replaced(broken: Broken) -> None:
    old = broken.info().engine_id
    results = asyncio.run(streams_through(broken, lambda: kill(replica_pid(broken.app, "Engine"))))
    assert_ended_with_an_error(results)
    broken.wait_for_another_engine(old)
    assert_serves(broken)


def test_killed_engine_fails_handle_calls_with_engine_dead_error(broken: Broken) -> None:
    old = broken.info().engine_id
    stream = Client(broken.app).generate_stream("Hello", max_tokens=2000, ignore_eos=True)
    next(stream)
    kill(replica_pid(broken.app, "Engine"))
    with pytest.raises(EngineDeadError):
        list(stream)
    broken.wait_for_another_engine(old)
    assert_serves(broken)


def test_failed_forward_pass_ends_all_streams_and_the_replica_is_replaced(broken: Broken) -> None:
    old = broken.info().engine_id

    def fail() -> None:
        reply = httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, [1, FAIL]), timeout=60)
        assert reply.status_code >= 500
        assert "fell off the bus" not in reply.text
        assert reply.json()["error"]["message"]

    assert_ended_with_an_error(asyncio.run(streams_through(broken, fail)))
    broken.wait_for_another_engine(old)
    assert_serves(broken)


def test_dead_engine_is_unhealthy_and_rejects_requests(broken: Broken) -> None:
    old = broken.info().engine_id
    httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, [1, FAIL]), timeout=60)
    assert httpx.get(f"{broken.base_url}/health", timeout=60).status_code == 503
    assert httpx.post(f"{broken.base_url}/v1/completions", json=body(broken), timeout=60).status_code == 503
    assert read_metrics(broken.base_url)["minivllm_engine_up"] == 0
    broken.wait_for_another_engine(old)
    assert_serves(broken)


def test_hung_forward_pass_ends_all_streams_and_the_replica_is_replaced(broken: Broken) -> None:
    old = broken.info().engine_id

    def hang() -> None:
        reply = httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, [1, HANG]), timeout=60)
        assert reply.status_code >= 500

    assert_ended_with_an_error(asyncio.run(streams_through(broken, hang)))
    broken.wait_for_another_engine(old)
    assert_serves(broken)


def test_shared_connection_survives_the_abort_of_its_first_request(broken: Broken) -> None:
    """The first request opens the connection between ingress and engine that all requests share."""
    old = broken.info().engine_id
    kill(replica_pid(broken.app, "Engine"))
    broken.wait_for_another_engine(old)

    async def disconnect_first() -> str:
        started = asyncio.Semaphore(0)
        async with httpx.AsyncClient(timeout=60) as client:
            first = asyncio.create_task(read_stream(client, broken, started))
            await started.acquire()
            other = asyncio.create_task(read_stream(client, broken, started, 200))
            await started.acquire()
            first.cancel()
            return await other

    text = asyncio.run(disconnect_first())
    assert '"error"' not in text
    assert text.rstrip().endswith("data: [DONE]")
    assert_serves(broken)


def test_many_closed_connections_free_all_blocks(broken: Broken) -> None:
    aborted = broken.stats().stats.finished.get("abort", 0)

    async def disconnect_all() -> None:
        started = asyncio.Semaphore(0)
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            tasks = [asyncio.create_task(read_stream(client, broken, started)) for _ in range(60)]
            for _ in tasks:
                await started.acquire()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(5):
        asyncio.run(disconnect_all())
        wait_until(lambda: broken.stats().stats.num_used_blocks == 0, "the engine has freed all blocks", 5)
    assert broken.stats().stats.finished["abort"] == aborted + 300


def test_killed_ingress_aborts_its_requests_in_the_engine(broken: Broken) -> None:
    aborted = broken.stats().stats.finished.get("abort", 0)
    results = asyncio.run(streams_through(broken, lambda: kill(replica_pid(broken.app, "Ingress"))))
    assert len(results) == STREAMS
    wait_until(lambda: broken.stats().stats.num_used_blocks == 0, "the engine has freed all blocks", 10)
    assert broken.stats().stats.finished["abort"] == aborted + STREAMS
    assert_serves(broken)


def test_restarted_metrics_actor_keeps_all_totals(broken: Broken) -> None:
    counted_before = broken.stats().stats.rejections.get("never_fits", 0)
    for _ in range(3):
        httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, max_tokens=30), timeout=60)
    assert httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, [5] * 5000), timeout=60).status_code == 400
    wait_for_no_load(broken.app, broken.base_url)

    def stats_in_metrics() -> EngineStats:
        stats: EngineStats = broken.metrics().current.remote().result(timeout_s=30).stats
        return stats

    # The ingress rejects the long prompt itself and reports it to the engine without waiting.
    counted = counted_before + 1
    wait_until(lambda: stats_in_metrics().rejections.get("never_fits") == counted, "the rejection is counted")
    before = stats_in_metrics()
    assert before.generated_tokens_total >= 90
    old = replica_pid(broken.app, "Metrics")
    kill(old)
    started = time.time()

    def is_back() -> bool:
        try:
            current = broken.metrics().current.remote().result(timeout_s=30)
        except Exception:
            return False
        return current is not None and current.time > started and replica_pid(broken.app, "Metrics") != old

    wait_until(is_back, "the new metrics actor has a snapshot")
    assert stats_in_metrics() == before
    assert_serves(broken)


def test_engine_serves_without_the_metrics_actor(broken: Broken) -> None:
    kill(replica_pid(broken.app, "Metrics"))
    before = broken.stats().stats.steps_total
    reply = httpx.post(f"{broken.base_url}/v1/completions", json=body(broken, max_tokens=50), timeout=60)
    assert reply.status_code == 200
    assert broken.stats().stats.steps_total >= before + 50
    assert_serves(broken)


def test_reconfigure_applies_without_restarting_the_engine(broken: Broken) -> None:
    old = broken.info().engine_id
    engine = broken.engine()
    engine.reconfigure.remote({"max_waiting_requests": 1}).result(timeout_s=30)

    async def flood() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as client:
            replies = await asyncio.gather(
                *(
                    client.post(f"{broken.base_url}/v1/completions", json=body(broken, max_tokens=20, n=8))
                    for _ in range(40)
                )
            )
            return [reply.status_code for reply in replies]

    codes = asyncio.run(flood())
    assert set(codes) == {200, 429}
    engine.reconfigure.remote({"max_waiting_requests": 2048}).result(timeout_s=30)
    # reconfigure() ignores unknown settings: if it raised, Serve would stop the engine and every replacement.
    engine.reconfigure.remote({"consumer_timeout_sec": 5}).result(timeout_s=30)
    assert broken.info().engine_id == old
    assert_serves(broken)


def test_model_load_error_appears_in_the_serve_status(ray_cluster: RayCluster) -> None:
    with pytest.raises(RuntimeError):
        serve.run(bind_app(AppArgs(), fail_to_build), name="nowhere", route_prefix="/nowhere")
    message = serve.status().applications["nowhere"].deployments["Engine"].message
    assert "no model 'nowhere'" in message
    serve.delete("nowhere")
