"""An engine without a model that fails or hangs when a prompt contains a special token.

Replicas import this module as they import the real engine.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import ModelLoadError
from minivllm.core.outputs import SampleResult
from minivllm.core.sampling_params import SamplingParams
from tests.core.fakes import FakeModel, FakeRunner

VOCABULARY = 49152
"""Vocabulary size of the default model, whose tokenizer the ingress uses."""
FAIL = 40_001
"""Makes the forward pass of a prompt with this token raise; `HANG` makes it hang."""
HANG = 40_002
STEP_S = 0.02


class FaultyRunner(FakeRunner):
    generation_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, max_model_len=4096, model=FakeModel(vocab_size=VOCABULARY))

    def precompile(self, sampling_params: SamplingParams) -> None: ...

    def execute(self, step: Any) -> list[SampleResult]:
        time.sleep(STEP_S)
        for scheduled in step.sequences:
            if FAIL in scheduled.sequence.prompt_token_ids:
                raise RuntimeError("the device fell off the bus")
            if HANG in scheduled.sequence.prompt_token_ids:
                time.sleep(3600)
        return super().execute(step)


def build_engine(config: EngineConfig) -> LLMEngine:
    return LLMEngine(config, model_runner=FaultyRunner(512, config.block_size))


def fail_to_build(config: EngineConfig) -> LLMEngine:
    raise ModelLoadError("no model 'nowhere': not a folder, not a file, and no such hub id")
