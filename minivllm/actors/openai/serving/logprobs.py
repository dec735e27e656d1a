"""Log probabilities in the two forms of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.core.outputs import TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
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

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._decoder = tokenizer.incremental_decoder(params.skip_special_tokens)
        self._offset = 0

    def prompt(self, token_ids: list[int], logprobs: list[TokenLogprobs], text: str) -> dict[str, list[Any]]:
        """Returns the lists of the echoed prompt. Its first token has no log probability."""
        texts = [self._decoder.push(token_id) for token_id in token_ids]
        texts[-1] += self._decoder.flush()
        lists = self._lists(texts, [None, *logprobs])
        # The output has a decoder of its own: it does not complete a character of the prompt.
        self._decoder = self._tokenizer.incremental_decoder(self._params.skip_special_tokens)
        self._offset = len(text)
        return lists

    def output(self, logprobs: list[TokenLogprobs], *, is_last: bool, hides_last: bool) -> dict[str, list[Any]]:
        """Returns the lists of some output tokens; `hides_last` when the text leaves out the last one."""
        texts = [self._decoder.push(entry.token_id) for entry in (logprobs[:-1] if hides_last else logprobs)]
        if is_last and texts:
            texts[-1] += self._decoder.flush()
        return self._lists([*texts, ""] if hides_last else texts, logprobs)

    def _lists(self, texts: list[str], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": texts, "top_logprobs": []}
        for text, entry in zip(texts, logprobs, strict=True):
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._alternatives(text, entry))
            self._offset += len(text)
        return lists

    def _alternatives(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        """Returns the log probabilities by text, that of the token itself under `text`."""
        found: dict[str, float] = {}
        for token_id, logprob in [*entry.top[: self._params.logprobs], (entry.token_id, entry.logprob)]:
            own = token_id == entry.token_id
            found.setdefault(text if own else token_text(self._tokenizer, token_id), _finite(logprob))
        return found


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: list[TokenLogprobs], params: SamplingParams, *, hides_last: bool
) -> list[dict[str, Any]]:
    """Returns the entries of `logprobs.content` of a chat; `hides_last` when the text leaves out the last token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        is_left_out = params.skip_special_tokens and tokenizer.is_special(token_id)
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": _finite(logprob),
            # The joined bytes of all tokens are the text, so a token that the text leaves out has none.
            "bytes": None if is_left_out else list(tokenizer.token_bytes(token_id)),
        }

    entries = [
        entry(one.token_id, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top[: params.logprobs]]}
        for one in logprobs
    ]
    if hides_last and entries:
        entries[-1]["bytes"] = None
    return entries


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns the text of one token; incomplete characters become replacement characters."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
