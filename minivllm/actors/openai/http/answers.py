"""ASGI responses that do the work while they are sent: so whoever hangs up early ends the work, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.actors.openai.protocol.errors import answer_for
from minivllm.actors.openai.protocol.sse import DONE, event

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class JsonAnswer(Response):
    """A JSON object that is ready to be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def error_answer(error: BaseException) -> Response:
    """The answer that tells of an error."""
    answer = answer_for(error)
    return JsonAnswer(answer.body(), answer.status, headers=answer.headers)


class WorkingAnswer(Response):
    """Base of both: runs `_respond`, and cancels it when the client closes the connection.

    Serve also cancels the whole call then; other servers only say it through `receive`.
    """

    def __init__(self) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            await self._respond(scope, receive, send)

        await until_disconnected(receive, answer())

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Does the work and sends what comes of it."""


class WholeAnswer(WorkingAnswer):
    """One JSON object.

    Args:
        make: does the work; its exceptions become error answers.
    """

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        super().__init__()
        self._make = make

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = JsonAnswer(await self._make())
        except Exception as error:
            response = error_answer(error)
        await response(scope, receive, send)


class StreamAnswer(WorkingAnswer):
    """Server-sent events.

    The status waits for the first chunks: an error before them is an answer of its own. One after them is an event, and
    `[DONE]` comes all the same.

    Args:
        chunks: JSON texts; those that come together are sent together.
    """

    def __init__(self, chunks: AsyncGenerator[list[str], None]) -> None:
        super().__init__()
        self._chunks = chunks

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks):
            try:
                first: list[str] = await anext(self._chunks, [])
            except Exception as error:
                await error_answer(error)(scope, receive, send)
                return
            headers = [(name.encode(), value.encode()) for name, value in EVENT_STREAM_HEADERS.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send_events(send, first)
            last = await self._send_rest(send)
            await send({"type": "http.response.body", "body": last + DONE, "more_body": False})

    async def _send_rest(self, send: Send) -> bytes:
        """Sends all that follows; returns the event that tells of an error, if there was one."""
        try:
            async for chunks in self._chunks:
                await _send_events(send, chunks)
        except Exception as error:
            return event(json.dumps(answer_for(error).body())).encode()
        return b""


async def _send_events(send: Send, chunks: list[str]) -> None:
    body = "".join(map(event, chunks)).encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it as soon as the client has gone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and watcher.exception() is not None:
            await asyncio.wait((task,))  # the watcher failed: that is no reason to end the work
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
