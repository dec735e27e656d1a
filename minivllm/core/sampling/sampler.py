"""Sampler: samples one token per row of logits.

The result of a row depends on its own logits, parameters and tokens only, never on the other rows of the batch:

- Every operation works along a row, and ties go to the lowest token id.
- The random numbers of a request are a pure function of its seed and the number of its output tokens, see `rng`. So a
  recomputed sequence, or a batch that is sampled again row by row, gets the same tokens.

Order: repetition, frequency and presence penalties; logit_bias; min_tokens; the grammar's bitmask. A greedy row then
takes the argmax. Other rows apply temperature, top_k, top_p and min_p, each to what the one before keeps (the order of
transformers and llama.cpp), see `topk_topp`.

Reported log probabilities are the log-softmax of the raw logits, before penalties, bias, masks and temperature, as
vLLM's and OpenAI's servers report by default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from minivllm.core.errors import InvalidRequestError, MinivllmError, NotFiniteError, RequestFailedError
from minivllm.core.outputs import SampleResult, TokenLogprobs
from minivllm.core.sampling.ops import (
    Workspace,
    apply_token_bitmask,
    block_argmax,
    random_sample,
    random_sample_candidates,
    select_rows,
    unnormalized_softmax,
    update_logits,
)
from minivllm.core.sampling.rng import make_seed
from minivllm.core.sampling.state import SamplerState
from minivllm.core.sampling.structured_output import GrammarCompiler, GrammarMatcher
from minivllm.core.sampling.topk_topp import filter_candidates, has_filter, topk_per_row
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NOT_FINITE = "the model's output for this request is not a number"


class Sampler:
    """Samples tokens. The state of each sequence is its `sampler_state`.

    Args:
        eos_token_ids: tokens that `min_tokens` masks and a finished grammar allows.
        tokenizer: loads the tokenizer for structured output at first use.
        seed: makes requests without a seed reproducible, by the order in which they are prepared.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        tokenizer: Callable[[], Tokenizer] | None = None,
        seed: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._num_prepared = 0
        self._grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_token_ids)
        self._raw, self._adjusted, self._workspace = Workspace(), Workspace(), Workspace()
        self._bitmask_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-bitmasks")
        self._pending_bitmasks: Future[None] | None = None

    def warm_up(self) -> None:
        """Loads the tokenizer for grammars. Does not fail for a model without one, which only refuses grammars."""
        try:
            self._grammars.load_tokenizer()
        except MinivllmError as error:
            logger.info("no structured output with this model: %s", error)

    def prepare(self, sequence: Sequence) -> None:
        """Checks the parameters against the model, compiles the grammar, and sets `sequence.sampler_state`.

        Raises:
            InvalidRequestError: a token id is outside the vocabulary, or the grammar cannot be compiled; sets no state.
        """
        params = sequence.sampling_params
        for param, token_ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token_id in token_ids:
                if not 0 <= token_id < self.vocab_size:
                    reason = f"token id {token_id} is not in the model's vocabulary of {self.vocab_size}"
                    raise InvalidRequestError(f"{param}: {reason}", param=param)
        matcher, output = None, params.structured_output
        if output is not None:
            matcher = GrammarMatcher(sequence, output, self._grammars.compile(output))
        seed = make_seed(self._seed, self._num_prepared) if params.seed is None else params.seed + sequence.index
        sequence.sampler_state = SamplerState(sequence, seed, self.eos_token_ids, matcher)
        self._num_prepared += 1

    def release(self, sequence: Sequence) -> None:
        """Clears `sequence.sampler_state`. Idempotent."""
        sequence.sampler_state = None

    def precompile(self, params: SamplingParams) -> None:
        """Compiles and caches the grammar of a later request, from any thread. Raises what `prepare` would."""
        if params.structured_output is not None:
            self._grammars.compile(params.structured_output)

    def start_bitmasks(self, sequences: list[Sequence]) -> None:
        """Starts to compute the grammar bitmasks of these sequences on a thread, without the GIL; `sample` joins it.

        Call it before the forward pass with the sequences that sample after it. `sample` computes missing bitmasks.
        """
        self._join_bitmasks()
        states = [sequence.sampler_state for sequence in sequences]
        matchers = [state.matcher for state in states if state is not None and state.matcher is not None]
        if matchers:
            self._pending_bitmasks = self._bitmask_thread.submit(self._grammars.fill_bitmasks, matchers)

    def _join_bitmasks(self) -> None:
        pending, self._pending_bitmasks = self._pending_bitmasks, None
        if pending is not None:
            pending.result()

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampleResult]:
        """Samples one token per row.

        Args:
            logits: (rows, vocab_size), any float type and device. Not changed.
            sequences: one per row, in the same order; prepared.

        Returns:
            One result per row. A row that fails, or whose logits are not finite, has `error` set and does not affect
            the others.
        """
        self._join_bitmasks()
        if not sequences:
            return []
        # Plain greedy rows by one argmax over all rows, which is cheaper than selecting them.
        states = [sequence.sampler_state for sequence in sequences]
        others = [row for row, state in enumerate(states) if state is None or not state.is_plain_greedy]
        if len(others) == len(sequences):
            return self._sample_isolated(logits, sequences)
        values, token_ids = block_argmax(logits)
        results = [
            SampleResult(token_id) if is_finite else SampleResult(error=NotFiniteError(_NOT_FINITE))
            for token_id, is_finite in zip(token_ids.tolist(), torch.isfinite(values).tolist(), strict=True)
        ]
        if others:
            found = self._sample_isolated(select_rows(logits, others), [sequences[row] for row in others])
            for row, result in zip(others, found, strict=True):
                results[row] = result
        return results

    def _sample_isolated(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampleResult]:
        """Samples these rows together; if that raises, row by row, so that only the failing row gets the error."""
        try:
            return self._sample_rows(logits, sequences)
        except Exception as error:
            if len(sequences) == 1:
                if isinstance(error, MinivllmError):
                    return [SampleResult(error=error)]
                logger.exception("sampling request %s failed", sequences[0].seq_id)
                return [SampleResult(error=_failed(repr(error)))]
            logger.debug("sampling %d rows together failed; samples them one by one", len(sequences), exc_info=True)
        rows = zip(logits.split(1), sequences, strict=True)
        return [self._sample_isolated(row_logits, [sequence])[0] for row_logits, sequence in rows]

    def _sample_rows(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampleResult]:
        """Samples rows with any parameters. `logits` (rows, vocab_size) is not changed."""
        states = [_state(sequence) for sequence in sequences]
        raw = logits
        if logits.dtype != torch.float32:
            raw = self._raw.take(len(states), logits.shape[1], logits.device).copy_(logits)
        maxima, best = block_argmax(raw)
        raw_is_finite = torch.isfinite(maxima).tolist()
        adjusted = raw
        if any(state.changes_logits for state in states):
            adjusted = self._adjusted.take(len(states), raw.shape[1], raw.device).copy_(raw)
            self._adjust(adjusted, states)
            maxima, best = block_argmax(adjusted)
        token_ids: list[int] = best.tolist()
        is_finite = torch.isfinite(maxima).tolist()
        at_random = {row: state for row, state in enumerate(states) if is_finite[row] and not state.params.is_greedy}
        for row, token_id in self._random_sample(adjusted, maxima, at_random):
            token_ids[row] = token_id
        logprobs = _logprobs(raw, states, token_ids)
        return [
            SampleResult(error=NotFiniteError(_NOT_FINITE))
            if not raw_is_finite[row]
            else SampleResult(error=_failed("every token is masked"))
            if not is_finite[row]
            else SampleResult(token_id, logprobs.get(row))
            for row, token_id in enumerate(token_ids)
        ]

    def _adjust(self, logits: torch.Tensor, states: list[SamplerState]) -> None:
        """Applies penalties, bias, min_tokens and grammar bitmasks in place."""
        matchers = [(row, state.matcher) for row, state in enumerate(states) if state.matcher is not None]
        self._grammars.fill_bitmasks([matcher for _, matcher in matchers])
        for same_kind in zip(*(state.updates() for state in states), strict=True):
            updates = [(row, *update) for row, update in enumerate(same_kind) if update is not None]
            if updates:
                update_logits(logits, updates)
        if matchers:
            bitmask = np.stack([matcher.bitmask() for _, matcher in matchers])
            apply_token_bitmask(logits, [row for row, _ in matchers], bitmask, self._workspace)

    def _random_sample(
        self, logits: torch.Tensor, maxima: torch.Tensor, states: dict[int, SamplerState]
    ) -> Iterator[tuple[int, int]]:
        """Samples the rows of `states` at random; yields (row, token id)."""
        width = logits.shape[1]
        for is_filtered in (False, True):
            selected = [row for row, state in states.items() if has_filter(state.params, width) == is_filtered]
            if not selected:
                continue
            picked, picked_maxima = select_rows(logits, selected), select_rows(maxima, selected)
            params = [states[row].params for row in selected]
            seeds = [states[row].seed for row in selected]
            positions = [len(states[row].sequence.output_token_ids) for row in selected]
            if is_filtered:
                candidates = filter_candidates(picked, picked_maxima, params, self._workspace)
                sampled = random_sample_candidates(*candidates, seeds, positions)
            else:
                temperatures = [one.temperature for one in params]
                weights, sums = unnormalized_softmax(picked, picked_maxima, temperatures, self._workspace)
                sampled = random_sample(weights, sums, seeds, positions).tolist()
            yield from zip(selected, sampled, strict=True)


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Returns the log probabilities of the given tokens and of the top tokens of their rows.

    Args:
        logits: (rows, vocab), raw.
        token_ids: one per row.
        num_top: number of top tokens per row, 0 for none.
    """
    logits = logits.float()
    # Not `logsumexp`, which is several times slower on a CPU.
    largest = logits.amax(dim=-1, keepdim=True)
    normalizer = (logits - largest).exp_().sum(dim=-1, keepdim=True).log_() + largest
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - normalizer
    own_list = own.squeeze(1).tolist()
    if not any(num_top):
        return [TokenLogprobs(token_id, value) for token_id, value in zip(token_ids, own_list, strict=True)]
    found = topk_per_row(logits, [min(count, logits.shape[1]) for count in num_top])
    offsets = normalizer.squeeze(1).tolist()
    return [
        TokenLogprobs(token_id, value, tuple(zip(ids.tolist(), (values - offset).tolist(), strict=True)))
        for token_id, value, (ids, values), offset in zip(token_ids, own_list, found, offsets, strict=True)
    ]


def _logprobs(raw: torch.Tensor, states: list[SamplerState], token_ids: list[int]) -> dict[int, TokenLogprobs]:
    """Returns the log probabilities by row, where requested."""
    requested = [(row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None]
    if not requested:
        return {}
    rows = [row for row, _ in requested]
    found = token_logprobs(select_rows(raw, rows), [token_ids[row] for row in rows], [count for _, count in requested])
    return dict(zip(rows, found, strict=True))


def _state(sequence: Sequence) -> SamplerState:
    state: SamplerState | None = sequence.sampler_state
    if state is None:
        raise _failed("the sequence was not prepared")
    return state


def _failed(reason: str) -> RequestFailedError:
    return RequestFailedError(f"sampling failed for this request: {reason}")
