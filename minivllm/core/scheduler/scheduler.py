"""Scheduler: decides which sequences compute how many tokens in the next step, and applies the results.

Each step has one token budget. Running sequences come first: decodes, then the next chunks of partly computed prompts.
The rest goes to waiting sequences, which are admitted if sequence limit, budget and block manager allow it. When a
running sequence needs a block and none is free, the one that ranks last (by priority, then arrival) is preempted: its
blocks are freed, its output is kept, and it is recomputed later. The first in rank always advances: no livelock.

Continuous batching is Orca's idea, chunked prefill with one token budget Sarathi-Serve's. "Compute tokens
num_computed_tokens .. num_tokens" as the one notion of prefill, decode and recompute is vLLM's (V1).
"""

from __future__ import annotations

import contextlib
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from minivllm.core.config import EngineConfig, SchedulerConfig
from minivllm.core.errors import (
    EngineOverloadedError,
    IntegrityError,
    InvalidRequestError,
    MinivllmError,
    NeverFitsError,
    NotFiniteError,
)
from minivllm.core.kv_cache.block_manager import BlockManager, flat_slots
from minivllm.core.outputs import RequestOutput, SampleResult
from minivllm.core.scheduler.output import ScheduledSequence, SchedulerOutput, StepPlan
from minivllm.core.scheduler.request_queue import RequestQueue
from minivllm.core.sequence import FinishReason, Sequence, SequenceStatus
from minivllm.core.stats import EngineStats, RejectionReason

BYPASS_LOOKAHEAD = 8
"""Requests behind a blocked queue head that a step looks at, so that its cost is independent of the queue's length."""


class Scheduler:
    """The queues, the live requests, and the only user of the block manager.

    Use: `step = schedule()`, compute it, `outputs = update_from_output(step, results)`, in turn. `add` and `abort` may
    be called between; an abort while a step is computed takes effect in `update_from_output`.

    `max_model_len` and `max_num_batched_tokens` default to the pool's tokens and 512. `eos_token_ids` end a sequence
    unless it ignores them. `on_end` is called once with every sequence that ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        eos_token_ids: Iterable[int] = frozenset(),
        on_end: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.config = SchedulerConfig.resolve(config, block_manager.num_blocks * block_manager.block_size)
        self.block_manager = block_manager
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stats = EngineStats()
        self._on_end = on_end
        self._waiting = RequestQueue()
        self._running: list[Sequence] = []  # the next to be preempted last
        self._live: dict[str, list[Sequence]] = {}  # samples by request id, until their terminal output is taken
        self._outputs: list[RequestOutput] = []
        self._aborted_in_flight: dict[Sequence, None] = {}  # an ordered set
        self._in_flight: SchedulerOutput | None = None

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in queue order: by priority; of equal priority the preempted before the new."""
        return self._waiting.in_order()

    @property
    def running(self) -> list[Sequence]:
        """Sequences with blocks, in reverse order of preemption."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Returns True until the last terminal output is taken."""
        return bool(self._live)

    # ---- requests

    def add(self, sequence: Sequence, *followers: Sequence) -> None:
        """Queues a new request: its first sample, and its other samples (n > 1).

        Raises InvalidRequestError (empty prompt, live id), NeverFitsError or EngineOverloadedError (full queue), and
        then keeps nothing.
        """
        self.check_new(sequence)
        length, max_model_len = sequence.num_prompt_tokens, self.config.max_model_len
        if length + (sequence.sampling_params.max_tokens != 0) > max_model_len:
            self.count_never_fits()
            raise NeverFitsError(
                f"the prompt has {length} tokens; the context of {max_model_len} tokens must hold it and at least one "
                "token of output",
                param="prompt",
                num_prompt_tokens=length,
                max_model_len=max_model_len,
            )
        group = [sequence, *followers]
        if not self._waiting.has_room(group, self.config.max_waiting_requests, self.config.max_waiting_tokens):
            self.stats.rejections[RejectionReason.QUEUE_FULL.value] += 1
            raise EngineOverloadedError(
                f"the server is overloaded: {self.num_waiting} requests of {self._waiting.num_tokens} tokens wait"
            )
        for sample in group:
            params = sample.sampling_params
            if not params.ignore_eos:
                sample.stop_token_ids |= self.eos_token_ids
            room = self.config.max_model_len - sample.num_prompt_tokens
            sample.max_output_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._live[sequence.request_id] = group
        self.stats.requests_total += 1
        self.stats.prompt_tokens_total += sequence.num_prompt_tokens
        self._waiting.add(sequence)
        if self.block_manager.enable_prefix_caching and followers:
            self._waiting.add_followers(sequence, list(followers))
        else:
            for sample in followers:
                self._waiting.add(sample)

    def check_new(self, sequence: Sequence) -> None:
        """Raises InvalidRequestError if the prompt is empty or the request id is live."""
        if not sequence.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
        if sequence.request_id in self._live:
            raise InvalidRequestError(f"request id {sequence.request_id!r} is in use", param="request_id")

    def count_never_fits(self) -> None:
        """Counts a prompt that can never fit; the ingress also refuses some before they arrive here."""
        self.stats.rejections[RejectionReason.NEVER_FITS.value] += 1

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one sample of it, in any state. Unknown and ended ids are a no-op."""
        for sequence in list(self._live.get(request_id, ())):
            if sequence.is_finished or index not in (None, sequence.index):
                continue
            if self._in_flight is None:
                self._end(sequence, FinishReason.ABORT)
            else:
                self._aborted_in_flight[sequence] = None

    def fail_all(self, error: MinivllmError) -> None:
        """Ends every live sequence with `error`. Blocks that cannot be freed stay in use."""
        self._in_flight = None
        self._aborted_in_flight.clear()
        for sequence in [one for group in self._live.values() for one in group if not one.is_finished]:
            with contextlib.suppress(IntegrityError):
                self.block_manager.free_sequence(sequence)
            self._finish(sequence, FinishReason.ERROR, SampleResult(error=error))

    def take_outputs(self) -> list[RequestOutput]:
        """Returns the new outputs. The id of a request is free again once all its terminal outputs are taken."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if output.finished:
                group = self._live[output.request_id]
                group[:] = [sequence for sequence in group if sequence.index != output.index]
                if not group:
                    del self._live[output.request_id]
        return outputs

    # ---- the step

    def schedule(self) -> SchedulerOutput:
        """Decides the next step and allocates its blocks. Empty when nothing can run. Raises IntegrityError."""
        if self._in_flight is not None:
            raise InvalidRequestError("schedule() was called again before update_from_output()", param="step")
        plan = StepPlan(self.config.max_num_batched_tokens)
        preempted = self._schedule_running(plan)
        if not preempted:  # otherwise there is no room, and the preempted must not be overtaken
            self._admit(plan)
        self._in_flight = plan.freeze(self._slot_mapping(plan) if self.block_manager.validate else None)
        return self._in_flight

    def _slot_mapping(self, plan: StepPlan) -> list[int]:
        """Returns the flat slots that the step writes: of a decode the allocated one, of others by the block table."""
        slots: list[int] = []
        for sequence, start, end, _, slot in plan.scheduled:
            if slot is None:
                slots += self.block_manager.slot_mapping(sequence, start, end)
            else:
                slots.append(flat_slots(*slot, self.block_manager.block_size))
        return slots

    def update_from_output(
        self, step: SchedulerOutput, results: SequenceOf[int | SampleResult | None]
    ) -> list[RequestOutput]:
        """Applies the results of the step that `schedule` returned last, and returns all new outputs.

        `results` has one per scheduled sequence: the sampled id, None where none is sampled, or a SampleResult. Raises
        IntegrityError.
        """
        if step is not self._in_flight:
            raise InvalidRequestError(
                "update_from_output() was not given the step that schedule() returned last", param="step"
            )
        if len(results) != len(step.sequences):
            message = f"{len(results)} results for {len(step.sequences)} scheduled sequences"
            raise InvalidRequestError(message, param="results")
        self._in_flight = None
        self.stats.steps_total += bool(step.sequences)
        self.stats.computed_tokens_total += step.num_tokens
        aborted = self._aborted_in_flight
        for scheduled, result in zip(step.sequences, results, strict=True):
            if not aborted or scheduled.sequence not in aborted:
                self._advance(scheduled, result if isinstance(result, SampleResult) else SampleResult(result))
        self.close_step()
        return self.take_outputs()

    def close_step(self) -> None:
        """Ends the step in flight and applies the aborts that waited for it. Without results it is scheduled again."""
        self._in_flight = None
        for sequence in self._aborted_in_flight:
            self._end(sequence, FinishReason.ABORT)
        self._aborted_in_flight.clear()

    # ---- running sequences

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Schedules the running sequences, decodes before prompts. Returns whether any was preempted."""
        decodes_first = sorted(self._running, key=lambda one: one.num_tokens - one.num_computed_tokens > 1)
        has_blocks = self.block_manager.can_append_slots(self._running)
        preempted = False
        for sequence in decodes_first:
            if plan.budget == 0:  # by prompts: no more sequences run than the budget has tokens
                break
            if preempted and sequence.status is not SequenceStatus.RUNNING:
                continue
            if self._schedule_sequence(plan, sequence, has_blocks):
                preempted = True
        return preempted

    def _schedule_sequence(self, plan: StepPlan, sequence: Sequence, has_blocks: bool) -> bool:
        """Schedules tokens of a running sequence, as many as budget and free blocks allow but at least one.

        Preempts the sequences that rank last until there is a block for that token. Returns whether any was preempted.
        """
        manager, preempted = self.block_manager, False
        start, end = sequence.num_computed_tokens, sequence.num_tokens
        while not (has_blocks or manager.can_append_slot(sequence)):
            room = (len(sequence.block_table) + manager.get_num_free_blocks()) * manager.block_size
            if room > start:
                end = room
                break
            preempted = True
            if self._preempt_last(plan) is sequence:
                return True
        if sequence.num_tokens - start <= 1:
            slot = manager.append_slot_for_decode(sequence)
            plan.add(sequence, end, slot if manager.validate else None)  # kept slots are work for the garbage collector
        else:
            end = min(end, self._chunk_end(plan, sequence, start))
            manager.allocate_for_prefill(sequence, end)
            plan.add(sequence, end)
        return preempted

    def _chunk_end(self, plan: StepPlan, sequence: Sequence, start: int) -> int:
        """Returns the end of a chunk from `start`: the last token, the budget or the threshold for long prompts."""
        return min(sequence.num_tokens, start + min(plan.budget, self.config.long_prefill_token_threshold))

    def _preempt_last(self, plan: StepPlan) -> Sequence:
        """Frees the blocks of the running sequence that ranks last, and puts it at the head of its priority's queue."""
        victim = self._running[-1]
        victim.num_computed_before_preemption = max(victim.num_computed_before_preemption, victim.num_computed_tokens)
        self.block_manager.free_sequence(victim)
        self._running.pop()
        plan.remove(victim)
        victim.num_preemptions += 1
        self.stats.preemptions_total += 1
        self._waiting.add(victim)
        return victim

    # ---- admission

    def _admit(self, plan: StepPlan) -> None:
        """Admits sequences from the head of the queue until one is rejected.

        A head that lacks blocks may be bypassed by requests of its own priority that fit, but by no more than
        `max_head_bypasses` in all; a preempted one is never bypassed.
        """
        if not self._waiting.admissible:
            return
        reserved = sum(map(self._num_reserved, self._running))
        blocked: Sequence | None = None
        position = 0
        while position < len(self._waiting.admissible) and position <= BYPASS_LOOKAHEAD:
            sequence = self._waiting.admissible[position]
            if blocked is not None and not self._may_bypass(sequence, blocked):
                break
            reason = self._try_admit(plan, sequence, reserved)
            if reason is None:
                reserved += self._num_reserved(sequence)
                if blocked is not None:
                    blocked.times_bypassed += 1
                continue
            if sequence.rejection_reason is None:  # one rejection per wait, under its first reason
                sequence.rejection_reason = reason
                self.stats.rejections[reason.value] += 1
            if reason not in (RejectionReason.NO_FREE_BLOCKS, RejectionReason.WATERMARK):
                break
            blocked = blocked or sequence
            position += 1

    def _may_bypass(self, sequence: Sequence, blocked: Sequence) -> bool:
        return (
            sequence.priority == blocked.priority
            and blocked.num_preemptions == 0
            and blocked.times_bypassed < self.config.max_head_bypasses
        )

    def _num_reserved(self, sequence: Sequence) -> int:
        """Returns the blocks that a running sequence needs for its later chunks; none while it decodes."""
        if sequence.num_tokens - sequence.num_computed_tokens == 1:
            return 0
        return max(0, -(-sequence.num_tokens // self.block_manager.block_size) - len(sequence.block_table))

    def _try_admit(self, plan: StepPlan, sequence: Sequence, reserved: int) -> RejectionReason | None:
        """Lets a waiting sequence run and schedules its first chunk, or returns why it cannot."""
        if len(self._running) >= self.config.max_num_seqs:
            return RejectionReason.MAX_NUM_SEQS
        # Every running sequence gets a token in every step, so no more may run than the budget has tokens.
        if plan.budget == 0 or len(self._running) >= plan.token_budget:
            return RejectionReason.TOKEN_BUDGET
        match = self.block_manager.match_prefix(sequence)
        reason = self.block_manager.admission_rejection(sequence, match, reserved)
        if reason is not None:
            return reason
        end = self._chunk_end(plan, sequence, match.num_cached_tokens)
        self.block_manager.allocate_for_prefill(sequence, end, match)
        self._waiting.remove(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = match.num_cached_tokens
            if self.block_manager.enable_prefix_caching and not sequence.skip_prefix_lookup:
                self.stats.prefix_cache_query_tokens_total += sequence.num_tokens
                self.stats.prefix_cache_hit_tokens_total += match.num_cached_tokens
        sequence.status = SequenceStatus.RUNNING
        sequence.rejection_reason = None
        sequence.times_bypassed = 0
        insort(self._running, sequence, key=lambda running: running.rank)
        plan.add(sequence, end)
        return None

    # ---- results

    def _advance(self, scheduled: ScheduledSequence, result: SampleResult) -> None:
        """Applies the result of one sequence: counts its tokens, appends the sampled one, ends it if it is complete."""
        sequence, start, end, samples, _ = scheduled
        if result.error is not None:
            if isinstance(result.error, NotFiniteError):
                self.block_manager.forget_prefixes(sequence)
            self._end(sequence, FinishReason.ERROR, SampleResult(error=result.error))
            return
        self.block_manager.mark_computed(sequence, end)
        recomputed = sequence.num_computed_before_preemption - start
        if recomputed > 0:
            self.stats.recomputed_tokens_total += min(recomputed, end - start)
            if result.prompt_logprobs:  # those of recomputed tokens were delivered before
                result = replace(result, prompt_logprobs=result.prompt_logprobs[recomputed:])
        if start < sequence.num_prompt_tokens <= end:
            self._waiting.release_followers(sequence)
        reason = None
        if samples:
            token_id = result.token_id
            if token_id is None:
                raise InvalidRequestError(f"no token was sampled for {sequence.seq_id}", param="results")
            sequence.append_token(token_id)
            self.stats.generated_tokens_total += 1
            num_generated = len(sequence.output_token_ids)
            if token_id in sequence.stop_token_ids and num_generated >= sequence.sampling_params.min_tokens:
                reason = FinishReason.STOP
            elif num_generated >= sequence.max_output_tokens:
                reason = FinishReason.LENGTH
        elif end == sequence.num_tokens:  # max_tokens=0: the prompt is scored, nothing is sampled
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason, result)
        elif samples or result.prompt_logprobs:
            self._emit(sequence, result)

    def _emit(self, sequence: Sequence, result: SampleResult) -> None:
        """Adds an output, which is the terminal one if the sequence is finished."""
        token_id, logprobs, reason = result.token_id, result.logprobs, sequence.finish_reason
        finished = reason is not None
        output = RequestOutput(
            sequence.request_id,
            [] if token_id is None else [token_id],
            finished,
            reason,
            sequence.num_cached_tokens,
            sequence.index,
            None if logprobs is None else [logprobs],
            result.prompt_logprobs,
            result.error,
            token_id if finished and reason is FinishReason.STOP else None,
        )
        self._outputs.append(output)

    # ---- ends

    def _end(self, sequence: Sequence, reason: FinishReason, result: SampleResult | None = None) -> None:
        """Frees the blocks of a sequence and ends it. Raises IntegrityError, and then the sequence has not ended."""
        self.block_manager.free_sequence(sequence)
        self._finish(sequence, reason, result or SampleResult())

    def _finish(self, sequence: Sequence, reason: FinishReason, result: SampleResult) -> None:
        """Ends a sequence, the only place that does: removes it from its queue and adds its terminal output."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._emit(sequence, result)
        self.stats.finished[reason.value] += 1
        if self._on_end is not None:
            self._on_end(sequence)
        self._waiting.release_followers(sequence)  # without a leader each computes its own prompt
