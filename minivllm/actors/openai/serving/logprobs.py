"""Log probabilities in the two forms of the API."""

from __future__ import annotations

from typing import Any

from minivllm.core.outputs import TokenLogprobs
from minivllm.core.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST)


class CompletionLogprobs:
    """Builds the four lists of /v1/completions along one choice.

    The strings of the tokens, joined, are the text: a character that spans tokens belongs to the token that completes
    it, and a special token that the text leaves out is an empty string.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special_tokens = skip_special_tokens
        self._decoder = tokenizer.incremental_decoder(skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: list[int], logprobs: list[TokenLogprobs], text: str) -> dict[str, Any]:
        """Returns the lists of the echoed prompt. Its first token has no log probability."""
        lists = _empty_lists()
        if token_ids:
            self._add(lists, self._decoder.push(token_ids[0]), None)
        for entry in logprobs:
            self._add(lists, self._decoder.push(entry.token_id), entry)
        # The output has a decoder of its own: it does not complete a character of the prompt.
        _append_to_last(lists, self._decoder.flush())
        self._decoder = self._tokenizer.incremental_decoder(self._skip_special_tokens)
        self._offset = len(text)
        return lists

    def output(self, logprobs: list[TokenLogprobs], *, is_last: bool, hides_last: bool = False) -> dict[str, Any]:
        """Returns the lists of some output tokens; `hides_last` when the text leaves out the last one."""
        lists = _empty_lists()
        for entry in logprobs[:-1] if hides_last else logprobs:
            self._add(lists, self._decoder.push(entry.token_id), entry)
        if is_last and lists["tokens"]:
            _append_to_last(lists, self._decoder.flush())
        if hides_last and logprobs:
            self._add(lists, "", logprobs[-1])
        return lists

    def _add(self, lists: dict[str, list[Any]], text: str, entry: TokenLogprobs | None) -> None:
        lists["tokens"].append(text)
        lists["text_offset"].append(self._offset)
        self._offset += len(text)
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(_finite(entry.logprob))
        alternatives: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._num_top]:
            if token_id == entry.token_id:
                alternatives.setdefault(text, _finite(entry.logprob))
            else:
                alternatives.setdefault(token_text(self._tokenizer, token_id), _finite(logprob))
        alternatives.setdefault(text, _finite(entry.logprob))
        lists["top_logprobs"].append(alternatives)


def _append_to_last(lists: dict[str, list[Any]], rest: str) -> None:
    """Appends the text that the decoder held back to the last token, and to its key in `top_logprobs`."""
    if not rest or not lists["tokens"]:
        return
    before, own = lists["tokens"][-1], lists["token_logprobs"][-1]
    lists["tokens"][-1] = before + rest
    alternatives = lists["top_logprobs"][-1]
    if alternatives is not None:
        renamed: dict[str, float] = {}
        for text, logprob in alternatives.items():
            renamed.setdefault(before + rest if text == before and logprob == own else text, logprob)
        renamed.setdefault(before + rest, own)
        lists["top_logprobs"][-1] = renamed


def _empty_lists() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def merge_lists(first: dict[str, list[Any]] | None, second: dict[str, list[Any]] | None) -> dict[str, list[Any]] | None:
    """Appends the four lists of `second` to those of `first`; either may be None."""
    if first is None or second is None:
        return second if first is None else first
    for name, values in second.items():
        first[name].extend(values)
    return first


def chat_logprobs(
    tokenizer: Tokenizer,
    logprobs: list[TokenLogprobs],
    *,
    num_top: int,
    skip_special_tokens: bool,
    hides_last: bool = False,
) -> list[dict[str, Any]]:
    """Returns the entries of `logprobs.content` of a chat; `hides_last` when the text leaves out the last token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        is_left_out = skip_special_tokens and tokenizer.is_special(token_id)
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": _finite(logprob),
            # The joined bytes of all tokens are the text, so a token that the text leaves out has none.
            "bytes": None if is_left_out else list(tokenizer.token_bytes(token_id)),
        }

    entries = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*alternative) for alternative in one.top[:num_top]]}
        for one in logprobs
    ]
    if hides_last and entries:
        entries[-1]["bytes"] = None
    return entries


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the text of one token; incomplete characters become replacement characters."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
