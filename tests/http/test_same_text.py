"""Every interface gives the same greedy text: completions, streams, chat, `LLM.generate`, transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from minivllm.core.llm import LLM
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.text.tokenizer import Tokenizer
from tests.http.stand_ins import LocalServer
from tests.http.streams import joined_text, streamed

PROMPTS = {
    "ascii": "Once upon a time there was",
    "cjk": "你好世界。今日は良い天気ですね",
    "emoji": "🦊 and 👩\u200d👩\u200d👧 went to 🇫🇷",
    "combining": "e\u0301a\u0308 n\u0303o\u0302 Z\u0351\u036b\u0343a\u0349",
    "code": "def add(a, b):\n\treturn a + b\n\n\nif __name__ == '__main__':",
    "right to left": "שלום עולם مرحبا بالعالم",
    "odd spaces": "  a \u00a0 b\u3000\n\n  ",
}
LENGTH = 24


@pytest.fixture(scope="module")
def oracle(tiny: LocalServer, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Returns the tokens that transformers generates, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny.args.model, dtype=torch.float32)
    generated = {}
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([tokenizer.encode(prompt)])
        options: dict[str, Any] = {
            "max_new_tokens": LENGTH,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        generated[name] = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    return generated


@pytest.mark.parametrize("name", PROMPTS)
def test_completion_and_stream_equal_transformers_at_every_length(
    client: httpx.Client, tokenizer: Tokenizer, oracle: dict[str, list[int]], name: str
) -> None:
    for max_tokens in range(1, LENGTH + 1):
        body = {"prompt": PROMPTS[name], "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        text = tokenizer.decode(oracle[name][:max_tokens])
        complete = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert complete == text
        assert joined_text(streamed(client, "/v1/completions", body)) == text


def test_offline_generation_equals_transformers(
    tiny: LocalServer, tokenizer: Tokenizer, oracle: dict[str, list[int]]
) -> None:
    assert Path(tiny.args.model).is_dir()
    llm = LLM(model=tiny.args.model, dtype="float32", device="cpu", num_blocks=128, num_threads=1, compile="off")
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    results = llm.generate(list(PROMPTS.values()), params)
    for name, result in zip(PROMPTS, results, strict=True):
        assert list(result.token_ids) == oracle[name]
        assert result.text == tokenizer.decode(oracle[name])


def test_chat_equals_the_completion_of_its_rendered_prompt(client: httpx.Client, tokenizer: Tokenizer) -> None:
    for content in PROMPTS.values():
        messages = [{"role": "user", "content": content}]
        common = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True}
        chat = client.post("/v1/chat/completions", json={"messages": messages, **common}).json()["choices"][0]
        prompt = tokenizer.render_chat(messages)
        fields = {"prompt": prompt, "add_special_tokens": False, **common}
        completion = client.post("/v1/completions", json=fields).json()["choices"][0]
        assert chat["message"]["content"] == completion["text"]
