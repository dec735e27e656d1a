"""Number of blocks of the KV pool: as configured, or what fits in memory beside a worst-case step."""

from __future__ import annotations

import logging
import os

import torch

from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.backbone import Backbone
from minivllm.core.models.loader import LoadedModel
from minivllm.core.native.resources import available_bytes
from minivllm.core.sampling.sampler import Sampler
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from minivllm.core.worker.dummy_step import dummy_step

logger = logging.getLogger(__name__)


POOL_SHARE = 0.8
"""Part of the available memory that a KV pool may take; packed weights and the steps need the rest."""


def default_token_budget(device: torch.device) -> int:
    """Returns `max_num_batched_tokens` of a config that does not set it."""
    return 8192 if device.type == "cuda" else 512


def count_blocks(config: EngineConfig, model: LoadedModel, backbone: Backbone, sampler: Sampler) -> int:
    """Returns the usable blocks of the KV pool: `num_blocks`, or what the memory settings of `config` allow.

    Raises:
        ModelLoadError: the setting leaves too little memory for one block, or is more than the machine has.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if model.device.type == "cuda":
        return blocks_on_cuda(config, model, backbone, sampler)
    return blocks_on_cpu(model.kv_cache_spec(config.block_size), config.cpu_kv_cache_bytes)


def _blocks_in(num_bytes: int, spec: KVCacheSpec, setting: str) -> int:
    """Returns the usable blocks of a pool of `num_bytes`, the padding block included. Raises as `count_blocks`."""
    num_blocks = num_bytes // spec.block_bytes - 1
    if num_blocks < 1:
        raise ModelLoadError(
            f"{setting} leaves {max(num_bytes, 0):,} bytes for the KV pool, but one block of {spec.block_size} tokens "
            f"takes {spec.block_bytes:,} and one more is needed for padding: raise {setting} or lower block_size"
        )
    return num_blocks


def blocks_on_cpu(spec: KVCacheSpec, num_bytes: int) -> int:
    """Returns the blocks in `num_bytes`, the setting `cpu_kv_cache_bytes`, or in what is left of the memory if less.

    Raises as `count_blocks`.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > physical:
        raise ModelLoadError(f"cpu_kv_cache_bytes={num_bytes} is more than the memory of this machine, {physical}")
    available = available_bytes()
    if available is not None and num_bytes > POOL_SHARE * available:
        num_bytes = int(POOL_SHARE * available)
        logger.warning(
            "cpu_kv_cache_bytes lowered to %d: machine and control groups have %d bytes left", num_bytes, available
        )
    return _blocks_in(num_bytes, spec, "cpu_kv_cache_bytes")


def blocks_on_cuda(config: EngineConfig, model: LoadedModel, backbone: Backbone, sampler: Sampler) -> int:
    """Returns the blocks in what `gpu_memory_utilization` leaves beside the weights and the worst-case steps.

    Runs those steps and reads their peak. Memory that other processes use on the device counts against the share.
    """
    device = model.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_steps(config, model, backbone, sampler)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    left = int(total * config.gpu_memory_utilization) - peak - outside
    message = "%s: %.2f GiB in all, %.2f at the peak of a step, %.2f outside of torch, %.2f left for the KV pool"
    logger.info(message, device, *(num_bytes / 2**30 for num_bytes in (total, peak, outside, max(left, 0))))
    return _blocks_in(left, model.kv_cache_spec(config.block_size), "gpu_memory_utilization")


def run_worst_steps(config: EngineConfig, model: LoadedModel, backbone: Backbone, sampler: Sampler) -> None:
    """Runs the two steps that need the most memory, on a pool of one block.

    The first is a prompt chunk that fills the token budget at the end of the longest context. The second decodes
    `max_num_seqs` sequences of the longest context with the most expensive sampling parameters.
    """
    longest = min(config.max_model_len or model.max_model_len, model.max_model_len)
    budget = config.max_num_batched_tokens or default_token_budget(model.device)
    kv_cache = KVCachePool(model.kv_cache_spec(config.block_size), 1, model.device)
    kv_cache.tensor.zero_()
    dummy_step(backbone, kv_cache, [min(budget, longest)], [longest])
    num_decodes = min(config.max_num_seqs, budget)
    logits = dummy_step(backbone, kv_cache, [1] * num_decodes, [longest] * num_decodes)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=0, logprobs=1)
    sequences = [Sequence(f"memory-{row}", [0], params) for row in range(num_decodes)]
    for sequence in sequences:
        sampler.prepare(sequence)
    sampler.sample(logits, sequences)
    for sequence in sequences:
        sampler.release(sequence)
