"""Tiny random models of every supported architecture, and their reference logits from transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 97

# Weights ten times larger than usual, so that attention has a visible effect on the logits.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_LLAMA = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 64}

TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_LLAMA),
    "llama-multi-query": lambda: LlamaConfig(**{**_LLAMA, "num_key_value_heads": 1}),
    "qwen2": lambda: Qwen2Config(**_LLAMA),
    "qwen2-window-in-upper-layers": lambda: Qwen2Config(
        **_LLAMA, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_LLAMA, head_dim=16),
    "mistral-window": lambda: MistralConfig(**_LLAMA, head_dim=8, sliding_window=9),
    "mistral": lambda: MistralConfig(**_LLAMA, head_dim=8, sliding_window=None),
    "gemma": lambda: GemmaConfig(**_LLAMA, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **{**_LLAMA, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=9,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "phi3": lambda: Phi3Config(**_LLAMA, pad_token_id=0, sliding_window=None),
    "phi3-window": lambda: Phi3Config(**_LLAMA, pad_token_id=0, sliding_window=9),
    "mixtral": lambda: MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": lambda: Olmo2Config(**_LLAMA),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB_SIZE, n_embd=48, n_layer=3, n_head=6, n_positions=256),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON, intermediate_size=64),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=256,
        init_std=0.2,
    ),
}


def save_tiny(config: PreTrainedConfig, folder: Path, **generation: Any) -> Path:
    """Saves a model with random weights, deterministic per config."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    # EOS would end a comparison early, so only tests that ask for it have one.
    model.generation_config.eos_token_id = generation.pop("eos_token_id", None)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads the same weights with the eager attention of transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Returns float32 logits (tokens, vocabulary) of one forward pass."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
