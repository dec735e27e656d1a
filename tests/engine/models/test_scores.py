"""Prompt logprobs computed in chunks equal those of one forward pass."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.outputs import TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.worker import model_runner
from tests.engine.tiny_models import TINY, VOCAB_SIZE, reference_logits, reference_model, save_tiny

PROMPTS = {f"r{length}": [random.Random(length).randrange(VOCAB_SIZE) for _ in range(length)] for length in (2, 9, 30)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY["gemma2"](), tmp_path_factory.mktemp("gemma2"))


def score(folder: Path, max_tokens: int, **settings: object) -> tuple[dict[str, list[TokenLogprobs]], LLMEngine]:
    settings = {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 8, "watermark": 0.0, **settings}
    engine = LLMEngine(EngineConfig(model=str(folder), dtype="float32", device="cpu", num_threads=1, **settings))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, prompt_logprobs=3)
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, params)
    found: dict[str, list[TokenLogprobs]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.prompt_logprobs or [])
    return found, engine


def check(folder: Path, found: dict[str, list[TokenLogprobs]]) -> None:
    model = reference_model(folder)
    for request_id, prompt in PROMPTS.items():
        exact = reference_logits(model, prompt).log_softmax(-1)
        entries = found[request_id]
        assert [entry.token_id for entry in entries] == prompt[1:]
        for row, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(float(exact[row, prompt[row + 1]]), abs=1e-4)
            top = torch.tensor([value for _, value in entry.top])
            torch.testing.assert_close(top, exact[row].topk(3).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("budget", [1, 8, 100])
def test_prompt_logprobs_are_independent_of_the_chunk_size(folder: Path, max_tokens: int, budget: int) -> None:
    found, _ = score(folder, max_tokens, max_num_batched_tokens=budget)
    check(folder, found)


def test_prompt_logprobs_of_large_chunks_are_computed_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_LOGIT_ROWS", 3)
    found, _ = score(folder, 1, max_num_batched_tokens=100)
    check(folder, found)


def test_preempted_request_delivers_its_prompt_logprobs_once(folder: Path) -> None:
    found, engine = score(folder, 25, num_blocks=14, max_num_batched_tokens=12)
    assert engine.stats().preemptions_total > 0
    check(folder, found)
