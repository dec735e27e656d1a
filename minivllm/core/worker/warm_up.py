"""warm_up: runs a few throw-away steps so that the first client does not pay one-time costs."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.core.worker.dummy_step import dummy_step

if TYPE_CHECKING:
    from minivllm.core.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_SHORT_LEN = 8
_NUM_DECODES = 2


def warm_up(runner: ModelRunner, max_num_batched_tokens: int) -> None:
    """Runs a full chunk of a prompt beside a short one, then decodes both, then one alone; greedy and random.

    Such steps choose and compile kernels and allocate buffers. They write to the first blocks of the pool without the
    block manager, so call it before the first request.
    """
    started = time.monotonic()
    longest = min(runner.max_model_len, runner.kv_cache.num_tokens) - _NUM_DECODES
    long_len = min(max_num_batched_tokens - _SHORT_LEN, longest)
    if long_len < 1:
        logger.warning("not warmed up: the KV pool or the token budget is too small")
        return
    short_len = min(_SHORT_LEN, longest)
    sequences = [
        Sequence("warm-up-random", [0], SamplingParams(temperature=1.0, top_p=0.9, seed=0)),
        Sequence("warm-up-greedy", [0], SamplingParams(temperature=0.0)),
    ]
    for sequence in sequences:
        runner.prepare(sequence)
    run = partial(dummy_step, runner.backbone, runner.kv_cache, max_seq_len=max(long_len, short_len) + _NUM_DECODES)
    steps = (
        ((long_len, short_len), (long_len, short_len)),
        ((1, 1), (long_len + 1, short_len + 1)),
        ((1,), (long_len + 2,)),
    )
    with ThreadPoolExecutor(1) as executor:
        # On the core that the Python code of the steps leaves idle.
        vocabulary = executor.submit(runner.sampler.warm_up)
        for query_lens, seq_lens in steps:
            runner.sampler.sample(run(query_lens, seq_lens), sequences[: len(query_lens)])
        vocabulary.result()
    for sequence in sequences:
        runner.release(sequence)
    logger.info("warmed up in %.1f s", time.monotonic() - started)
