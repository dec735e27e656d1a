"""ModelRunner: a scheduled step becomes tensors, the tensors logits, the logits one sample for each sequence."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minivllm.core.attention import choose_backend
from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.attention.metadata import ModelInput, to_device
from minivllm.core.config import EngineConfig
from minivllm.core.models.backbone import ModelBody, TransformersBody, choose_body
from minivllm.core.models.loader import default_num_threads, load_model
from minivllm.core.native.memory import prefer_huge_pages
from minivllm.core.native.prefault import Prefaulter
from minivllm.core.outputs import SampleResult, TokenLogprobs
from minivllm.core.sampling.sampler import Sampler, token_logprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.output import ScheduledSequence, SchedulerOutput
from minivllm.core.sequence import Sequence
from minivllm.core.worker import memory_profiling as memory
from minivllm.core.worker.block_table import BlockTable
from minivllm.core.worker.self_check import check_unproven

logger = logging.getLogger(__name__)

MAX_LOGIT_ROWS = 256
"""Rows of prompt logits that exist at once: with a large vocabulary a whole chunk of them would fill the memory."""

UNLIMITED_CONTEXT = 2**20
"""Context of a model that sets no limit; the pool holds less in any case that matters."""


class ModelRunner:
    """The model, its KV pool, its attention backend and its sampler. Used by one thread.

    Attributes:
        num_blocks: usable blocks of the pool.
        vocab_size: width of the logits.
        max_model_len: longest context of the model itself, in tokens.
        eos_token_ids: tokens that end a text.
        generation_defaults: sampling fields that the model's makers recommend.
        default_token_budget: tokens a step that suit the device.

    Raises:
        ModelLoadError: the model cannot be loaded or served, or there is no memory for a useful pool.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        torch.set_num_threads(config.num_threads or default_num_threads())
        self.model = load_model(config)
        self.device = self.model.device
        self.default_token_budget = 8192 if self.device.type == "cuda" else 512
        self.vocab_size = self.model.vocab_size
        self.max_model_len = self.model.max_model_len or UNLIMITED_CONTEXT
        self.eos_token_ids = self.model.eos_token_ids | _tokenizer_eos(config)
        self.generation_defaults = self.model.generation_defaults
        self.attention = choose_backend(
            config.attention_backend, self.model.layers, self.model.dtype, self.model.device
        )
        layer = self.model.layers[0]
        self.kv_cache_spec = KVCacheSpec(
            num_layers=len(self.model.layers),
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            block_size=config.block_size,
            dtype=self.model.dtype,
        )
        self.sampler = Sampler(self.vocab_size, self.eos_token_ids, tokenizer=self._load_tokenizer, seed=config.seed)
        self.body: ModelBody = TransformersBody(self.model, self.attention)
        # Body and sampler stand before: to count the blocks, a GPU runs a step.
        self.kv_cache = KVCachePool(self.kv_cache_spec, self._count_blocks(), self.device)
        prefer_huge_pages(self.kv_cache.tensor)
        self.num_blocks = self.kv_cache.num_blocks
        self._block_table = BlockTable(config.block_size, self.kv_cache.padding_block_id)
        check_unproven(self)
        longest = min(self.max_model_len, self.kv_cache.num_tokens)
        self.body = choose_body(config, self.model, self.attention, self.kv_cache, longest)
        # Last: nothing can fail any more and leave it behind.
        self.prefaulter = Prefaulter.start(self.kv_cache)

    # -- what the engine calls ---------------------------------------------------------------------------------------

    def prepare(self, sequence: Sequence) -> None:
        """Makes what sampling this sequence needs.

        Raises:
            InvalidRequestError: it asks for what the sampler cannot do. Nothing is kept then.
        """
        self.sampler.prepare(sequence)

    def precompile(self, params: SamplingParams) -> None:
        """Does the slow part of `prepare` ahead, from any thread; raises the same."""
        self.sampler.precompile(params)

    def release(self, sequence: Sequence) -> None:
        """Lets go of everything held for a sequence."""
        self._block_table.release(sequence)
        self.sampler.release(sequence)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> list[SampleResult]:
        """Computes a step: K and V of its tokens are written, and a token is sampled where one is due.

        Returns:
            One result for each scheduled sequence, in order; without a token where none is due.
        """
        sampled = [scheduled for scheduled in step.sequences if scheduled.samples]
        self.sampler.start_bitmasks([scheduled.sequence for scheduled in sampled])
        model_input = self.make_input(step.sequences)
        hidden_states = self.forward(model_input)
        last_rows = model_input.last_rows
        samples = iter(self._sample(hidden_states, last_rows, step.sequences, sampled))
        results = [next(samples) if scheduled.samples else SampleResult() for scheduled in step.sequences]
        for index, scheduled in enumerate(step.sequences):
            if scheduled.sequence.sampling_params.prompt_logprobs is not None:
                first_row = int(model_input.attention.query_start_loc_cpu[index])
                scores = self._score_prompt(hidden_states, first_row, scheduled)
                if scores:
                    results[index] = replace(results[index], prompt_logprobs=scores)
        return results

    # -- the forward pass --------------------------------------------------------------------------------------------

    def make_input(self, sequences: SequenceOf[ScheduledSequence]) -> ModelInput:
        """Packs the tokens that are due. Work by sequence is kept to lists and slices; the rest is arrays."""
        starts = np.fromiter((one.start for one in sequences), np.int64, len(sequences))
        ends = np.fromiter((one.end for one in sequences), np.int64, len(sequences))
        token_ids: list[int] = []
        for one in sequences:
            token_ids += one.sequence.token_ids(one.start, one.end)
        return ModelInput.build(token_ids, starts, ends, self._block_table.tables(sequences), self.kv_cache)

    def forward(self, model_input: ModelInput) -> torch.Tensor:
        """Last hidden states (T, hidden_size); K and V of the tokens are in the pool afterwards."""
        return self.body.hidden_states(model_input)

    # -- sampling ----------------------------------------------------------------------------------------------------

    def _sample(
        self,
        hidden_states: torch.Tensor,
        last_rows: npt.NDArray[np.int64],
        sequences: SequenceOf[ScheduledSequence],
        sampled: list[ScheduledSequence],
    ) -> list[SampleResult]:
        """One result for each sequence that samples. Logits are computed for their last rows only."""
        if not sampled:
            return []
        if len(sampled) < len(hidden_states):
            rows = last_rows[[one.samples for one in sequences]]
            hidden_states = hidden_states[to_device(rows, self.device)]
        return self.sampler.sample(self.body.logits(hidden_states), [one.sequence for one in sampled])

    def _score_prompt(
        self, hidden_states: torch.Tensor, first_row: int, scheduled: ScheduledSequence
    ) -> list[TokenLogprobs]:
        """Log probabilities of the prompt tokens whose predecessors were computed in this step."""
        sequence = scheduled.sequence
        last_predecessor = min(scheduled.end, sequence.num_prompt_tokens - 1)
        found: list[TokenLogprobs] = []
        for start in range(scheduled.start, last_predecessor, MAX_LOGIT_ROWS):
            end = min(start + MAX_LOGIT_ROWS, last_predecessor)
            row = first_row + start - scheduled.start
            logits = self.body.logits(hidden_states[row : row + end - start]).float()
            targets = sequence.prompt_token_ids[start + 1 : end + 1]
            counts = [sequence.sampling_params.prompt_logprobs or 0] * len(targets)
            found += token_logprobs(logits, targets, counts)
        return found

    # -- start -------------------------------------------------------------------------------------------------------

    def _count_blocks(self) -> int:
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        if self.device.type == "cuda":
            return memory.blocks_on_cuda(self, self.config.gpu_memory_utilization)
        return memory.blocks_on_cpu(self.kv_cache_spec, self.config.cpu_kv_cache_bytes)

    def _load_tokenizer(self) -> Any:
        from minivllm.core.text.tokenizer import load_tokenizer

        return load_tokenizer(self.config)


def _tokenizer_eos(config: EngineConfig) -> frozenset[int]:
    """The tokenizer's, or nothing: a model may be served by token ids alone, without one."""
    from minivllm.core.text.tokenizer import load_tokenizer

    try:
        return load_tokenizer(config).eos_token_ids
    except Exception as error:
        logger.warning("%s: no tokenizer, so its end-of-text token is not known (%s)", config.model, error)
        return frozenset()
