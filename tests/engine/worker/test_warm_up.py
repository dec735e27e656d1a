"""warm_up: runs on the KV pool before the first request and leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.stats import EngineStats
from minivllm.core.worker.model_runner import build_model_runner
from minivllm.core.worker.warm_up import warm_up
from tests.engine.tiny_models import TINY, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY["llama"](), tmp_path_factory.mktemp("models") / "llama")


def started(folder: Path, num_blocks: int, *, warm: bool) -> LLMEngine:
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=4, num_blocks=num_blocks, validate_blocks=True, num_threads=1
    )
    runner = build_model_runner(config)
    engine = LLMEngine(config, runner)
    if warm:
        warm_up(runner, engine.scheduler.token_budget)
    return engine


def outputs(engine: LLMEngine) -> list[int]:
    engine.add_request("r", list(range(1, 20)), SamplingParams(max_tokens=12, seed=3))
    token_ids: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            token_ids += output.new_token_ids
    return token_ids


def test_warm_up_changes_no_output_and_no_counter(folder: Path) -> None:
    warm, cold = started(folder, 64, warm=True), started(folder, 64, warm=False)
    assert warm.stats() == cold.stats()
    assert warm.stats() == EngineStats(
        num_free_blocks=64, num_total_blocks=64, block_size=4, max_model_len=warm.scheduler.max_model_len
    )
    assert outputs(warm) == outputs(cold)


def test_warm_up_leaves_no_sequence_in_the_runner(folder: Path) -> None:
    engine = started(folder, 64, warm=True)
    # A second warm-up uses the same request ids, which must be free again.
    warm_up(engine.model_runner, engine.scheduler.token_budget)  # type: ignore[arg-type]
    assert outputs(engine)


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5, 7])
def test_warm_up_fits_in_a_tiny_pool(folder: Path, num_blocks: int) -> None:
    engine = started(folder, num_blocks, warm=True)
    assert engine.stats().num_free_blocks == num_blocks
