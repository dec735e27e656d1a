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
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_STRING_REST = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)
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


class _NotACallError(Exception):
    """The text is not a call, or ends before the call does."""


Reading = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns what it has read."""


class ToolParser(ABC):
    """Takes the text in pieces of any size; the joined results do not depend on the pieces.

    Reads calls, `{"name": ..., "arguments": ...}` with keys in any order. Subclasses find where calls start. Calls
    after the first `max_calls` are dropped, and so is the content after them.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._max_calls = sys.maxsize if max_calls is None else max_calls
        self._unread = ""
        self._is_last = False
        self._parsed = Parsed()
        self._start_call()
        self._parser = self._parse()

    def feed(self, text: str, *, is_last: bool = False) -> Parsed:
        """Parses the next piece of the text. Returns at most one delta per call."""
        self._unread += text
        self._is_last = is_last
        next(self._parser, None)
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    @abstractmethod
    def _parse(self) -> Reading[None]:
        """Parses all of the text."""

    def _wait(self) -> Reading[bool]:
        """Waits for more text. Returns False at the end of the text."""
        if self._is_last:
            return False
        yield
        return True

    def _show(self, text: str) -> None:
        if self.num_calls <= self._max_calls:
            self._parsed.content += text

    # ---- one call

    def _start_call(self, name: str | None = None) -> None:
        self._raw = ""
        self._name = name
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
                return None if self._is_last and not self._unread else ""
            return self._raw
        return None

    def _read_entry(self) -> Reading[None]:
        key = yield from self._read_string()
        is_arguments, is_ignored = key in ("arguments", "parameters"), key in ("id", "type")
        if not (is_arguments or is_ignored or key == "name"):
            raise _NotACallError
        yield from self._expect(":")
        first = yield from self._peek()
        if (is_arguments and first == "{") or (is_ignored and first in "{["):
            yield from self._read_nested(is_arguments=is_arguments)
            return
        if is_ignored and first in "-0123456789tfn":
            yield from self._match(_NUMBER_OR_WORD)
            return
        string = yield from self._read_string()
        if is_ignored:
            return
        try:
            text = str(json.loads(f'"{string}"'))
        except ValueError:
            raise _NotACallError from None
        if is_arguments:
            self._pass_on(text)  # some models write the arguments as a string that contains JSON
            return
        if not text:
            raise _NotACallError
        self._name = text
        if self._early_arguments is not None:
            self._pass_on(self._early_arguments)
            self._early_arguments = None

    def _read_nested(self, *, is_arguments: bool) -> Reading[None]:
        """Reads an object or a list."""
        depth = 0
        in_string = is_escaped = False
        while True:
            length = len(self._unread)
            for place, character in enumerate(self._unread):
                if in_string:
                    in_string = is_escaped or character != '"'
                    is_escaped = character == "\\" and not is_escaped
                    continue
                in_string = character == '"'
                depth += (character in "{[") - (character in "}]")
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
            self.num_calls += 1
            if self.num_calls <= self._max_calls:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append(ToolCallDelta(self.num_calls - 1, arguments, call_id, self._name))
        elif calls and calls[-1].index == self.num_calls - 1:
            calls[-1].arguments += arguments
        elif arguments and self.num_calls <= self._max_calls:
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
        """Returns a string without its quotes."""
        yield from self._expect('"')
        return (yield from self._match(_STRING_REST))[:-1]

    def _match(self, pattern: re.Pattern[str]) -> Reading[str]:
        while (found := pattern.match(self._unread)) is None:
            yield from self._wait_in_call()
        return self._advance(found.end())


class HermesParser(ToolParser):
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
            self._show(self._spaces)

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
            self._show(self._spaces + body)
            self._spaces = ""
        self._spaces += text[len(body) :]


class JsonParser(ToolParser):
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
        self._show(skipped)
        has_more = True
        while has_more:
            self._show(self._advance(len(self._unread)))
            has_more = yield from self._wait()


class ArgumentsParser(ToolParser):
    """The text is the arguments of one function, whose name is known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._start_call(name)

    def _parse(self) -> Reading[None]:
        has_more = True
        while has_more:
            if text := self._advance(len(self._unread)):
                self._pass_on(text)
            has_more = yield from self._wait()


def _partial_suffix(text: str, tag: str) -> int:
    """Returns the length of the longest end of `text` that `tag` starts with."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if tag.startswith(text[-length:])), 0)
