"""warm_up: a few steps for nobody, so that no client waits for what happens only once."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.output import ScheduledSequence, SchedulerOutput
from minivllm.core.sequence import Sequence

if TYPE_CHECKING:
    from minivllm.core.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_SHORT = 8
_DECODES = 2


def warm_up(runner: ModelRunner, max_num_batched_tokens: int) -> None:
    """Runs a full chunk of a prompt beside a short one, then decodes both and one alone; greedy and random.

    Kernels are chosen and compiled, and buffers found, in the first such step. It writes to the first blocks of the
    pool, which nobody owns yet; scheduler and block manager do not hear of it. Call it before the first request.
    """
    started = time.monotonic()
    block_size = runner.config.block_size
    room = (runner.num_blocks - _blocks(_SHORT, block_size)) * block_size
    long = min(max_num_batched_tokens - _SHORT, min(runner.max_model_len, room) - _DECODES)
    if long < 1:
        logger.warning("not warmed up: the KV pool is too small for it")
        return
    sequences = [
        Sequence("warm-up-long", [0] * long, SamplingParams(temperature=0.0)),
        Sequence("warm-up-short", [0] * _SHORT, SamplingParams(temperature=1.0, top_p=0.9, seed=0)),
    ]
    first_block = 0
    for sequence in sequences:
        end = first_block + _blocks(sequence.num_tokens, block_size)
        sequence.block_table = list(range(first_block, end))
        first_block = end
        runner.prepare(sequence)
    with ThreadPoolExecutor(1) as executor:
        vocabulary = executor.submit(runner.sampler.warm_up)  # on the core that the steps' Python leaves idle
        _step(runner, sequences)
        _step(runner, sequences)
        _step(runner, sequences[-1:])
        vocabulary.result()
    for sequence in sequences:
        runner.release(sequence)
    logger.info("warmed up in %.1f s", time.monotonic() - started)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-(num_tokens + _DECODES) // block_size)


def _step(runner: ModelRunner, sequences: list[Sequence]) -> None:
    """Computes all that is due of the sequences, and appends what was sampled."""
    scheduled = tuple(
        ScheduledSequence(sequence, sequence.num_computed_tokens, sequence.num_tokens, samples=True)
        for sequence in sequences
    )
    step = SchedulerOutput(scheduled, sum(one.end - one.start for one in scheduled))
    for one, result in zip(scheduled, runner.execute(step), strict=True):
        one.sequence.num_computed_tokens = one.end
        if result.token_id is not None:
            one.sequence.append_token(result.token_id)
