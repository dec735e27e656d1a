"""The default model in float32: prefix cache, chunked prefill and preemption change no token."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.text.tokenizer import load_tokenizer
from minivllm.core.worker.model_runner import ModelRunner, build_model_runner
from tests.engine.running import greedy, poison, poison_unused

NEW_TOKENS = 12
NUM_BLOCKS = 40

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_model_runner(EngineConfig(dtype="float32", device="cpu", num_blocks=NUM_BLOCKS))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Returns prompts of which some share 33 tokens (two full blocks of 16 and one token); two are equal."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = load_tokenizer(EngineConfig()).encode(text)
    common = token_ids[1326:1359]
    return [common, common, common + token_ids[617:626], common + token_ids[1999:2012], token_ids[452:469]]


def run(runner: ModelRunner, prompts: list[list[int]], **settings: Any) -> tuple[dict[str, list[int]], LLMEngine]:
    """Runs the prompts on a pool full of NaN, with the unused blocks poisoned again before each step."""
    config = EngineConfig(
        **{"dtype": "float32", "device": "cpu", "validate_blocks": True, "watermark": 0.0, **settings}
    )
    runner.num_blocks = config.num_blocks or NUM_BLOCKS
    poison(runner.kv_cache)
    engine = LLMEngine(config, model_runner=runner)
    tokens: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(NEW_TOKENS))
    while engine.has_unfinished_requests():
        poison_unused(engine)
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return dict(tokens), engine


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Returns the tokens of each prompt alone, prefilled in one chunk without prefix cache."""
    alone = [run(runner, [prompt], enable_prefix_caching=False)[0]["0"] for prompt in prompts]
    return {str(index): tokens for index, tokens in enumerate(alone)}


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 512])
def test_chunked_prefill_and_prefix_cache_change_no_token(
    runner: ModelRunner, prompts: list[list[int]], expected: dict[str, list[int]], chunk: int, caching: bool
) -> None:
    tokens, engine = run(runner, prompts, enable_prefix_caching=caching, max_num_batched_tokens=chunk)
    assert tokens == expected
    again, _ = run(runner, prompts, enable_prefix_caching=caching, long_prefill_token_threshold=chunk)
    assert again == expected
    # At one token per step the prompts run one after another, so all but the first hit the shared prefix.
    if chunk == 1:
        assert (engine.stats().prefix_cache_hit_tokens_total >= 3 * 32) is caching


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_preemption_changes_no_token(
    runner: ModelRunner, prompts: list[list[int]], expected: dict[str, list[int]], caching: bool
) -> None:
    tokens, engine = run(runner, prompts, enable_prefix_caching=caching, num_blocks=5 if caching else 7)
    assert engine.stats().preemptions_total > 0
    assert tokens == expected
