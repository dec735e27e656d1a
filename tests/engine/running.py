"""Runs an engine to completion and records the logits it samples from."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import torch

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **settings})


def shuffle_free_blocks(engine: LLMEngine, seed: int = 0) -> None:
    """Shuffles the free blocks, so that logical and physical block ids differ."""
    manager = engine.block_manager
    blocks = manager.allocate_blocks(manager.num_blocks)
    random.Random(seed).shuffle(blocks)
    manager.free_blocks(blocks)


def poison_unused(engine: LLMEngine) -> None:
    """Fills every free block that is not cached with NaN, the padding block included."""
    pool = engine.model_runner.kv_cache
    free = [owner.block_id for owner in engine.block_manager.owners() if owner.state == "free"]
    pool.poison([*free, pool.padding_block_id])


class WatchedRun:
    """Runs an engine and records tokens and logits per request.

    Poisons all unused blocks before every step. Blocks in use contain NaN beyond the written tokens.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.engine = LLMEngine(config)
        shuffle_free_blocks(self.engine)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logits: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.finish_reasons: dict[str, str] = {}
        self._watch(self.engine.model_runner.sampler)

    def _watch(self, sampler: Any) -> None:
        sample = sampler.sample

        def watched(logits: torch.Tensor, sequences: list[Any]) -> Any:
            for row, sequence in zip(logits.float().clone(), sequences, strict=True):
                self.logits[sequence.seq_id].append(row)
            return sample(logits, sequences)

        sampler.sample = watched

    def add(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self.engine.add_request(request_id, prompt, params)

    def step(self) -> None:
        poison_unused(self.engine)
        for output in self.engine.step():
            self.tokens[output.request_id] += output.new_token_ids
            if output.finished:
                if output.error is not None:
                    raise output.error
                self.finish_reasons[output.request_id] = str(output.finish_reason)

    def run(self) -> None:
        """Runs all requests on a pool full of NaN."""
        self.engine.model_runner.kv_cache.poison()
        self.run_on()

    def run_on(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()
