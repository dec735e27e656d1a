"""Every supported architecture against transformers: chunked prefill, mixed batches, shuffled blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from minivllm.core.config import EngineConfig
from tests.engine.running import WatchedRun, greedy, poison
from tests.engine.tiny_models import TINY, VOCAB_SIZE, reference_logits, reference_model, save_tiny

PROMPT_LENGTHS = (1, 4, 7, 23, 38)
MAX_TOKENS = 14


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(make_config(), root / name) for name, make_config in TINY.items()}


def prompts() -> dict[str, list[int]]:
    rng = random.Random(1)
    return {f"r{length}": [rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS}


def run_all(config: EngineConfig) -> WatchedRun:
    """Runs all prompts; some join while others decode, so that prefill chunks and decodes share batches."""
    run = WatchedRun(config)
    texts = list(prompts().items())
    for request_id, prompt in texts[:2]:
        run.add(request_id, prompt, greedy(MAX_TOKENS))
    poison(run.engine.model_runner.kv_cache)
    run.step()
    run.step()
    for request_id, prompt in texts[2:]:
        run.add(request_id, prompt, greedy(MAX_TOKENS))
    run.run_on()
    return run


def config_for(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "block_size": 4,
            "num_blocks": 60,
            "max_num_batched_tokens": 11,
            "enable_prefix_caching": False,
            "validate_blocks": True,
            **settings,
        }
    )


def largest_difference(run: WatchedRun, folder: Path) -> float:
    """Returns the largest difference of any logit, in standard deviations of the logits."""
    model = reference_model(folder)
    worst = 0.0
    for request_id, prompt in prompts().items():
        tokens = run.tokens[request_id]
        assert len(tokens) == MAX_TOKENS
        expected = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack(run.logits[request_id])
        assert torch.isfinite(ours).all()
        worst = max(worst, float((ours - expected).abs().max() / expected.std()))
        assert tokens == ours.argmax(dim=-1).tolist()
    return worst


@pytest.mark.parametrize("name", TINY)
def test_mixed_batches_match_one_forward_pass_of_transformers(name: str, folders: dict[str, Path]) -> None:
    run = run_all(config_for(folders[name]))
    assert largest_difference(run, folders[name]) < 1e-4


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_torch_backends_support_sliding_window_and_grouped_queries(backend: str, folders: dict[str, Path]) -> None:
    run = run_all(config_for(folders["mistral-window"], attention_backend=backend))
    assert largest_difference(run, folders["mistral-window"]) < 1e-4


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_logits_are_independent_of_the_block_size(block_size: int, folders: dict[str, Path]) -> None:
    num_blocks = -(-60 // block_size) * len(PROMPT_LENGTHS)
    run = run_all(config_for(folders["gemma2"], block_size=block_size, num_blocks=num_blocks))
    assert largest_difference(run, folders["gemma2"]) < 1e-4


@pytest.mark.parametrize("budget", [1, 2, 200])
def test_logits_are_independent_of_the_chunk_size(budget: int, folders: dict[str, Path]) -> None:
    run = run_all(config_for(folders["phi3-window"], max_num_batched_tokens=budget))
    assert largest_difference(run, folders["phi3-window"]) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_half_precision_error_is_comparable_to_transformers(name: str, dtype: str, folders: dict[str, Path]) -> None:
    run = run_all(config_for(folders[name], dtype=dtype))
    assert run.engine.model_runner.kv_cache.tensor.dtype == getattr(torch, dtype)
    exact = reference_model(folders[name])
    rounded = reference_model(folders[name], getattr(torch, dtype))
    ours_off, theirs_off = 0.0, 0.0
    for request_id, prompt in prompts().items():
        text = prompt + run.tokens[request_id]
        expected = reference_logits(exact, text)[len(prompt) - 1 : -1]
        ours_off += float((torch.stack(run.logits[request_id]) - expected).square().sum())
        theirs_off += float((reference_logits(rounded, text)[len(prompt) - 1 : -1] - expected).square().sum())
    assert ours_off < 1.5 * theirs_off


def test_recompute_after_preemption_gives_the_same_logits(folders: dict[str, Path]) -> None:
    run = run_all(config_for(folders["llama"], num_blocks=18, watermark=0.0))
    assert run.engine.stats().preemptions_total > 0
    assert largest_difference(run, folders["llama"]) < 1e-4


def test_nan_in_a_live_block_reaches_the_logits(folders: dict[str, Path]) -> None:
    """Shows that the other tests detect a read of a poisoned slot."""
    run = WatchedRun(config_for(folders["llama"]))
    run.add("r", [5] * 9, greedy(4))
    poison(run.engine.model_runner.kv_cache)
    run.step()
    poison(run.engine.model_runner.kv_cache, [run.engine.scheduler.running[0].block_table[0]])
    with pytest.raises(ValueError, match="not a number"):
        run.run_on()
