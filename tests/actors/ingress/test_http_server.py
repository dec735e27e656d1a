"""HttpServer: the HTTP server of the ingress, on real sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from minivllm.actors.ingress.http_server import HttpServer
from tests.conftest import free_port

HOST = "127.0.0.1"


class Slow:
    """An application whose answer waits for `may_answer`."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def answer(self, request: Any) -> PlainTextResponse:
        self.is_asked.set()
        await self.may_answer.wait()
        return PlainTextResponse("done")

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/slow", self.answer), Route("/quick", lambda request: PlainTextResponse("hi"))])


def never() -> None:
    raise AssertionError("close() ends requests only after the grace period")


async def opened(app: Any, port: int = 0) -> tuple[HttpServer, str]:
    server = HttpServer(app, HOST, port)
    await server.open(timeout_s=5)
    return server, f"http://{HOST}:{server.port}"


async def test_server_answers_between_open_and_close() -> None:
    server, url = await opened(Slow().app())
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/quick")).text == "hi"
        await server.close(never)  # does not wait for the client's idle connection
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/quick")


async def test_port_in_use_raises_an_error_with_the_port() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"http_port: {port} on {HOST} is in use") as caught:
            await HttpServer(Slow().app(), HOST, port).open(timeout_s=0.3)
        assert caught.value.errno == errno.EADDRINUSE


async def test_open_waits_until_the_previous_server_frees_the_port() -> None:
    first, url = await opened(Slow().app())
    second = HttpServer(Slow().app(), HOST, first.port)
    opening = asyncio.create_task(second.open(timeout_s=10))
    await asyncio.sleep(0.3)
    assert not opening.done()
    await first.close(never)
    await opening
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/quick")).text == "hi"
    await second.close(never)


async def test_unavailable_address_fails_without_waiting() -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match="assign requested address"):
        await HttpServer(Slow().app(), "203.0.113.1", free_port()).open(timeout_s=60)
    assert time.monotonic() - began < 30


async def test_close_waits_for_running_requests() -> None:
    slow = Slow()
    server, url = await opened(slow.app())
    async with httpx.AsyncClient() as client:
        running = asyncio.create_task(client.get(f"{url}/slow"))
        await slow.is_asked.wait()
        closing = asyncio.create_task(server.close(never))
        await asyncio.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(f"{url}/quick")  # new connections are refused
        assert not closing.done()
        slow.may_answer.set()
        assert (await running).text == "done"
        await closing


async def test_requests_beyond_the_grace_period_are_ended_and_answered() -> None:
    slow = Slow()
    server, url = await opened(slow.app())
    async with httpx.AsyncClient() as client:
        running = asyncio.create_task(client.get(f"{url}/slow"))
        await slow.is_asked.wait()
        await server.close(slow.may_answer.set, grace_s=0.2)
        assert (await running).text == "done"


async def test_unopened_server_can_be_closed() -> None:
    await HttpServer(Slow().app(), HOST, 0).close(never)
