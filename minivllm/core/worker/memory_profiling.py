"""How many blocks the KV pool may have: what was set on a CPU, what is left after a worst step on CUDA."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.errors import ModelLoadError
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence

if TYPE_CHECKING:
    from minivllm.core.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def blocks_in(num_bytes: int, spec: KVCacheSpec, setting: str) -> int:
    """Usable blocks of a pool of `num_bytes`, the padding block paid from them too.

    Raises:
        ModelLoadError: not even one fits; names `setting`, which the bytes come from.
    """
    num_blocks = num_bytes // spec.block_bytes - 1
    if num_blocks < 1:
        raise ModelLoadError(
            f"{setting} leaves {max(num_bytes, 0):,} bytes for the KV pool, but one block of {spec.block_size} tokens "
            f"takes {spec.block_bytes:,} and one more is needed for padding: raise {setting} or lower block_size"
        )
    return num_blocks


def blocks_on_cpu(spec: KVCacheSpec, num_bytes: int) -> int:
    """Blocks in `cpu_kv_cache_bytes`.

    Raises:
        ModelLoadError: too few bytes for one block, or more than the machine has.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > physical:
        raise ModelLoadError(f"cpu_kv_cache_bytes={num_bytes} is more than the memory of this machine, {physical}")
    return blocks_in(num_bytes, spec, "cpu_kv_cache_bytes")


def blocks_on_cuda(runner: ModelRunner, utilization: float) -> int:
    """Blocks in what `gpu_memory_utilization` leaves after the weights and the worst step, which is tried out.

    Memory that other processes hold on this device counts against the share.
    """
    device = runner.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_steps(runner)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    left = int(total * utilization) - peak - others
    logger.info(
        "%s: %.2f GiB in all, %.2f GiB at the peak of a step, %.2f GiB outside of torch, %.2f GiB left for the KV pool",
        device,
        total / 2**30,
        peak / 2**30,
        others / 2**30,
        max(left, 0) / 2**30,
    )
    return blocks_in(left, runner.kv_cache_spec, "gpu_memory_utilization")


@torch.inference_mode()
def run_worst_steps(runner: ModelRunner) -> None:
    """Runs the two steps that need the most memory: a prompt that fills the token budget at the end of the longest
    context, and as many decodes of that length as may run at once, each sampled by the costliest way.

    All block tables name the only block of a pool made for the occasion: the values mean nothing, the shapes do.
    """
    config = runner.config
    longest = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
    budget = config.max_num_batched_tokens or runner.default_token_budget
    pool = KVCachePool(runner.kv_cache_spec, 1, runner.device)
    pool.tensor.zero_()
    runner.forward(_input_of(pool, [min(budget, longest)], [longest]))
    rows = min(config.max_num_seqs, budget)
    hidden_states = runner.forward(_input_of(pool, [1] * rows, [longest] * rows))
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=0, logprobs=1)
    sequences = [Sequence(f"memory-{row}", [0], params) for row in range(rows)]
    try:
        for sequence in sequences:
            runner.sampler.prepare(sequence)
        runner.sampler.sample(runner.body.logits(hidden_states), sequences)
    finally:
        for sequence in sequences:
            runner.sampler.release(sequence)


def _input_of(pool: KVCachePool, query_lens: list[int], context_lens: list[int]) -> ModelInput:
    """Sequences of these lengths, every one of them in block 0."""
    ends = np.array(context_lens, dtype=np.int64)
    starts = ends - np.array(query_lens, dtype=np.int64)
    tables = np.zeros((len(ends), -(-max(context_lens) // pool.block_size)), dtype=np.int32)
    return ModelInput.build([0] * int((ends - starts).sum()), starts, ends, tables, pool)
