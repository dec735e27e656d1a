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
from dataclasses import dataclass, field
from typing import Literal, Protocol

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


class CallReader:
    """Reads one call, `{"name": ..., "arguments": ...}` with keys in any order, and passes on its arguments early.

    `name` and `fragment` are set as soon as the name and the beginning of the arguments were read.
    """

    def __init__(self) -> None:
        self.state: Literal["reading", "done", "failed"] = "reading"
        self.name: str | None = None
        self.fragment = ""
        self.is_committed = False
        self.raw = ""
        """Text read so far, which becomes content if the call fails."""
        self._expected = "{"  # a "key", a "value", or one of these characters
        self._key = ""
        self._held: str | None = None  # arguments that come before the name
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def read(self, text: str) -> str:
        """Reads until the call ends or fails. Returns the unread text, which may start with an incomplete token."""
        while self.state == "reading":
            if self._depth:
                length = self._read_nested(text)
            else:
                space = len(text) - len(text.lstrip())
                length = space + (self._read_token(text[space:]) if space < len(text) else 0)
            if not length:
                break
            self.raw += text[:length]
            text = text[length:]
        return text

    def take_fragment(self) -> str:
        fragment, self.fragment = self.fragment, ""
        return fragment

    def _read_token(self, text: str) -> int:
        """Returns the length of the token at the start of `text`, 0 when it is incomplete."""
        if self._expected == "key":
            return self._read_key(text)
        if self._expected == "value":
            return self._read_value(text)
        if text[0] not in self._expected:
            return self._fail(1)
        self._expected = {":": "value", "{": "key", ",": "key"}.get(text[0], "")
        if text[0] == "}":
            self._end_call()
        return 1

    def _read_key(self, text: str) -> int:
        if text[0] != '"':
            return self._fail(1)
        string = _STRING.match(text)
        if string is None:
            return 0
        self._key = string[0][1:-1]
        self._expected = ":"
        return string.end() if self._key in _CALL_KEYS else self._fail(string.end())

    def _read_value(self, text: str) -> int:
        is_arguments = self._key in _ARGUMENT_KEYS
        self._expected = ",}"
        if text[0] == "{" or (text[0] == "[" and not is_arguments):
            self._depth = 1
            if is_arguments:
                self._pass_on("{")
            return 1 if self._key != "name" else self._fail(1)
        if text[0] != '"' and (is_arguments or self._key == "name" or text[0] not in "-0123456789tfn"):
            return self._fail(1)
        value = (_STRING if text[0] == '"' else _NUMBER_OR_WORD).match(text)
        if value is None:
            self._expected = "value"
            return 0
        if is_arguments or self._key == "name":
            self._end_string(value[0])
        return value.end()

    def _read_nested(self, text: str) -> int:
        """Reads an object or a list up to its end. Returns the length read."""
        length = len(text)
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    length = place + 1
                    break
        if self._key in _ARGUMENT_KEYS:
            self._pass_on(text[:length])
        return length

    def _end_string(self, value: str) -> None:
        try:
            text = str(json.loads(value))
        except ValueError:
            self.state = "failed"
            return
        if self._key != "name":
            self._pass_on(text)  # some models write the arguments as a string that contains JSON
        elif text:
            self.name = text
            if self._held is not None:
                held, self._held = self._held, None
                self._pass_on(held)
        else:
            self.state = "failed"

    def _pass_on(self, arguments: str) -> None:
        if self.name is None:
            self._held = (self._held or "") + arguments
        else:
            self.is_committed = True
            self.fragment += arguments

    def _end_call(self) -> None:
        self.state = "failed" if self.name is None else "done"
        if self.name is not None and not self.is_committed:
            self._pass_on("{}")

    def _fail(self, length: int) -> int:
        self.state = "failed"
        return length


class _CallsParser(ABC):
    """Numbers calls, and turns the progress of their reader into deltas."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._reader: CallReader | None = None
        self._is_announced = False
        self._pending = ""

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        self._pending += text
        while self._advance(parsed):
            pass
        return self._without_surplus(parsed)

    def finish(self) -> Parsed:
        parsed = Parsed()
        self._end(parsed)
        return self._without_surplus(parsed)

    @abstractmethod
    def _advance(self, parsed: Parsed) -> bool:
        """Parses a part of `_pending`. Returns False when more text is needed."""

    @abstractmethod
    def _end(self, parsed: Parsed) -> None:
        """Makes content of the rest of the text, unless it belongs to a call."""

    def _without_surplus(self, parsed: Parsed) -> Parsed:
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            parsed.calls = [call for call in parsed.calls if call.index < self._max_calls]
            if self.num_calls > self._max_calls:
                parsed.content = ""
        return parsed

    def _read_call(self, reader: CallReader, parsed: Parsed) -> None:
        self._pending = reader.read(self._pending)
        if reader.is_committed:
            fragment = reader.take_fragment()
            if not self._is_announced:
                self._is_announced = True
                parsed.calls.append(ToolCallDelta(self.num_calls, fragment, _new_call_id(), reader.name))
                self.num_calls += 1
            elif fragment:
                parsed.calls.append(ToolCallDelta(self.num_calls - 1, fragment))

    def _end_reader(self) -> str | None:
        """Removes the reader. Returns the text it has read, None if that belongs to an announced call."""
        reader, self._reader = self._reader, None
        is_announced, self._is_announced = self._is_announced, False
        return None if reader is None or is_announced else reader.raw


class HermesParser(_CallsParser):
    """Calls between `<tool_call>` and `</tool_call>`; other text is content, without white space around the tags."""

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._spaces = ""
        self._is_after_call = False

    def _advance(self, parsed: Parsed) -> bool:
        if self._reader is not None:
            return self._advance_call(self._reader, parsed)
        if self._is_after_call and not self._skip_close_tag():
            return False
        before, tag, after = self._pending.partition(OPEN_TAG)
        if tag:
            self._add_content(parsed, before)
            self._spaces = ""
            self._pending = after
            self._reader = CallReader()
            return True
        end = len(self._pending) - _partial_suffix(self._pending, OPEN_TAG)
        self._add_content(parsed, self._pending[:end])
        self._pending = self._pending[end:]
        return False

    def _advance_call(self, reader: CallReader, parsed: Parsed) -> bool:
        self._read_call(reader, parsed)
        if reader.state == "reading":
            return False
        raw = self._end_reader()
        if reader.state == "done":
            self._is_after_call = True
        elif raw is not None:
            self._add_content(parsed, OPEN_TAG + raw)
        return True

    def _skip_close_tag(self) -> bool:
        """Drops the closing tag if it is there. Returns False when that is not known yet."""
        stripped = self._pending.lstrip()
        if stripped.startswith(CLOSE_TAG):
            self._pending = stripped[len(CLOSE_TAG) :]
        elif CLOSE_TAG.startswith(stripped):
            return False
        self._is_after_call = False
        return True

    def _add_content(self, parsed: Parsed, text: str) -> None:
        """Holds back white space at the end, which is dropped next to a call."""
        body = text.rstrip()
        if body:
            parsed.content += self._spaces + body
            self._spaces = ""
        self._spaces += text[len(body) :]

    def _end(self, parsed: Parsed) -> None:
        if self._reader is not None:
            raw = self._end_reader()
            if raw is not None:
                self._add_content(parsed, OPEN_TAG + raw + self._pending)
        elif not self._is_after_call:
            self._add_content(parsed, self._pending)
        self._pending = ""
        if self.num_calls == 0:
            parsed.content += self._spaces
        self._spaces = ""


class JsonParser(_CallsParser):
    """Calls from the first character on, one after another; text that does not start with one is all content."""

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._is_content = False
        self._skipped = ""

    def _advance(self, parsed: Parsed) -> bool:
        if self._is_content:
            parsed.content += self._skipped + self._pending
            self._pending = self._skipped = ""
            return False
        if self._reader is None:
            return self._find_call()
        reader = self._reader
        self._read_call(reader, parsed)
        if reader.state == "reading":
            return False
        raw = self._end_reader()
        if reader.state == "done":
            self._skipped = ""
        else:
            self._is_content = True
            self._pending = (raw or "") + self._pending
        return True

    def _find_call(self) -> bool:
        """Skips to the next call. Returns False when more text is needed to know whether there is one."""
        rest = self._pending.lstrip(" \n\r\t;,[]")
        if PYTHON_TAG.startswith(rest):
            return False
        rest = rest.removeprefix(PYTHON_TAG).lstrip()
        if not rest:
            return False
        self._skipped += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if rest[0] == "{":
            self._reader = CallReader()
        else:
            self._is_content = True
            if self.num_calls:
                self._skipped = ""
        return True

    def _end(self, parsed: Parsed) -> None:
        raw = self._end_reader()
        if raw is not None or self.num_calls == 0:
            parsed.content += self._skipped + (raw or "") + self._pending
        self._pending = self._skipped = ""


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
