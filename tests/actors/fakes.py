"""A runner without a model for the tests of the engine's thread: paced, and able to fail or hang on demand."""

from __future__ import annotations

import threading
import time
from typing import Any

from minivllm.actors.engine_loop import EngineLoop
from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.outputs import SampleResult
from tests.core.fakes import FakeRunner

BLOCK_SIZE = 4


class PacedRunner(FakeRunner):
    """Each step takes `step_s`; while `gate` is cleared, steps wait."""

    def __init__(self, num_blocks: int = 64, *, step_s: float = 0.001) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, step: Any) -> list[SampleResult]:
        self.gate.wait()
        time.sleep(self.step_s)
        return super().execute(step)


def paced_engine(runner: PacedRunner, **config: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(block_size=BLOCK_SIZE, validate_blocks=True, **config), model_runner=runner)


async def started_loop(runner: PacedRunner, *, settings: dict[str, Any] | None = None, **config: Any) -> EngineLoop:
    loop = EngineLoop(lambda: paced_engine(runner, **config), **(settings or {}))
    await loop.start()
    return loop
