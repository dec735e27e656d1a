"""LLMEngine: scheduler, block manager and model runner in one loop. Token ids in, token ids out; one thread.

A step is: schedule, execute, update.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

from minivllm.core.config import EngineConfig, SchedulerConfig
from minivllm.core.errors import EngineDeadError, IntegrityError, InvalidRequestError
from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.outputs import RequestOutput, SampleResult
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.output import SchedulerOutput
from minivllm.core.scheduler.scheduler import Scheduler
from minivllm.core.sequence import Sequence
from minivllm.core.stats import EngineStats

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes the steps: the ModelRunner, or a fake in tests."""

    num_blocks: int  # usable blocks of the KV pool
    vocab_size: int  # width of the logits: token ids from 0 up to this exist
    max_model_len: int  # longest context of the model itself, in tokens
    eos_token_ids: frozenset[int]  # tokens that end a text
    generation_defaults: dict[str, Any]  # fields of SamplingParams that the model's authors recommend
    default_token_budget: int  # tokens per step that suit the device

    def prepare(self, sequence: Sequence) -> None:
        """Makes what sampling this sequence needs. Raises InvalidRequestError if that cannot be done."""

    def precompile(self, sampling_params: SamplingParams) -> None:
        """Does the slow part of `prepare` ahead, from any thread. Raises the same."""

    def execute(self, scheduler_output: SchedulerOutput) -> list[SampleResult]:
        """Computes a step. Returns one result per sequence, in order."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Drops all state of a sequence. Called once, when it has ended."""


class LLMEngine:
    """One model on one KV pool.

    `engine.config` is a copy with `num_blocks`, `max_model_len` and `max_num_batched_tokens` filled in. The model
    runner is built from the config unless given. Raises InvalidRequestError if `max_model_len` is more than the model
    or the pool can hold, ModelLoadError if the model cannot be loaded.
    """

    def __init__(self, config: EngineConfig, model_runner: Runner | None = None) -> None:
        if model_runner is None:
            from minivllm.core.worker.model_runner import build_model_runner  # here, since it loads torch

            model_runner = build_model_runner(config)
        self.model_runner = model_runner
        self.block_manager = BlockManager(
            model_runner.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            validate=config.validate_blocks,
        )
        resolved = {
            "num_blocks": model_runner.num_blocks,
            "max_model_len": _resolve_max_model_len(config, model_runner, self.block_manager),
            "max_num_batched_tokens": config.max_num_batched_tokens or model_runner.default_token_budget,
        }
        self.config = config.model_copy(update=resolved)
        self.scheduler = Scheduler(self.config, self.block_manager, model_runner.eos_token_ids, model_runner.release)
        self.is_dead = False

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queues a request, or raises and keeps nothing of it. The other arguments are those of `Sequence`.

        Raises InvalidRequestError (`param` names the field), NeverFitsError, EngineOverloadedError, EngineDeadError.
        """
        if self.is_dead:
            raise EngineDeadError("the engine has failed and takes no more requests")
        if not isinstance(sampling_params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, not {type(sampling_params).__name__}", param="sampling_params"
            )
        self._check_ids(prompt_token_ids)
        samples = [
            Sequence(
                request_id,
                prompt_token_ids,
                sampling_params if index == 0 else sampling_params.model_copy(update={"prompt_logprobs": None}),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                index=index,
            )
            for index in range(sampling_params.n)
        ]
        self.scheduler.check_new(samples[0])  # first, so that nothing is prepared for a live id
        with ExitStack() as undo:
            for sequence in samples:
                self.model_runner.prepare(sequence)
                undo.callback(self.model_runner.release, sequence)
            self.scheduler.add(*samples)
            undo.pop_all()

    def abort_request(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one sample of it; its terminal output comes with the next step. Unknown ids: a no-op."""
        try:
            self.scheduler.abort(request_id, index)
        except IntegrityError as error:
            self._die(error)

    def has_unfinished_requests(self) -> bool:
        """Returns True until `step` has returned the terminal output of every request."""
        return self.scheduler.has_unfinished()

    # ---- the step

    def step(self) -> list[RequestOutput]:
        """Computes one step, and returns the new outputs.

        After a failed forward pass or a broken block invariant the engine is dead: every live request ends with an
        EngineDeadError in its output. With `validate_blocks` all invariants are checked before the results are used.
        """
        if self.is_dead:
            return self.scheduler.take_outputs()
        try:
            step = self.scheduler.schedule()
            try:
                results = self.model_runner.execute(step) if step.sequences else []
            except Exception as error:
                self._die(error)
                return self.scheduler.take_outputs()
            except BaseException:  # Ctrl-C: the step did not happen, the engine goes on
                self.scheduler.close_step()
                raise
            if self.config.validate_blocks:
                self.block_manager.check_integrity()
            return self.scheduler.update_from_output(step, results)
        except IntegrityError as error:
            self._die(error)
            return self.scheduler.take_outputs()

    # ---- settings and state

    def apply_settings(self, **limits: int | None) -> None:
        """Changes limits of the running engine: `max_waiting_requests`, `max_waiting_tokens`; None is no limit.

        Raises InvalidRequestError on another name, pydantic's ValidationError on a wrong value (both ValueErrors), and
        then changes nothing.
        """
        for name in sorted(limits.keys() - {"max_waiting_requests", "max_waiting_tokens"}):
            raise InvalidRequestError(f"{name} cannot be changed while the engine runs", param=name)
        self.config = EngineConfig.model_validate(self.config.model_dump() | limits)
        pool_tokens = self.block_manager.num_blocks * self.block_manager.block_size
        self.scheduler.config = SchedulerConfig.resolve(self.config, pool_tokens)

    def stats(self) -> EngineStats:
        """Returns a snapshot of gauges and counters."""
        manager, scheduler = self.block_manager, self.scheduler
        free = manager.get_num_free_blocks()
        return replace(
            scheduler.stats,
            num_free_blocks=free,
            num_used_blocks=manager.num_blocks - free,
            num_total_blocks=manager.num_blocks,
            num_cached_blocks=len(manager.pool.evictable),
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            block_size=manager.block_size,
            max_model_len=scheduler.config.max_model_len,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            max_waiting_requests=scheduler.config.max_waiting_requests,
            max_waiting_tokens=scheduler.config.max_waiting_tokens,
            rejections=dict(scheduler.stats.rejections),
            finished=dict(scheduler.stats.finished),
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes. False, and nothing changed, while a request uses one."""
        return self.block_manager.reset_prefix_cache()

    # ---- inside

    def _check_ids(self, prompt_token_ids: object) -> None:
        if not isinstance(prompt_token_ids, (list, tuple)):
            raise InvalidRequestError("the prompt must be a list of token ids", param="prompt")
        size = self.model_runner.vocab_size
        for token_id in prompt_token_ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                message = f"token id {token_id!r:.50} is not an integer from 0 to {size - 1}"
                raise InvalidRequestError(message, param="prompt")

    def _die(self, error: Exception) -> None:
        """Stops the engine. A broken invariant may mean that one request reads the KV of another."""
        message = f"the forward pass failed: {type(error).__name__}: {error}"
        if isinstance(error, IntegrityError):
            self.scheduler.stats.integrity_violations_total += 1
            message = f"a KV block invariant is broken: {error.message}"
        logger.error("%s; every request ends with an error", message, exc_info=error)
        self.is_dead = True
        self.scheduler.fail_all(EngineDeadError(message))


def _resolve_max_model_len(config: EngineConfig, runner: Runner, block_manager: BlockManager) -> int:
    """Returns the context length in force: `max_model_len`, by default the longest that model and pool can hold.

    Raises InvalidRequestError naming the longest if the one configured is longer.
    """
    pool_tokens = block_manager.num_blocks * block_manager.block_size
    largest = min(runner.max_model_len, pool_tokens)
    wanted = config.max_model_len
    if wanted is None and largest < runner.max_model_len:
        logger.warning("max_model_len lowered from %d to %d, which the KV pool can hold", runner.max_model_len, largest)
    if wanted is not None and (wanted > runner.max_model_len or not block_manager.can_allocate(wanted)):
        limit = "the KV pool holds" if pool_tokens < runner.max_model_len else "the model was trained for"
        message = f"max_model_len is {wanted}, but {limit} {largest} tokens; the largest possible is {largest}"
        raise InvalidRequestError(message, param="max_model_len", largest=largest)
    return wanted or largest
