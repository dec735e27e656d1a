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


# ---- calls as models write them

NAMES = {"f", "g"}
Maker = Callable[[], ToolParser]


def hermes_parser() -> ToolParser:
    return HermesParser(names=NAMES)


def llama_parser() -> ToolParser:
    return JsonParser(names=NAMES)


def parse_whole(parser: ToolParser, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the same as `parse`, of a complete response."""
    parsed = parser.parse(text)
    assert [call.index for call in parsed.calls] == list(range(parser.num_calls))
    assert all(call.call_id and call.name for call in parsed.calls)
    return parsed.content, [(str(call.name), call.arguments) for call in parsed.calls]


OBJECTS: dict[str, str | None] = {
    # text of an object: arguments of f if it is a call. ARGS is the format's own key, OTHER the one of the other format
    '{"name": "f", "ARGS": {"a": 1}}': '{"a": 1}',
    '{"ARGS": {"a": 1}, "name": "f"}': '{"a": 1}',
    # unknown keys
    '{"id": "call_1", "type": "function", "name": "f", "ARGS": {"a": 1}}': '{"a": 1}',
    '{"name": "f", "ARGS": {"a": 1}, "id": 7, "why": [{"x": "}"}, null, -1.5e3, true]}': '{"a": 1}',
    '{"why": {"name": "g", "ARGS": {}}, "name": "f", "note": "\\"", "ARGS": {"a": 1}}': '{"a": 1}',
    '{"name": "f", "id": "1", "type": "function"}': "{}",
    '{"name": "f", "age": 4}': None,
    '{"function": {"name": "f", "ARGS": {}}}': None,
    # trailing commas
    '{"name": "f", "ARGS": {"a": 1},}': '{"a": 1}',
    '{"name": "f", "ARGS": {"a": [1, 2 , ], "b": {"c": "," ,},\n} , }': '{"a": [1, 2  ], "b": {"c": "," }\n}',
    '{"name": "f",, "ARGS": {"a": 1}}': None,
    '{"name": "f", "ARGS": {,}}': None,
    '{,"name": "f"}': None,
    '{"name": "f" "ARGS": {}}': None,
    # no arguments
    '{"name": "f", "ARGS": null}': "{}",
    '{"name": "f", "ARGS": null, "OTHER": null}': "{}",
    '{"name": "f", "ARGS": ""}': "{}",
    '{"name": "f", "ARGS": {}}': "{}",
    '{"name": "f", "ARGS": { }}': "{ }",
    '{"name": "f"}': "{}",
    # arguments in a string
    '{"name": "f", "ARGS": "{\\"a\\": \\"\\u00e9 \\\\n\\"}"}': '{"a": "é \\n"}',
    '{"ARGS": "{\\"a\\": 1}", "name": "f"}': '{"a": 1}',
    '{"name": "f", "ARGS": "Rome"}': None,
    '{"name": "f", "ARGS": "[1]"}': None,
    '{"name": "f", "ARGS": "{\\"a\\": NaN}"}': None,
    # two keys of arguments
    '{"name": "f", "OTHER": {"a": 1}}': '{"a": 1}',
    '{"name": "f", "ARGS": {"a": 1}, "OTHER": {"b": 2}}': '{"a": 1}',
    '{"name": "f", "OTHER": {"b": 2}, "ARGS": {"a": 1}}': '{"a": 1}',
    '{"OTHER": {"b": 2}, "ARGS": {"a": 1}, "name": "f"}': '{"a": 1}',
    '{"name": "f", "ARGS": null, "OTHER": {"b": 2}}': '{"b": 2}',
    '{"name": "f", "OTHER": {"b": 2}, "ARGS": null}': '{"b": 2}',
    '{"name": "f", "ARGS": {"a": 1}, "ARGS": {"b": 2}}': '{"a": 1}',
    '{"name": "f", "ARGS": {"a": 1}, "name": "g"}': '{"a": 1}',
    # not JSON
    "{'name': 'f', 'ARGS': {'a': 1}}": None,
    '{"name": "f", "ARGS": {\'a\': 1}}': None,
    '{"name": "f", "ARGS": {"a": True}}': None,
    '{"name": "f", "ARGS": {"a": None}}': None,
    '{"name": "f", "ARGS": {"a": NaN}}': None,
    '{"name": "f", "ARGS": {"a": 01}}': None,
    '{"name": "f", "ARGS": {a: 1}}': None,
    '{"name": f, "ARGS": {}}': None,
    '{"name": "f", "ARGS": [1]}': None,
    '{"name": "f", "ARGS": 5}': None,
    # names
    '{"name": "h", "ARGS": {"a": 1}}': None,
    '{"ARGS": {"a": 1}, "name": "h"}': None,
    '{"name": "", "ARGS": {}}': None,
    '{"name": null, "ARGS": {}}': None,
    '{"name": "\\u0066", "ARGS": {"a": 1}}': '{"a": 1}',
    # strings and nesting
    '{"name": "f", "ARGS": {"a": "\\u00e9\\ud83d\\ude00 \\"}]{[ \\\\"}}': '{"a": "\\u00e9\\ud83d\\ude00 \\"}]{[ \\\\"}',
    '{"name": "f", "ARGS": {"a": "<tool_call></tool_call>"}}': '{"a": "<tool_call></tool_call>"}',
    '{"name": "f", "ARGS": {"a": [[], {"b": {"c": [{}, "}"]}}]}}': '{"a": [[], {"b": {"c": [{}, "}"]}}]}',
    '{"name": "f", "ARGS": ' + '{"a": [' * 3000 + "]}" * 3000 + "}": '{"a": [' * 3000 + "]}" * 3000,
}


@pytest.mark.parametrize("make", [hermes_parser, llama_parser])
@pytest.mark.parametrize("text", OBJECTS, ids=lambda text: text[:60])
def test_object_is_a_call_or_stays_content(make: Maker, text: str) -> None:
    keys = ("arguments", "parameters") if make is hermes_parser else ("parameters", "arguments")
    arguments, text = OBJECTS[text], text.replace("ARGS", keys[0]).replace("OTHER", keys[1])
    if make is hermes_parser:
        text = f"<tool_call>\n{text}\n</tool_call>"
    expected = (text, []) if arguments is None else ("", [("f", arguments)])
    parser = make()
    assert parse_whole(parser, text) == expected
    assert parser.ends_with_calls == (arguments is not None)
    for pieces in ([text], list(text)):
        parser = make()
        assert parse(parser, pieces) == expected
        assert parser.ends_with_calls == (arguments is not None)
    if arguments is not None and len(arguments) < 1000:
        assert isinstance(json.loads(arguments), dict)


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
F = ("f", '{"a": 1}')
TEXTS: dict[str, tuple[str, list[tuple[str, str]], bool]] = {
    # text in the format of Hermes: content, calls, whether it ends with calls
    "<tool_call></tool_call>": ("<tool_call></tool_call>", [], False),
    f"<tool_call> </tool_call>{CALL}": ("<tool_call> </tool_call>", [F], True),
    f"One \n{CALL} \n{CALL}\n Two \n": ("One\n Two \n", [F, F], True),
    f"{CALL}\n<tool_call> is a tag. \n": ("\n<tool_call> is a tag. \n", [F], True),
    f" \n<tool_call>no\n{CALL}\n": (" \n<tool_call>no", [F], True),
    f"<tool_call>{CALL}": ("<tool_call>", [F], True),
    f'<tool_call>{{"name": "f", "argum\n{CALL}': ('<tool_call>{"name": "f", "argum', [F], True),
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>': ("", [F], True),
    '<tool_call>{"name": "f", "arguments": {"a": 1}': ('<tool_call>{"name": "f", "arguments": {"a": 1}', [], False),
    f'{CALL} <tool_call>{{"name": "f", "arg': (' <tool_call>{"name": "f", "arg', [F], False),
    f"{CALL}<tool_call>": ("<tool_call>", [F], False),
    f"{CALL}<tool_ca": ("<tool_ca", [F], True),
    f"{CALL[:-3]}": ("", [F], True),
    '<tool_call>{"name": "f"</tool_call>': ('<tool_call>{"name": "f"</tool_call>', [], False),
    f"{CALL[:-12]}\n": ("", [F], True),
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:60])
def test_text_around_calls_stays_content(text: str) -> None:
    parser = hermes_parser()
    assert (*parse_whole(parser, text), parser.ends_with_calls) == TEXTS[text]


CUT = '{"name": "f", "ARGS": {"a": 1, "b": "x"}'
BROKEN: dict[str, tuple[str, str]] = {
    # text of an object: arguments that a stream sends before it turns out to be no call, content after that
    CUT: ('{"a": 1, "b": "x"}', ""),
    CUT[:-1]: ('{"a": 1, "b": "x"', ""),
    CUT[:-5]: ('{"a": 1', ""),
    '{"name": "f", "ARGS": {"a": 1, "b": True}}': ('{"a": 1', ', "b": True}}'),
    '{"name": "f", "ARGS": {"a": "x\ny"}}': ('{"a": "x', '\ny"}}'),
    '{"name": "f", "ARGS": {"a": 1}]': ('{"a": 1}', "]"),
    '{"name": "f", "ARGS": {"a": 1,,}}': ('{"a": 1', ",,}}"),
}


@pytest.mark.parametrize("make", [hermes_parser, llama_parser])
@pytest.mark.parametrize("text", BROKEN)
def test_call_that_breaks_off_is_content_of_a_response_and_part_of_a_stream(make: Maker, text: str) -> None:
    arguments, rest = BROKEN[text]
    text = text.replace("ARGS", "arguments" if make is hermes_parser else "parameters")
    if make is hermes_parser:
        text = f"<tool_call>{text}"
    parser = make()
    assert (*parse_whole(parser, text), parser.ends_with_calls) == (text, [], False)
    for pieces in ([text], list(text)):
        parser = make()
        assert (*parse(parser, pieces), parser.ends_with_calls) == (rest, [("f", arguments)], False)


spaces = st.text(alphabet=" \n\t", max_size=2)


@st.composite
def written_json(draw: st.DrawFn, value: Any) -> str:
    """Returns a text of the value with white space and trailing commas."""
    if isinstance(value, dict | list):
        if isinstance(value, list):
            parts, ends = [draw(written_json(item)) for item in value], "[]"
        else:
            keys = [json.dumps(key, ensure_ascii=draw(st.booleans())) for key in value]
            texts = [draw(written_json(item)) for item in value.values()]
            parts, ends = [f"{key}{draw(spaces)}:{text}" for key, text in zip(keys, texts, strict=True)], "{}"
        comma = draw(st.sampled_from(["", ","])) if parts else ""
        text = ends[0] + ",".join(draw(spaces) + part for part in parts) + comma + draw(spaces) + ends[1]
    else:
        text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    return draw(spaces) + text + draw(spaces)


@st.composite
def written_calls(draw: st.DrawFn, key: str) -> tuple[str, dict[str, Any] | None]:
    """Returns an object, and the arguments if it is a call."""
    arguments = draw(st.none() | st.dictionaries(st.text(), json_values, max_size=3))
    name = draw(st.sampled_from(["f", "f", "f", "g", "h"]))
    written = draw(st.sampled_from([arguments, json.dumps(arguments)])) if arguments else arguments
    fields = {"name": name, key: written} | draw(
        st.fixed_dictionaries({}, optional={"id": json_values, "why": json_values})
    )
    fields = {name: fields[name] for name in draw(st.permutations(list(fields)))}
    return draw(written_json(fields)).strip(), None if name == "h" else arguments or {}


def split(text: str, cuts: list[float]) -> list[str]:
    places = sorted(int(cut * len(text)) for cut in cuts)
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


cut_places = st.lists(st.floats(0, 1), max_size=12)


@given(st.data(), st.sampled_from([hermes_parser, llama_parser]), cut_places)
def test_calls_keep_their_arguments_however_they_are_written(
    data: st.DataObject, make: Maker, cuts: list[float]
) -> None:
    key = "arguments" if make is hermes_parser else "parameters"
    text, arguments = data.draw(written_calls(key))
    if make is hermes_parser:
        text = f"<tool_call>{text}</tool_call>"
    content, calls = parse_whole(make(), text)
    if arguments is None:
        assert (content, calls) == (text, [])
    else:
        assert (content, [json.loads(found) for _, found in calls]) == ("", [arguments])
    assert parse(make(), split(text, cuts)) == (content, calls)


@given(st.data(), st.sampled_from([hermes_parser, llama_parser]), cut_places)
def test_pieces_give_the_calls_content_and_end_of_the_whole(
    data: st.DataObject, make: Maker, cuts: list[float]
) -> None:
    tags = ["<tool_call>", "</tool_call>", "{", "}", '"', ",", "\\", "<", "True", "\n", " ", "; ", "text"]
    key = "arguments" if make is hermes_parser else "parameters"
    call = written_calls(key).map(lambda call: call[0])
    part = st.sampled_from(tags) | call | call.map(lambda text: f"<tool_call>{text}</tool_call>")
    text = "".join(data.draw(st.lists(part, max_size=5)))
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    parsers = [make() for _ in range(3)]
    streamed = parse(parsers[0], [text])
    assert parse(parsers[1], split(text, cuts)) == streamed
    content, calls = parse_whole(parsers[2], text)
    assert all(name in NAMES and isinstance(json.loads(arguments), dict) for name, arguments in calls)
    if len(calls) == len(streamed[1]):
        assert (content, calls) == streamed
        assert {parser.ends_with_calls for parser in parsers} == {parsers[2].ends_with_calls}
    else:  # the stream contains calls that broke off
        assert len(calls) < len(streamed[1])
        assert not any(parser.ends_with_calls for parser in parsers)


def test_arguments_of_a_named_function_that_are_cut_off_are_content_of_a_response() -> None:
    assert parse_whole(ArgumentsParser("f"), '{"a": 1}') == ("", [("f", '{"a": 1}')])
    assert parse_whole(ArgumentsParser("f"), '{"a": 1') == ('{"a": 1', [])
    assert parse(ArgumentsParser("f"), ['{"a', '": 1']) == ("", [("f", '{"a": 1')])


def test_second_call_does_not_end_the_answer_if_one_is_allowed() -> None:
    for text in (f"{CALL}{CALL}", f"{CALL}{CALL[:-20]}", f"{CALL}{CALL[:20]}"):
        for end in (len(text), 3):
            parser = HermesParser(max_calls=1, names=NAMES)
            parsed = [parser.feed(text[:end]), parser.feed(text[end:]), parser.feed("", is_last=True)]
            assert "".join(call.arguments for part in parsed for call in part.calls) == F[1]
            assert parser.ends_with_calls
