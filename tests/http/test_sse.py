"""Stream chunks built from strings are valid JSON of the documented schema."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from minivllm.actors.openai.protocol.responses import ChatCompletionChunk, CompletionChunk
from minivllm.actors.openai.protocol.sse import ChunkWriter, event

USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def writer(*, announces_usage: bool = False, kind: str = "text_completion") -> ChunkWriter:
    return ChunkWriter("id", kind, 5, 'a "model"', announces_usage=announces_usage)


@given(st.text(), st.sampled_from([None, "stop", "length"]))
def test_text_round_trips_through_a_chunk(text: str, reason: str | None) -> None:
    chunk = CompletionChunk.model_validate_json(writer().text(3, text, None, reason))
    assert (chunk.choices[0].index, chunk.choices[0].text, chunk.choices[0].finish_reason) == (3, text, reason)
    assert (chunk.id, chunk.created, chunk.model) == ("id", 5, 'a "model"')
    chat = ChatCompletionChunk.model_validate_json(writer(kind="chat.completion.chunk").content(1, text, None, reason))
    assert chat.choices[0].delta.content == (text or None)


@given(st.text())
def test_event_is_one_line_for_any_text(text: str) -> None:
    lines = event(writer().text(0, text)).splitlines()
    assert len(lines) == 2
    assert lines[1] == ""


def test_usage_is_null_before_the_last_chunk_when_requested() -> None:
    def usage(text: str) -> Any:
        return json.loads(text).get("usage", "absent")

    assert usage(writer().text(0, "a")) == "absent"
    assert usage(writer(announces_usage=True).text(0, "a")) is None
    assert usage(writer(announces_usage=True).text(0, "a", usage=USAGE)) == USAGE
    last = json.loads(writer(announces_usage=True).usage(USAGE))
    assert last["choices"] == []
    assert last["usage"] == USAGE


def test_finish_reason_and_logprobs_are_in_every_chunk() -> None:
    for text in (writer().text(0, ""), writer().content(0, ""), writer().delta(0, {"role": "assistant"})):
        choice = json.loads(text)["choices"][0]
        assert choice["finish_reason"] is None
        assert choice["logprobs"] is None
