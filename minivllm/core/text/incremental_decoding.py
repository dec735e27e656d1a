"""Incremental decoding: token ids -> text, one token at a time, equal to decoding all ids at once.

A tokenizer's decoder is a function of the complete list of tokens: characters span tokens, a leading space is removed
only at the start, a run of byte tokens is decoded as one. A decoder here returns text as soon as no later token can
change it, and the rest by `flush`:

- `ByteLevelDecoder`: GPT-2 style; a token is bytes, the text is their UTF-8.
- `PieceDecoder`: SentencePiece style; a token is a piece of text with a mark for the space, or one byte.
- `WindowDecoder`: any other, by decoding a short window with and without the new tokens.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable(Protocol):
    """The part of a Tokenizer that decoders use."""

    def token(self, token_id: int) -> str | None: ...
    def is_special(self, token_id: int) -> bool: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


class IncrementalDecoder(ABC):
    """Decodes the tokens of one output; with `skip_special_tokens` special ones have no text."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._skip_special_tokens = skip_special_tokens

    def push(self, token_id: int) -> str:
        """Returns the text that is now final; often empty."""
        token = self._table.token(token_id)
        if token is None or (self._skip_special_tokens and self._table.is_special(token_id)):
            return ""
        return self._push(token_id, token)

    @abstractmethod
    def _push(self, token_id: int, token: str) -> str: ...

    @abstractmethod
    def flush(self) -> str:
        """Returns the text held back for later tokens. Call it once, at the end."""


# ---- bytes


def _byte_alphabet() -> dict[str, int]:
    """Returns the 256 printable characters by which byte-level BPE writes bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + place): value for place, value in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a byte-level token. One with other characters is an added token, whose text is its own."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class ByteLevelDecoder(IncrementalDecoder):
    """Decodes the tokens' bytes as UTF-8; an incomplete character waits for the next token."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        super().__init__(table, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _push(self, token_id: int, token: str) -> str:
        return self._utf8.decode(byte_level_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


# ---- pieces


@dataclass(slots=True)
class PieceRules:
    """The steps of a SentencePiece style decoder, in this order.

    Args:
        replace: (from, to) in each token's text, before bytes are joined.
        has_bytes: `<0x..>` tokens are bytes; a run that is not UTF-8 becomes one replacement character per byte.
        replace_after: (from, to) of single characters, after that.
        strip: (character, how many of it at most) to remove at the start of the text.
        mark: of the metaspace decoder: the mark of a space, and whether the first token loses it.
    """

    replace: list[tuple[str, str]] = field(default_factory=list)
    has_bytes: bool = False
    replace_after: list[tuple[str, str]] = field(default_factory=list)
    strip: tuple[str, int] = ("", 0)
    mark: tuple[str, bool] | None = None


class PieceDecoder(IncrementalDecoder):
    """Joins pieces. A run of byte tokens waits for its end, since an invalid byte changes the text of all of it."""

    def __init__(self, table: TokenTable, skip_special_tokens: bool, rules: PieceRules) -> None:
        super().__init__(table, skip_special_tokens)
        self._rules = rules
        self._run = bytearray()
        self._is_first = True
        self._strip_left = rules.strip[1]

    def _push(self, token_id: int, token: str) -> str:
        is_first, self._is_first = self._is_first, False
        for old, new in self._rules.replace:
            token = token.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(token) if self._rules.has_bytes else None
        if byte:
            self._run.append(int(byte[1], 16))
            return ""
        if self._rules.mark is not None:
            mark, first_loses_it = self._rules.mark
            token = token.replace(mark, "" if first_loses_it and is_first else " ")
        return self._finish(self._end_run() + token)

    def flush(self) -> str:
        return self._finish(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _finish(self, text: str) -> str:
        for old, new in self._rules.replace_after:
            text = text.replace(old, new)
        if self._strip_left and text:
            count = min(self._strip_left, len(text) - len(text.lstrip(self._rules.strip[0])))
            text = text[count:]
            self._strip_left = 0 if text else self._strip_left - count
        return text


# ---- windows


class WindowDecoder(IncrementalDecoder):
    """Decodes the tokens since the last final text, with the tokens before it as context.

    The new text is the window's text beyond that of the context. It is held back while it ends in an incomplete
    character, or while the context's text is not a prefix of the window's.
    """

    def __init__(self, table: TokenTable, skip_special_tokens: bool) -> None:
        super().__init__(table, skip_special_tokens)
        self._window: list[int] = []
        self._context_length = 0
        self._context = ""

    def _push(self, token_id: int, token: str) -> str:
        self._window.append(token_id)
        text = self._decode()
        if text.endswith(_REPLACEMENT) or not text.startswith(self._context):
            return ""
        new = text[len(self._context) :]
        if new:
            self._window = self._window[self._context_length :]
            self._context_length = len(self._window)
            self._context = self._decode()
        return new

    def flush(self) -> str:
        text = self._decode()
        return text[len(self._context) :] if text.startswith(self._context) else ""

    def _decode(self) -> str:
        return self._table.decode(self._window, self._skip_special_tokens)


# ---- the choice

DecoderFactory = Callable[[TokenTable, bool], IncrementalDecoder]


def choose_decoder(decoder: dict[str, Any] | None) -> DecoderFactory:
    """Returns the decoder for what `tokenizer.json` contains under "decoder"; WindowDecoder for an unknown kind."""
    if decoder is not None and decoder["type"] == "ByteLevel":
        return ByteLevelDecoder
    rules = None if decoder is None else _piece_rules(decoder)
    return WindowDecoder if rules is None else lambda table, skip: PieceDecoder(table, skip, rules)


def _piece_rules(decoder: dict[str, Any]) -> PieceRules | None:
    """Returns the rules of a SentencePiece style decoder, None when `PieceDecoder` lacks one of its steps."""
    rules, is_fused = PieceRules(), False
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        kind = step["type"]
        is_joined = rules.has_bytes or is_fused
        old = step["pattern"].get("String") if kind == "Replace" else None
        if rules.strip[1] or rules.mark is not None:
            return None  # a later step would see the text, not tokens
        if old is not None and (len(old) == 1 or not is_joined):
            (rules.replace_after if is_joined else rules.replace).append((old, step["content"]))
        elif kind == "ByteFallback" and not is_joined:
            rules.has_bytes = True
        elif kind == "Fuse":
            is_fused = True
        elif kind == "Strip" and is_fused and step["stop"] == 0 and len(step["content"]) == 1:
            rules.strip = (step["content"], step["start"])
        elif kind == "Metaspace" and not (rules.replace or is_joined):
            rules.mark = (step["replacement"], step.get("prepend_scheme", "always") != "never")
        else:
            return None
    return rules
