"""Server-sent events: chunks of a stream as JSON text, formatted from parts, which is faster than `json.dumps`."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any

DONE = b"data: [DONE]\n\n"

quote = encode_basestring_ascii
"""Formats a JSON string in ASCII: some clients split lines at U+2028, which JSON allows unescaped."""


def event(data: str) -> str:
    """Formats one server-sent event."""
    return f"data: {data}\n\n"


class ChunkWriter:
    """Formats the chunks of one stream: what they have in common only once.

    With `announces_usage`, as `include_usage` asks, every chunk but the last has `"usage": null`.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, response_id: str, kind: str, created: int, model: str, *, announces_usage: bool) -> None:
        self._head = (
            f'{{"id":{quote(response_id)},"object":{quote(kind)},"created":{created},"model":{quote(model)},"choices":['
        )
        self._tail = '],"usage":null}' if announces_usage else "]}"

    def text(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, usage: Any = None) -> str:
        """Formats a chunk of /v1/completions."""
        return self._choice(index, f'"text":{quote(text)}', logprobs, reason, usage)

    def content(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, usage: Any = None) -> str:
        """Formats a chunk of /v1/chat/completions with text only; without text the delta is empty."""
        delta = f'"delta":{{"content":{quote(text)}}}' if text else '"delta":{}'
        return self._choice(index, delta, logprobs, reason, usage)

    def delta(self, index: int, delta: Any, logprobs: Any = None, reason: str | None = None, usage: Any = None) -> str:
        """Formats a chunk of /v1/chat/completions with any delta."""
        return self._choice(index, f'"delta":{json.dumps(delta)}', logprobs, reason, usage)

    def usage(self, usage: Any) -> str:
        """Formats the last chunk under `include_usage`, which has no choices."""
        return self._chunk("", usage)

    def _choice(self, index: int, field: str, logprobs: Any, reason: str | None, usage: Any) -> str:
        shown = "null" if logprobs is None else json.dumps(logprobs)
        finish = "null" if reason is None else quote(reason)
        return self._chunk(f'{{"index":{index},{field},"logprobs":{shown},"finish_reason":{finish}}}', usage)

    def _chunk(self, choice: str, usage: Any) -> str:
        return self._head + choice + (self._tail if usage is None else f'],"usage":{json.dumps(usage)}}}')
