"""EngineClient: one channel for all requests of an ingress, over a transport that delays and loses calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from minivllm.actors.config import LiveSettings
from minivllm.actors.engine.deployment import Engine
from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.ingress.engine_client import EngineClient
from minivllm.core.errors import EngineDeadError, InvalidRequestError
from minivllm.core.sampling_params import StructuredOutput
from minivllm.core.sequence import FinishReason
from tests.actors.fakes import PARENT, LocalHandle, PacedRunner, paced_engine, started_engine
from tests.actors.helpers import assert_idle, collect, read, request, until


@pytest.fixture
async def runner() -> PacedRunner:
    return PacedRunner()


@pytest.fixture
async def engine(runner: PacedRunner) -> AsyncIterator[Engine]:
    engine = await started_engine(lambda: paced_engine(runner))
    yield engine
    runner.gate.set()
    engine.loop.stop()


@pytest.fixture
async def loop(engine: Engine) -> EngineLoop:
    return engine.loop


@pytest.fixture
async def handle(engine: Engine) -> LocalHandle:
    return LocalHandle(engine)


@pytest.fixture
async def client(handle: LocalHandle) -> AsyncIterator[EngineClient]:
    client = EngineClient(handle, connect_timeout_s=0.3)  # type: ignore[arg-type]
    yield client
    client.close()


def made(handle: LocalHandle, name: str) -> int:
    return sum(called == name for called, _ in handle.calls)


async def test_all_requests_share_one_channel(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    prompts = [[index, index + 1] * (1 + index % 5) for index in range(1, 33)]
    streams = [client.submit(request(f"r{index}", 15, prompt=prompt)) for index, prompt in enumerate(prompts)]
    results = await asyncio.gather(*map(collect, streams))
    for prompt, result in zip(prompts, results, strict=True):
        expected, _ = runner.model.complete(prompt, request("", 15).sampling_params, max_model_len=256)
        assert result[0].new_token_ids == expected
    assert made(handle, "connect") == 1
    await assert_idle(loop, runner)


async def test_each_step_sends_at_most_one_message(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    runner.gate.clear()
    tasks = [asyncio.create_task(collect(client.submit(request(f"r{index}", 40)))) for index in range(16)]
    await until(lambda: made(handle, "submit") == 16, "all requests are submitted")
    messages = 0
    channel = client._open_channel()
    assert channel is not None
    deliver = channel.router.deliver

    def count(*arguments: Any) -> None:
        nonlocal messages
        messages += 1
        deliver(*arguments)

    channel.router.deliver = count  # type: ignore[method-assign]
    runner.gate.set()
    await asyncio.gather(*tasks)
    assert 0 < messages <= runner.steps_executed


async def test_rejection_is_raised_only_in_its_own_request(
    client: EngineClient, loop: EngineLoop, runner: PacedRunner
) -> None:
    neighbour = asyncio.create_task(collect(client.submit(request("good", 20))))
    with pytest.raises(InvalidRequestError) as caught:
        await client.submit(request("bad", prompt=[10**6]))
    assert caught.value.param == "prompt"
    assert len((await neighbour)[0].new_token_ids) == 20
    assert len((await collect(client.submit(request("bad", 5))))[0].new_token_ids) == 5
    await assert_idle(loop, runner)


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_closed_stream_aborts_its_request(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner, how: str
) -> None:
    neighbour = asyncio.create_task(collect(client.submit(request("stays", 60))))
    if how == "close":
        stream = await client.submit(request("leaves", 200))
        await stream.take()
        stream.close()
    else:
        task = asyncio.create_task(collect(client.submit(request("leaves", 200))))
        await until(lambda: runner.steps_executed > 3, "some steps")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await until(lambda: "leaves" not in runner.live_request_ids, "the engine has released the request")
    assert len((await neighbour)[0].new_token_ids) == 60
    assert made(handle, "abort") == 1
    await assert_idle(loop, runner)


async def test_abort_follows_the_submission_of_its_request(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    handle.delays_s["submit"] = 0.1
    task = asyncio.create_task(collect(client.submit(request("r", 200))))
    await until(lambda: made(handle, "submit") == 1, "the submission is under way")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made(handle, "abort") == 0
    await until(lambda: made(handle, "abort") == 1, "the abort follows")
    await assert_idle(loop, runner)
    assert runner.released_total == 1


async def test_engine_calls_run_outside_the_context_of_the_request(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    """Serve cancels the child calls of a request, which would include the shared channel and the abort."""

    async def leave() -> None:
        PARENT.set("a request")
        stream = await client.submit(request("r", 200))
        await stream.take()
        stream.close()

    await asyncio.create_task(leave())
    await until(lambda: made(handle, "abort") > 0, "every kind of call was made")
    assert handle.parents == {None}
    await assert_idle(loop, runner)


async def test_request_cancelled_while_connecting_keeps_the_connection(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    handle.delays_s["connect"] = 0.1
    first = asyncio.create_task(collect(client.submit(request("first", 200))))
    second = asyncio.create_task(collect(client.submit(request("second", 5))))
    await asyncio.sleep(0.02)
    first.cancel()
    assert len((await second)[0].new_token_ids) == 5
    assert made(handle, "connect") == 1
    await assert_idle(loop, runner)


async def test_lost_abort_is_repeated(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    runner.step_s = 0.05
    handle.lost.add("abort")
    neighbour = asyncio.create_task(collect(client.submit(request("stays", 50))))
    stream = await client.submit(request("leaves", 200))
    await stream.take()
    stream.close()
    await until(lambda: made(handle, "abort") == 1, "the abort is sent")
    handle.lost.clear()
    await until(lambda: "leaves" not in runner.live_request_ids, "the engine has released the request")
    assert runner.steps_executed < 150
    assert len((await neighbour)[0].new_token_ids) == 50
    await assert_idle(loop, runner)


async def test_request_whose_acceptance_was_lost_is_aborted(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    """The engine accepts the request, and its reply does not arrive."""
    runner.step_s = 0.01
    handle.lost_replies.add("submit")
    with pytest.raises(EngineDeadError, match="cannot be reached"):
        await client.submit(request("r", 240))
    await assert_idle(loop, runner)
    assert runner.steps_executed < 150
    assert runner.released_total == 1


async def test_unread_stream_is_aborted_after_the_consumer_timeout(
    client: EngineClient, engine: Engine, loop: EngineLoop, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    await engine.reconfigure({"consumer_timeout_s": 0.2})
    forgotten = await client.submit(request("forgotten", 240))
    await forgotten.take()
    polled = await collect(client.submit(request("polled", 60)))
    assert len(polled[0].new_token_ids) == 60
    assert (await read(forgotten))[0].finish_reason is FinishReason.ABORT
    await assert_idle(loop, runner)


async def test_changed_consumer_timeout_reaches_an_open_channel(
    client: EngineClient, engine: Engine, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    forgotten = await client.submit(request("forgotten", 240))
    await forgotten.take()
    await engine.reconfigure({"consumer_timeout_s": 0.2})
    await until(lambda: "forgotten" not in runner.live_request_ids, "the engine has released the request")
    assert runner.steps_executed < 150
    forgotten.close()


async def test_waiting_for_a_long_step_counts_as_reading(
    client: EngineClient, engine: Engine, runner: PacedRunner
) -> None:
    runner.step_s = 0.4
    await engine.reconfigure({"consumer_timeout_s": 0.1})
    assert len((await collect(client.submit(request("r", 3))))[0].new_token_ids) == 3


async def test_channel_closed_while_a_grammar_compiles_leaves_no_state(
    client: EngineClient, handle: LocalHandle, loop: EngineLoop, runner: PacedRunner
) -> None:
    release = threading.Event()
    runner.precompile = lambda _: release.wait(30)  # type: ignore[method-assign,assignment,return-value]
    grammar = StructuredOutput(kind="regex", value="a")
    submission = asyncio.create_task(client.submit(request("r", 200, structured_output=grammar)))
    await until(lambda: made(handle, "submit") == 1, "the submission is under way")
    client.close()
    await asyncio.sleep(0.05)
    release.set()
    with contextlib.suppress(EngineDeadError):
        await submission
    await assert_idle(loop, runner)


async def test_stats_report_the_settings_in_force(client: EngineClient, engine: Engine, loop: EngineLoop) -> None:
    defaults = LiveSettings()
    assert (await client.stats()).settings == defaults
    await engine.reconfigure({"max_waiting_requests": 1, "stall_timeout_s": 9})
    changed = (await client.stats()).settings
    assert changed == defaults.model_copy(update={"max_waiting_requests": 1, "stall_timeout_s": 9.0})
    assert await loop.call(lambda engine: engine.scheduler.config.max_waiting_requests) == 1
    await engine.reconfigure({"consumer_timeout_s": -1, "max_waiting_requests": 5})
    assert (await client.stats()).settings == changed
    await engine.reconfigure({})
    assert (await client.stats()).settings == defaults


async def test_closing_the_client_ends_its_requests(
    client: EngineClient, loop: EngineLoop, runner: PacedRunner
) -> None:
    tasks = [asyncio.create_task(collect(client.submit(request(f"r{index}", 200)))) for index in range(4)]
    await until(lambda: runner.steps_executed > 3, "some steps")
    client.close()
    for result in await asyncio.gather(*tasks):
        assert isinstance(result[0].error, EngineDeadError)
    await assert_idle(loop, runner)
    assert runner.steps_executed < 150


async def test_idle_connection_closes_when_its_engine_stops(client: EngineClient, loop: EngineLoop) -> None:
    await collect(client.submit(request("r", 5)))
    channel = client._open_channel()
    assert channel is not None
    loop.stop()
    await until(lambda: not channel.is_open, "the connection is closed")


async def test_dead_engine_fails_all_requests_and_its_successor_serves(
    client: EngineClient, handle: LocalHandle, runner: PacedRunner
) -> None:
    tasks = [asyncio.create_task(collect(client.submit(request(f"r{index}", 200)))) for index in range(4)]
    await until(lambda: runner.steps_executed > 3, "some steps")
    runner.fail_next_step = RuntimeError("gone")
    for result in await asyncio.gather(*tasks):
        assert isinstance(result[0].error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        await client.submit(request("late"))
    replacement = await started_engine(lambda: paced_engine(PacedRunner()))
    handle.target = replacement
    assert len((await collect(client.submit(request("r0", 5))))[0].new_token_ids) == 5
    replacement.loop.stop()


async def test_broken_connection_fails_its_requests_and_is_reopened(
    client: EngineClient, loop: EngineLoop, runner: PacedRunner
) -> None:
    runner.gate.clear()
    task = asyncio.create_task(collect(client.submit(request("r", 200))))
    await until(lambda: client._open_channel() is not None, "connected")
    client._open_channel()._response.break_off()  # type: ignore[union-attr]
    assert isinstance((await task)[0].error, EngineDeadError)
    runner.gate.set()
    assert len((await collect(client.submit(request("next", 5))))[0].new_token_ids) == 5


async def test_replaced_engine_gets_a_new_channel(client: EngineClient, handle: LocalHandle, loop: EngineLoop) -> None:
    await collect(client.submit(request("r", 5)))
    replacement = await started_engine(lambda: paced_engine(PacedRunner()))
    handle.target = replacement
    assert len((await collect(client.submit(request("r", 5))))[0].new_token_ids) == 5
    assert made(handle, "connect") == 2
    replacement.loop.stop()


async def test_connect_timeout_raises_engine_dead_error(client: EngineClient, handle: LocalHandle) -> None:
    handle.target = None
    with pytest.raises(EngineDeadError, match="no engine is ready"):
        await client.submit(request("r"))


async def test_failed_call_raises_engine_dead_error(client: EngineClient, handle: LocalHandle) -> None:
    handle.lost.update({"submit", "stats"})
    with pytest.raises(EngineDeadError, match="cannot be reached"):
        await client.submit(request("r"))
    with pytest.raises(EngineDeadError, match="cannot be reached"):
        await client.stats()


async def test_thousand_cancelled_requests_leave_no_state(
    client: EngineClient, loop: EngineLoop, runner: PacedRunner
) -> None:
    runner.step_s = 0.0
    for batch in range(20):
        streams = [client.submit(request(f"{batch}/{index}", 100)) for index in range(50)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0.002 * (batch % 5))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await assert_idle(loop, runner)
    channel = client._open_channel()
    assert channel is not None
    await until(lambda: len(channel.router) == 0, "the client has released all requests")
