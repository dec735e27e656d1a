"""Reads server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Stream:
    """A stream read to its end; `error` is the body of its error event."""

    status: int
    headers: httpx.Headers
    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    body: bytes = b""


def read_stream(
    client: httpx.Client, path: str, body: dict[str, Any], on_chunk: Callable[[], None] = lambda: None
) -> Stream:
    """Reads a stream to its end; checks that [DONE] comes once and last."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        stream = Stream(answer.status_code, answer.headers)
        if answer.status_code != 200:
            stream.body = answer.read()
            return stream
        is_done = False
        for line in answer.iter_lines():
            if not line:
                continue
            assert line.startswith("data: "), line
            assert not is_done, "an event follows [DONE]"
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
            elif "error" in (chunk := json.loads(data)):
                stream.error = chunk["error"]
            else:
                assert stream.error is None, "a chunk follows an error event"
                stream.chunks.append(chunk)
                on_chunk()
        assert is_done
        return stream


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a stream without errors."""
    stream = read_stream(client, path, body)
    assert stream.status == 200, stream.body
    assert stream.error is None
    return stream.chunks


def joined_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Returns the joined text of one choice."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join((choice["text"] if "text" in choice else choice["delta"].get("content")) or "" for choice in own)
