"""Tools: their description in the prompt, forced calls, and calls parsed from the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from minivllm.actors.openai.protocol.requests import ChatCompletionRequest
from minivllm.actors.openai.protocol.responses import ChatCompletionChunk, ChatCompletionResponse
from minivllm.actors.openai.tools.tools import ToolUse
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.stand_ins import ScriptedRunner
from tests.http.streams import read_stream

PATH = "/v1/chat/completions"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [tool("weather", CITY), tool("count", COUNT)]
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ask(client: httpx.Client, content: str = "Hi", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "tools": TOOLS, "max_tokens": 100, **fields}
    answer = client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    ChatCompletionResponse.model_validate(answer.json())
    choice: dict[str, Any] = answer.json()["choices"][0]
    whole, streamed = without_ids(choice), streamed_choice(client, body)
    if len(streamed[1]) > len(whole[1]):  # a stream has begun to send a call that is cut off
        assert (whole[2], streamed[2], streamed[1][:-1]) == ("length", "length", whole[1])
    else:
        assert streamed == whole
    return choice


def without_ids(choice: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert all(call["id"] and call["type"] == "function" for call in message.get("tool_calls", []))
    return message["content"] or "", calls, choice["finish_reason"]


def streamed_choice(client: httpx.Client, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """Returns the same from the joined chunks of a stream."""
    content, reason = "", ""
    calls: list[list[str]] = []
    for chunk in read_stream(client, PATH, body).chunks:
        ChatCompletionChunk.model_validate(chunk)
        [choice] = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, [(name, arguments) for name, arguments in calls], reason


@pytest.fixture
def replies(runner: ScriptedRunner) -> Iterator[dict[str, str]]:
    kept = dict(runner.replies)
    yield runner.replies
    runner.replies.clear()
    runner.replies.update(kept)


def test_tool_call_in_the_text_is_returned_as_a_call(scripted_client: httpx.Client, replies: dict[str, str]) -> None:
    replies["weather?"] = f"I look.\n{ROME}"
    choice = ask(scripted_client, "weather?")
    assert without_ids(choice) == ("I look.", [("weather", '{"city": "Rome"}')], "tool_calls")


def test_parallel_tool_calls_false_returns_one_call(scripted_client: httpx.Client, replies: dict[str, str]) -> None:
    replies["weather?"] = ROME + "\n" + ROME
    choice = ask(scripted_client, "weather?")
    assert choice["message"]["content"] is None
    assert without_ids(choice)[1] == [("weather", '{"city": "Rome"}')] * 2
    assert without_ids(ask(scripted_client, "weather?", parallel_tool_calls=False))[1] == [
        ("weather", '{"city": "Rome"}')
    ]


def test_answer_without_calls_is_text(scripted_client: httpx.Client) -> None:
    assert without_ids(ask(scripted_client, "REPLY-SHORT")) == ("Yes.", [], "stop")


def test_calls_are_not_parsed_without_tools_or_with_choice_none(
    scripted_client: httpx.Client, replies: dict[str, str]
) -> None:
    replies["weather?"] = ROME
    for fields in ({"tool_choice": "none"}, {"tools": []}, {"tools": None}):
        assert without_ids(ask(scripted_client, "weather?", **fields)) == (ROME, [], "stop")


def test_truncated_call_ends_with_length(
    scripted_client: httpx.Client, replies: dict[str, str], tokenizer: Tokenizer
) -> None:
    """A stream sends the call as far as it goes; a complete response has its text as content."""
    replies["weather?"] = ROME
    whole = [("weather", '{"city": "Rome"}')]
    calls_seen = 0
    for max_tokens in range(1, len(tokenizer.encode(ROME))):
        content, calls, reason = without_ids(ask(scripted_client, "weather?", max_tokens=max_tokens))
        assert reason == "length"
        assert (content, calls) == ("", whole) if calls else ROME.startswith(content)
        message = {"messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS, "max_tokens": max_tokens}
        content, calls, reason = streamed_choice(scripted_client, message)
        assert reason == "length"
        calls_seen += len(calls)
        if calls:
            [(name, arguments)] = calls
            assert (content, name) == ("", "weather")
            assert '{"city": "Rome"}'.startswith(arguments)
        else:
            assert ROME.startswith(content)
    assert calls_seen > 3


WRITTEN: dict[str, tuple[str, list[tuple[str, str]], str]] = {
    # text of the model: content, calls, finish reason
    '<tool_call>{"id": 1, "arguments": {"city": "Rome",}, "name": "weather",}</tool_call>': (
        "",
        [("weather", '{"city": "Rome"}')],
        "tool_calls",
    ),
    '<tool_call>{"name": "count", "arguments": null}</tool_call>': ("", [("count", "{}")], "tool_calls"),
    '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>': (
        "",
        [("weather", '{"city": "Rome"}')],
        "tool_calls",
    ),
    '<tool_call>{"name": "weather", "parameters": {}, "arguments": {"city": "Rome"}}</tool_call>': (
        "",
        [("weather", '{"city": "Rome"}')],
        "tool_calls",
    ),
    f"One.\n{ROME}\n Two.": ("One.\n Two.", [("weather", '{"city": "Rome"}')], "tool_calls"),
    "Hm \n<tool_call>{'name': 'weather', 'arguments': {}}</tool_call>": (
        "Hm \n<tool_call>{'name': 'weather', 'arguments': {}}</tool_call>",
        [],
        "stop",
    ),
    '<tool_call>{"name": "rain", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "rain", "arguments": {}}</tool_call>',
        [],
        "stop",
    ),
    "<tool_call></tool_call>": ("<tool_call></tool_call>", [], "stop"),
    '<tool_call>{"name": "weather", "arg': ('<tool_call>{"name": "weather", "arg', [], "stop"),
    f'{ROME}\n<tool_call>{{"name": "weather", "arg': (
        '\n<tool_call>{"name": "weather", "arg',
        [("weather", '{"city": "Rome"}')],
        "stop",
    ),
}


@pytest.mark.parametrize("text", WRITTEN, ids=lambda text: text[:60])
def test_calls_are_read_as_models_write_them(scripted_client: httpx.Client, replies: dict[str, str], text: str) -> None:
    replies["weather?"] = text
    assert without_ids(ask(scripted_client, "weather?")) == WRITTEN[text]


def test_call_that_the_answer_breaks_off_ends_with_stop(scripted_client: httpx.Client, replies: dict[str, str]) -> None:
    """What a stream has sent stays; a complete response has the text of the call as content."""
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"'
    replies["weather?"] = text
    body = {"messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS, "max_tokens": 100}
    choice = scripted_client.post(PATH, json=body).json()["choices"][0]
    assert without_ids(choice) == (text, [], "stop")
    assert streamed_choice(scripted_client, body) == ("", [("weather", '{"city": "Rome"')], "stop")


def test_llama_calls_are_parsed_for_llama_templates(
    scripted_client: httpx.Client, replies: dict[str, str], tokenizer: Tokenizer
) -> None:
    replies["weather?"] = '{"name": "weather", "parameters": {"city": "Rome"}}'
    kept = tokenizer.hf_tokenizer.chat_template
    try:
        tokenizer.hf_tokenizer.chat_template = "<|python_tag|>{{ tools }}" + kept
        assert without_ids(ask(scripted_client, "weather?"))[1] == [("weather", '{"city": "Rome"}')]
    finally:
        tokenizer.hf_tokenizer.chat_template = kept


def test_prompt_describes_the_tools(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """Without tool support in the chat template, the descriptions go into the system message."""

    def prompt(messages: list[dict[str, Any]]) -> str:
        ids = client.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
        return tokenizer.decode(ids, skip_special_tokens=False)

    question = {"role": "user", "content": "Hi"}
    text = prompt([{"role": "system", "content": "Be brief."}, question])
    assert text.index("Be brief.") < text.index("Does weather.") < text.index("Hi")
    assert text.count("<|im_start|>system") == 1
    assert "Does count." in prompt([question])
    kept = tokenizer.hf_tokenizer.chat_template
    try:
        tokenizer.hf_tokenizer.chat_template = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
        assert prompt([question]) == "[weather][count]"
    finally:
        tokenizer.hf_tokenizer.chat_template = kept


@pytest.mark.parametrize("seed", range(4))
def test_tool_choice_required_forces_a_call(client: httpx.Client, seed: int) -> None:
    """The model is random and makes no call unless forced."""
    choice = ask(client, tool_choice="required", temperature=1, seed=seed, max_tokens=200)
    assert choice["finish_reason"] == "tool_calls"
    [(name, arguments)] = without_ids(choice)[1]
    jsonschema.validate(json.loads(arguments), {"weather": CITY, "count": COUNT}[name])


@pytest.mark.parametrize("seed", range(2))
def test_named_tool_choice_forces_that_function(client: httpx.Client, seed: int) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(client, tool_choice=named, temperature=1, seed=seed, max_tokens=200)
    assert choice["finish_reason"] == "stop"
    [(name, arguments)] = without_ids(choice)[1]
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), CITY)


@pytest.mark.parametrize("seed", range(4))
def test_response_format_beside_tools_constrains_the_text_answer(client: httpx.Client, seed: int) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bias = {"107": 100}  # "{", with which the answer starts and a call does not
    fields = {"response_format": format_, "logit_bias": bias, "temperature": 1, "seed": seed}
    content, calls, reason = without_ids(ask(client, **fields))
    assert (calls, reason) == ([], "stop")
    jsonschema.validate(json.loads(content), schema)


def test_recursive_arguments_keep_their_root(client: httpx.Client) -> None:
    tree = {
        "type": "object",
        "properties": {"v": {"enum": [1, 2]}, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["v", "kids"],
    }
    for seed in range(3):
        fields = {"tools": [tool("tree", tree), tool("count", COUNT)], "temperature": 1, "seed": seed}
        [(name, arguments)] = without_ids(ask(client, tool_choice="required", max_tokens=300, **fields))[1]
        jsonschema.validate(json.loads(arguments), {"tree": tree, "count": COUNT}[name])


def test_function_without_parameters_can_be_forced(client: httpx.Client) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        found = ask(client, tools=[tool("now")], tool_choice=choice, temperature=1, seed=1)
        [(name, arguments)] = without_ids(found)[1]
        assert (name, json.loads(arguments)) == ("now", {})


def test_forced_parallel_calls_use_the_declared_functions(client: httpx.Client) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": True, "temperature": 1, "seed": 1, "max_tokens": 60}
    calls = without_ids(ask(client, **fields))[1]
    assert calls
    assert {name for name, _ in calls} <= {"weather", "count"}


def test_forced_arguments_contain_only_declared_properties(client: httpx.Client) -> None:
    """The schema allows others, which a random model would generate without end."""
    size = {"type": "object", "properties": {"unit": {"enum": ["m", "ft"]}}, "required": ["unit"]}
    parameters = {"type": "object", "properties": {"size": size, "n": {"type": "boolean"}}, "required": ["size"]}
    for seed in range(3):
        fields = {"tools": [tool("measure", parameters)], "tool_choice": "required", "temperature": 1, "seed": seed}
        [(_, arguments)] = without_ids(ask(client, **fields))[1]
        found = json.loads(arguments)
        assert set(found) <= {"size", "n"}
        assert list(found["size"]) == ["unit"]


def test_all_of_subschemas_stay_open() -> None:
    """A closed subschema would forbid the properties of the others."""
    parts = [{"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]} for name in "ab"]
    fields = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool("both", {"allOf": parts})],
        "tool_choice": {"type": "function", "function": {"name": "both"}},
    }
    grammar = ToolUse(ChatCompletionRequest.model_validate(fields), "").grammar()
    assert grammar is not None
    assert json.loads(grammar.value) == {"allOf": parts}
