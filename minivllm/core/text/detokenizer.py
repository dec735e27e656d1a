"""From the tokens of one sample to text that is final: nothing given out is ever taken back.

    tokens --decoder--> settled text --stop strings--> text given out
             holds back unfinished      holds back what may become
             characters                 a stop string

A stop string counts as soon as its last character is there, whatever the tokens' borders; of several, the one that
completes first wins, and of those that complete with the same character the first in the list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.core.outputs import TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from minivllm.core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """News of a sample: text, and the tokens and log probabilities that belong to it.

    Not worth sending (falsy) unless it has text or ends the sample. Tokens whose text is held back come with it later.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None

    def __bool__(self) -> bool:
        return bool(self.text) or self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A token not given out yet; its text is settled text `start..end`."""

    token_id: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


class StopStrings:
    """Looks for several strings in a text that arrives in pieces (Knuth, Morris and Pratt's automaton for each)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._matched = [0] * len(stops)

    @property
    def longest_start(self) -> int:
        """How many of the last characters may be the start of a stop string."""
        return max(self._matched, default=0)

    def find(self, text: str, *, may_stop: bool = True) -> tuple[int, str] | None:
        """Goes on with `text`. Returns (characters of it up to the end of the first stop string, that string).

        With `may_stop=False` strings that end inside `text` are passed over.
        """
        matched = self._matched
        for place, character in enumerate(text):
            for number, stop in enumerate(self._stops):
                length = matched[number]
                while length and stop[length] != character:
                    length = self._fallbacks[number][length]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    if may_stop:
                        return place + 1, stop
                    length = self._fallbacks[number][length]
                matched[number] = length
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each matched length, the next shorter length that is matched as well."""
    fallbacks = [0] * (len(stop) + 1)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = fallbacks[length]
        if stop[length] == stop[place]:
            length += 1
        fallbacks[place + 1] = length
    return fallbacks


class IncrementalDetokenizer:
    """The text of one sample, as it grows.

    Joined, the deltas' texts are `tokenizer.decode` of all generated ids, cut where a stop string begins (or ends, with
    `include_stop_str_in_output`). Token ids and log probabilities are cut with it: tokens whose text is cut away wholly
    are left out, while `num_tokens` counts every token up to the one that completed the stop string.

    The text of a token of `stop_token_ids` that ended the sample is left out too, unless
    `include_stop_str_in_output`; EOS is left out as any special token, by `skip_special_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, sampling_params: SamplingParams) -> None:
        self._params = sampling_params
        self._decoder = tokenizer.incremental_decoder(sampling_params.skip_special_tokens)
        self._stops = StopStrings(sampling_params.stop) if sampling_params.stop else None
        self._held = ""
        self._settled_length = 0
        self._pending: list[_Pending] = []
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        """Those given out so far."""
        self.logprobs: list[TokenLogprobs] = []
        self.num_tokens = 0
        """Tokens for usage counts."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """The stop string or the id of `stop_token_ids` that ended the sample, if one did."""

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

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
        """Takes new tokens. Once a delta had a finish reason, whatever comes is ignored.

        Args:
            logprobs: one for each token, or None.
            finish_reason: these tokens are the last.
            stop_token_id: the last token, if it is what ended the sample.

        Returns:
            What can be given out now. `finish_reason` is STOP when a stop string was found: then the caller ends the
            sample, unless `finish_reason` came in as well.
        """
        if self.finished:
            return TextDelta()
        hidden = len(token_ids) - 1 if self._hides(token_ids, stop_token_id) else -1
        for place, token_id in enumerate(token_ids):
            text = "" if place == hidden else self._decoder.push(token_id)
            self.num_tokens += 1
            start = self._settled_length
            self._settled_length += len(text)
            entry = logprobs[place] if logprobs is not None else None
            self._pending.append(_Pending(token_id, entry, start, self._settled_length))
            if self._settle(text):
                return self._end(FinishReason.STOP)
        if finish_reason is None:
            return self._give_out(len(self._held) - (self._stops.longest_start if self._stops else 0))
        text = self._decoder.flush()
        self._settled_length += len(text)
        if self._settle(text):
            return self._end(FinishReason.STOP)
        if stop_token_id is not None and stop_token_id in self._params.stop_token_ids:
            self.stop_reason = stop_token_id
        return self._end(finish_reason)

    def _hides(self, token_ids: list[int], stop_token_id: int | None) -> bool:
        """True when the last token is a stop token whose text is to be left out."""
        return (
            stop_token_id is not None
            and stop_token_id in self._params.stop_token_ids
            and not self._params.include_stop_str_in_output
            and bool(token_ids)
            and token_ids[-1] == stop_token_id
        )

    def _settle(self, text: str) -> bool:
        """Adds settled text. True when a stop string is complete: then what is held is cut, and so are the tokens."""
        self._held += text
        if self._stops is None or not text:
            return False
        found = self._stops.find(text, may_stop=self.num_tokens > self._params.min_tokens)
        if found is None:
            return False
        end, stop = found
        cut = len(self._held) - len(text) + end
        if not self._params.include_stop_str_in_output:
            cut -= len(stop)
        first_held = self._settled_length - len(self._held)
        self._held = self._held[:cut]
        self._pending = [token for token in self._pending if token.start < first_held + cut]
        self.stop_reason = stop
        return True

    def _give_out(self, length: int) -> TextDelta:
        """The first `length` characters of what is held, with the tokens that end in them."""
        if length <= 0:
            return TextDelta()
        text, self._held = self._held[:length], self._held[length:]
        given_length = self._settled_length - len(self._held)
        count = 0
        while count < len(self._pending) and self._pending[count].end <= given_length:
            count += 1
        return self._record(text, count, None)

    def _end(self, finish_reason: FinishReason) -> TextDelta:
        text, self._held = self._held, ""
        self.finish_reason = finish_reason
        return self._record(text, len(self._pending), finish_reason)

    def _record(self, text: str, count: int, finish_reason: FinishReason | None) -> TextDelta:
        given, self._pending = self._pending[:count], self._pending[count:]
        token_ids = [token.token_id for token in given]
        logprobs = [token.logprobs for token in given if token.logprobs is not None]
        if text:
            self._parts.append(text)
        self.token_ids += token_ids
        self.logprobs += logprobs
        return TextDelta(text, token_ids, logprobs if self._params.logprobs is not None else None, finish_reason)
