"""Unsupported architectures are rejected at load time with the feature they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
    Starcoder2Config,
    T5Config,
)

from minivllm.core.attention import AttentionLayer, choose_backend
from minivllm.core.attention.reference import ReferenceBackend
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models import support
from minivllm.core.models.backbone import TransformersBackbone
from minivllm.core.models.lm_head import LMHead
from minivllm.core.models.loader import load_model
from minivllm.core.worker import self_check
from minivllm.core.worker.model_runner import build_model_runner
from tests.engine.running import WatchedRun, greedy
from tests.engine.tiny_models import VOCAB_SIZE, reference_logits, reference_model, save_tiny

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def dummy(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(folder),
            "load_format": "dummy",
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "block_size": 4,
            "num_blocks": 20,
            **settings,
        }
    )


REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "encoder-decoder": (lambda: T5Config(vocab_size=VOCAB_SIZE), "an encoder"),
    "bidirectional attention": (lambda: BertConfig(vocab_size=VOCAB_SIZE), "attention to later tokens"),
    "recurrent": (lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=2), "linear_attention"),
    "hybrid": (lambda: JambaConfig(**TINY), "linear_attention"),
    "gated delta net": (lambda: Qwen3NextConfig(**TINY), "linear_attention"),
    "chunked attention": (lambda: Llama4TextConfig(**TINY), "chunked_attention"),
    "MLA": (lambda: DeepseekV3Config(**{**TINY, "num_key_value_heads": 6}), "multi-head latent attention"),
    "custom attention code": (
        lambda: BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=48, n_layer=2, n_head=6),
        "its own attention code",
    ),
    "shared K and V": (
        lambda: Gemma4TextConfig(**TINY, head_dim=8, num_kv_shared_layers=1),
        "layers that share the K and V of others",
    ),
    "attention sinks": (
        lambda: GptOssConfig(**TINY, head_dim=8, num_local_experts=4, sliding_window=9),
        "attention sinks",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_architecture_is_rejected_with_the_missing_feature(kind: str, tmp_path: Path) -> None:
    make_config, missing = REFUSED[kind]
    config = make_config()
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"{config.model_type}.*cannot be served: it needs .*{missing}"):
        load_model(dummy(tmp_path))


def test_longrope_context_is_limited_to_the_short_factor_range(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    config = Phi3Config(**TINY, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=64)
    save_tiny(config, tmp_path)
    settings = {"load_format": "auto", "max_num_batched_tokens": 16}
    with pytest.raises(ValueError, match="the largest possible is 64"):
        WatchedRun(dummy(tmp_path, max_model_len=65, **settings))
    run = WatchedRun(dummy(tmp_path, **settings))
    assert run.engine.config.max_model_len == 64
    prompt = list(range(40))
    run.add("r", prompt, greedy(24))
    run.run()
    expected = reference_logits(reference_model(tmp_path), prompt + run.tokens["r"])[39:-1]
    torch.testing.assert_close(torch.stack(run.logits["r"]), expected, atol=1e-4, rtol=1e-4)


def test_dynamic_rope_context_is_limited_to_the_trained_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    LlamaConfig(**TINY, rope_parameters=rope).save_pretrained(tmp_path)
    assert load_model(dummy(tmp_path)).max_model_len == 256


UNTESTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "cohere": lambda: CohereConfig(**TINY, logit_scale=0.3),
    "cohere2": lambda: Cohere2Config(**TINY, sliding_window=3),
    "granite": lambda: GraniteConfig(**TINY, logits_scaling=3.0, attention_multiplier=0.3),
    "starcoder2": lambda: Starcoder2Config(**TINY, sliding_window=3),
}


@pytest.mark.parametrize("name", UNTESTED)
def test_untested_model_type_is_compared_with_transformers_at_start(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    UNTESTED[name]().save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        build_model_runner(dummy(tmp_path))
    assert "compared with transformers on 16 tokens" in caplog.text


@pytest.mark.parametrize("name", ["cohere2", "starcoder2"])
def test_self_check_rejects_a_sliding_window_that_is_not_applied(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UNTESTED[name]().save_pretrained(tmp_path)
    initialize = ReferenceBackend.__init__

    def without_windows(backend: ReferenceBackend, layers: tuple[AttentionLayer, ...], *args: Any) -> None:
        initialize(backend, tuple(replace(layer, sliding_window=None) for layer in layers), *args)

    monkeypatch.setattr(ReferenceBackend, "__init__", without_windows)
    with pytest.raises(
        ModelLoadError, match=f"{name}.*cannot be served: it needs something that paged attention lacks"
    ):
        build_model_runner(dummy(tmp_path, attention_backend="reference"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_alone_is_no_reason_to_reject_a_mixture_of_experts(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In 16 bits a token may get other experts; with a tolerance that rounding exceeds, float32 decides."""
    OlmoeConfig(**TINY, num_experts=8, num_experts_per_tok=2).save_pretrained(tmp_path)
    monkeypatch.setitem(self_check._TOLERANCE, getattr(torch, dtype), 1e-4)
    with caplog.at_level("INFO"):
        build_model_runner(dummy(tmp_path, dtype=dtype))
    assert "rounding alone changes its logits" in caplog.text


@pytest.mark.parametrize("name", ["cohere2", "starcoder2"])
def test_self_check_in_float32_rejects_a_sliding_window_that_is_not_applied(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UNTESTED[name]().save_pretrained(tmp_path)
    initialize = ReferenceBackend.__init__

    def without_windows(backend: ReferenceBackend, layers: tuple[AttentionLayer, ...], *args: Any) -> None:
        initialize(backend, tuple(replace(layer, sliding_window=None) for layer in layers), *args)

    monkeypatch.setattr(ReferenceBackend, "__init__", without_windows)
    monkeypatch.setitem(self_check._TOLERANCE, torch.bfloat16, 1e-4)
    with pytest.raises(ModelLoadError, match="something that paged attention lacks"):
        build_model_runner(dummy(tmp_path, attention_backend="reference", dtype="bfloat16"))


def test_self_check_leaves_the_weights_in_their_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    UNTESTED["granite"]().save_pretrained(tmp_path)
    monkeypatch.setitem(self_check._TOLERANCE, torch.bfloat16, 1e-4)
    loaded = load_model(dummy(tmp_path, dtype="bfloat16"))
    before = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
    backend = choose_backend("reference", loaded.layers, loaded.dtype, loaded.device)
    self_check.check_against_transformers(loaded, TransformersBackbone(loaded, backend), 4)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype == torch.bfloat16


def test_unknown_logits_processing_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    UNTESTED["granite"]().save_pretrained(tmp_path)
    monkeypatch.setattr(LMHead, "__call__", lambda self, hidden_states: self.projection(hidden_states))
    with pytest.raises(ModelLoadError, match=r"granite.*a treatment of its logits"):
        load_model(dummy(tmp_path))


def test_sliding_window_on_full_attention_layers_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model applies its window in the attention mask, which paged attention does not use."""
    Starcoder2Config(**TINY, sliding_window=3).save_pretrained(tmp_path)
    found = load_model(dummy(tmp_path)).layers
    config = Starcoder2Config(**TINY, layer_types=["full_attention"] * 3)
    missing = support._unsupported_combination(dict(enumerate(found)), config)
    assert missing is not None
    assert "a sliding window that does not reach" in missing


def test_self_check_runs_with_a_tiny_pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    UNTESTED["granite"]().save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        build_model_runner(dummy(tmp_path, num_blocks=2))
    assert "compared with transformers on 16 tokens" in caplog.text


def test_model_types_without_a_self_check_are_exactly_the_tested_ones() -> None:
    from tests.engine.tiny_models import TINY as TESTED

    assert {make_config().model_type for make_config in TESTED.values()} == support.TESTED_MODEL_TYPES
