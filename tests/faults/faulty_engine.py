"""An engine without a model that fails, hangs or corrupts its block manager when a prompt contains a special token.

Replicas import this module as they import the real engine.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import ModelLoadError
from minivllm.core.kv_cache.block_manager import BlockManager
from minivllm.core.outputs import SampleResult
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from tests.core.fakes import FakeModel, FakeRunner

VOCABULARY = 49152
"""Vocabulary size of the default model, whose tokenizer the ingress uses."""
FAIL = 40_001
"""Makes the forward pass of a prompt with this token raise; `HANG` makes it hang."""
HANG = 40_002
CORRUPT = 40_003
"""Makes the engine put a block that another sequence uses into the free queue, after `CORRUPT_AFTER` output tokens."""
CORRUPT_AFTER = 5
STEP_S = 0.02


class FaultyRunner(FakeRunner):
    generation_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, max_model_len=4096, model=FakeModel(vocab_size=VOCABULARY))

    block_manager: BlockManager

    def precompile(self, sampling_params: SamplingParams) -> None: ...

    def execute(self, step: Any) -> list[SampleResult]:
        time.sleep(STEP_S)
        for scheduled in step.sequences:
            if FAIL in scheduled.sequence.prompt_token_ids:
                raise RuntimeError("the device fell off the bus")
            if HANG in scheduled.sequence.prompt_token_ids:
                time.sleep(3600)
        results = super().execute(step)
        for scheduled in step.sequences:
            sequence = scheduled.sequence
            if CORRUPT in sequence.prompt_token_ids and len(sequence.output_token_ids) == CORRUPT_AFTER:
                self._corrupt(sequence)
        return results

    def _corrupt(self, sequence: Sequence) -> None:
        used = [owner for owner in self.block_manager.owners() if owner.state == "owned"]
        others = [owner for owner in used if sequence.request_id not in owner.request_ids]
        self.block_manager.pool.release(others[0].block_id)


def build_engine(config: EngineConfig) -> LLMEngine:
    runner = FaultyRunner(512, config.block_size)
    engine = LLMEngine(config, model_runner=runner)
    runner.block_manager = engine.block_manager
    return engine


def fail_to_build(config: EngineConfig) -> LLMEngine:
    raise ModelLoadError("no model 'nowhere': not a folder, not a file, and no such hub id")
