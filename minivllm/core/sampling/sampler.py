"""Sampler: logits of the rows that sample -> one token each.

What a row gets depends on its own logits, parameters and tokens only, never on its neighbours in the batch:

- Every operation works along a row, and ties go to the lowest token id.
- The random numbers of a request are a pure function of (its seed, how many tokens it has generated), see
  `sampler_noise`. Nothing is drawn from a shared stream, so a preempted and recomputed sequence, or a batch that had to
  be sampled again row by row, goes on exactly where it was.

Order: repetition, frequency and presence penalties; logit_bias; min_tokens; the grammar's mask. A greedy row then
takes the argmax. The others: temperature, top_k, top_p, min_p, each on what the one before left (the order of
transformers and llama.cpp), see `sampler_filters`.

Reported log probabilities are those of the model itself: log-softmax of the raw logits, before penalties, bias,
masks and temperature, as OpenAI's and vLLM's servers report by default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from minivllm.core.errors import InvalidRequestError, MinivllmError, RequestFailedError
from minivllm.core.outputs import SampleResult, TokenLogprobs
from minivllm.core.sampling.ops import (
    Workspace,
    block_argmax,
    draw_from_all,
    draw_from_kept,
    rule_out,
    scatter_rows,
    token_logprobs,
    weigh,
)
from minivllm.core.sampling.rng import fresh_seed
from minivllm.core.sampling.state import RowState
from minivllm.core.sampling.structured_output import GrammarCompiler, GrammarMasks
from minivllm.core.sampling.topk_topp import has_filter, keep, needs_total
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

__all__ = ["Sampler", "token_logprobs"]


class Sampler:
    """Samples tokens; keeps a small state for each live sequence.

    Args:
        vocab_size: width of the logits.
        eos_token_ids: what `min_tokens` holds back and a finished grammar allows.
        tokenizer: needed for structured output only: the tokenizer, or a function that makes it at first use.
        seed: makes requests without a seed repeatable: the n-th request prepared always draws the same numbers.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        *,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
        seed: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._prepared_count = 0
        self._states: dict[Sequence, RowState] = {}
        self._grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_token_ids)
        self._raw, self._adjusted, self._weights = Workspace(), Workspace(), Workspace()
        self._mask_thread: ThreadPoolExecutor | None = None
        self._started_masks: GrammarMasks | None = None
        self._pending_masks: Future[GrammarMasks] | None = None

    def warm_up(self) -> None:
        """Loads what the first grammar would otherwise wait for: the tokenizer, and its vocabulary as a trie.

        A model without a tokenizer is fine: its requests for structured output are refused, each by itself.
        """
        try:
            self._grammars.load()
        except MinivllmError as error:
            logger.info("no structured output with this model: %s", error)

    # -- life of a sequence ------------------------------------------------------------------------

    def prepare(self, sequence: Sequence) -> None:
        """Checks what only the model's side can check, and compiles the grammar. Keeps nothing when it raises.

        Raises:
            InvalidRequestError: a token id beyond the logits' width, or a grammar that cannot be compiled.
        """
        params = sequence.sampling_params
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids)
        grammar = None
        if params.structured_output is not None:
            grammar = self._grammars.compile(params.structured_output)
        seed = self._seed_of(sequence)
        self._prepared_count += 1
        self._states[sequence] = RowState(sequence, seed, self.eos_token_ids, grammar)

    def release(self, sequence: Sequence) -> None:
        """Forgets the sequence. One that is not known is a no-op."""
        self._states.pop(sequence, None)

    def _check_ids(self, param: str, token_ids: dict[int, float] | tuple[int, ...]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {token_id} is not in the model's vocabulary of {self.vocab_size}", param=param
                )

    def _seed_of(self, sequence: Sequence) -> int:
        """Choice k of n uses seed + k. Without a seed: one nobody can guess, or the next of the engine's seed."""
        if sequence.sampling_params.seed is not None:
            return sequence.sampling_params.seed + sequence.index
        return fresh_seed(self._seed, self._prepared_count)

    def _state_of(self, sequence: Sequence) -> RowState:
        if sequence not in self._states:
            self.prepare(sequence)
        return self._states[sequence]

    def precompile(self, params: SamplingParams) -> None:
        """Compiles and keeps the grammar of a request to come, from any thread. Raises what `prepare` would."""
        if params.structured_output is not None:
            self._grammars.compile(params.structured_output)

    # -- grammar masks, beside the forward pass ----------------------------------------------------

    def start_masks(self, sequences: list[Sequence]) -> None:
        """Starts to compute the grammar masks of these sequences on a thread; `sample` joins it.

        Call it before the forward pass with the sequences whose logits that pass will sample; calling it for others,
        or not at all, is harmless. The work releases the GIL.
        """
        self._join_masks()
        entries = [
            (sequence, state.grammar)
            for sequence in sequences
            if (state := self._states.get(sequence)) is not None and state.grammar is not None
        ]
        if not entries:
            return
        if self._mask_thread is None:
            self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._pending_masks = self._mask_thread.submit(self._grammars.masks, entries)

    def _join_masks(self) -> GrammarMasks | None:
        pending, self._pending_masks = self._pending_masks, None
        return pending.result() if pending is not None else None

    def _masks_of(self, states: list[RowState]) -> GrammarMasks | None:
        """Masks of those rows that have a grammar, as started before, or computed now."""
        entries = [(state.sequence, state.grammar) for state in states if state.grammar is not None]
        masks = self._started_masks
        if not entries or (masks is not None and all(masks.hold(sequence) for sequence, _ in entries)):
            return masks
        return self._grammars.masks(entries)

    # -- sampling ----------------------------------------------------------------------------------

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampleResult]:
        """Samples one token for each row.

        Args:
            logits: (rows, vocab_size), any float type and device. Not changed.
            sequences: one for each row, in the same order.

        Returns:
            One result a row. A row whose logits are not numbers, or that fails by itself, has `error` set; the others
            are what they would be without it.
        """
        self._started_masks = self._join_masks()
        if not sequences:
            return []
        with torch.inference_mode():
            return self._sample(logits.detach()[:, : self.vocab_size], sequences)

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampleResult]:
        """Plain greedy rows by one argmax; the others by the general path."""
        results: list[SampleResult | None] = [None] * len(sequences)
        others: list[int] = []
        for row, sequence in enumerate(sequences):
            state = self._states.get(sequence)
            if state is None or not state.is_plain_greedy:
                others.append(row)
        if len(others) < len(sequences):
            self._sample_greedy(logits, others, results)
        if others:
            self._sample_others(logits, others, sequences, results)
        return [result if result is not None else SampleResult(error=_failed("no result")) for result in results]

    def _sample_greedy(self, logits: torch.Tensor, others: list[int], results: list[SampleResult | None]) -> None:
        """One argmax over all rows, plain greedy or not: cheaper than picking rows out."""
        values, token_ids = block_argmax(logits)
        skipped = set(others)
        finite = torch.isfinite(values).tolist()
        for row, token_id in enumerate(token_ids.tolist()):
            if row not in skipped:
                results[row] = SampleResult(token_id) if finite[row] else SampleResult(error=_not_finite())

    def _sample_others(
        self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence], results: list[SampleResult | None]
    ) -> None:
        """Samples these rows together; if that raises, one by one, so that the error stays with its row."""
        try:
            found = self._sample_rows(_pick(logits, rows), [sequences[row] for row in rows])
            for row, result in zip(rows, found, strict=True):
                results[row] = result
            return
        except Exception:
            if len(rows) > 1:
                logger.debug("sampling %d rows together failed; each is tried alone", len(rows), exc_info=True)
        for row in rows:
            try:
                results[row] = self._sample_rows(_pick(logits, [row]), [sequences[row]])[0]
            except MinivllmError as error:
                results[row] = SampleResult(error=error)
            except Exception as error:
                logger.exception("sampling request %s failed", sequences[row].seq_id)
                results[row] = SampleResult(error=_failed(repr(error)))

    def _sample_rows(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampleResult]:
        """The general path. `logits` is (rows, vocab_size), and not changed."""
        states = [self._state_of(sequence) for sequence in sequences]
        raw = logits
        if logits.dtype != torch.float32:
            raw = self._raw.take(len(states), logits.shape[1], logits.device).copy_(logits)
        maxima, best = block_argmax(raw)
        raw_is_finite = torch.isfinite(maxima).tolist()
        adjusted = raw
        if any(state.adjusts for state in states):
            adjusted = self._adjusted.take(len(states), raw.shape[1], raw.device).copy_(raw)
            self._adjust(adjusted, states)
            maxima, best = block_argmax(adjusted)
        chosen: list[int] = best.tolist()
        has_choice = torch.isfinite(maxima).tolist()
        drawing = [row for row, state in enumerate(states) if has_choice[row] and not state.is_greedy]
        if drawing:
            self._draw(adjusted, maxima, drawing, states, chosen)
        logprobs = _logprobs(raw, states, chosen)
        return [
            SampleResult(error=_not_finite())
            if not raw_is_finite[row]
            else SampleResult(error=_failed("every token is ruled out"))
            if not has_choice[row]
            else SampleResult(token_id, logprobs.get(row))
            for row, token_id in enumerate(chosen)
        ]

    def _adjust(self, logits: torch.Tensor, states: list[RowState]) -> None:
        """Penalties, bias, min_tokens and grammar masks, in place."""
        penalised = [(row, state.penalties) for row, state in enumerate(states) if state.penalties is not None]
        if penalised:
            scatter_rows(logits, [(row, penalty.entries()) for row, penalty in penalised], _penalise)
        biased = [(row, state.bias) for row, state in enumerate(states) if state.bias is not None]
        if biased:
            scatter_rows(logits, biased, lambda values, columns: values + columns[0])
        masks = self._masks_of(states)
        held_back = [
            (row, (state.stop_ids,))
            for row, state in enumerate(states)
            if state.holds_back_stop() and not (masks and masks.is_complete(state.sequence))
        ]
        if held_back:
            scatter_rows(logits, held_back, lambda values, _: np.full_like(values, -np.inf))
        followed = [row for row, state in enumerate(states) if state.grammar is not None]
        if masks and followed:
            bits = np.stack([masks.bits(states[row].sequence) for row in followed])
            if len(followed) == len(states):
                rule_out(logits, bits, self._weights)
            else:
                picked = logits[followed]
                rule_out(picked, bits, self._weights)
                logits[followed] = picked

    def _draw(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        rows: list[int],
        states: list[RowState],
        chosen: list[int],
    ) -> None:
        """Draws the tokens of these rows into `chosen`."""
        width = logits.shape[1]
        params = {row: states[row].sequence.sampling_params for row in rows}
        filtered = [row for row in rows if has_filter(params[row], width)]
        # The whole distribution is needed to draw from it, and to know what share of it top_p asks for.
        whole = [row for row in rows if row not in set(filtered)]
        shares = [row for row in filtered if needs_total(params[row], width)]
        weighed = whole + shares
        totals = np.zeros(len(states))
        if weighed:
            picked = _pick(logits, weighed)
            temperatures = [params[row].temperature for row in weighed]
            weights, sums = weigh(picked, _pick(maxima, weighed), temperatures, self._weights)
            totals[weighed] = sums.sum(-1).cpu().numpy()
            if whole:
                count = len(whole)
                found = draw_from_all(weights[:count], sums[:count], *_places(states, whole)).tolist()
                for row, token_id in zip(whole, found, strict=True):
                    chosen[row] = token_id
        if filtered:
            kept = keep(
                _pick(logits, filtered), _pick(maxima, filtered), totals[filtered], [params[row] for row in filtered]
            )
            for row, token_id in zip(filtered, draw_from_kept(kept, *_places(states, filtered)), strict=True):
                chosen[row] = token_id


def _places(states: list[RowState], rows: list[int]) -> tuple[list[int], list[int]]:
    """(seeds, positions) that the random numbers of these rows belong to."""
    return [states[row].seed for row in rows], [len(states[row].sequence.output_token_ids) for row in rows]


def _logprobs(raw: torch.Tensor, states: list[RowState], chosen: list[int]) -> dict[int, TokenLogprobs]:
    """By row, where asked for."""
    wanted = [(row, state.num_logprobs) for row, state in enumerate(states) if state.num_logprobs is not None]
    if not wanted:
        return {}
    rows = [row for row, _ in wanted]
    found = token_logprobs(_pick(raw, rows), [chosen[row] for row in rows], [count for _, count in wanted])
    return dict(zip(rows, found, strict=True))


def _penalise(values: np.ndarray, columns: tuple[np.ndarray, ...]) -> np.ndarray:
    repetition, subtract = columns
    penalised: np.ndarray = np.where(values > 0, values / repetition, values * repetition) - subtract
    return penalised


def _pick(rows_of: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows; no copy when they are all."""
    return rows_of if rows == list(range(rows_of.shape[0])) else rows_of[rows]


def _not_finite() -> RequestFailedError:
    return RequestFailedError("the model's output for this request is not a number")


def _failed(reason: str) -> RequestFailedError:
    return RequestFailedError(f"sampling failed for this request: {reason}")
