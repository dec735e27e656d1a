"""Tiny models of each GGUF architecture and feature, and the tables of docs/models.md that list them.

`python -m tests.engine.gguf_models` writes the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType
from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from minivllm.core.models.gguf.dequantize import can_dequantize
from tests.engine.gguf_files import ARCHITECTURE_OF
from tests.engine.tiny_models import VOCAB_SIZE

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
}
_GRANITE = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **more}


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama, tied embeddings": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama, biases": lambda: LlamaConfig(**COMMON, **_BIASES),
    "llama, head size": lambda: LlamaConfig(**COMMON, head_dim=16),
    "llama, other rope base": lambda: LlamaConfig(**COMMON, rope_parameters=_rope("default", rope_theta=500.0)),
    "llama, linear rope": lambda: LlamaConfig(**COMMON, rope_parameters=_rope("linear", factor=4.0)),
    "llama, yarn": lambda: LlamaConfig(**COMMON, rope_parameters=_YARN),
    "llama, yarn with all settings": lambda: LlamaConfig(
        **COMMON, rope_parameters={**_YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
    ),
    "llama, factors of Llama 3.1": lambda: LlamaConfig(**COMMON, rope_parameters=_LLAMA3),
    "llama, as mistral": lambda: MistralConfig(**COMMON, sliding_window=None),
    "llama, sliding window of mistral": lambda: MistralConfig(**COMMON, sliding_window=9),
    "llama, experts of mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen2, yarn": lambda: Qwen2Config(**COMMON, rope_parameters=_YARN),
    "qwen2moe": lambda: Qwen2MoeConfig(**COMMON, **MOE, shared_expert_intermediate_size=40),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16),
    "qwen3, biases": lambda: Qwen3Config(**COMMON, head_dim=16, attention_bias=True),
    "qwen3moe": lambda: Qwen3MoeConfig(**COMMON, **MOE, head_dim=16, norm_topk_prob=True),
    "gemma": lambda: GemmaConfig(**COMMON, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **{**COMMON, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3, linear rope of the layers without window": lambda: Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 7},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        rope_parameters={
            "full_attention": _rope("linear", rope_theta=1_000.0, factor=8.0),
            "sliding_attention": _rope("default"),
        },
    ),
    "phi3": lambda: Phi3Config(**COMMON, original_max_position_embeddings=256),
    "phi3, sliding window": lambda: Phi3Config(**COMMON, original_max_position_embeddings=256, sliding_window=9),
    "phi3, partial rotation and longrope": lambda: Phi3Config(
        **COMMON, original_max_position_embeddings=64, rope_parameters=_LONGROPE
    ),
    "starcoder2": lambda: Starcoder2Config(**COMMON),
    "smollm3": lambda: SmolLM3Config(**{**COMMON, "num_hidden_layers": 5}),
    "granite": lambda: GraniteConfig(**COMMON, **_GRANITE),
    "granitemoe": lambda: GraniteMoeSharedConfig(**COMMON, **_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe, shared experts": lambda: GraniteMoeSharedConfig(
        **COMMON, **_GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=40
    ),
    "olmo2": lambda: Olmo2Config(**COMMON),
    "olmo2, sliding window of olmo3": lambda: Olmo3Config(**{**COMMON, "num_hidden_layers": 5}, sliding_window=9),
    "olmo": lambda: OlmoConfig(**COMMON),
    "olmo, clipped": lambda: OlmoConfig(**COMMON, clip_qkv=0.5),
    "olmoe": lambda: OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2),
    "mistral3, yarn and temperature scale": lambda: Ministral3Config(
        **COMMON,
        head_dim=16,
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "command-r": lambda: CohereConfig(**COMMON, logit_scale=0.5),
    "command-r, norms of queries and keys": lambda: CohereConfig(**COMMON, logit_scale=0.5, use_qk_norm=True),
    "cohere2": lambda: Cohere2Config(**{**COMMON, "num_hidden_layers": 5}, logit_scale=0.5, sliding_window=9),
    "arcee": lambda: ArceeConfig(**COMMON),
    "seed_oss": lambda: SeedOssConfig(**COMMON, head_dim=16),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=2,
        n_head=6,
        n_inner=64,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
"""Each architecture and feature that GGUF files can have here: "architecture, feature"."""

QUANTIZATIONS = sorted((kind for kind in GGMLQuantizationType if can_dequantize(kind)), key=lambda kind: kind.name)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_START, _END = "<!-- tables: start -->\n", "<!-- tables: end -->\n"


def tables() -> str:
    """Returns the tables of architectures and quantization types."""
    rows: dict[str, tuple[set[str], list[str]]] = {}
    for name, make_config in MODELS.items():
        model_type = make_config().model_type
        model_types, features = rows.setdefault(ARCHITECTURE_OF.get(model_type, model_type), (set(), []))
        model_types.add(f"`{model_type}`")
        features += name.split(", ", maxsplit=1)[1:] or ["plain"]
    lines = ["| architecture | model types of transformers | features compared |", "|---|---|---|"]
    for architecture, (model_types, features) in sorted(rows.items()):
        lines.append(f"| `{architecture}` | {', '.join(sorted(model_types))} | {', '.join(features)} |")
    kinds = ", ".join(f"`{kind.name}`" for kind in QUANTIZATIONS)
    return "\n".join([*lines, "", f"Quantization types: {kinds}.", ""])


def page() -> str:
    """Returns docs/models.md with the present tables."""
    before, _, rest = PAGE.read_text().partition(_START)
    return before + _START + tables() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
