"""The longest context of scaled positions, and `hf_overrides`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig

from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.loader import load_model
from minivllm.core.models.location import resolve_model, resolve_tokenizer
from minivllm.core.models.support import context_limit
from tests.engine.running import WatchedRun, greedy
from tests.engine.tiny_models import TINY, reference_logits, reference_model, save_tiny

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def llama(rope: dict[str, Any], max_position_embeddings: int = 64) -> PreTrainedConfig:
    changes = {"rope_parameters": rope, "max_position_embeddings": max_position_embeddings}
    return LlamaConfig(**{**TINY["llama"]().to_dict(), **changes})


def config_for(folder: Path | str, **changes: Any) -> EngineConfig:
    fixed = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4, "num_blocks": 80}
    return EngineConfig(model=str(folder), **(fixed | changes))


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (llama(YARN), 256),
        (llama(YARN, 256), 256),
        (llama({**YARN, "original_max_position_embeddings": 32}, 40), 128),
        (llama({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}), 160),
        (llama({**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256), 256),
        (llama({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}), 64),
        (llama({"rope_type": "default", "rope_theta": 10000.0}), 64),
        # Gemma 3: scaled linearly in its full-attention layers, and `max_position_embeddings` is the result.
        (Gemma3TextConfig(max_position_embeddings=256, rope_scaling={"rope_type": "linear", "factor": 8.0}), 256),
    ],
    ids=["yarn", "yarn, scaled already", "yarn of less", "linear", "llama3", "dynamic", "default", "gemma3"],
)
def test_context_reaches_factor_times_the_original(config: PreTrainedConfig, limit: int) -> None:
    assert context_limit("m", config) == limit


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_longer_context_than_fixed_frequencies_allow_is_refused_with_the_scaling_named(
    rope_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if rope_type == "longrope" else {"factor": 4.0}
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    if rope_type == "longrope":
        fields = {**TINY["phi3"]().to_dict(), "rope_parameters": rope, "original_max_position_embeddings": 64}
        config: PreTrainedConfig = Phi3Config(**fields)
    else:
        config = llama({name: value for name, value in rope.items() if "original" not in name})
    save_tiny(config, tmp_path)
    with pytest.raises(ModelLoadError, match=rf"max_model_len is 65, but {rope_type} .* largest possible is 64"):
        load_model(config_for(tmp_path, max_model_len=65))
    assert load_model(config_for(tmp_path, max_model_len=64)).max_model_len == 64
    assert f"{rope_type} rotary embeddings change their frequencies beyond 64 tokens" in caplog.text


# ---- hf_overrides --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_overridden_rope_gives_the_context_and_the_logits_of_that_config(
    field: str, folder: Path, tmp_path: Path
) -> None:
    rope = {name: value for name, value in YARN.items() if name != "rope_theta"}
    overrides = {field: rope, "max_position_embeddings": 64}
    run = WatchedRun(config_for(folder, hf_overrides=overrides))
    assert run.engine.config.max_model_len == 256
    prompt = [token % 97 for token in range(100)]
    run.add("r", prompt, greedy(2))
    run.run()
    model = reference_model(folder)
    model.config.max_position_embeddings = 64
    changed = save_tiny(llama({**YARN, "rope_theta": model.config.rope_parameters["rope_theta"]}), tmp_path)
    expected = reference_logits(reference_model(changed), prompt)[-1]
    torch.testing.assert_close(run.logits["r"][0], expected, atol=1e-4, rtol=1e-4)


def test_overridden_theta_keeps_the_other_fields_of_the_rope(folder: Path) -> None:
    loaded = load_model(config_for(folder, hf_overrides={"rope_theta": 500.0}))
    assert loaded.model.config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert load_model(config_for(folder)).model.config.rope_parameters["rope_theta"] != 500.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_position_embedings": 9}, "no field 'max_position_embedings'; did you mean 'max_position_embeddings'"),
        ({"rope_parameters": {"facter": 4.0}}, r"hf_overrides\.rope_parameters: .* 'facter'; did you mean 'factor'"),
        ({"model_type": "gpt2"}, "'model_type' is 'llama' whatever is set"),
        ({"num_hidden_layers": 2}, r"has 9 tensors \(model\.layers\.2"),
        ({"intermediate_size": 32}, r"has the shape \(48, 64\), and the model needs \(48, 32\)"),
    ],
    ids=["unknown field", "unknown field of the rope", "without effect", "layers", "size"],
)
def test_wrong_override_is_named(overrides: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(config_for(folder, hf_overrides=overrides))


# ---- revisions -----------------------------------------------------------------------------------------------------


def test_revision_is_for_the_repository_of_the_model_alone(folder: Path) -> None:
    assert resolve_tokenizer(EngineConfig(model="owner/model", revision="v2")).revision == "v2"
    assert resolve_tokenizer(EngineConfig(model="owner/model", tokenizer="owner/model", revision="v2")).revision == "v2"
    assert resolve_tokenizer(EngineConfig(model="owner/model", tokenizer="owner/other", revision="v2")).revision is None
    with pytest.raises(ModelLoadError, match="revision='v2' is for models of the Hugging Face hub"):
        resolve_model(EngineConfig(model=str(folder), revision="v2"))


@pytest.mark.parametrize("none", [None, {}])
def test_empty_rope_scaling_takes_the_scaling_off(none: Any, tmp_path: Path) -> None:
    folder = save_tiny(llama(YARN), tmp_path)
    loaded = load_model(config_for(folder, hf_overrides={"rope_scaling": none}))
    assert (loaded.model.config.rope_parameters["rope_type"], loaded.max_model_len) == ("default", 64)


def test_both_names_of_rope_parameters_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(llama(YARN), tmp_path)
    overrides = {"rope_parameters": {"factor": 2.0}, "rope_scaling": {"rope_type": "default"}}
    with pytest.raises(ModelLoadError, match="'rope_scaling' is the older name of 'rope_parameters'"):
        load_model(config_for(folder, hf_overrides=overrides))


def gemma3() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    kinds = {"full_attention": rope, "sliding_attention": rope}
    fields = {**TINY["llama"]().to_dict(), "rope_parameters": kinds, "head_dim": 16, "sliding_window": 9}
    return Gemma3TextConfig(
        **{key: value for key, value in fields.items() if key not in ("model_type", "architectures")}
    )


@pytest.mark.parametrize("overrides", [{"rope_theta": 50.0}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}])
def test_rope_of_a_model_with_one_per_kind_of_layer_is_refused_without_the_kind(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(gemma3(), tmp_path)
    with pytest.raises(ModelLoadError, match=r"hf_overrides\.rope_parameters: set .* within .*full_attention"):
        load_model(config_for(folder, hf_overrides=overrides))


def test_overridden_window_layers_change_the_kinds_of_layers(tmp_path: Path) -> None:
    folder = save_tiny(TINY["qwen2-window-in-upper-layers"](), tmp_path)
    windows = [layer.sliding_window for layer in load_model(config_for(folder)).layers]
    assert None in windows
    loaded = load_model(config_for(folder, hf_overrides={"max_window_layers": 0}))
    assert None not in [layer.sliding_window for layer in loaded.layers]
