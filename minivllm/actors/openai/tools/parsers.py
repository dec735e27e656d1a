"""Parsers of tool calls in generated text, as it arrives. They serve both streams and complete responses.

    Hermes, Qwen   text <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...
    Llama          {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    forced         under the grammar of `tool_choice`: the arguments of the named function alone, or calls as in Llama's
                   format, perhaps in a list

Arguments are passed on as the model wrote them, piece by piece, once the function's name is known. Text that turns out
not to be a call becomes content.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

T = TypeVar("T")

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER_OR_WORD = re.compile(r"[-0-9tfn][^\s,}]*(?=[\s,}])")


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


class ToolParser(Protocol):
    """Takes the text in pieces of any size; the joined results do not depend on the pieces."""

    num_calls: int

    def feed(self, text: str) -> Parsed: ...
    def finish(self) -> Parsed: ...


class _NotACallError(Exception):
    """The text is not a call, or ends before the call does."""


Reading = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns what it has read."""


class _CallsParser(ABC):
    """Reads calls, `{"name": ..., "arguments": ...}` with keys in any order. Subclasses find where calls start."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._unread = ""
        self._is_complete = False
        self._parsed = Parsed()
        self._start_call()
        self._parser = self._parse()
        next(self._parser)

    def feed(self, text: str) -> Parsed:
        self._unread += text
        next(self._parser, None)
        parsed, self._parsed = self._parsed, Parsed()
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            parsed.calls = [call for call in parsed.calls if call.index < self._max_calls]
            if self.num_calls > self._max_calls:
                parsed.content = ""
        return parsed

    def finish(self) -> Parsed:
        self._is_complete = True
        return self.feed("")

    @abstractmethod
    def _parse(self) -> Reading[None]:
        """Parses all of the text."""

    def _wait(self) -> Reading[bool]:
        """Waits for more text. Returns False at the end of the text."""
        if not self._is_complete:
            yield
        return not self._is_complete

    # ---- one call

    def _start_call(self) -> None:
        self._raw = ""
        self._name: str | None = None
        self._early_arguments: str | None = None
        """Arguments that come before the name."""
        self._is_announced = False
        """A delta contains the call's name."""

    def _read_call(self) -> Reading[str | None]:
        """Reads a call. Returns None, or the text to show as content if it is not a call."""
        self._start_call()
        try:
            yield from self._expect("{")
            character = ","
            while character == ",":
                yield from self._read_entry()
                character = yield from self._expect(",}")
            if self._name is None:
                raise _NotACallError
            if not self._is_announced:
                self._pass_on("{}")
        except _NotACallError:
            if self._is_announced:  # a truncated call is passed on as far as it goes
                return None if self._is_complete else ""
            return self._raw
        return None

    def _read_entry(self) -> Reading[None]:
        key = (yield from self._read_string())[1:-1]
        if key not in _CALL_KEYS:
            raise _NotACallError
        yield from self._expect(":")
        first = yield from self._peek()
        if key in _ARGUMENT_KEYS and first == "{":
            yield from self._read_nested(is_arguments=True)
        elif key in ("id", "type") and first in "{[":
            yield from self._read_nested(is_arguments=False)
        elif key in ("id", "type") and first in "-0123456789tfn":
            yield from self._match(_NUMBER_OR_WORD)
        else:
            self._take_value(key, (yield from self._read_string()))

    def _take_value(self, key: str, string: str) -> None:
        if key in ("id", "type"):
            return
        try:
            text = str(json.loads(string))
        except ValueError:
            raise _NotACallError from None
        if key != "name":
            self._pass_on(text)  # some models write the arguments as a string that contains JSON
        elif text:
            self._name = text
            if self._early_arguments is not None:
                self._pass_on(self._early_arguments)
                self._early_arguments = None
        else:
            raise _NotACallError

    def _read_nested(self, *, is_arguments: bool) -> Reading[None]:
        """Reads an object or a list."""
        depth = 0
        in_string = is_escaped = False
        while True:
            length = len(self._unread)
            for place, character in enumerate(self._unread):
                if is_escaped:
                    is_escaped = False
                elif in_string:
                    is_escaped = character == "\\"
                    in_string = character != '"'
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if not depth:
                        length = place + 1
                        break
            text = self._advance(length)
            if is_arguments:
                self._pass_on(text)
            if not depth:
                return
            yield from self._wait_in_call()

    def _pass_on(self, arguments: str) -> None:
        """Adds arguments to the call's deltas, once its name is known."""
        calls = self._parsed.calls
        if self._name is None:
            self._early_arguments = (self._early_arguments or "") + arguments
        elif not self._is_announced:
            self._is_announced = True
            calls.append(ToolCallDelta(self.num_calls, arguments, _new_call_id(), self._name))
            self.num_calls += 1
        elif calls and calls[-1].index == self.num_calls - 1:
            calls[-1].arguments += arguments
        elif arguments:
            calls.append(ToolCallDelta(self.num_calls - 1, arguments))

    # ---- tokens

    def _advance(self, length: int) -> str:
        text, self._unread = self._unread[:length], self._unread[length:]
        self._raw += text
        return text

    def _wait_in_call(self) -> Reading[None]:
        if not (yield from self._wait()):
            self._advance(len(self._unread))
            raise _NotACallError

    def _peek(self) -> Reading[str]:
        """Skips white space. Returns the next character, which stays unread."""
        while True:
            self._advance(len(self._unread) - len(self._unread.lstrip()))
            if self._unread:
                return self._unread[0]
            yield from self._wait_in_call()

    def _expect(self, characters: str) -> Reading[str]:
        yield from self._peek()
        character = self._advance(1)
        if character not in characters:
            raise _NotACallError
        return character

    def _read_string(self) -> Reading[str]:
        """Returns a string with its quotes."""
        if (yield from self._peek()) != '"':
            self._advance(1)
            raise _NotACallError
        return (yield from self._match(_STRING))

    def _match(self, pattern: re.Pattern[str]) -> Reading[str]:
        while (found := pattern.match(self._unread)) is None:
            yield from self._wait_in_call()
        return self._advance(found.end())


class HermesParser(_CallsParser):
    """Calls between `<tool_call>` and `</tool_call>`; other text is content, without white space around the tags."""

    _spaces = ""
    """White space at the end of the content, which is dropped next to a call."""

    def _parse(self) -> Reading[None]:
        has_more = True
        while has_more:
            before, tag, after = self._unread.partition(OPEN_TAG)
            if tag:
                self._add_content(before)
                self._spaces = ""
                self._unread = after
                text = yield from self._read_call()
                if text is None:
                    yield from self._skip_close_tag()
                elif not self._is_announced:
                    self._add_content(OPEN_TAG + text)
            else:
                end = len(before) - _partial_suffix(before, OPEN_TAG)
                self._add_content(before[:end])
                self._unread = before[end:]
                has_more = yield from self._wait()
        self._add_content(self._unread)
        if self.num_calls == 0:
            self._parsed.content += self._spaces

    def _skip_close_tag(self) -> Reading[None]:
        while CLOSE_TAG.startswith(stripped := self._unread.lstrip()) and stripped != CLOSE_TAG:
            if not (yield from self._wait()):
                self._unread = ""
                return
        if stripped.startswith(CLOSE_TAG):
            self._unread = stripped[len(CLOSE_TAG) :]

    def _add_content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._parsed.content += self._spaces + body
            self._spaces = ""
        self._spaces += text[len(body) :]


class JsonParser(_CallsParser):
    """Calls from the first character on, one after another; text that does not start with one is all content."""

    def _parse(self) -> Reading[None]:
        skipped = ""
        while True:
            rest = self._unread.lstrip(" \n\r\t;,[]")
            start = rest.removeprefix(PYTHON_TAG).lstrip()
            if not start or PYTHON_TAG.startswith(rest):
                if (yield from self._wait()):
                    continue
                if self.num_calls:
                    return
                break
            skipped += self._unread[: len(self._unread) - len(start)]
            self._unread = start
            if start[0] != "{":
                if self.num_calls:
                    skipped = ""
                break
            text = yield from self._read_call()
            if text is not None:
                self._unread = text + self._unread
                break
            skipped = ""
        has_more = True
        while has_more:
            self._parsed.content += skipped + self._unread
            skipped = self._unread = ""
            has_more = yield from self._wait()


class ArgumentsParser:
    """The text is the arguments of one function, whose name is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        if self.num_calls:
            return Parsed(calls=[ToolCallDelta(0, text)])
        self.num_calls = 1
        return Parsed(calls=[ToolCallDelta(0, text, _new_call_id(), self._name)])

    def finish(self) -> Parsed:
        return Parsed()


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _partial_suffix(text: str, tag: str) -> int:
    """Returns the length of the longest end of `text` that `tag` starts with."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
