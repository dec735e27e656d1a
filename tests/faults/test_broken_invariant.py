"""A broken block invariant in a running application: the engine stops, no request gets a wrong token, Serve replaces
the replica."""

from __future__ import annotations

import asyncio
import json

import httpx

from minivllm.actors.transport.messages import EngineSnapshot
from tests.actors.idle import in_engine, read_metrics
from tests.faults.conftest import Broken
from tests.faults.faulty_engine import CORRUPT
from tests.faults.test_processes import assert_serves
from tests.processes import wait_until

STREAMS = 12
MAX_TOKENS = 250


def body(broken: Broken, prompt: list[int], **fields: object) -> dict[str, object]:
    return {"model": broken.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, **fields}


def prompts() -> list[list[int]]:
    return [[100 + index, *range(7 + index)] for index in range(STREAMS)]


async def stream_all(broken: Broken, *, with_fault: bool) -> list[tuple[str, dict[str, str] | None]]:
    """Returns the text and the error of each stream; sends the corrupting request once all have begun."""
    started = asyncio.Semaphore(0)

    async def stream(client: httpx.AsyncClient, prompt: list[int]) -> tuple[str, dict[str, str] | None]:
        text, error = "", None
        request = body(broken, prompt, stream=True)
        async with client.stream("POST", f"{broken.base_url}/v1/completions", json=request) as response:
            lines = [line async for line in _noting_the_first(response, started)]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            event = json.loads(line.removeprefix("data: "))
            error = event.get("error", error)
            text += "".join(choice["text"] for choice in event.get("choices", []))
        return text, error

    async with httpx.AsyncClient(timeout=60) as client:
        streams = [asyncio.create_task(stream(client, prompt)) for prompt in prompts()]
        for _ in streams:
            await started.acquire()
        if with_fault:
            reply = await client.post(f"{broken.base_url}/v1/completions", json=body(broken, [1, CORRUPT]))
            assert reply.status_code >= 500
            assert reply.json()["error"]["code"] == "engine_unavailable"
        return await asyncio.gather(*streams)


async def _noting_the_first(response: httpx.Response, started: asyncio.Semaphore):  # type: ignore[no-untyped-def]
    is_first = True
    async for line in response.aiter_lines():
        if line:
            if is_first:
                started.release()
            is_first = False
            yield line


def test_broken_block_invariant_ends_all_requests_and_the_replica_is_replaced(broken: Broken) -> None:
    clean = asyncio.run(stream_all(broken, with_fault=False))
    assert all(error is None for _, error in clean)
    old = broken.info()
    accepted = broken.stats().stats.requests_total

    results = asyncio.run(stream_all(broken, with_fault=True))

    def published() -> EngineSnapshot:
        snapshot: EngineSnapshot = broken.metrics().current.remote().result(timeout_s=30)
        return snapshot

    wait_until(lambda: published().is_dead or published().engine_id != old.engine_id, "the failure is published", 10)
    dead = published()
    assert (dead.engine_id, dead.is_dead) == (old.engine_id, True)
    assert dead.stats.integrity_violations_total == 1
    assert dead.stats.requests_total == accepted + STREAMS + 1
    assert dead.stats.finished["error"] == STREAMS + 1
    assert read_metrics(broken.base_url)["minivllm_engine_up"] == 0

    for (text, error), (expected, _) in zip(results, clean, strict=True):
        assert error is not None
        assert error["code"] == "engine_unavailable"
        assert text
        assert len(text) < len(expected)
        assert expected.startswith(text)

    broken.wait_for_another_engine(old.engine_id)
    assert_serves(broken)
    assert in_engine(broken.app).free == old.num_blocks
    assert read_metrics(broken.base_url)["minivllm_integrity_violations_total"] == 0
    again = asyncio.run(stream_all(broken, with_fault=False))
    assert again == clean
