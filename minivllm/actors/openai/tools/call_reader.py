"""Reads one tool call, character by character, and passes its arguments on before it is complete."""

from __future__ import annotations

import json

_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallReader:
    """Reads one call, `{"name": ..., "arguments": ...}`, character by character; keys in any order.

    `name` and `fragment` fill as soon as both the name and the beginning of the arguments are there. `state` ends as
    "done" or "failed". `raw` is all that was read, for a call that fails.
    """

    __slots__ = (
        "_depth",
        "_escaped",
        "_held",
        "_in_string",
        "_key",
        "_value",
        "fragment",
        "is_committed",
        "name",
        "raw",
        "state",
    )

    def __init__(self) -> None:
        self.state = "start"
        self.name: str | None = None
        self.fragment = ""
        self.is_committed = False
        self.raw = ""
        self._held: str | None = None  # arguments that wait for the name
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> int:
        """Reads on until the call ends or fails; returns how many characters were read."""
        for position, character in enumerate(text):
            self._step(character)
            if self.state in ("done", "failed"):
                self.raw += text[: position + 1]
                return position + 1
        self.raw += text
        return len(text)

    def take_fragment(self) -> str:
        fragment, self.fragment = self.fragment, ""
        return fragment

    def _step(self, character: str) -> None:
        if self.state == "value":
            self._step_in_value(character)
        elif self.state == "key":
            self._step_in_key(character)
        elif character.isspace():
            return
        elif self.state == "start" and character == "{":
            self.state = "next key"
        elif self.state == "next key" and character == '"':
            self.state, self._key = "key", '"'
        elif self.state == "colon" and character == ":":
            self.state = "next value"
        elif self.state == "next value":
            self._begin_value(character)
        elif self.state == "comma" and character == ",":
            self.state = "next key"
        elif self.state == "comma" and character == "}":
            self._end_call()
        else:
            self.state = "failed"

    def _step_in_key(self, character: str) -> None:
        self._key += character
        if self._ends_string(character):
            self._key = self._key[1:-1]
            self.state = "colon" if self._key in _CALL_KEYS else "failed"

    def _begin_value(self, character: str) -> None:
        self.state, self._value = "value", ""
        self._depth, self._in_string, self._escaped = 0, False, False
        is_argument = self._key in _ARGUMENT_KEYS
        if character not in ('{"' if is_argument else '"{[-0123456789tfn'):
            self.state = "failed"
            return
        if is_argument and character == "{":
            self._held = ""
        self._step_in_value(character)

    def _step_in_value(self, character: str) -> None:
        """A value ends with its closing quote or bracket; a number or word ends before what follows it."""
        if self._depth == 0 and not self._in_string and self._value and character in ",} \n\r\t":
            self._end_value()
            self._step(character)
            return
        self._value += character
        if self._key in _ARGUMENT_KEYS and self._value[0] == "{":
            self._pass_on(character)
        if self._in_string:
            if self._ends_string(character):
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        else:
            return character == '"'
        return False

    def _end_value(self) -> None:
        self.state = "comma"
        if self._key == "name":
            self._learn_name()
        elif self._key in _ARGUMENT_KEYS and self._value[0] == '"':
            # Some models write the arguments as a string that contains JSON.
            try:
                self._held = ""
                self._pass_on(str(json.loads(self._value)))
            except ValueError:
                self.state = "failed"

    def _learn_name(self) -> None:
        try:
            name = json.loads(self._value)
        except ValueError:
            name = None
        if not isinstance(name, str) or not name:
            self.state = "failed"
            return
        self.name = name
        if self._held is not None:
            held, self._held = self._held, ""
            self._pass_on(held)

    def _pass_on(self, text: str) -> None:
        if self.name is None:
            self._held = (self._held or "") + text
        else:
            self.is_committed = True
            self.fragment += text

    def _end_call(self) -> None:
        if self.name is None:
            self.state = "failed"
            return
        if not self.is_committed:
            self.is_committed = True
            self.fragment = "{}"
        self.state = "done"
