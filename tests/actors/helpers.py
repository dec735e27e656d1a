"""Helpers shared by the tests in this folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.transport.messages import GenerateRequest
from minivllm.actors.transport.output_router import RequestOutputCollector, RequestStream
from minivllm.core.outputs import RequestOutput
from minivllm.core.sampling_params import SamplingParams
from tests.actors.fakes import PacedRunner


def request(name: str, max_tokens: int = 20, *, prompt: list[int] | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt or [1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


async def submit_to(loop: EngineLoop, request: GenerateRequest) -> RequestStream:
    """Submits a request without a client; its collector has no other request."""
    collector = RequestOutputCollector()
    try:
        return RequestStream(loop.router, await loop.submit(request, collector))
    except BaseException:
        collector.close()
        loop.router.abort_all(collector)
        raise


async def collect(submission: Awaitable[RequestStream]) -> dict[int, RequestOutput]:
    """Submits a request and returns what `read` returns; closes the stream when it is cancelled."""
    stream = await submission
    try:
        return await read(stream)
    finally:
        stream.close()


async def read(stream: RequestStream) -> dict[int, RequestOutput]:
    """Returns all outputs merged per sample; checks that each sample ends exactly once, with its last output."""
    merged: dict[int, RequestOutput] = {}
    while outputs := await stream.take():
        for output in outputs:
            earlier = merged.get(output.index)
            if earlier is not None:
                assert not earlier.finished
                output.new_token_ids[:0] = earlier.new_token_ids
            merged[output.index] = output
    assert all(output.finished for output in merged.values())
    assert await stream.take() == []
    return merged


async def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)


async def assert_idle(loop: EngineLoop, runner: PacedRunner) -> None:
    await until(lambda: len(loop.router) == 0, "no live request")
    stats = (await loop.snapshot()).stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not runner.live_request_ids
