"""The sampler's state of one sequence. All of it can be recomputed from the sequence."""

from __future__ import annotations

from array import array

import numpy as np

from minivllm.core.sampling.ops import FloatArray, IdArray
from minivllm.core.sampling.structured_output import GrammarMatcher
from minivllm.core.sequence import Sequence

MIN_REPETITION_PENALTY = 1e-20
"""Smaller penalties give the same distribution, but would make logits infinite."""


LogitUpdate = tuple[IdArray, float, FloatArray]
"""Token ids, their repetition penalty and what is added to their logits, see `ops.update_logits`."""


class PenaltyState:
    """Distinct tokens of a sequence and how often each was sampled, updated per output token.

    The repetition penalty covers prompt and output, the frequency and presence penalties cover the output.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._repetition = max(sequence.sampling_params.repetition_penalty, MIN_REPETITION_PENALTY)
        prompt = dict.fromkeys(sequence.prompt_token_ids) if self._repetition != 1.0 else {}
        self._place = {token_id: place for place, token_id in enumerate(prompt)}
        self._ids, self._counts = array("q", prompt), array("f", [0.0] * len(prompt))
        self._num_counted = 0

    def update(self) -> LogitUpdate:
        """Counts new output tokens; returns the update of the logits."""
        output, params = self._sequence.output_token_ids, self._sequence.sampling_params
        for token_id in output[self._num_counted :]:
            place = self._place.setdefault(token_id, len(self._place))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0.0)
            self._counts[place] += 1
        self._num_counted = len(output)
        counts = np.array(self._counts)
        added = -params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        return np.array(self._ids), self._repetition, added.astype(np.float32)


class SamplerState:
    """Sampling parameters of one sequence as arrays, with its seed, penalty counts and grammar matcher."""

    def __init__(
        self, sequence: Sequence, seed: int, eos_token_ids: frozenset[int], matcher: GrammarMatcher | None
    ) -> None:
        self.sequence = sequence
        self.params = params = sequence.sampling_params
        self.seed = seed
        self.matcher = matcher
        has_penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self._penalties = PenaltyState(sequence) if has_penalties else None
        bias = params.logit_bias
        self._bias = _addition(list(bias), list(bias.values())) if bias else None
        stops = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})
        self._stops = _addition(stops, [-np.inf] * len(stops)) if params.min_tokens and stops else None
        self.changes_logits = bool(has_penalties or bias or matcher or self._stops)
        self.is_plain_greedy = params.is_greedy and params.logprobs is None and not self.changes_logits

    def updates(self) -> tuple[LogitUpdate | None, ...]:
        """Returns the updates by penalties, by logit_bias and by min_tokens; None for one that changes nothing.

        min_tokens masks the tokens that end the text, unless the grammar allows nothing but EOS.
        """
        is_terminated = self.matcher is not None and self.matcher.is_terminated
        ends_later = len(self.sequence.output_token_ids) < self.params.min_tokens and not is_terminated
        penalties = None if self._penalties is None else self._penalties.update()
        return penalties, self._bias, self._stops if ends_later else None


def _addition(token_ids: list[int], added: list[float]) -> LogitUpdate:
    return np.array(token_ids, dtype=np.int64), 1.0, np.array(added, dtype=np.float32)
