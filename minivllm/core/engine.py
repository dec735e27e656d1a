"""LLMEngine: scheduler, block manager and model runner in one loop. Token ids in, token ids out; one thread.

A step is: schedule, execute, update. Everything else here guards the three.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from minivllm.core.config import EngineConfig
from minivllm.core.errors import EngineDeadError, IntegrityError, InvalidRequestError
from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.outputs import RequestOutput, SampleResult
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.output import SchedulerOutput
from minivllm.core.scheduler.scheduler import DEFAULT_TOKEN_BUDGET, Scheduler
from minivllm.core.sequence import Sequence
from minivllm.core.stats import EngineStats

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What computes the steps: the ModelRunner, or in tests something that only pretends to."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Width of the logits: ids from 0 to this exist."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest context of the model itself."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def prepare(self, sequence: Sequence) -> None:
        """Makes what sampling this sequence needs; InvalidRequestError if it asks for what cannot be done."""

    def execute(self, step: SchedulerOutput) -> SequenceOf[int | SampleResult | None]:
        """Computes a step; one result for each of its sequences, in order."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Lets go of everything held for a sequence. Called once, when it has ended."""


class LLMEngine:
    """One model on one pool.

    Args:
        config: `engine.config` is a copy with `num_blocks`, `max_model_len` and `max_num_batched_tokens` filled in.
        model_runner: made from the config unless given.

    Raises InvalidRequestError if `max_model_len` is more than the model or the pool can hold, ModelLoadError if there
    is no such model.
    """

    def __init__(self, config: EngineConfig, model_runner: Runner | None = None) -> None:
        if model_runner is None:
            from minivllm.core.worker.model_runner import build_model_runner  # here, since it loads torch

            model_runner = build_model_runner(config)
        self.model_runner = model_runner
        pool_tokens = model_runner.num_blocks * config.block_size
        budget = getattr(model_runner, "default_token_budget", DEFAULT_TOKEN_BUDGET)
        self.config = config.model_copy(
            update={
                "num_blocks": model_runner.num_blocks,
                "max_model_len": resolve_max_model_len(config.max_model_len, model_runner.max_model_len, pool_tokens),
                "max_num_batched_tokens": config.max_num_batched_tokens or budget,
            }
        )
        self.block_manager = BlockManager(
            model_runner.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            validate=config.validate_blocks,
        )
        self.scheduler = Scheduler(
            self.config, self.block_manager, model_runner.eos_token_ids, on_end=model_runner.release
        )
        self.is_dead = False

    # ---------------------------------------------------------------- requests

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
        """Queues a request, or raises and keeps nothing of it.

        Args:
            request_id: not alive in this engine; an ended one may come again.
            prompt_token_ids: at least one, each below the vocabulary's size.
            priority: lower goes first.
            cache_salt: shares cached prefixes only with requests of the same salt.

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
                request_id if sampling_params.n == 1 else f"{request_id}/{index}",
                prompt_token_ids,
                sampling_params if index == 0 else sampling_params.model_copy(update={"prompt_logprobs": None}),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                parent_request_id=request_id,
                index=index,
            )
            for index in range(sampling_params.n)
        ]
        self._prepare_and_add(samples)

    def abort_request(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one sample of it; its terminal output comes with the next step. Unknown ids: a no-op."""
        self.scheduler.abort(request_id, index)

    def has_unfinished_requests(self) -> bool:
        """True until the terminal output of every request has been handed out."""
        return self.scheduler.has_unfinished()

    # ---------------------------------------------------------------- the step

    def step(self) -> list[RequestOutput]:
        """Computes one step, and returns what is new.

        A failed forward pass ends every request with an EngineDeadError in its output, and the engine with them.
        """
        try:
            step = self.scheduler.schedule()
        except IntegrityError as error:
            self.scheduler.contain(error)
            step = self.scheduler.schedule()
        try:
            results = self.model_runner.execute(step) if step.sequences else []
        except Exception as error:
            return self._die(error)
        except BaseException:  # Ctrl-C: the step did not happen, the engine is still whole
            self.scheduler.discard_step()
            raise
        outputs = self.scheduler.update_from_output(step, results)
        if self.config.validate_blocks:
            self._check_integrity()
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot: gauges of now, and sums since the start."""
        manager, counters = self.block_manager, self.scheduler.counters
        free = manager.get_num_free_blocks()
        return EngineStats(
            num_free_blocks=free,
            num_used_blocks=manager.num_blocks - free,
            num_total_blocks=manager.num_blocks,
            num_cached_blocks=len(manager.pool.evictable),
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            block_size=manager.block_size,
            max_model_len=self.scheduler.max_model_len,
            steps_total=counters.steps,
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            computed_tokens_total=counters.computed_tokens,
            prefix_cache_query_tokens_total=counters.cache_query_tokens,
            prefix_cache_hit_tokens_total=counters.cache_hit_tokens,
            recomputed_tokens_total=counters.recomputed_tokens,
            preemptions_total=counters.preemptions,
            integrity_violations_total=counters.integrity_violations,
            requests_total=counters.requests,
            rejections=dict(counters.rejections),
            finished=dict(counters.finished),
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes. False, and nothing changed, while a request uses one."""
        return self.block_manager.reset_prefix_cache()

    # ---------------------------------------------------------------- inside

    def _check_ids(self, prompt_token_ids: object) -> None:
        if not isinstance(prompt_token_ids, (list, tuple)):
            raise InvalidRequestError("the prompt must be a list of token ids", param="prompt")
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
        size = self.model_runner.vocab_size
        for token_id in prompt_token_ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise InvalidRequestError(
                    f"token id {token_id!r:.50} is not a whole number from 0 to {size - 1}", param="prompt"
                )

    def _prepare_and_add(self, samples: list[Sequence]) -> None:
        self.scheduler.check_new(samples)  # first: preparing a live id again would replace its sampler state
        prepared: list[Sequence] = []
        try:
            for sequence in samples:
                self.model_runner.prepare(sequence)
                prepared.append(sequence)
            self.scheduler.add(*samples)
        except BaseException:
            for sequence in prepared:
                self.model_runner.release(sequence)
            raise

    def _die(self, error: Exception) -> list[RequestOutput]:
        logger.error("the forward pass failed; every request ends with an error", exc_info=error)
        self.is_dead = True
        return self.scheduler.fail_all(EngineDeadError(f"the forward pass failed: {type(error).__name__}: {error}"))

    def _check_integrity(self) -> None:
        """Audits the ledger after a step. What is broken is contained; its requests end with the next step."""
        try:
            self.block_manager.check_integrity()
        except IntegrityError as error:
            self.scheduler.contain(error)


def resolve_max_model_len(wanted: int | None, model_limit: int, pool_tokens: int) -> int:
    """The context length in force. What was asked for is held or refused; unasked, it is what fits.

    Raises InvalidRequestError naming the largest length that would be possible.
    """
    largest = min(model_limit, pool_tokens)
    if wanted is None:
        if pool_tokens < model_limit:
            logger.warning("max_model_len lowered from %d to %d, which the KV pool can hold", model_limit, largest)
        return largest
    if wanted > largest:
        owner = "the KV pool holds" if pool_tokens < model_limit else "the model was made for"
        raise InvalidRequestError(
            f"max_model_len is {wanted}, but {owner} {largest} tokens; the largest possible is {largest}",
            param="max_model_len",
            largest=largest,
        )
    return wanted
