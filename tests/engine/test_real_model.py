"""The default model in float32 against transformers' `generate`, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from minivllm.core.config import DEFAULT_MODEL, EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.models.location import locate
from minivllm.core.text.tokenizer import load_tokenizer
from minivllm.core.worker.model_runner import ModelRunner, build_model_runner
from tests.engine.running import greedy, poison

NEW_TOKENS = 48

# Length and start of each prompt in the tokens of the licence, chosen so that rounding cannot change a greedy token.
# Short and long prompts alternate, so that a batch has both.
PROMPTS = (
    *((1, 1326), (159, 203), (2, 617), (197, 1999), (3, 1618), (243, 452), (4, 197), (301, 1191)),
    *((5, 296), (371, 1140), (6, 2194), (459, 1758), (7, 385), (567, 273), (8, 1717), (700, 593)),
    *((9, 237), (16, 482), (10, 590), (19, 769), (11, 879), (24, 286), (12, 153), (29, 986)),
    *((13, 352), (36, 371), (45, 1525), (55, 242), (68, 507), (85, 914), (104, 253), (129, 422)),
)

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = load_tokenizer(EngineConfig()).encode(text)
    return [token_ids[start : start + length] for length, start in PROMPTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """Returns the tokens of `generate`, one prompt at a time; checks that each greedy choice is beyond rounding."""
    location = locate(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        location.path,
        gguf_file=location.gguf_file,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    found = []
    for prompt in prompts:
        result = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best_two = torch.cat(result.logits).topk(2, dim=-1).values
        assert float((best_two[:, 0] - best_two[:, 1]).min()) > 5e-3
        found.append(result.sequences[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_model_runner(EngineConfig(dtype="float32", device="cpu", num_blocks=1000))


def engine_on(runner: ModelRunner, num_blocks: int) -> LLMEngine:
    """Returns a new engine on the shared model, with the first `num_blocks` blocks of a pool full of NaN."""
    config = EngineConfig(dtype="float32", device="cpu", num_blocks=num_blocks, validate_blocks=True, watermark=0.0)
    poison(runner.kv_cache)
    runner.num_blocks = num_blocks
    return LLMEngine(config, model_runner=runner)


def run(engine: LLMEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_concurrent_requests_give_the_tokens_of_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = engine_on(runner, num_blocks=1000)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(NEW_TOKENS))
    assert run(engine) == {str(index): tokens for index, tokens in enumerate(expected)}
    assert engine.stats().preemptions_total == 0


def test_preempted_requests_give_the_tokens_of_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = engine_on(runner, num_blocks=90)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(NEW_TOKENS))
    assert run(engine) == {str(index): tokens for index, tokens in enumerate(expected)}
    assert engine.stats().preemptions_total > 0
    assert engine.stats().rejections["no_free_blocks"] > 0
    assert engine.block_manager.get_num_free_blocks() == 90


def test_sequential_requests_give_the_tokens_of_transformers(
    runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = engine_on(runner, num_blocks=60)
    for prompt, tokens in zip(prompts, expected, strict=True):
        engine.add_request("only", prompt, greedy(NEW_TOKENS))
        assert run(engine) == {"only": tokens}
