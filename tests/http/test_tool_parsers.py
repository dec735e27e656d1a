"""Tool call parsers: find calls in generated text, independent of how the text is split."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.actors.openai.tools.parsers import ArgumentsParser, HermesParser, JsonParser, Parsed, ToolParser
from minivllm.actors.openai.tools.tools import call_format

ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'


def parse(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the content and (name, arguments) of each call; checks that the deltas are consistent."""
    content = ""
    calls: list[tuple[str, str]] = []
    parts: list[Parsed] = [*(parser.feed(piece) for piece in pieces), parser.feed("", is_last=True)]
    for part in parts:
        content += part.content
        for call in part.calls:
            if call.name is not None:
                assert call.index == len(calls)
                assert call.call_id
                calls.append((call.name, ""))
            else:
                assert call.call_id is None
                assert call.index == len(calls) - 1
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert parser.num_calls == len(calls)
    return content, calls


def hermes(text: str) -> tuple[str, list[tuple[str, str]]]:
    return parse(HermesParser(), [text])


def bare(text: str) -> tuple[str, list[tuple[str, str]]]:
    return parse(JsonParser(), [text])


HERMES_CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "Hello there.": ("Hello there.", []),
    "  spaced out \n": ("  spaced out \n", []),
    f"<tool_call>{ROME}</tool_call>": ("", [("weather", '{"city": "Rome"}')]),
    f"<tool_call>\n{ROME}\n</tool_call>\n": ("", [("weather", '{"city": "Rome"}')]),
    f"Let me look.\n<tool_call>{ROME}</tool_call>": ("Let me look.", [("weather", '{"city": "Rome"}')]),
    f"<tool_call>{ROME}</tool_call>\n<tool_call>{ROME}</tool_call>": ("", [("weather", '{"city": "Rome"}')] * 2),
    f"<tool_call>{ROME}</tool_call> Done.": (" Done.", [("weather", '{"city": "Rome"}')]),
    # other key orders and key names
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "parameters": {"a": [1, {"b": "}"}]}}</tool_call>': (
        "",
        [("f", '{"a": [1, {"b": "}"}]}')],
    ),
    '<tool_call>{"id": 7, "type": "function", "name": "f", "arguments": {}}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f"}</tool_call>': ("", [("f", "{}")]),
    # arguments as a string that contains JSON
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>': ("", [("f", '{"a": "\\n"}')]),
    # brackets and quotes inside strings
    '<tool_call>{"name": "f", "arguments": {"t": "a\\"}{</tool_call>"}}</tool_call>': (
        "",
        [("f", '{"t": "a\\"}{</tool_call>"}')],
    ),
    # no closing tag
    f"<tool_call>{ROME}": ("", [("weather", '{"city": "Rome"}')]),
    f"<tool_call>{ROME} and more": (" and more", [("weather", '{"city": "Rome"}')]),
    # no call at all
    "a < b and <tool": ("a < b and <tool", []),
    "<tool_call>not json</tool_call>": ("<tool_call>not json</tool_call>", []),
    '<tool_call>{"city": "Rome"}</tool_call>': ('<tool_call>{"city": "Rome"}</tool_call>', []),
    '<tool_call>{"name": 5, "arguments": {}}': ('<tool_call>{"name": 5, "arguments": {}}', []),
    '<tool_call>{"name": "f", "arguments": 5}': ('<tool_call>{"name": "f", "arguments": 5}', []),
    # truncated: text before the name and arguments are known, partial arguments after that
    '<tool_call>{"name": "f"': ('<tool_call>{"name": "f"', []),
    "<tool_call>": ("<tool_call>", []),
    '<tool_call>{"name": "f", "arguments": {"city": "Ro': ("", [("f", '{"city": "Ro')]),
}

JSON_CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "Hello there.": ("Hello there.", []),
    "[1] is a footnote": ("[1] is a footnote", []),
    '{"name": "f", "parameters": {"a": 1}}': ("", [("f", '{"a": 1}')]),
    '\n{"name": "f", "parameters": {"a": 1}}\n': ("", [("f", '{"a": 1}')]),
    '<|python_tag|>{"name": "f", "parameters": {}}': ("", [("f", "{}")]),
    '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}': ("", [("f", "{}"), ("g", "{}")]),
    '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": [1]}}]': (
        "",
        [("f", "{}"), ("g", '{"x": [1]}')],
    ),
    '{"answer": 42}': ('{"answer": 42}', []),
    '{"name": "f", "age": 4}': ('{"name": "f", "age": 4}', []),
    '{"name": "f", "parameters": {"a": "x': ("", [("f", '{"a": "x')]),
    '{"name": "f", "parame': ('{"name": "f", "parame', []),
    '{"name": "f", "parameters": {}} That is all.': ("That is all.", [("f", "{}")]),
}


@pytest.mark.parametrize("text", HERMES_CASES, ids=lambda text: text[:60])
def test_hermes_parser_separates_calls_from_text(text: str) -> None:
    assert hermes(text) == HERMES_CASES[text]


@pytest.mark.parametrize("text", JSON_CASES, ids=lambda text: text[:60])
def test_json_parser_separates_calls_from_text(text: str) -> None:
    assert bare(text) == JSON_CASES[text]


ALL_CASES: list[tuple[Callable[[], ToolParser], str]] = [
    *((HermesParser, text) for text in HERMES_CASES),
    *((JsonParser, text) for text in JSON_CASES),
    *((lambda: ArgumentsParser("f"), text) for text in ('{"a": 1}', "")),
]


@pytest.mark.parametrize(
    ("make", "text"), ALL_CASES, ids=[f"{type(make()).__name__}-{text[:60]}" for make, text in ALL_CASES]
)
def test_result_is_independent_of_how_the_text_is_split(make: Callable[[], ToolParser], text: str) -> None:
    complete = parse(make(), [text])
    assert parse(make(), list(text)) == complete
    choose = random.Random(text)
    for _ in range(20):
        cuts = sorted(choose.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(make(), pieces) == complete


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)


@given(
    arguments=st.dictionaries(st.text(), json_values, max_size=4),
    name=st.text(min_size=1),
    is_swapped=st.booleans(),
    indent=st.sampled_from([None, 2]),
    step=st.integers(1, 7),
)
def test_arguments_round_trip_through_the_parsers(
    arguments: dict[str, Any], name: str, is_swapped: bool, indent: int | None, step: int
) -> None:
    call = {"arguments": arguments, "name": name} if is_swapped else {"name": name, "arguments": arguments}
    text = json.dumps(call, indent=indent)
    for parser, written in ((HermesParser(), f"<tool_call>{text}</tool_call>"), (JsonParser(), text)):
        content, calls = parse(parser, [written[place : place + step] for place in range(0, len(written), step)])
        assert content == ""
        [(found, raw)] = calls
        assert found == name
        assert json.loads(raw) == arguments


@given(st.text(alphabet="ab <>{}[]\"':,/\\tool_cal\n"), st.integers(1, 5))
def test_arbitrary_text_is_returned_as_content_or_calls(text: str, step: int) -> None:
    pieces = [text[place : place + step] for place in range(0, len(text), step)]
    for make in (HermesParser, JsonParser):
        assert parse(make(), pieces) == parse(make(), [text])
        content, calls = parse(make(), [text])
        assert calls or content == text


def test_arguments_are_streamed_before_the_call_is_complete() -> None:
    parser = HermesParser()
    parsed = parser.feed('<tool_call>{"name": "f", "arguments": {"city": "Ro')
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"city": "Ro')]
    assert [call.arguments for call in parser.feed("me").calls] == ["me"]


def test_calls_beyond_max_calls_are_dropped() -> None:
    two = f"<tool_call>{ROME}</tool_call><tool_call>{ROME}</tool_call>"
    for size in (1, 1000):
        parser = HermesParser(max_calls=1)
        pieces = [two[place : place + size] for place in range(0, len(two), size)]
        calls = [call for piece in pieces for call in parser.feed(piece).calls] + parser.feed("", is_last=True).calls
        assert {call.index for call in calls} == {0}
        assert "".join(call.arguments for call in calls) == '{"city": "Rome"}'


def test_call_format_follows_from_the_chat_template() -> None:
    assert call_format("...<tool_call>...") == "hermes"
    assert call_format("...<|python_tag|>...") == "llama"
    assert call_format("nothing about tools") == "hermes"
