"""Ids -> text, one token at a time, equal to decoding them all at once.

A tokenizer's decoder is a function of the whole list of tokens: characters span tokens, a leading space goes only at
the start, a run of byte tokens is judged as a whole. Each decoder here gives out text as soon as nothing that follows
can change it, and the rest by `flush`:

- `ByteLevelDecoder`: GPT-2 style; a token is bytes, the text is their UTF-8.
- `PieceDecoder`: SentencePiece style; a token is a piece of text with a mark for the space, or one byte.
- `WindowDecoder`: anything else, by decoding a short window with and without the new tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder(Protocol):
    """Turns the tokens of one output into text, piece by piece."""

    def push(self, token_id: int) -> str:
        """The text that is now settled; often empty."""

    def flush(self) -> str:
        """The rest: what was held back for tokens that never came. Call it once, at the end."""


class TokenTable(Protocol):
    """What decoders need to know of the vocabulary."""

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that stands for nothing."""

    def is_special(self, token_id: int) -> bool: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


# -- bytes -----------------------------------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters by which byte-level BPE spells bytes (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(kept)]
    return {chr(value): value for value in kept} | {chr(256 + place): value for place, value in enumerate(others)}


_ALPHABET = byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token. One with other characters is an added token and stands for itself."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class ByteLevelDecoder:
    """UTF-8 over the tokens' bytes; an incomplete character waits for the next token."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._table.token(token_id)
        if token is None or (self._skip and self._table.is_special(token_id)):
            return ""
        return self._utf8.decode(byte_level_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


# -- pieces ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PieceRules:
    """What a SentencePiece style decoder does, in this order.

    Args:
        replace: (from, to) in each token's text, before bytes are joined.
        has_bytes: `<0x..>` tokens are bytes; a run of them that is no UTF-8 is one replacement character a byte.
        replace_after: (from, to) of single characters, after that.
        strip: (character, how many of it go at most) at the start of the text.
        mark: of the metaspace decoder: the mark that is a space, but nothing in the first token.
    """

    replace: tuple[tuple[str, str], ...] = ()
    has_bytes: bool = False
    replace_after: tuple[tuple[str, str], ...] = ()
    strip: tuple[str, int] = ("", 0)
    mark: tuple[str, bool] | None = None


class PieceDecoder:
    """A run of byte tokens waits for its end, as an invalid byte changes what the whole run means."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool, rules: PieceRules) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._rules = rules
        self._run = bytearray()
        self._is_first = True
        self._strip_left = rules.strip[1]

    def push(self, token_id: int) -> str:
        token = self._table.token(token_id)
        if token is None or (self._skip and self._table.is_special(token_id)):
            return ""
        for old, new in self._rules.replace:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._rules.has_bytes else None
        if byte:
            self._run.append(int(byte[1], 16))
            self._is_first = False
            return ""
        return self._finish(self._end_run() + self._unmark(token))

    def flush(self) -> str:
        return self._finish(self._end_run())

    def _unmark(self, token: str) -> str:
        if self._rules.mark is None:
            return token
        mark, drops_first = self._rules.mark
        text = token.replace(mark, "" if drops_first and self._is_first else " ")
        self._is_first = False
        return text

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _finish(self, text: str) -> str:
        for old, new in self._rules.replace_after:
            text = text.replace(old, new)
        while self._strip_left and text:
            if not text.startswith(self._rules.strip[0]):
                self._strip_left = 0
                break
            text = text[len(self._rules.strip[0]) :]
            self._strip_left -= 1
        return text


# -- anything --------------------------------------------------------------------------------------


class WindowDecoder:
    """Decodes the tokens since the last settled point with those before it as context.

    The new text is what the window gives beyond what its older part gives alone. It is held back while it ends in an
    unfinished character, or while the older part is not a prefix of the whole.
    """

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._settled = 0
        self._settled_text = ""

    def push(self, token_id: int) -> str:
        if self._table.token(token_id) is None or (self._skip and self._table.is_special(token_id)):
            return ""
        self._window.append(token_id)
        text = self._table.decode(self._window, self._skip)
        if text.endswith(_REPLACEMENT) or not text.startswith(self._settled_text):
            return ""
        new = text[len(self._settled_text) :]
        if new:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._settled_text = self._table.decode(self._window, self._skip)
        return new

    def flush(self) -> str:
        text = self._table.decode(self._window, self._skip)
        common = text.startswith(self._settled_text)
        return text[len(self._settled_text) :] if common else ""


# -- the choice ------------------------------------------------------------------------------------

DecoderFactory = Callable[[TokenTable, bool], IncrementalDecoder]


def choose_decoder(decoder: dict[str, Any] | None) -> DecoderFactory:
    """Our decoder for what `tokenizer.json` says under "decoder"; the general one when we do not know its kind."""
    if spells_bytes(decoder):
        return ByteLevelDecoder
    rules = piece_rules(decoder) if decoder is not None else None
    if rules is None:
        return WindowDecoder
    return lambda table, skip: PieceDecoder(table, skip, rules)


def spells_bytes(decoder: dict[str, Any] | None) -> bool:
    """True for byte-level BPE."""
    return decoder is not None and decoder["type"] == "ByteLevel"


def piece_rules(decoder: dict[str, Any]) -> PieceRules | None:
    """The rules of a SentencePiece style decoder; None when it does anything that `PieceDecoder` does not."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    before: list[tuple[str, str]] = []
    after: list[tuple[str, str]] = []
    has_bytes = is_fused = False
    strip = ("", 0)
    mark: tuple[str, bool] | None = None
    for step in steps:
        kind = step["type"]
        if strip[1] or mark is not None:
            return None  # whatever follows would see the text, not tokens
        if kind == "Replace" and "String" in step["pattern"]:
            old, new = step["pattern"]["String"], step["content"]
            if (has_bytes or is_fused) and len(old) != 1:
                return None
            (after if has_bytes or is_fused else before).append((old, new))
        elif kind == "ByteFallback" and not has_bytes and not is_fused:
            has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and step["stop"] == 0 and len(step["content"]) == 1:
            strip = (step["content"], step["start"])
        elif kind == "Metaspace" and not (before or after or has_bytes or is_fused):
            mark = (step["replacement"], step.get("prepend_scheme", "always") != "never")
        else:
            return None
    return PieceRules(tuple(before), has_bytes, tuple(after), strip, mark)
