"""Prefix caching with a model: a cache hit changes no logit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from minivllm.core.config import EngineConfig
from minivllm.core.kv_cache import block_pool
from tests.engine.running import WatchedRun, greedy, poison
from tests.engine.tiny_models import TINY, VOCAB_SIZE, reference_logits, reference_model, save_tiny

MAX_TOKENS = 10
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY["mistral-window"](), tmp_path_factory.mktemp("mistral"))


def shared_prompts() -> dict[str, list[int]]:
    """Returns prompts that share all tokens, some full blocks, part of a block, or nothing."""
    rng = random.Random(3)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(22)]
    tails = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (0, 0, 1, 6, 9, 13)]
    prompts = [common + tail for tail in tails]
    prompts += [common[:17], common[:16], common[:15], common[:16] + tails[3]]
    prompts += [[rng.randrange(VOCAB_SIZE) for _ in range(19)]]
    return {f"r{index}": prompt for index, prompt in enumerate(prompts)}


def run_shared(folder: Path, **settings: object) -> WatchedRun:
    settings = {"num_blocks": 80, "max_num_batched_tokens": 16, "watermark": 0.0, **settings}
    run = WatchedRun(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            num_threads=1,
            block_size=BLOCK_SIZE,
            validate_blocks=True,
            **settings,
        )
    )
    poison(run.engine.model_runner.kv_cache)
    for request_id, prompt in shared_prompts().items():
        run.add(request_id, prompt, greedy(MAX_TOKENS))
        run.step()
    run.run_on()
    return run


def check(folder: Path, run: WatchedRun) -> None:
    model = reference_model(folder)
    for request_id, prompt in shared_prompts().items():
        tokens = run.tokens[request_id]
        expected = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(run.logits[request_id]), expected, atol=1e-4, rtol=1e-4)
        assert tokens == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("enabled", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("budget", [1, 3, 16, 200])
def test_prefix_hits_change_no_logit_at_any_chunk_size(folder: Path, enabled: bool, budget: int) -> None:
    run = run_shared(folder, enable_prefix_caching=enabled, max_num_batched_tokens=budget)
    assert (run.engine.stats().prefix_cache_hit_tokens_total > 0) is enabled
    check(folder, run)


def test_prefix_hits_with_preemption_change_no_logit(folder: Path) -> None:
    run = run_shared(folder, num_blocks=16)
    stats = run.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_hit_tokens_total > 0
    check(folder, run)


def test_colliding_block_hashes_change_no_logit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "hash_block", lambda *args: 0)
    check(folder, run_shared(folder))


def test_samples_of_a_shared_prompt_match_transformers(folder: Path) -> None:
    prompt = shared_prompts()["r5"]
    run = WatchedRun(
        EngineConfig(
            model=str(folder), dtype="float32", device="cpu", num_threads=1, block_size=BLOCK_SIZE, num_blocks=60
        )
    )
    run.add("r", prompt, greedy(MAX_TOKENS, n=3, temperature=1.0, seed=5))
    texts: dict[int, list[int]] = {}
    poison(run.engine.model_runner.kv_cache)
    while run.engine.has_unfinished_requests():
        for output in run.engine.step():
            texts.setdefault(output.index, []).extend(output.new_token_ids)
    assert sorted(texts) == [0, 1, 2]
    assert len({tuple(text) for text in texts.values()}) > 1
    model = reference_model(folder)
    for index, tokens in texts.items():
        expected = reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(run.logits[f"r/{index}"]), expected, atol=1e-4, rtol=1e-4)
