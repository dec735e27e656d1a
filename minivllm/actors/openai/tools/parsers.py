"""Finds tool calls in generated text, as it comes: the same code serves streams and whole answers.

    Hermes, Qwen   text <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...
    Llama          {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    forced         what `tool_choice` makes the model write under a grammar: the arguments of the named function alone,
                   or calls as in Llama's format, perhaps in a list

Arguments are passed on as the model wrote them, piece by piece, once the function's name is known. What turns out to be
no call after all is given back as text.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from minivllm.actors.openai.tools.call_reader import CallReader

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(slots=True)
class ToolCallDelta:
    """What is new of call `index`. `call_id` and `name` come with its first delta."""

    index: int
    arguments: str
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """What a piece of generated text turned out to be."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser(Protocol):
    """Feed it the text in pieces of any size, then finish it; the joined results do not depend on the pieces."""

    num_calls: int

    def feed(self, text: str) -> Parsed: ...
    def finish(self) -> Parsed: ...


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class _CallsParser(ABC):
    """What the formats share: numbering calls, and turning a reader's progress into deltas."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._max_calls = max_calls
        self._reader: CallReader | None = None
        self._announced = False
        self._pending = ""

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        self._pending += text
        while self._advance(parsed):
            pass
        return self._without_surplus(parsed)

    def finish(self) -> Parsed:
        parsed = Parsed()
        self._give_up(parsed)
        return self._without_surplus(parsed)

    @abstractmethod
    def _advance(self, parsed: Parsed) -> bool:
        """Deals with some of `_pending`; False when more text is needed."""

    @abstractmethod
    def _give_up(self, parsed: Parsed) -> None:
        """No more text comes: what is left becomes content, unless it belongs to a call."""

    def _without_surplus(self, parsed: Parsed) -> Parsed:
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            parsed.calls = [call for call in parsed.calls if call.index < self._max_calls]
            if self.num_calls > self._max_calls:
                parsed.content = ""
        return parsed

    def _read_call(self, parsed: Parsed) -> str:
        """Lets the reader read on; returns its state."""
        reader = self._reader = self._reader or CallReader()
        self._pending = self._pending[reader.read(self._pending) :]
        if reader.is_committed:
            fragment = reader.take_fragment()
            if not self._announced:
                self._announced = True
                parsed.calls.append(ToolCallDelta(self.num_calls, fragment, new_call_id(), reader.name))
                self.num_calls += 1
            elif fragment:
                parsed.calls.append(ToolCallDelta(self.num_calls - 1, fragment))
        return reader.state

    def _end_reader(self) -> str | None:
        """Forgets the reader. Returns what it read if no call came of it, so that it can be shown as text."""
        reader, self._reader = self._reader, None
        announced, self._announced = self._announced, False
        return None if reader is None or announced else reader.raw


class HermesParser(_CallsParser):
    """Calls between `<tool_call>` and `</tool_call>`; all else is content, but for white space around the tags."""

    def __init__(self, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._spaces = ""
        self._is_after_call = False

    def _advance(self, parsed: Parsed) -> bool:
        if self._reader is not None:
            return self._advance_call(parsed)
        if self._is_after_call and not self._skip_close_tag():
            return False
        before, tag, after = self._pending.partition(OPEN_TAG)
        if tag:
            self._add_content(parsed, before)
            self._spaces = ""
            self._pending = after
            self._reader = CallReader()
            return True
        kept = _partial_suffix(self._pending, OPEN_TAG)
        cut = len(self._pending) - kept
        self._add_content(parsed, self._pending[:cut])
        self._pending = self._pending[cut:]
        return False

    def _advance_call(self, parsed: Parsed) -> bool:
        state = self._read_call(parsed)
        if state == "failed":
            raw = self._end_reader()
            self._add_content(parsed, "" if raw is None else OPEN_TAG + raw)
        elif state == "done":
            self._end_reader()
            self._is_after_call = True
        return state in ("failed", "done")

    def _skip_close_tag(self) -> bool:
        """Drops the closing tag, or goes on without; False when it is not yet known which."""
        stripped = self._pending.lstrip()
        if stripped.startswith(CLOSE_TAG):
            self._pending = stripped[len(CLOSE_TAG) :]
        elif CLOSE_TAG.startswith(stripped):
            return False
        self._is_after_call = False
        return True

    def _add_content(self, parsed: Parsed, text: str) -> None:
        """White space waits for what it separates: next to a call it separates nothing."""
        if not text:
            return
        body = text.rstrip()
        if not body:
            self._spaces += text
            return
        parsed.content += self._spaces + body
        self._spaces = text[len(body) :]

    def _give_up(self, parsed: Parsed) -> None:
        if self._reader is not None:
            raw = self._end_reader()
            self._add_content(parsed, "" if raw is None else OPEN_TAG + raw)
        elif not self._is_after_call:
            self._add_content(parsed, self._pending)
        self._pending = ""
        if self.num_calls == 0:
            parsed.content += self._spaces
        self._spaces = ""


class JsonParser(_CallsParser):
    """Bare calls from the first character on, one after another; what does not begin with one is all content."""

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
        state = self._read_call(parsed)
        if state == "done":
            self._end_reader()
            self._skipped = ""
        elif state == "failed":
            raw = self._end_reader()
            self._is_content = True
            self._pending = (raw or "") + self._pending
        return state in ("done", "failed")

    def _find_call(self) -> bool:
        """Skips to the next call; False when it is not yet known whether there is one."""
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

    def _give_up(self, parsed: Parsed) -> None:
        raw = self._end_reader()
        if raw is not None or self.num_calls == 0:
            parsed.content += self._skipped + (raw or "") + self._pending
        self._pending = self._skipped = ""


class ArgumentsParser:
    """All text is the arguments of one function, which is known beforehand."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        if not text:
            return Parsed()
        if self.num_calls:
            return Parsed(calls=[ToolCallDelta(0, text)])
        self.num_calls = 1
        return Parsed(calls=[ToolCallDelta(0, text, new_call_id(), self._name)])

    def finish(self) -> Parsed:
        return Parsed()


def _partial_suffix(text: str, tag: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
