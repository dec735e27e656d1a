"""Scheduler: who computes how many tokens in the next step, and what follows from what was computed.

One budget of tokens a step. Running sequences come first: decodes, then the next chunks of prompts half done; what is
left goes to waiting ones, each of which is admitted only if the sequence limit, the budget and the block manager agree.
When a running sequence needs a block and none is free, the newest one is preempted: its blocks are freed, its output is
kept, and it is recomputed later. The oldest is never preempted for another, so it always advances: no livelock.

Continuous batching is Orca's idea, chunked prefill with one token budget Sarathi-Serve's; the single notion of
"compute tokens num_computed_tokens .. num_tokens" for prefill, decode and recompute is vLLM's (V1).
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from minivllm.core.config import EngineConfig
from minivllm.core.errors import (
    EngineOverloadedError,
    IntegrityError,
    InvalidRequestError,
    MinivllmError,
    NeverFitsError,
    RequestFailedError,
)
from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.outputs import RequestOutput, SampleResult, TokenLogprobs
from minivllm.core.scheduler.live_requests import LiveRequests
from minivllm.core.scheduler.output import ScheduledSequence, SchedulerOutput, StepPlan
from minivllm.core.scheduler.request_queue import RequestQueue
from minivllm.core.sequence import FinishReason, Sequence, SequenceStatus
from minivllm.core.stats import SchedulerCounters

__all__ = ["ScheduledSequence", "Scheduler", "SchedulerOutput"]

logger = logging.getLogger(__name__)

DEFAULT_TOKEN_BUDGET = 512
BYPASS_LOOKAHEAD = 8
"""Requests behind a blocked head that are looked at in one step, so that a step's cost is independent of the queue."""


class Scheduler:
    """The queues, and the only caller of the block manager.

    Use: `step = schedule()`, compute it, `outputs = update_from_output(step, results)`, in turn. `add` and `abort`
    may be called at any time between; an abort while a step is computed takes effect in `update_from_output`.

    Args:
        config: `max_model_len` and `max_num_batched_tokens` get defaults (the pool's tokens, 512) when None.
        block_manager: of the pool that the sequences run on.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        on_end: called once with every sequence that ends, so that others can let go of their state too.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        eos_token_ids: Iterable[int] = frozenset(),
        on_end: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.eos_token_ids = frozenset(eos_token_ids)
        self._on_end = on_end
        pool_tokens = block_manager.num_blocks * block_manager.block_size
        self.max_model_len = min(config.max_model_len or pool_tokens, pool_tokens)
        self.token_budget = config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET
        self.counters = SchedulerCounters()
        self._waiting = RequestQueue()
        self._running: list[Sequence] = []
        self._live = LiveRequests()
        self._ended: list[RequestOutput] = []
        self._abort_later: set[str] = set()
        self._in_flight: SchedulerOutput | None = None

    # ---------------------------------------------------------------- what one can see

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in queue order: by priority; of one priority the preempted before the new."""
        return self._waiting.in_order()

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks, the one that would be preempted last first."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_unfinished(self) -> bool:
        """True until the last terminal output has been handed out."""
        return bool(len(self._live) or self._ended)

    # ---------------------------------------------------------------- coming and going

    def add(self, sequence: Sequence, *followers: Sequence) -> None:
        """Puts a new sequence into the queue, and with it the other samples of the same request (n > 1).

        Raises and keeps nothing: InvalidRequestError (empty prompt, id alive already), NeverFitsError, or
        EngineOverloadedError (the queue is full).
        """
        group = [sequence, *followers]
        self._live.check_new(group)
        self._check_fits(sequence)
        self._check_queue(group)
        for sample in group:
            self._prepare_limits(sample)
        self._live.add(group)
        self.counters.requests += 1
        self.counters.prompt_tokens += sequence.num_prompt_tokens
        self._waiting.add(sequence)
        if self.block_manager.enable_prefix_caching and followers:
            self._waiting.add_followers(sequence, list(followers))
        else:
            for sample in followers:
                self._waiting.add(sample)

    def check_new(self, group: list[Sequence]) -> None:
        """Raises InvalidRequestError if a prompt is empty or an id is alive: before anybody makes state for the id."""
        self._live.check_new(group)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one sample of it, wherever it is. Unknown and ended ids are a no-op."""
        for sequence in self._live.unfinished(request_id, index):
            if self._in_flight is None:
                self._end(sequence, FinishReason.ABORT)
            else:
                self._abort_later.add(sequence.request_id)

    def fail_all(self, error: MinivllmError) -> list[RequestOutput]:
        """A step could not be computed: ends every live sequence with `error`, and hands the outputs out."""
        self._in_flight = None
        self._abort_later.clear()
        for sequence in self._live.unfinished():
            self._end(sequence, FinishReason.ERROR, error=error)
        return self._take_ended()

    # ---------------------------------------------------------------- a step

    def schedule(self) -> SchedulerOutput:
        """Decides the next step and takes the blocks it needs. Empty when nothing can run."""
        if self._in_flight is not None:
            raise InvalidRequestError("schedule() was called again before update_from_output()", param="step")
        plan = StepPlan(self.token_budget)
        violations = self.counters.integrity_violations
        preempted = self._schedule_running(plan)
        if not preempted:  # there is no room then, and the preempted must not be overtaken
            self._admit(plan)
        if self.counters.integrity_violations > violations:
            plan.drop_ended()
        self._in_flight = plan.freeze()
        return self._in_flight

    def update_from_output(
        self, step: SchedulerOutput, tokens: SequenceOf[int | SampleResult | None]
    ) -> list[RequestOutput]:
        """Takes a computed step in, and returns what is new, terminal outputs of aborts included.

        Args:
            step: what `schedule` returned last.
            tokens: one for each scheduled sequence: the sampled id, None where none is sampled, or a SampleResult.
        """
        if step is not self._in_flight:
            raise InvalidRequestError(
                "update_from_output() was not given the step that schedule() returned last", param="step"
            )
        if len(tokens) != len(step.sequences):
            raise InvalidRequestError(
                f"{len(tokens)} results for {len(step.sequences)} scheduled sequences", param="tokens"
            )
        self._in_flight = None
        self.counters.steps += bool(step.sequences)
        self.counters.computed_tokens += step.num_tokens
        outputs: list[RequestOutput] = []
        for scheduled, token in zip(step.sequences, tokens, strict=True):
            if scheduled.sequence.request_id in self._abort_later:
                continue
            result = token if isinstance(token, SampleResult) else SampleResult(token)
            try:
                output = self._advance(scheduled, result)
            except IntegrityError as error:
                self.contain(error, scheduled.sequence)
                continue
            if output is not None:
                outputs.append(output)
        self.counters.generated_tokens += sum(len(output.new_token_ids) for output in outputs)
        self._apply_aborts()
        return self._take_ended(before=outputs)

    def discard_step(self) -> None:
        """The step that is out was interrupted: nothing of it counts, its tokens are scheduled again."""
        self._in_flight = None
        self._apply_aborts()

    def contain(self, error: IntegrityError, *concerned: Sequence) -> None:
        """An invariant is broken: ends the sequences concerned, mends the ledger, and goes on."""
        self.counters.integrity_violations += 1
        logger.error("KV block ledger damaged: %s", error.message)
        damaged = {sequence.request_id: sequence for sequence in concerned}
        for request_id in error.request_ids:
            sequence = self._live.sequence(request_id)
            if sequence is not None:
                damaged[request_id] = sequence
        self.block_manager.repair(damaged.values())
        for sequence in damaged.values():
            if not sequence.is_finished:
                failure = RequestFailedError(f"the KV blocks of this request were damaged: {error.message}")
                self._end(sequence, FinishReason.ERROR, error=failure)

    # ---------------------------------------------------------------- running sequences

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Gives each running sequence its next tokens, decodes before prompts. True if anybody was preempted."""
        preemptions = self.counters.preemptions
        prompts: list[Sequence] = []
        # A decode takes one block at most: with that many free there is no need to ask for each.
        ample = self.block_manager.get_num_free_blocks() >= len(self._running)
        for sequence in list(self._running):
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                prompts.append(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self._schedule_decode(plan, sequence, ample)
        for sequence in prompts:
            if plan.budget == 0:
                break
            if sequence.status is SequenceStatus.RUNNING:
                self._schedule_chunk(plan, sequence)
        return self.counters.preemptions > preemptions

    def _schedule_decode(self, plan: StepPlan, sequence: Sequence, ample: bool) -> None:
        manager = self.block_manager
        try:
            while not ample and not manager.can_append_slot(sequence):
                if self._preempt_newest(plan) is sequence:
                    return
            manager.append_slot_for_decode(sequence)
        except IntegrityError as error:
            self.contain(error, sequence)
            return
        plan.put(sequence, sequence.num_tokens)

    def _schedule_chunk(self, plan: StepPlan, sequence: Sequence) -> None:
        """The next chunk of a prompt half done: as much as the budget and the free blocks give, at least one token."""
        manager = self.block_manager
        try:
            while (room := self._room(sequence)) <= sequence.num_computed_tokens:
                if self._preempt_newest(plan) is sequence:
                    return
            end = min(room, self._chunk_end(plan, sequence, sequence.num_computed_tokens))
            manager.allocate_for_prefill(sequence, end)
        except IntegrityError as error:
            self.contain(error, sequence)
            return
        plan.put(sequence, end)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that the blocks it has and the free blocks could hold."""
        blocks = len(sequence.block_table) + self.block_manager.get_num_free_blocks()
        return blocks * self.block_manager.block_size

    def _chunk_end(self, plan: StepPlan, sequence: Sequence, start: int) -> int:
        """Where a chunk from `start` ends: at the last token, the budget or the threshold for long prompts."""
        count = min(plan.budget, sequence.num_tokens - start)
        if self.config.long_prefill_token_threshold is not None:
            count = min(count, self.config.long_prefill_token_threshold)
        return start + count

    def _preempt_newest(self, plan: StepPlan) -> Sequence:
        """Takes the blocks of the running sequence that came last, and puts it at the head of the queue."""
        victim = self._running.pop()
        plan.drop(victim)
        victim.computed_high_water = max(victim.computed_high_water, victim.num_computed_tokens)
        self._free(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.add(victim)
        return victim

    # ---------------------------------------------------------------- admission

    def _admit(self, plan: StepPlan) -> None:
        """Admits from the head of the queue while everything agrees.

        A head that waits for blocks may be overtaken by requests of its own priority for which there is room, but by
        no more than `max_head_bypasses` in all; one that was preempted is never overtaken.
        """
        reserved = self._reserved_blocks()
        blocked: Sequence | None = None
        position = 0
        while position < self._waiting.num_admissible and position <= BYPASS_LOOKAHEAD:
            sequence = self._waiting.at(position)
            if blocked is not None and not self._may_overtake(sequence, blocked):
                break
            refusal = self._refusal(plan, sequence, reserved)
            if refusal is None:
                reserved += self._start(plan, sequence)
                if blocked is not None:
                    blocked.times_bypassed += 1
                continue
            self._record_refusal(sequence, refusal)
            if refusal not in ("no_free_blocks", "watermark"):
                break
            blocked = blocked or sequence
            position += 1

    def _may_overtake(self, sequence: Sequence, blocked: Sequence) -> bool:
        return (
            sequence.priority == blocked.priority
            and blocked.num_preemptions == 0
            and blocked.times_bypassed < self.config.max_head_bypasses
        )

    def _reserved_blocks(self) -> int:
        """Blocks that admitted prompts still have to take for their later chunks."""
        manager = self.block_manager
        return sum(
            max(0, manager.blocks_needed(sequence, sequence.num_tokens))
            for sequence in self._running
            if sequence.num_tokens - sequence.num_computed_tokens > 1
        )

    def _refusal(self, plan: StepPlan, sequence: Sequence, reserved_blocks: int) -> str | None:
        if len(self._running) >= self.config.max_num_seqs:
            return "max_num_seqs"
        # Every running sequence must get a token in every step, so no more may run than the budget has tokens.
        if plan.budget == 0 or len(self._running) >= self.token_budget:
            return "token_budget"
        return self.block_manager.admission_refusal(sequence, reserved_blocks)

    def _record_refusal(self, sequence: Sequence, reason: str) -> None:
        """Counts the first "no" of a wait, once."""
        if sequence.first_refusal is None:
            sequence.first_refusal = reason
            self.counters.rejections[reason] += 1

    def _start(self, plan: StepPlan, sequence: Sequence) -> int:
        """Lets a waiting sequence run. Returns how many blocks its later chunks will need."""
        manager = self.block_manager
        hits = manager.num_cached_prefix_tokens(sequence)
        end = self._chunk_end(plan, sequence, hits)  # blocks for all of it were asked for just now
        manager.allocate_for_prefill(sequence, end)
        self._waiting.remove(sequence)
        self._count_hits(sequence)
        sequence.status = SequenceStatus.RUNNING
        sequence.first_refusal = None
        sequence.times_bypassed = 0
        insort(self._running, sequence, key=lambda one: one.rank)
        plan.put(sequence, end)
        return max(0, manager.blocks_needed(sequence, sequence.num_tokens))

    def _count_hits(self, sequence: Sequence) -> None:
        hits = sequence.num_computed_tokens
        if sequence.first_admission_hits is None:
            sequence.first_admission_hits = min(hits, sequence.num_prompt_tokens)
            if self.block_manager.enable_prefix_caching and not sequence.skip_prefix_lookup:
                self.counters.cache_query_tokens += sequence.num_tokens
                self.counters.cache_hit_tokens += hits

    # ---------------------------------------------------------------- results

    def _advance(self, scheduled: ScheduledSequence, result: SampleResult) -> RequestOutput | None:
        """Takes in what one sequence computed: counts its tokens, appends the sampled one, ends it if it is over."""
        sequence = scheduled.sequence
        if sequence.is_finished:
            return None
        if result.error is not None:
            self._end(sequence, FinishReason.ERROR, error=result.error)
            return None
        self.block_manager.mark_computed(sequence, scheduled.end)
        if sequence.computed_high_water > scheduled.start:
            self._count_recomputed(scheduled)
            result = _without_told_logprobs(result, sequence.computed_high_water - scheduled.start)
        if self._waiting.has_followers(sequence) and scheduled.end >= sequence.num_prompt_tokens:
            self._waiting.release_followers(sequence)
        if not scheduled.samples:
            if sequence.max_output_tokens == 0 and scheduled.end == sequence.num_tokens:
                self._end(sequence, FinishReason.LENGTH, prompt_logprobs=result.prompt_logprobs)
                return None
            return self._output(sequence, result) if result.prompt_logprobs else None
        if result.token_id is None:
            raise InvalidRequestError(f"no token was sampled for {sequence.request_id}", param="tokens")
        sequence.append_token(result.token_id)
        output = self._output(sequence, result)
        reason = self._finish_reason(sequence, result.token_id)
        if reason is not None:
            if reason is FinishReason.STOP:
                output.stop_token_id = result.token_id
            self._close(sequence, output, reason)
        return output

    def _output(self, sequence: Sequence, result: SampleResult) -> RequestOutput:
        token_ids = [] if result.token_id is None else [result.token_id]
        hits = sequence.first_admission_hits or 0
        output = RequestOutput(sequence.parent_request_id, token_ids, False, None, hits, sequence.index)
        if result.logprobs is not None:
            output.logprobs = [result.logprobs]
        output.prompt_logprobs = result.prompt_logprobs
        return output

    def _count_recomputed(self, scheduled: ScheduledSequence) -> None:
        """Tokens of this chunk that had been computed before the sequence was preempted."""
        self.counters.recomputed_tokens += min(scheduled.sequence.computed_high_water, scheduled.end) - scheduled.start

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        num_generated = len(sequence.output_token_ids)
        if token_id in sequence.stop_token_ids and num_generated >= sequence.sampling_params.min_tokens:
            return FinishReason.STOP
        if sequence.max_output_tokens is not None and num_generated >= sequence.max_output_tokens:
            return FinishReason.LENGTH
        return None

    def _apply_aborts(self) -> None:
        for sequence_id in self._abort_later:
            sequence = self._live.sequence(sequence_id)
            if sequence is not None and not sequence.is_finished:
                self._end(sequence, FinishReason.ABORT)
        self._abort_later.clear()

    # ---------------------------------------------------------------- ends

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: MinivllmError | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Ends a sequence outside of a sampled token; its terminal output leaves with the next `update_from_output`."""
        output = self._output(sequence, SampleResult(error=error, prompt_logprobs=prompt_logprobs))
        output.error = error
        self._close(sequence, output, reason)
        self._ended.append(output)

    def _close(self, sequence: Sequence, output: RequestOutput, reason: FinishReason) -> None:
        """The one place where a sequence ends: out of its queue, blocks back, terminal output filled in."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        output.finished = True
        output.finish_reason = reason
        self.counters.finished[reason.value] += 1
        self._free(sequence)
        if self._on_end is not None:
            self._on_end(sequence)
        self._waiting.release_followers(sequence)  # without a leader each computes for itself

    def _free(self, sequence: Sequence) -> None:
        """Gives the blocks back. A table that names blocks of others is dropped instead, and the ledger mended."""
        try:
            self.block_manager.free_sequence(sequence)
        except MinivllmError as error:
            self.counters.integrity_violations += 1
            logger.error("KV block ledger damaged: %s", error.message)
            self.block_manager.repair([sequence])

    def _take_ended(self, before: list[RequestOutput] | None = None) -> list[RequestOutput]:
        """All outputs that are due; ids whose terminal output is among them are free again."""
        outputs = [*(before or ()), *self._ended]
        self._ended = []
        for output in outputs:
            if output.finished:
                self._live.forget(output)
        return outputs

    # ---------------------------------------------------------------- checks at arrival

    def _check_fits(self, sequence: Sequence) -> None:
        room = 0 if sequence.sampling_params.max_tokens == 0 else 1
        if sequence.num_prompt_tokens + room > self.max_model_len:
            self.count_never_fits()
            raise NeverFitsError(
                f"the prompt has {sequence.num_prompt_tokens} tokens; the context of {self.max_model_len} tokens "
                "must hold it and at least one token of output",
                param="prompt",
                num_prompt_tokens=sequence.num_prompt_tokens,
                max_model_len=self.max_model_len,
            )

    def count_never_fits(self) -> None:
        """Counts a prompt refused since it could never fit; the text layer refuses some before they come here."""
        self.counters.rejections["never_fits"] += 1

    def _check_queue(self, group: list[Sequence]) -> None:
        try:
            self._waiting.check_room(group, self.config.max_waiting_requests, self.config.max_waiting_tokens)
        except EngineOverloadedError:
            self.counters.rejections["queue_full"] += 1
            raise

    def _prepare_limits(self, sequence: Sequence) -> None:
        params = sequence.sampling_params
        if not params.ignore_eos:
            sequence.stop_token_ids = sequence.stop_token_ids | self.eos_token_ids
        room = self.max_model_len - sequence.num_prompt_tokens
        sequence.max_output_tokens = room if params.max_tokens is None else min(params.max_tokens, room)


def _without_told_logprobs(result: SampleResult, num_recomputed: int) -> SampleResult:
    """A recomputed token has told the log probability of its successor before; each is delivered once."""
    if not result.prompt_logprobs:
        return result
    return replace(result, prompt_logprobs=result.prompt_logprobs[num_recomputed:])
