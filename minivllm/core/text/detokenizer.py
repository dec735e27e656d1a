"""Incremental detokenization: from the tokens of one sample to its text, cut at stop strings.

    tokens --IncrementalDecoder--> final text --StopStrings--> deltas
             holds back incomplete              holds back a possible
             characters                         start of a stop string

A stop string ends the text with its last character, wherever tokens begin and end. Of several, the one that completes
first wins; of those that complete with the same character, the first in the list. A stop string that is a special token
is found although `skip_special_tokens` leaves the token out of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.core.outputs import TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from minivllm.core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a sample, with its tokens and log probabilities.

    Falsy, and not worth sending, unless it has text or ends the sample. Tokens whose text is held back come later.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None

    def __bool__(self) -> bool:
        return bool(self.text) or self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class _Token:
    """A token that no delta contains yet. Its text is `start..end` of the sample's text."""

    token_id: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


class StopStrings:
    """Finds the first of several strings in a text that arrives in pieces.

    For each of them, keeps the longest end of the text that it starts with. The position where that begins only moves
    forward, so each position is compared once.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._starts = [0] * len(stops)
        """Length of the longest end of the text that each stop string starts with."""
        self._tail = ""
        self.longest_start = 0
        """Number of last characters that may be the start of a stop string."""

    def find(self, text: str, *, may_stop: bool = True) -> tuple[int, str] | None:
        """Appends `text`. Returns its length up to the end of the first stop string, and that string, or None.

        With `may_stop=False` strings that end inside `text` are ignored.
        """
        window = self._tail + text
        found: tuple[int, str] | None = None
        for number, stop in enumerate(self._stops):
            start = len(self._tail) - self._starts[number]
            place = window.find(stop, start) if may_stop else -1
            if place >= 0 and (found is None or place + len(stop) < found[0]):
                found = place + len(stop), stop
            self._starts[number] = _longest_start(stop, window, start)
        if found is not None:
            return found[0] - len(self._tail), found[1]
        self.longest_start = max(self._starts, default=0)
        self._tail = window[len(window) - self.longest_start :]
        return None


def _longest_start(stop: str, window: str, start: int) -> int:
    """Returns the length of the longest end of `window[start:]` that is a start of `stop`, but not all of it."""
    place = window.find(stop[0], max(start, len(window) - len(stop) + 1))
    while place >= 0 and not stop.startswith(window[place:]):
        place = window.find(stop[0], place + 1)
    return len(window) - place if place >= 0 else 0


class IncrementalDetokenizer:
    """The text of one sample.

    The deltas' texts, joined, are `tokenizer.decode` of all generated ids, cut where a stop string begins (or ends,
    with `include_stop_str_in_output`). Token ids and log probabilities are cut with the text: tokens without any text
    left are dropped, while `num_tokens` counts every token up to the one that completed the stop string.

    The text of a token of `stop_token_ids` that ended the sample is also left out, unless
    `include_stop_str_in_output`; EOS is left out like any special token, by `skip_special_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, sampling_params: SamplingParams) -> None:
        self._params = sampling_params
        self._decoder = tokenizer.incremental_decoder(sampling_params.skip_special_tokens)
        self._stops = StopStrings(sampling_params.stop)
        self._special_stops = {}
        if sampling_params.skip_special_tokens:
            ids = {tokenizer.special_token_id(stop): stop for stop in sampling_params.stop}
            self._special_stops = {token_id: stop for token_id, stop in ids.items() if token_id is not None}
        self._pending_text = ""
        self._pending_tokens: list[_Token] = []
        self._decoded_length = 0
        self.text = ""
        """Of all deltas so far, as `token_ids` and `logprobs`."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_tokens = 0
        """Tokens for usage counts."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string, or the id of `stop_token_ids`, that ended the sample."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> TextDelta:
        """Appends new tokens. Ignored after a delta with a finish reason.

        Args:
            finish_reason: these tokens are the last.
            stop_token_id: the last token, if it ended the sample.

        Returns the text that is now final. Its `finish_reason` is STOP when a stop string was found: then the caller
        ends the sample, unless it passed a `finish_reason`.
        """
        if self.finished:
            return TextDelta()
        is_stop_token = stop_token_id is not None and stop_token_id in self._params.stop_token_ids
        hides_last = is_stop_token and not self._params.include_stop_str_in_output and token_ids[-1:] == [stop_token_id]
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if hides_last and place == len(token_ids) - 1:
                text = ""
            elif token_id in self._special_stops and self.num_tokens > self._params.min_tokens:
                text = self._decoder.flush() + self._special_stops[token_id]
            else:
                text = self._decoder.push(token_id)
            start = self._decoded_length
            entry = logprobs[place] if logprobs is not None else None
            self._pending_tokens.append(_Token(token_id, entry, start, start + len(text)))
            if self._append(text):
                finish_reason = FinishReason.STOP
                break
        else:
            if finish_reason is None:
                return self._emit(len(self._pending_text) - self._stops.longest_start)
            if self._append(self._decoder.flush()):
                finish_reason = FinishReason.STOP
            elif is_stop_token:
                self.stop_reason = stop_token_id
        self.finish_reason = finish_reason
        return self._emit(len(self._pending_text))

    def _append(self, text: str) -> bool:
        """Appends decoded text. Returns True when it completes a stop string; pending text and tokens are then cut."""
        self._decoded_length += len(text)
        self._pending_text += text
        found = self._stops.find(text, may_stop=self.num_tokens > self._params.min_tokens) if text else None
        if found is None:
            return False
        end, self.stop_reason = found
        length = len(self._pending_text) - len(text) + end
        if not self._params.include_stop_str_in_output:
            length -= len(found[1])
        cut = self._decoded_length - len(self._pending_text) + length
        self._pending_text = self._pending_text[:length]
        self._pending_tokens = [token for token in self._pending_tokens if token.start < cut]
        return True

    def _emit(self, length: int) -> TextDelta:
        """Returns the first `length` characters of the pending text, with the tokens that end in them."""
        if length <= 0 and not self.finished:
            return TextDelta()
        text, self._pending_text = self._pending_text[:length], self._pending_text[length:]
        end = self._decoded_length - len(self._pending_text)
        tokens = [token for token in self._pending_tokens if token.end <= end]
        self._pending_tokens = self._pending_tokens[len(tokens) :]
        token_ids = [token.token_id for token in tokens]
        logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
        self.text += text
        self.token_ids += token_ids
        self.logprobs += logprobs
        return TextDelta(text, token_ids, None if self._params.logprobs is None else logprobs, self.finish_reason)
