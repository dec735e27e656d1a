"""What the sampler remembers of one sequence. All of it can be derived again from the sequence alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from minivllm.core.sampling.structured_output import GrammarState
from minivllm.core.sequence import Sequence

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]


LEAST_REPETITION = 1e-20
"""A smaller factor does the same to every distribution there is, but logits divided by it would be infinite."""


class PenaltyCounts:
    """The distinct tokens of a sequence and how often each was generated, kept up to date a token at a time.

    The repetition penalty looks at prompt and output, the frequency and presence penalties at the output.
    """

    def __init__(self, sequence: Sequence) -> None:
        params = sequence.sampling_params
        self._sequence = sequence
        self._repetition = max(params.repetition_penalty, LEAST_REPETITION)
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        prompt = dict.fromkeys(sequence.prompt_token_ids) if self._repetition != 1.0 else {}
        self._place = {token_id: place for place, token_id in enumerate(prompt)}
        self._ids: IdArray = np.zeros(max(64, 2 * len(prompt)), dtype=np.int64)
        self._ids[: len(prompt)] = list(prompt)
        self._counts: FloatArray = np.zeros(len(self._ids), dtype=np.float32)
        self._seen = 0

    def entries(self) -> tuple[IdArray, FloatArray, FloatArray]:
        """(token ids, their repetition factors, what to subtract), after counting the tokens generated since."""
        generated = self._sequence.output_token_ids
        for token_id in generated[self._seen :]:
            self._count(token_id)
        self._seen = len(generated)
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


class RowState:
    """Parameters of one sequence in the form the sampler needs, worked out once."""

    __slots__ = (
        "adjusts",
        "bias",
        "grammar",
        "is_greedy",
        "is_plain_greedy",
        "num_logprobs",
        "penalties",
        "seed",
        "sequence",
        "stop_ids",
    )

    def __init__(
        self, sequence: Sequence, seed: int, eos_token_ids: frozenset[int], grammar: GrammarState | None
    ) -> None:
        params = sequence.sampling_params
        self.sequence = sequence
        self.seed = seed
        self.grammar = grammar
        self.is_greedy = params.is_greedy
        self.num_logprobs = params.logprobs
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.penalties = PenaltyCounts(sequence) if penalised else None
        self.bias: tuple[IdArray, FloatArray] | None = None
        if params.logit_bias:
            self.bias = (
                np.fromiter(params.logit_bias.keys(), dtype=np.int64),
                np.fromiter(params.logit_bias.values(), dtype=np.float32),
            )
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        self.stop_ids: IdArray = np.array(sorted(stops), dtype=np.int64)
        self.adjusts = bool(penalised or self.bias or grammar or (params.min_tokens and stops))
        """Whether anything may change this row's logits."""
        self.is_plain_greedy = self.is_greedy and self.num_logprobs is None and not self.adjusts

    def holds_back_stop(self) -> bool:
        """True while `min_tokens` has not been reached."""
        return len(self.sequence.output_token_ids) < self.sequence.sampling_params.min_tokens and bool(
            self.stop_ids.size
        )
