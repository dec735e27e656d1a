"""Accuracy of number formats: perplexity on a fixed text, and agreement of greedy tokens.

    python -m benchmarks.accuracy [--tokens 4096]

The text is the language reference included in Python, in windows of 512 tokens. Perplexity uses the prompt log
probabilities of the engine, so it covers the KV pool and chunked prefill. The baseline is transformers' own modules
(`compile: off`) in float32 and in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.common import arguments, print_environment, print_table, quiet, write_json

WINDOW = 512
SETTINGS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32", "compile": "off"},
    {"dtype": "bfloat16", "compile": "off"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
)


def fixed_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(tokenizer: Any, count: int) -> list[list[int]]:
    token_ids = tokenizer.encode(fixed_text())
    return [token_ids[start : start + WINDOW] for start in range(0, count * WINDOW, WINDOW)]


def measure(settings: dict[str, Any], num_tokens: int) -> tuple[float, list[list[int]]]:
    """Returns the perplexity of the windows, and greedy continuations of their first halves."""
    from minivllm import LLM, SamplingParams

    llm = LLM(**settings)
    texts = windows(llm.tokenizer, num_tokens // WINDOW)
    scored = llm.generate(texts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    total, count = 0.0, 0
    for result, text in zip(scored, texts, strict=True):
        scores = result.prompt_logprobs or []
        if len(scores) != len(text) - 1:
            raise RuntimeError("prompt log probabilities do not cover the prompt")
        total += sum(entry.logprob for entry in scores)
        count += len(scores)
    halves = [text[: WINDOW // 2] for text in texts]
    greedy = llm.generate(halves, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
    return math.exp(-total / count), [list(result.token_ids) for result in greedy]


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Returns the share of greedy tokens before the first difference of each pair."""
    same = 0
    for left, right in zip(one, other, strict=True):
        same += next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))
    return same / sum(len(left) for left in one)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the text")
    options = parser.parse_args()
    print_environment()
    rows, baseline, results = [], None, []
    for settings in SETTINGS:
        with quiet():
            perplexity, greedy = measure(settings, options.tokens)
        baseline = baseline or (perplexity, greedy)
        name = ", ".join(f"{key}={value}" for key, value in settings.items())
        change = f"{100 * (perplexity / baseline[0] - 1):+.2f} %"
        share = agreement(baseline[1], greedy)
        rows.append((name, f"{perplexity:.4f}", change, f"{100 * share:.1f} %"))
        results.append({"settings": settings, "perplexity": perplexity, "greedy_agreement": share})
    print_table(("settings", "perplexity", "relative to float32", "greedy tokens before the first difference"), rows)
    write_json(options.json, "accuracy", results)


if __name__ == "__main__":
    main()
