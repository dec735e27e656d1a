"""ModelRunner: runs a scheduled step. Builds the input tensors, runs the model, samples one token per sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import torch

from minivllm.core.attention import choose_backend
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.attention.metadata import ModelInput, to_device
from minivllm.core.config import EngineConfig
from minivllm.core.errors import IntegrityError
from minivllm.core.models.backbone import Backbone, TransformersBackbone, choose_backbone
from minivllm.core.models.loader import LoadedModel, load_model
from minivllm.core.native.prefault import Prefaulter
from minivllm.core.native.resources import prefer_huge_pages, usable_cores
from minivllm.core.outputs import SampleResult, TokenLogprobs
from minivllm.core.sampling.sampler import Sampler, token_logprobs
from minivllm.core.scheduler.output import ScheduledSequence, SchedulerOutput
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import load_tokenizer
from minivllm.core.worker import memory_profiling
from minivllm.core.worker.block_table import BlockTable
from minivllm.core.worker.self_check import check_against_transformers

logger = logging.getLogger(__name__)

MAX_LOGIT_ROWS = 256
"""Rows of prompt logits computed at once, which bounds their memory when the vocabulary is large."""


def build_model_runner(config: EngineConfig) -> ModelRunner:
    """Loads the model, allocates its KV pool and builds the runner.

    Raises:
        ModelLoadError: the model cannot be loaded or served, or there is too little memory for the pool.
    """
    torch.set_num_threads(config.num_threads or usable_cores())
    model = load_model(config)
    attention = choose_backend(config.attention_backend, model.layers, model.dtype, model.device)
    sampler = _build_sampler(config, model)
    unoptimized = TransformersBackbone(model, attention)
    num_blocks = memory_profiling.count_blocks(config, model, unoptimized, sampler)
    kv_cache = KVCachePool(model.kv_cache_spec(config.block_size), num_blocks, model.device)
    prefer_huge_pages(kv_cache.tensor)
    check_against_transformers(model, unoptimized, config.block_size)
    backbone = choose_backbone(config, model, attention, kv_cache)
    logger.info("backbone: %s", backbone.name)
    return ModelRunner(model, backbone, kv_cache, sampler)


def _build_sampler(config: EngineConfig, model: LoadedModel) -> Sampler:
    eos_token_ids = model.eos_token_ids
    try:
        eos_token_ids |= load_tokenizer(config).eos_token_ids
    except Exception as error:  # A model without a tokenizer can be served by token ids.
        logger.warning("%s: no tokenizer, so its end-of-text token is not known (%s)", config.model, error)
    return Sampler(model.vocab_size, eos_token_ids, tokenizer=partial(load_tokenizer, config), seed=config.seed)


class ModelRunner:
    """A backbone, its KV pool and a sampler. Used by one thread; see `build_model_runner`.

    Attributes:
        prepare, precompile: see `Sampler`.
        prefaulter: touches the pages of the pool in the background, or None.
        num_blocks: usable blocks of the pool.
        max_model_len: longest context of the model itself, in tokens.
        generation_defaults: sampling fields of the model's generation_config.
        default_token_budget: `max_num_batched_tokens` that suits the device.
    """

    def __init__(self, model: LoadedModel, backbone: Backbone, kv_cache: KVCachePool, sampler: Sampler) -> None:
        self.backbone = backbone
        self.kv_cache = kv_cache
        self.sampler = sampler
        self.prepare, self.precompile = sampler.prepare, sampler.precompile
        self.prefaulter = Prefaulter.start(kv_cache)
        self.num_blocks = kv_cache.num_blocks
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.eos_token_ids = sampler.eos_token_ids
        self.generation_defaults = model.generation_defaults
        self.default_token_budget = memory_profiling.default_token_budget(kv_cache.device)
        self._block_table = BlockTable(kv_cache.block_size, kv_cache.padding_block_id)

    def release(self, sequence: Sequence) -> None:
        """Frees the worker's state of a sequence."""
        self._block_table.release(sequence)
        self.sampler.release(sequence)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> list[SampleResult]:
        """Runs a step: writes K and V of its tokens, and samples for the sequences with `samples`.

        Returns:
            One result per scheduled sequence, in order; without a token for those that do not sample.
        """
        sampling = [scheduled.sequence for scheduled in step.sequences if scheduled.samples]
        self.sampler.start_bitmasks(sampling)
        model_input = self._build_input(step.sequences)
        if step.slot_mapping is not None and step.slot_mapping != model_input.attention.slot_mapping.tolist():
            raise IntegrityError("the block tables of the runner differ from those of the block manager")
        hidden_states = self.backbone.hidden_states(model_input)
        samples: Iterator[SampleResult] = iter(())
        if sampling:
            rows = model_input.last_rows[[scheduled.samples for scheduled in step.sequences]]
            are_all = len(rows) == len(hidden_states)
            last = hidden_states if are_all else hidden_states[to_device(rows, self.kv_cache.device)]
            samples = iter(self.sampler.sample(self.backbone.logits(last), sampling))
        results = [next(samples) if scheduled.samples else SampleResult() for scheduled in step.sequences]
        for index, scheduled in enumerate(step.sequences):
            if scheduled.sequence.sampling_params.prompt_logprobs is not None:
                first_row = int(model_input.attention.query_start_loc[index])
                results[index].prompt_logprobs = self._prompt_logprobs(hidden_states, first_row, scheduled) or None
        return results

    def _build_input(self, sequences: SequenceOf[ScheduledSequence]) -> ModelInput:
        starts = np.fromiter((scheduled.start for scheduled in sequences), np.int64, len(sequences))
        ends = np.fromiter((scheduled.end for scheduled in sequences), np.int64, len(sequences))
        token_ids: list[int] = []
        for sequence, start, end, *_ in sequences:
            token_ids += sequence.token_ids(start, end)
        return ModelInput.build(token_ids, starts, ends, self._block_table.tables(sequences), self.kv_cache)

    def _prompt_logprobs(
        self, hidden_states: torch.Tensor, first_row: int, scheduled: ScheduledSequence
    ) -> list[TokenLogprobs]:
        """Returns log probabilities of the prompt tokens whose predecessors are computed in this step."""
        sequence = scheduled.sequence
        last_predecessor = min(scheduled.end, sequence.num_prompt_tokens - 1)
        logprobs: list[TokenLogprobs] = []
        for start in range(scheduled.start, last_predecessor, MAX_LOGIT_ROWS):
            end = min(start + MAX_LOGIT_ROWS, last_predecessor)
            row = first_row + start - scheduled.start
            logits = self.backbone.logits(hidden_states[row : row + end - start]).float()
            targets = sequence.prompt_token_ids[start + 1 : end + 1]
            logprobs += token_logprobs(logits, targets, [sequence.sampling_params.prompt_logprobs or 0] * len(targets))
        return logprobs
