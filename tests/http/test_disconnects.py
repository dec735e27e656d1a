"""Closed connections: their requests are aborted, streamed or not, and leave no state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minivllm.actors.config import AppArgs
from minivllm.core.engine import LLMEngine
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.conftest import REPLIES
from tests.http.stand_ins import LocalServer, ScriptedRunner

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def slow_runner(tokenizer: Tokenizer) -> ScriptedRunner:
    return ScriptedRunner(tokenizer, dict(REPLIES), step_s=0.01)


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer, slow_runner: ScriptedRunner) -> Iterator[LocalServer]:
    """Takes ten milliseconds per token, so that an endless answer takes ten seconds."""
    args = AppArgs(served_model_name="slow", validate_blocks=True, max_model_len=1024, enable_prefix_caching=False)
    with LocalServer(args, tokenizer, lambda: LLMEngine(args.engine_config(), model_runner=slow_runner)) as server:
        yield server


def body(number: int) -> tuple[str, dict[str, Any]]:
    fields: dict[str, Any] = {"max_tokens": 900, "n": 1 + number % 2}
    if number % 3 == 0:
        return CHAT, {"messages": [{"role": "user", "content": f"endless {number}"}], **fields}
    return COMPLETIONS, {"prompt": [f"endless {number}"] * (1 + number % 3), **fields}


async def disconnect_midstream(client: httpx.AsyncClient, number: int) -> None:
    path, fields = body(number)
    async with client.stream("POST", path, json={**fields, "stream": True}) as answer:
        assert answer.status_code == 200
        count = 0
        async for line in answer.aiter_lines():
            count += line.startswith("data:")
            if count >= 3:
                return


async def disconnect_before_the_answer(client: httpx.AsyncClient, number: int) -> None:
    path, fields = body(number)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(path, json=fields, timeout=httpx.Timeout(10, read=0.3))


@pytest.mark.parametrize("disconnect", [disconnect_midstream, disconnect_before_the_answer])
def test_closed_connections_abort_their_requests(
    slow: LocalServer, slow_runner: ScriptedRunner, disconnect: Any
) -> None:
    async def all_disconnect() -> None:
        limits = httpx.Limits(max_connections=50, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=slow.base_url, timeout=30, limits=limits) as client:
            await asyncio.gather(*(disconnect(client, number) for number in range(20)))

    asyncio.run(all_disconnect())
    slow.until_idle(3.0)
    assert slow_runner.live == set()
    before = slow.snapshot().stats.steps_total
    time.sleep(0.1)
    assert slow.snapshot().stats.steps_total == before


def test_closed_connections_do_not_affect_other_requests(slow: LocalServer) -> None:
    async def work() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=slow.base_url, timeout=30) as client:
            staying = [
                asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "REPLY-LONG", "max_tokens": 60}))
                for _ in range(4)
            ]
            await asyncio.gather(*(disconnect_midstream(client, number) for number in range(8)))
            return await asyncio.gather(*staying)

    for answer in asyncio.run(work()):
        assert answer.json()["choices"][0]["text"] == REPLIES["REPLY-LONG"]
    slow.until_idle(3.0)


def test_connection_closed_while_sending_does_not_affect_other_requests(slow: LocalServer) -> None:
    import socket

    host, port = slow.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
        )
        connection.sendall(head.encode() + b'{"prompt": "x')
    answer = httpx.post(slow.base_url + COMPLETIONS, json={"prompt": "REPLY-SHORT"}, timeout=30)
    assert answer.json()["choices"][0]["text"] == "Yes."


def test_request_aborted_by_the_engine_returns_an_error(slow: LocalServer) -> None:
    """The engine aborts the request, as after the consumer timeout, while the client still waits."""
    assert slow.engine is not None
    engine = slow.engine

    async def abort_all() -> None:
        for request_id in list(engine.loop.router._live):
            engine.loop.router.abort(request_id)

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(base_url=slow.base_url, timeout=30) as client:
            answer = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "endless", "max_tokens": 900}))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(slow.call, abort_all())
            return await answer

    answer = asyncio.run(work())
    assert answer.status_code == 500
    assert "aborted" in answer.json()["error"]["message"]
