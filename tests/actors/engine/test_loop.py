"""EngineLoop: the step thread and its asyncio side, in one process without Ray."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from minivllm.actors.config import LiveSettings
from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.transport.messages import EngineSnapshot, GenerateRequest
from minivllm.core.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError, NeverFitsError
from minivllm.core.sampling_params import SamplingParams, StructuredOutput
from minivllm.core.sequence import FinishReason
from tests.actors.fakes import PacedRunner, paced_engine, started_loop
from tests.actors.helpers import assert_idle, collect, read, request, submit_to, until


@pytest.fixture
async def runner() -> PacedRunner:
    return PacedRunner()


@pytest.fixture
async def loop(runner: PacedRunner) -> AsyncIterator[EngineLoop]:
    loop = await started_loop(runner)
    yield loop
    runner.gate.set()
    loop.stop()


async def test_streams_deliver_the_tokens_of_the_reference_model(loop: EngineLoop, runner: PacedRunner) -> None:
    prompts = [[index, index + 1] * (1 + index % 5) for index in range(1, 33)]
    streams = [submit_to(loop, request(f"r{index}", 15, prompt=prompt)) for index, prompt in enumerate(prompts)]
    results = await asyncio.gather(*map(collect, streams))
    for prompt, result in zip(prompts, results, strict=True):
        expected, _ = runner.model.complete(prompt, request("", 15).sampling_params, max_model_len=256)
        assert result[0].new_token_ids == expected
    await assert_idle(loop, runner)


async def test_samples_of_a_request_share_one_stream(loop: EngineLoop, runner: PacedRunner) -> None:
    result = await collect(submit_to(loop, request("r", 7, n=3)))
    assert {index: len(output.new_token_ids) for index, output in result.items()} == {0: 7, 1: 7, 2: 7}
    await assert_idle(loop, runner)


async def test_first_token_is_delivered_at_once(loop: EngineLoop, runner: PacedRunner) -> None:
    runner.during_execute = lambda _: runner.gate.clear()
    stream = await submit_to(loop, request("r", 5))
    first = await stream.take()
    assert len(first[0].new_token_ids) == 1
    runner.during_execute = None
    runner.gate.set()
    await read(stream)


async def test_slow_consumer_gets_one_merged_output(loop: EngineLoop, runner: PacedRunner) -> None:
    stream = await submit_to(loop, request("r", 12, logprobs=0))
    first = await stream.take()
    await until(lambda: len(loop.router) == 0, "the request has ended")
    rest = [await stream.take()]
    assert await stream.take() == []
    assert [len(outputs) for outputs in rest] == [1]
    [output] = rest[0]
    assert len(first[0].new_token_ids) + len(output.new_token_ids) == 12
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.new_token_ids
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_closed_stream_aborts_its_request(loop: EngineLoop, runner: PacedRunner, how: str) -> None:
    if how == "close":
        stream = await submit_to(loop, request("r", 200))
        await stream.take()
        stream.close()
    else:
        task = asyncio.create_task(collect(submit_to(loop, request("r", 200))))
        await until(lambda: runner.steps_executed > 3, "some steps")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await assert_idle(loop, runner)
    assert runner.steps_executed < 100


async def test_request_cancelled_in_the_inbox_leaves_no_state(loop: EngineLoop, runner: PacedRunner) -> None:
    runner.gate.clear()
    other = asyncio.create_task(collect(submit_to(loop, request("other", 5))))
    await asyncio.sleep(0.02)
    task = asyncio.create_task(collect(submit_to(loop, request("r", 200))))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    refused = asyncio.create_task(collect(submit_to(loop, request("bad", prompt=[10**6]))))
    await asyncio.sleep(0.02)
    refused.cancel()
    runner.gate.set()
    assert len((await other)[0].new_token_ids) == 5
    await assert_idle(loop, runner)


async def test_repeated_aborts_reach_the_engine_once(loop: EngineLoop, runner: PacedRunner) -> None:
    heard = []
    await loop.call(lambda engine: note_aborts(engine, heard))
    stream = await submit_to(loop, request("r", 200))
    await stream.take()
    loop.router.abort("r")
    loop.router.abort("r")
    stream.close()
    loop.router.abort("r")
    loop.router.abort("unknown")
    await assert_idle(loop, runner)
    assert heard == [("r", None)]


def note_aborts(engine: Any, heard: list[tuple[str, int | None]]) -> None:
    abort = engine.abort_request

    def noting(request_id: str, index: int | None = None) -> None:
        heard.append((request_id, index))
        abort(request_id, index)

    engine.abort_request = noting


async def test_aborted_sample_leaves_the_other_samples_running(loop: EngineLoop, runner: PacedRunner) -> None:
    stream = await submit_to(loop, request("r", 30, n=3))
    await stream.take()
    loop.router.abort("r", 1)
    result = await read(stream)
    assert result[1].finish_reason is FinishReason.ABORT
    assert result[0].finish_reason is result[2].finish_reason is FinishReason.LENGTH
    await assert_idle(loop, runner)


async def test_abort_by_id_ends_the_stream_with_reason_abort(loop: EngineLoop) -> None:
    stream = await submit_to(loop, request("r", 200))
    await stream.take()
    loop.router.abort("r")
    assert (await read(stream))[0].finish_reason is FinishReason.ABORT


async def test_grammar_compilation_does_not_block_other_streams(runner: PacedRunner) -> None:
    release = threading.Event()
    runner.precompile = lambda _: release.wait(30)  # type: ignore[method-assign,assignment,return-value]
    loop = await started_loop(runner)
    slow = GenerateRequest(
        "slow", [1, 2], SamplingParams(max_tokens=3, structured_output=StructuredOutput(kind="regex", value="a"))
    )
    waiting = asyncio.ensure_future(collect(submit_to(loop, slow)))
    result = await collect(submit_to(loop, request("quick", 5)))
    assert len(result[0].new_token_ids) == 5
    assert not waiting.done()
    release.set()
    assert len((await waiting)[0].new_token_ids) == 3
    loop.stop()


async def test_duplicate_request_id_is_rejected_and_the_first_request_continues(
    loop: EngineLoop, runner: PacedRunner
) -> None:
    stream = await submit_to(loop, request("r", 30))
    await stream.take()
    with pytest.raises(InvalidRequestError, match="'r' is in use") as caught:
        await submit_to(loop, request("r"))
    assert caught.value.param == "request_id"
    assert len((await read(stream))[0].new_token_ids) == 29
    assert len((await collect(submit_to(loop, request("r", 3))))[0].new_token_ids) == 3
    await assert_idle(loop, runner)


async def test_rejection_reaches_the_caller_and_leaves_no_state(runner: PacedRunner) -> None:
    loop = await started_loop(runner, max_waiting_requests=1, max_num_seqs=1)
    with pytest.raises(InvalidRequestError) as caught:
        await submit_to(loop, request("empty", prompt=[10**6]))
    assert caught.value.param == "prompt"
    with pytest.raises(NeverFitsError):
        await submit_to(loop, request("long", prompt=[1] * 1000))
    runner.gate.clear()
    tasks = [asyncio.create_task(collect(submit_to(loop, request(f"r{index}", 3)))) for index in range(6)]
    await asyncio.sleep(0.05)
    runner.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, EngineOverloadedError) for result in results)
    assert all(isinstance(result, (dict, EngineOverloadedError)) for result in results)
    await assert_idle(loop, runner)
    loop.stop()


async def test_failed_forward_pass_fails_every_request(loop: EngineLoop, runner: PacedRunner) -> None:
    runner.gate.clear()
    streams = [submit_to(loop, request(f"r{index}", 50, n=1 + index % 2)) for index in range(8)]
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(0.05)
    runner.fail_next_step = RuntimeError("CUDA is gone")
    runner.gate.set()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert not isinstance(result, BaseException) or isinstance(result, EngineDeadError)
        if isinstance(result, dict):
            for output in result.values():
                assert output.finish_reason is FinishReason.ERROR
                assert isinstance(pickle.loads(pickle.dumps(output.error)), EngineDeadError)
    with pytest.raises(EngineDeadError):
        loop.check_health()
    with pytest.raises(EngineDeadError):
        await submit_to(loop, request("late"))
    with pytest.raises(EngineDeadError):
        await loop.call(lambda engine: engine.reset_prefix_cache())
    assert (await loop.snapshot()).is_dead
    assert len(loop.router) == 0


async def test_exception_in_the_step_thread_fails_every_request(loop: EngineLoop, runner: PacedRunner) -> None:
    stream = await submit_to(loop, request("r", 200, n=2))
    await stream.take()
    await loop.call(lambda engine: setattr(engine, "step", lambda: {}["bug"]))
    result = await read(stream)
    assert {output.finish_reason for output in result.values()} == {FinishReason.ERROR}
    assert "KeyError" in str(result[0].error)
    with pytest.raises(EngineDeadError, match="KeyError"):
        loop.check_health()


async def test_inbox_calls_are_answered_when_the_engine_dies(loop: EngineLoop, runner: PacedRunner) -> None:
    stream = await submit_to(loop, request("r", 200))
    await stream.take()
    runner.gate.clear()
    await asyncio.sleep(0.02)
    question = asyncio.create_task(loop.call(lambda engine: engine.stats()))
    addition = asyncio.create_task(collect(submit_to(loop, request("late", 5))))
    await asyncio.sleep(0.02)
    runner.fail_next_step = RuntimeError("gone")
    runner.gate.set()
    assert (await read(stream))[0].finish_reason is FinishReason.ERROR
    results = await asyncio.wait_for(asyncio.gather(question, addition, return_exceptions=True), 5)
    assert isinstance(results[1], EngineDeadError)


async def test_hung_step_makes_the_engine_unhealthy(runner: PacedRunner) -> None:
    loop = await started_loop(runner, settings=LiveSettings(stall_timeout_s=0.1))
    await asyncio.sleep(0.25)
    loop.check_health()  # idle for longer than stall_timeout_s
    task = asyncio.create_task(collect(submit_to(loop, request("r", 200))))
    await until(lambda: runner.steps_executed > 3, "some steps")
    runner.gate.clear()
    await asyncio.sleep(0.05)
    question = asyncio.create_task(loop.call(lambda engine: engine.stats()))
    await asyncio.sleep(0.2)
    with pytest.raises(EngineDeadError, match=r"in one step for over 0\.1 s"):
        loop.check_health()
    assert isinstance((await task)[0].error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        await question
    runner.gate.set()
    await until(lambda: not loop._thread.is_alive(), "the thread ends after the hung step returns")
    with pytest.raises(EngineDeadError, match=r"in one step for over 0\.1 s"):
        loop.check_health()


async def test_start_raises_the_error_of_the_engine_constructor() -> None:
    def build() -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        await EngineLoop(build, LiveSettings()).start()


async def test_idle_engine_uses_no_cpu(loop: EngineLoop, runner: PacedRunner) -> None:
    await collect(submit_to(loop, request("r", 5)))
    await asyncio.sleep(0.05)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.05


async def recording_loop(
    runner: PacedRunner, snapshots: list[EngineSnapshot], *, snapshot_interval_s: float
) -> EngineLoop:
    """Returns a started loop that appends a snapshot to `snapshots` at each change."""
    loop = EngineLoop(
        lambda: paced_engine(runner),
        LiveSettings(),
        on_change=lambda: snapshots.append(loop.last_snapshot()),
        snapshot_interval_s=snapshot_interval_s,
    )
    await loop.start()
    return loop


async def test_last_snapshot_shows_all_blocks_free(runner: PacedRunner) -> None:
    snapshots: list[EngineSnapshot] = []
    loop = await recording_loop(runner, snapshots, snapshot_interval_s=1000.0)
    for index in range(3):
        await collect(submit_to(loop, request(f"r{index}", 30)))
        await until(lambda: snapshots[-1].stats.num_running == 0, "a snapshot without running requests")
        stats = snapshots[-1].stats
        assert (stats.num_waiting, stats.num_free_blocks) == (0, stats.num_total_blocks)
        assert stats.finished == {"length": index + 1}
    assert len(snapshots) <= 8
    assert [snapshot.number for snapshot in snapshots] == sorted({snapshot.number for snapshot in snapshots})
    loop.stop()


async def test_snapshots_under_load_keep_the_snapshot_interval(runner: PacedRunner) -> None:
    snapshots: list[EngineSnapshot] = []
    loop = await recording_loop(runner, snapshots, snapshot_interval_s=0.1)
    await collect(submit_to(loop, request("r", 200)))
    busy = [snapshot for snapshot in snapshots if snapshot.stats.num_running]
    assert busy
    assert all(later.time - earlier.time > 0.09 for earlier, later in itertools.pairwise(busy))
    loop.stop()


async def test_latency_histograms_count_every_token(loop: EngineLoop) -> None:
    await asyncio.gather(*(collect(submit_to(loop, request(f"r{index}", 10, n=2))) for index in range(4)))
    histograms = (await loop.snapshot()).histograms
    counts = {name: sum(histogram.counts) for name, histogram in histograms.items()}
    assert counts == {
        "time_to_first_token_seconds": 8,
        "inter_token_latency_seconds": 72,
        "request_latency_seconds": 4,
    }


async def test_thousand_aborted_requests_leave_no_state(loop: EngineLoop, runner: PacedRunner) -> None:
    runner.step_s = 0.0
    for batch in range(20):
        streams = [submit_to(loop, request(f"{batch}/{index}", 100)) for index in range(50)]
        tasks = [asyncio.create_task(collect(stream)) for stream in streams]
        await asyncio.sleep(0.002 * (batch % 5))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await assert_idle(loop, runner)


async def test_stop_ends_the_thread_and_fails_open_requests(runner: PacedRunner) -> None:
    loop = await started_loop(runner)
    stream = await submit_to(loop, request("r", 200))
    await stream.take()
    loop.stop()
    assert (await read(stream))[0].finish_reason is FinishReason.ERROR
    await until(lambda: not loop._thread.is_alive(), "the thread has ended")
