"""The sampler's state of one sequence. All of it can be recomputed from the sequence."""

from __future__ import annotations

import numpy as np

from minivllm.core.sampling.ops import FloatArray, IdArray
from minivllm.core.sampling.structured_output import GrammarMatcher
from minivllm.core.sequence import Sequence

MIN_REPETITION_PENALTY = 1e-20
"""Smaller penalties give the same distribution, but would make logits infinite."""


class PenaltyState:
    """Distinct tokens of a sequence and how often each was sampled, updated per output token.

    The repetition penalty covers prompt and output, the frequency and presence penalties cover the output.
    """

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.sampling_params
        self._sequence = sequence
        self._repetition = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        prompt = dict.fromkeys(sequence.prompt_token_ids) if self._repetition != 1.0 else {}
        self._place = {token_id: place for place, token_id in enumerate(prompt)}
        self._ids: IdArray = np.zeros(max(64, 2 * len(prompt)), dtype=np.int64)
        self._ids[: len(prompt)] = list(prompt)
        self._counts: FloatArray = np.zeros(len(self._ids), dtype=np.float32)
        self._num_counted = 0

    def update(self) -> tuple[IdArray, FloatArray, FloatArray]:
        """Counts new output tokens; returns (token ids, repetition penalties, what the other penalties subtract)."""
        output = self._sequence.output_token_ids
        for token_id in output[self._num_counted :]:
            self._count(token_id)
        self._num_counted = len(output)
        size = len(self._place)
        counts = self._counts[:size]
        subtract = self._frequency * counts + self._presence * (counts > 0)
        return self._ids[:size], np.full(size, self._repetition, dtype=np.float32), subtract.astype(np.float32)

    def _count(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1


class SamplerState:
    """Sampling parameters of one sequence as arrays, with its seed, penalty counts and grammar matcher."""

    def __init__(
        self, sequence: Sequence, seed: int, eos_token_ids: frozenset[int], matcher: GrammarMatcher | None
    ) -> None:
        params = sequence.sampling_params
        self.sequence = sequence
        self.params = params
        self.seed = seed
        self.matcher = matcher
        has_penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.penalties = PenaltyState(sequence) if has_penalties else None
        self.logit_bias: tuple[IdArray, FloatArray] | None = None
        if params.logit_bias:
            self.logit_bias = (
                np.fromiter(params.logit_bias.keys(), dtype=np.int64),
                np.fromiter(params.logit_bias.values(), dtype=np.float32),
            )
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        self.stop_token_ids: IdArray = np.array(sorted(stops), dtype=np.int64)
        self.changes_logits = bool(has_penalties or self.logit_bias or matcher or (params.min_tokens and stops))
        self.is_plain_greedy = params.is_greedy and params.logprobs is None and not self.changes_logits

    def masks_stop_tokens(self) -> bool:
        """True while `min_tokens` is not reached, unless the grammar allows nothing but EOS."""
        below_min_tokens = len(self.sequence.output_token_ids) < self.params.min_tokens
        is_terminated = self.matcher is not None and self.matcher.is_terminated
        return below_min_tokens and self.stop_token_ids.size > 0 and not is_terminated
