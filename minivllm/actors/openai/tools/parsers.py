"""Parsers of tool calls in generated text, as it arrives. They serve both streams and complete responses.

    Hermes, Qwen   text <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...
    Llama          {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    forced         under the grammar of `tool_choice`: the arguments of the named function alone, or calls as in Llama's
                   format, perhaps in a list

A call is an object in JSON that may have trailing commas:

    keys        in any order; unknown keys are skipped, and so is the second of two equal keys
    name        a function of the request
    arguments   an object, a string that contains one, or null or "" for none. Of `arguments` and `parameters`, the
                format's own key counts unless it has none. An object without both is a call if its only other keys are
                `id` and `type`.
    end         `}`, or a tag in its place after the arguments

Arguments are passed on as the model wrote them, without trailing commas. Other text becomes content.

A stream passes arguments on once the function's name and the start of a first value are known. If the call is then
malformed, or cut off by the end of the text, what was sent stays. A complete response has the text of such a call as
content. In both, `ends_with_calls` is false.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic_core import from_json

T = TypeVar("T")

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"name", "id", "type"})
_SPACES = " \t\n\r"
_TOKEN = re.compile(
    r'([ \t\n\r]*+)([{}\[\]:,"]|'
    r"(?:-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][-+]?\d++)?|true|false|null)(?=[ \t\n\r,\]}]))",
    re.ASCII,
)
"""White space and a token of JSON; of a string, its first quote."""
_UNFINISHED_TOKEN = re.compile(r"[ \t\n\r]*+[-+.\w]*+", re.ASCII)
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_UNFINISHED_ESCAPE = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")


@dataclass(slots=True)
class ToolCallDelta:
    """New arguments of call `index`. `call_id` and `name` come with its first delta."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """Content and tool calls of a piece of generated text."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class _NotACallError(Exception):
    """The text is not a call."""


class _CutOffError(_NotACallError):
    """The text ends before the call does."""


Reading = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns what it has read."""

Take = Callable[[str], object]
"""Takes the next part of a JSON value."""


class ToolParser(ABC):
    """Takes the text in pieces of any size; the joined results do not depend on the pieces.

    Reads calls; subclasses find where calls start. Calls after the first `max_calls` are dropped, and so is the content
    after them. `names` are the functions of the request; None allows any name.
    """

    arguments_key = "arguments"
    """The format's own key of the arguments."""

    def __init__(
        self, max_calls: int | None = None, names: Collection[str] | None = None, arguments_key: str | None = None
    ) -> None:
        self.num_calls = 0
        self._max_calls = sys.maxsize if max_calls is None else max_calls
        self._names = names
        self._arguments_key = arguments_key or self.arguments_key
        self._text = ""
        self._place = 0
        """Where reading continues in the text."""
        self._begin = 0
        """Where the text starts that is not passed on yet."""
        self._spaces = ""
        """White space at the end of the content, which is dropped next to a call."""
        self._is_after_call = False
        self._is_last = False
        self._is_stream = True
        self._has_broken_call = False
        self._parsed = Parsed()
        self._start_call()
        self._parser = self._parse()

    @property
    def ends_with_calls(self) -> bool:
        """There are calls, and none is malformed or cut off."""
        return self.num_calls > 0 and not self._has_broken_call

    def feed(self, text: str, *, is_last: bool = False) -> Parsed:
        """Parses the next piece of a stream. Returns at most one delta per call."""
        self._text = self._text[self._begin :] + text
        self._place -= self._begin
        self._begin = 0
        self._is_last = is_last
        next(self._parser, None)
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    def parse(self, text: str) -> Parsed:
        """Parses a complete response. Returns one delta per call."""
        self._is_stream = False
        return self.feed(text, is_last=True)

    @abstractmethod
    def _parse(self) -> Reading[None]:
        """Parses all of the text."""

    def _wait(self) -> Reading[bool]:
        """Waits for more text. Returns False at the end of the text."""
        if self._is_last:
            return False
        yield
        return True

    def _advance(self, length: int) -> str:
        """Returns the next part of the text, which is not read again."""
        text = self._text[self._place : self._place + length]
        self._place += length
        self._begin = self._place
        return text

    def _show(self, text: str) -> None:
        if self.num_calls <= self._max_calls:
            self._parsed.content += text

    def _show_rest(self) -> Reading[None]:
        has_more = True
        while has_more:
            self._show(self._advance(len(self._text) - self._place))
            has_more = yield from self._wait()

    # ---- one call

    def _start_call(self, name: str | None = None) -> None:
        self._begin = self._place
        self._name = name
        self._arguments: list[str] = []
        """Arguments that are not passed on yet."""
        self._is_known = False
        """The name and the first arguments are known, with which a stream starts to pass the call on."""
        self._is_passed_on = False

    def _read_call(self) -> Reading[bool]:
        """Reads a call. Returns False if it is none: then what is not passed on of it remains to be read."""
        self._start_call()
        is_kept = self.num_calls < self._max_calls
        try:
            yield from self._read_object()
        except _NotACallError as error:
            is_cut_off = isinstance(error, _CutOffError)
            self._has_broken_call |= is_kept and (is_cut_off or self._is_known)
            self._place = len(self._text) if is_cut_off and self._is_passed_on else self._begin
            return False
        self._pass_on()
        return True

    def _read_object(self) -> Reading[None]:
        keys: set[str] = set()
        other_arguments: list[str] = []
        character = yield from self._expect("{")
        while character in "{,":
            if (yield from self._peek()) not in "}<":
                yield from self._read_entry(keys, other_arguments)
            character = yield from self._expect(",}<")
        if character == "<":  # small models forget the last brace
            if not self._is_known:
                raise _NotACallError
            self._place -= 1
        if self._name is None or not (keys & _ARGUMENTS_KEYS or keys <= _OTHER_KEYS):
            raise _NotACallError
        if not self._is_known:
            self._take("".join(other_arguments) or "{}")

    def _read_entry(self, keys: set[str], other_arguments: list[str]) -> Reading[None]:
        yield from self._expect('"')
        key = yield from self._read_text()
        yield from self._expect(":")
        if key == "name" and key not in keys:
            yield from self._expect('"')
            self._name = yield from self._read_text()
            if not self._name or (self._names is not None and self._name not in self._names):
                raise _NotACallError
            self._take("")
        elif key in _ARGUMENTS_KEYS and key not in keys and not self._is_known:
            yield from self._read_arguments(self._take if key == self._arguments_key else other_arguments.append)
        else:
            yield from self._read_value(lambda _: None)
        keys.add(key)

    def _read_arguments(self, take: Take) -> Reading[None]:
        first = yield from self._peek()
        if first == "{":
            yield from self._read_value(take)
        elif first == '"':
            self._place += 1
            text = yield from self._read_text()
            if text.strip():
                if not isinstance(_from_json(text), dict):
                    raise _NotACallError
                take(text)
        elif (yield from self._read_token())[1] != "null":
            raise _NotACallError

    def _take(self, arguments: str) -> None:
        if arguments:
            self._arguments.append(arguments)
        if self._name is not None and self._arguments:
            self._is_known = True
            if self._is_stream:
                self._pass_on()

    def _pass_on(self) -> None:
        """Adds the arguments so far to the deltas of the call."""
        arguments, self._arguments = "".join(self._arguments), []
        self._begin = self._place
        calls = self._parsed.calls
        if not self._is_passed_on:
            self._is_passed_on = True
            self._spaces, self._is_after_call = "", True
            self.num_calls += 1
            if self.num_calls <= self._max_calls:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append(ToolCallDelta(self.num_calls - 1, arguments, call_id, self._name))
        elif calls and calls[-1].index == self.num_calls - 1:
            calls[-1].arguments += arguments
        elif arguments and self.num_calls <= self._max_calls:
            calls.append(ToolCallDelta(self.num_calls - 1, arguments))

    # ---- JSON

    def _read_value(self, take: Take) -> Reading[None]:
        """Reads a value. Parts are taken up to the start of a number, word or string, and then to its end."""
        closers: list[str] = []
        part = ""
        while True:
            spaces, token = yield from self._read_token()
            if closers and token == closers[-1]:
                take(part.removesuffix(",") + spaces + token)
                closers.pop()
            else:
                part += spaces + token
                if closers and closers[-1] == "}":
                    part, token = yield from self._read_key(part, token)
                if token in "{[":
                    closers.append("}" if token == "{" else "]")
                    continue
                if token in "}]:,":
                    raise _NotACallError
                take(part)
                if token == '"':
                    yield from self._read_string(take)
            while closers:
                spaces, token = yield from self._read_token()
                if token == ",":
                    part = spaces + token
                    break
                if token != closers.pop():
                    raise _NotACallError
                take(spaces + token)
            else:
                return

    def _read_key(self, part: str, token: str) -> Reading[tuple[str, str]]:
        """Reads from the quote of a key to the start of its value. Returns `part` with it, and the last token."""
        if token != '"':
            raise _NotACallError
        parts = [part]
        yield from self._read_string(parts.append)
        for is_colon in (True, False):
            spaces, token = yield from self._read_token()
            if (token == ":") != is_colon:
                raise _NotACallError
            parts.append(spaces + token)
        return "".join(parts), token

    def _read_text(self) -> Reading[str]:
        """Reads a string after its first quote. Returns its value."""
        parts = ['"']
        yield from self._read_string(parts.append)
        return str(_from_json("".join(parts)))

    def _read_string(self, take: Take) -> Reading[None]:
        """Reads a string after its first quote."""
        while True:
            if found := _CHARACTERS.match(self._text, self._place):
                self._place = found.end()
                take(found[0])
            rest = self._text[self._place : self._place + 6]
            if rest.startswith('"'):
                self._place += 1
                take('"')
                return
            if not _UNFINISHED_ESCAPE.fullmatch(rest):
                raise _NotACallError
            yield from self._wait_in_call()

    def _read_token(self) -> Reading[tuple[str, str]]:
        """Returns the white space before a token, and the token."""
        while (found := _TOKEN.match(self._text, self._place)) is None:
            if not _UNFINISHED_TOKEN.fullmatch(self._text, self._place):
                raise _NotACallError
            yield from self._wait_in_call()
        self._place = found.end()
        return found[1], found[2]

    def _expect(self, characters: str) -> Reading[str]:
        character = yield from self._peek()
        if character not in characters:
            raise _NotACallError
        self._place += 1
        return character

    def _peek(self) -> Reading[str]:
        """Skips white space. Returns the next character, which stays unread."""
        while True:
            while self._place < len(self._text):
                if (character := self._text[self._place]) not in _SPACES:
                    return character
                self._place += 1
            yield from self._wait_in_call()

    def _wait_in_call(self) -> Reading[None]:
        if not (yield from self._wait()):
            raise _CutOffError


class HermesParser(ToolParser):
    """Calls between `<tool_call>` and `</tool_call>`; other text is content, without white space around calls."""

    def _parse(self) -> Reading[None]:
        has_more = True
        while has_more:
            before, tag, _ = self._text[self._place :].partition(OPEN_TAG)
            if tag:
                self._add_content(before)
                self._advance(len(before + tag))
                if (yield from self._read_call()):
                    yield from self._skip_close_tag()
                elif not self._is_passed_on:
                    self._add_content(OPEN_TAG)
            else:
                end = len(before) - _partial_suffix(before, OPEN_TAG)
                self._add_content(self._advance(end))
                has_more = yield from self._wait()
        self._add_content(self._advance(len(self._text) - self._place))
        if not self._is_after_call:
            self._show(self._spaces)

    def _skip_close_tag(self) -> Reading[None]:
        while CLOSE_TAG.startswith(stripped := self._text[self._place :].lstrip()) and stripped != CLOSE_TAG:
            if not (yield from self._wait()):
                self._advance(len(self._text) - self._place)
                return
        if stripped.startswith(CLOSE_TAG):
            self._advance(len(self._text) - self._place - len(stripped) + len(CLOSE_TAG))

    def _add_content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._show(self._spaces + body)
            self._spaces, self._is_after_call = "", False
        self._spaces += text[len(body) :]


class JsonParser(ToolParser):
    """Calls from the first character on, one after another; text that does not start with one is all content."""

    arguments_key = "parameters"

    def _parse(self) -> Reading[None]:
        skipped = ""
        while True:
            unread = self._text[self._place :]
            rest = unread.lstrip(" \n\r\t;,[]")
            start = rest.removeprefix(PYTHON_TAG).lstrip()
            if not start or PYTHON_TAG.startswith(rest):
                if (yield from self._wait()):
                    continue
                if self.num_calls:
                    return
                break
            skipped += self._advance(len(unread) - len(start))
            if start[0] != "{":
                if self.num_calls:
                    skipped = ""
                break
            if not (yield from self._read_call()):
                if self._is_passed_on:
                    skipped = ""
                break
            skipped = ""
        self._show(skipped)
        yield from self._show_rest()


class ArgumentsParser(ToolParser):
    """The text is the arguments of one function, whose name is known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._start_call(name)

    def _parse(self) -> Reading[None]:
        if not self._is_stream:
            try:
                json.loads(self._text)
            except (ValueError, RecursionError):
                yield from self._show_rest()
                return
        has_more = True
        while has_more:
            if text := self._advance(len(self._text) - self._place):
                self._arguments.append(text)
                self._pass_on()
            has_more = yield from self._wait()


def _from_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises _NotACallError."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        raise _NotACallError from None


def _partial_suffix(text: str, tag: str) -> int:
    """Returns the length of the longest end of `text` that `tag` starts with."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if tag.startswith(text[-length:])), 0)
