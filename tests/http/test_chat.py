"""/v1/chat/completions: messages, the template, formats, log probabilities, streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from minivllm.actors.openai.protocol.responses import ChatCompletionChunk, ChatCompletionResponse
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.conftest import REPLIES
from tests.http.streams import joined_text, read_stream, streamed

PATH = "/v1/chat/completions"


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={"messages": list(messages) or [user()], "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    ChatCompletionResponse.model_validate(answer.json())
    complete: dict[str, Any] = answer.json()
    return complete


def rendered(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> str:
    """Returns the rendered prompt of a conversation."""
    answer = client.post("/tokenize", json={"messages": list(messages), **fields})
    assert answer.status_code == 200, answer.text
    text = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    return str(text)


# ---- prompt rendering ----


def test_text_parts_render_like_plain_text(client: httpx.Client) -> None:
    assert rendered(client, user([{"type": "text", "text": "Name a colour."}])) == rendered(
        client, user("Name a colour.")
    )
    two = rendered(client, user([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]))
    assert "One." in two
    assert two.index("Two.") - two.index("One.") in (4, 5)


def test_developer_role_falls_back_to_system(client: httpx.Client) -> None:
    assert rendered(client, {"role": "developer", "content": "Be brief."}, user()) == rendered(
        client, {"role": "system", "content": "Be brief."}, user()
    )


def test_missing_content_with_tool_calls_renders_as_empty(client: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        user("Weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = rendered(client, *history)
    assert "None" not in text
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert "sunny" in text
    assert ask(client, *history, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_malformed_arguments_of_earlier_calls_render_unchanged(client: httpx.Client) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": '}}
    assert '{\\"city\\": ' in rendered(client, user(), {"role": "assistant", "tool_calls": [call]})


def test_continue_final_message_extends_the_last_message(client: httpx.Client) -> None:
    begun = [user("Count."), {"role": "assistant", "content": "One, two,"}]
    assert rendered(client, *begun, continue_final_message=True, add_generation_prompt=False).endswith("One, two,")
    assert not rendered(client, *begun).endswith("One, two,")
    assert ask(client, *begun, continue_final_message=True, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_generation_prompt_is_optional(client: httpx.Client) -> None:
    with_it = rendered(client, user())
    without = rendered(client, user(), add_generation_prompt=False)
    assert with_it.startswith(without)
    assert len(with_it) > len(without)


def test_failing_or_missing_chat_template_returns_400(client: httpx.Client, tokenizer: Tokenizer) -> None:
    kept = tokenizer.hf_tokenizer.chat_template
    try:
        tokenizer.hf_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        answer = client.post(PATH, json={"messages": [user()]})
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]
        tokenizer.hf_tokenizer.chat_template = None
        answer = client.post(PATH, json={"messages": [user()]})
        assert answer.status_code == 400
        assert "chat template" in answer.json()["error"]["message"]
    finally:
        tokenizer.hf_tokenizer.chat_template = kept


def test_chat_template_kwargs_reach_the_template(client: httpx.Client, tokenizer: Tokenizer) -> None:
    kept = tokenizer.hf_tokenizer.chat_template
    try:
        tokenizer.hf_tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}{{ documents | length }}"
        text = rendered(client, user("A"), chat_template_kwargs={"mood": "B", "documents": [{}, {}]})
        assert text == "AB2"
    finally:
        tokenizer.hf_tokenizer.chat_template = kept


# ---- answers ----


def test_max_tokens_defaults_to_the_remaining_context(client: httpx.Client) -> None:
    answer = ask(client, user("river " * 900), ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


def test_max_completion_tokens_overrides_max_tokens(client: httpx.Client) -> None:
    fields = {"max_tokens": 9, "max_completion_tokens": 4, "ignore_eos": True}
    assert ask(client, **fields)["usage"]["completion_tokens"] == 4
    assert ask(client, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_eos_ends_the_answer_and_is_hidden_by_default(scripted_client: httpx.Client) -> None:
    answer = ask(scripted_client, user("REPLY-SHORT"))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    assert answer["choices"][0]["finish_reason"] == "stop"
    shown = ask(scripted_client, user("REPLY-SHORT"), skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == "Yes.<|im_end|>"


def test_each_streamed_choice_starts_with_role_and_ends_with_finish_reason(scripted_client: httpx.Client) -> None:
    body = {"messages": [user("REPLY-LONG")], "n": 3, "max_tokens": 7}
    stream = read_stream(scripted_client, PATH, body)
    for chunk in stream.chunks:
        ChatCompletionChunk.model_validate(chunk)
    for index in range(3):
        own = [choice for chunk in stream.chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert joined_text(stream.chunks, index) == joined_text(stream.chunks, 0)


def test_only_the_first_and_last_deltas_may_be_empty(scripted_client: httpx.Client) -> None:
    chunks = streamed(scripted_client, PATH, {"messages": [user("REPLY-UNICODE")]})
    assert joined_text(chunks) == REPLIES["REPLY-UNICODE"]
    assert all(chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1])


def test_stream_joins_to_the_complete_text_at_every_length(scripted_client: httpx.Client) -> None:
    for max_tokens in range(1, 40):
        body = {"messages": [user("REPLY-UNICODE")], "temperature": 0, "max_tokens": max_tokens}
        complete = scripted_client.post(PATH, json=body).json()["choices"][0]
        chunks = streamed(scripted_client, PATH, body)
        assert joined_text(chunks) == complete["message"]["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == complete["finish_reason"]


# ---- log probabilities ----


def test_logprob_bytes_join_to_the_content(client: httpx.Client, scripted_client: httpx.Client) -> None:
    for one, prompt in ((client, "你好"), (scripted_client, "REPLY-UNICODE"), (scripted_client, "REPLY-SHORT")):
        answer = ask(one, user(prompt), max_tokens=60, logprobs=True, top_logprobs=3)
        choice = answer["choices"][0]
        entries = choice["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
        text = b"".join(bytes(entry["bytes"] or []) for entry in entries)
        assert text.decode("utf-8", "replace") == choice["message"]["content"]


def test_hidden_special_tokens_have_no_logprob_bytes(scripted_client: httpx.Client) -> None:
    for shows, given in ((False, None), (True, list(b"<|im_end|>"))):
        answer = ask(scripted_client, user("REPLY-SHORT"), logprobs=True, skip_special_tokens=not shows)
        last = answer["choices"][0]["logprobs"]["content"][-1]
        assert last["token"] == "<|im_end|>"
        assert last["bytes"] == given


def test_streamed_logprobs_equal_those_of_the_complete_answer(scripted_client: httpx.Client) -> None:
    body = {"messages": [user("REPLY-UNICODE")], "logprobs": True, "top_logprobs": 1}
    complete = scripted_client.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    joined = []
    for chunk in streamed(scripted_client, PATH, body):
        joined += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert joined == complete


# ---- structured output ----


def test_json_object_mode_produces_an_object(client: httpx.Client) -> None:
    # A random model rarely closes its strings, so the answer may end by length.
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=40, temperature=1)
    text = answer["choices"][0]["message"]["content"]
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["ok", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
def test_answer_follows_its_json_schema(client: httpx.Client, stream: bool) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    body = {"messages": [user()], "response_format": format_, "temperature": 1, "seed": 3, "max_tokens": 200}
    if stream:
        text = joined_text(streamed(client, PATH, body))
    else:
        text = client.post(PATH, json=body).json()["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)
