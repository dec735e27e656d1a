"""GGUF files: each architecture equals transformers, and what is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.gguf.dequantize import can_dequantize, dequantize
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.loader import load_model
from minivllm.core.models.location import resolve_model
from tests.engine.gguf_files import Content, converted, random_model
from tests.engine.tiny_models import VOCAB_SIZE, reference_logits

_COMMON: dict[str, Any] = {
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
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
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
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama, tied embeddings": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "llama, biases": lambda: LlamaConfig(**_COMMON, **_BIASES),
    "llama, head size": lambda: LlamaConfig(**_COMMON, head_dim=16),
    "llama, other rope base": lambda: LlamaConfig(**_COMMON, rope_parameters=_rope("default", rope_theta=500.0)),
    "llama, linear rope": lambda: LlamaConfig(**_COMMON, rope_parameters=_rope("linear", factor=4.0)),
    "llama, yarn": lambda: LlamaConfig(**_COMMON, rope_parameters=_YARN),
    "llama, yarn with all settings": lambda: LlamaConfig(
        **_COMMON, rope_parameters={**_YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
    ),
    "llama 3.1": lambda: LlamaConfig(**_COMMON, rope_parameters=_LLAMA3),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=None),
    "mistral, sliding window": lambda: MistralConfig(**_COMMON, sliding_window=9),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen2, yarn": lambda: Qwen2Config(**_COMMON, rope_parameters=_YARN),
    "qwen2moe": lambda: Qwen2MoeConfig(**_COMMON, **_MOE, shared_expert_intermediate_size=40),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "qwen3, biases": lambda: Qwen3Config(**_COMMON, head_dim=16, attention_bias=True),
    "qwen3moe": lambda: Qwen3MoeConfig(**_COMMON, **_MOE, head_dim=16, norm_topk_prob=True),
    "gemma": lambda: GemmaConfig(**_COMMON, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **{**_COMMON, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 7},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        rope_parameters={
            "full_attention": _rope("linear", rope_theta=1_000.0, factor=8.0),
            "sliding_attention": _rope("default"),
        },
    ),
    "phi3": lambda: Phi3Config(**_COMMON, original_max_position_embeddings=256),
    "phi3, sliding window": lambda: Phi3Config(**_COMMON, original_max_position_embeddings=256, sliding_window=9),
    "phi3, partial rotation and longrope": lambda: Phi3Config(
        **_COMMON, original_max_position_embeddings=64, rope_parameters=_LONGROPE
    ),
    "starcoder2": lambda: Starcoder2Config(**_COMMON),
    "smollm3": lambda: SmolLM3Config(**{**_COMMON, "num_hidden_layers": 5}),
    "granite": lambda: GraniteConfig(**_COMMON, **_GRANITE),
    "granitemoe": lambda: GraniteMoeSharedConfig(**_COMMON, **_GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe, shared experts": lambda: GraniteMoeSharedConfig(
        **_COMMON, **_GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=40
    ),
    "olmo2": lambda: Olmo2Config(**_COMMON),
    "olmo3": lambda: Olmo3Config(**{**_COMMON, "num_hidden_layers": 5}, sliding_window=9),
}
"""Each architecture and feature that GGUF files can have here."""

TOKENS = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def load(path: Path, **settings: Any) -> PreTrainedModel:
    return load_model(EngineConfig(**{"model": str(path), "dtype": "float32", "device": "cpu", **settings})).model


def eager_logits(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return reference_logits(model, TOKENS)


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_file_of_each_architecture_equals_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    original = random_model(MODELS[name]())
    path = converted(original).save(tmp_path / "tiny.gguf")
    assert_same_logits(eager_logits(load(path)), eager_logits(original))
