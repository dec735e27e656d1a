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
from hypothesis import given, settings
from hypothesis import strategies as st
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
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.gguf.dequantize import can_dequantize, dequantize
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.gguf.weights import load_config
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
    "olmo": lambda: OlmoConfig(**_COMMON),
    "olmo, clipped": lambda: OlmoConfig(**_COMMON, clip_qkv=0.5),
    "olmoe": lambda: OlmoeConfig(**_COMMON, num_experts=4, num_experts_per_tok=2),
    "ministral3": lambda: Ministral3Config(
        **_COMMON,
        head_dim=16,
        rope_parameters={
            **_YARN,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "command-r": lambda: CohereConfig(**_COMMON, logit_scale=0.5),
    "command-r, norms of queries and keys": lambda: CohereConfig(**_COMMON, logit_scale=0.5, use_qk_norm=True),
    "cohere2": lambda: Cohere2Config(**{**_COMMON, "num_hidden_layers": 5}, logit_scale=0.5, sliding_window=9),
    "arcee": lambda: ArceeConfig(**_COMMON),
    "seed_oss": lambda: SeedOssConfig(**_COMMON, head_dim=16),
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
"""Each architecture and feature that GGUF files can have here."""

TOKENS = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def load(path: Path, **options: Any) -> PreTrainedModel:
    return load_model(EngineConfig(**{"model": str(path), "dtype": "float32", "device": "cpu", **options})).model


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


# -- nothing without an effect -----------------------------------------------------------------------------------------

ABSENCE_HAS_A_MEANING = {
    "output.weight": "the head is the embeddings",
    "rope_freqs.weight": "Llama before 3.1",
    "llama.attention.sliding_window": "every layer sees all tokens",
    "llama.rope.freq_base": "10000, up to the context of Llama 2",
    "llama.rope.scaling.yarn_attn_factor": "follows from the factor",
    "llama.rope.scaling.yarn_beta_fast": "32",
    "llama.rope.scaling.yarn_beta_slow": "1",
}
"""What a complete file of another model may lack: without it, such a file cannot be told from a good one."""


@pytest.fixture(scope="module")
def originals() -> dict[str, tuple[Content, torch.Tensor]]:
    """Content and logits of each model, made once."""
    models = {name: random_model(make_config()) for name, make_config in MODELS.items()}
    return {name: (converted(model), eager_logits(model)) for name, model in models.items()}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_file_without_one_key_or_tensor_is_equal_or_refused(
    data: st.DataObject, originals: dict[str, tuple[Content, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    content, expected = originals[data.draw(st.sampled_from(sorted(originals)))]
    metadata, tensors = dict(content.metadata), dict(content.tensors)
    entries: dict[str, Any] = metadata if data.draw(st.booleans()) else tensors
    name = data.draw(st.sampled_from([name for name in entries if not name.startswith("tokenizer.")]))
    value = entries.pop(name)
    if is_renamed := data.draw(st.booleans()):
        other = "".join(data.draw(st.permutations(name)))
        entries[data.draw(st.sampled_from([f"{name}_", f"x.{name}", name[1:], other]))] = value
    path = tmp_path_factory.mktemp("changed") / "tiny.gguf"
    Content(content.architecture, metadata, tensors).save(path)
    refusal, logits = "", None
    try:
        logits = eager_logits(load(path))
    except ModelLoadError as error:
        refusal = str(error)
    assert "\n" not in refusal
    if logits is not None and (is_renamed or name not in ABSENCE_HAS_A_MEANING):
        assert_same_logits(logits, expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.expert_gating_func", 2),
        ("llama.pooling_type", 1),
        ("llama.rope.dimension_count", 4),
        ("llama.rope.scaling.type", "dynamic"),
        ("llama.attention.value_length", 4),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.vocab_size", 96),
        ("llama.nextn_predict_layers", 1),
        ("llama.something_new", 0),
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
    ],
)
def test_value_that_cannot_be_served_is_refused_with_its_key(
    key: str, value: Any, llama: Content, tmp_path: Path
) -> None:
    path = Content("llama", {**llama.metadata, key: value}, llama.tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf .*({key.rpartition('.')[2]}|dimensions of a head|sizes)"):
        load(path)


@pytest.mark.parametrize(
    "notes",
    [
        {"general.license": "mit", "general.tags": ["a", "b"], "general.base_model.0.name": "Base"},
        {"quantize.imatrix.file": "x.dat", "quantize.imatrix.chunks_count": 128},
        {"mradermacher.quantized_by": "someone"},
        {"llama.rope.scaling.finetuned": False, "llama.expert_count": 0, "llama.attention.causal": True},
    ],
)
def test_notes_and_features_left_off_change_nothing(notes: dict[str, Any], llama: Content, tmp_path: Path) -> None:
    plain = load(llama.save(tmp_path / "plain.gguf"))
    noted = load(Content("llama", {**llama.metadata, **notes}, llama.tensors).save(tmp_path / "noted.gguf"))
    assert_same_logits(eager_logits(noted), eager_logits(plain))


def test_tensor_of_another_shape_is_refused_with_both_shapes(llama: Content, tmp_path: Path) -> None:
    tensors = {**llama.tensors, "blk.1.ffn_up.weight": llama.tensors["blk.1.ffn_up.weight"][:-1]}
    path = Content("llama", llama.metadata, tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.ffn_up\.weight' of shape \[63, 48\].*\[64, 48\]"):
        load(path)


def test_llama_3_1_without_its_rope_factors_is_refused(tmp_path: Path) -> None:
    content = converted(random_model(MODELS["llama 3.1"]()))
    content.metadata |= {"llama.rope.freq_base": 500_000.0, "llama.context_length": 131_072}
    del content.tensors["rope_freqs.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'rope_freqs\.weight'"):
        load(content.save(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("family", "num_layers", "expected"), [("gemma2", 46, 8.0), ("gemma3", 62, 8.0)])
def test_largest_gemma_scales_queries_by_width_per_head(
    family: str, num_layers: int, expected: float, tmp_path: Path
) -> None:
    content = converted(random_model(MODELS[family]()))
    content.metadata[f"{family}.block_count"] = num_layers
    file = GGUFFile.open(content.save(tmp_path / "tiny.gguf"))
    assert load_config(file).query_pre_attn_scalar == expected


def test_eos_and_recommended_sampling_come_from_the_file(llama: Content, tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.mirostat": 0}
    path = Content("llama", {**llama.metadata, **sampling}, llama.tensors).save(tmp_path / "tiny.gguf")
    loaded = load_model(EngineConfig(model=str(path), dtype="float32", device="cpu"))
    assert loaded.eos_token_ids == {2}
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 7}


@pytest.mark.parametrize("architecture", ["llama4", "no-such-architecture"])
def test_unknown_architecture_is_refused_with_its_name(architecture: str, llama: Content, tmp_path: Path) -> None:
    metadata = {**llama.metadata, "general.architecture": architecture}
    path = Content(architecture, metadata, llama.tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=f"architecture '{architecture}', which is not read from GGUF"):
        load(path)


# -- quantized weights -------------------------------------------------------------------------------------------------

QUANTIZATIONS = sorted((kind for kind in GGMLQuantizationType if can_dequantize(kind)), key=lambda kind: kind.name)


@pytest.fixture(scope="module")
def wide() -> Content:
    """A model whose rows have one block of 256 values, as the K quantizations need."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    return converted(random_model(LlamaConfig(**{**_COMMON, **sizes})))


@pytest.mark.parametrize("kind", QUANTIZATIONS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_equal_their_dequantized_values(
    kind: GGMLQuantizationType, dtype: str, wide: Content, tmp_path: Path
) -> None:
    quantized = wide.quantized(kind)
    ours = load(quantized.save(tmp_path / "quantized.gguf"), dtype=dtype)
    theirs = load(quantized.dequantized().save(tmp_path / "plain.gguf"))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other.to(mine.dtype))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16], ids=lambda kind: kind.name)
def test_quantized_experts_equal_their_dequantized_values(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    content = converted(random_model(Qwen3MoeConfig(**{**_COMMON, **_MOE, **sizes}, head_dim=16)))
    quantized = content.quantized(kind)
    ours = load(quantized.save(tmp_path / "quantized.gguf"))
    theirs = load(quantized.dequantized().save(tmp_path / "plain.gguf"))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_packaged_model_equals_the_values_of_the_gguf_package(packaged: Path) -> None:
    model = load(packaged)
    tensors = GGUFFile.open(packaged).tensors
    for name, source in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
    ):
        assert np.array_equal(model.get_parameter(name).numpy(), dequantize(tensors[source]))


# -- the file itself ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packaged() -> Path:
    path = resolve_model(EngineConfig()).gguf_path
    assert path is not None
    return path


def test_metadata_and_tensors_equal_those_of_the_gguf_package(packaged: Path) -> None:
    ours, theirs = GGUFFile.open(packaged), gguf.GGUFReader(packaged)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert mine.data.tobytes() == tensor.data.tobytes()


@pytest.fixture(scope="module")
def llama() -> Content:
    return converted(random_model(MODELS["llama"]()))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_of_a_split_file_opens_all_parts(number: int, llama: Content, tmp_path: Path) -> None:
    whole = load(llama.save(tmp_path / "whole.gguf"))
    llama.save(tmp_path / "tiny.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) == 3
    model = load(tmp_path / f"tiny-0000{number}-of-00003.gguf")
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_folder_of_one_split_file_is_a_model(llama: Content, tmp_path: Path) -> None:
    llama.save(tmp_path / "tiny.gguf", split_max_tensors=8)
    assert load(tmp_path).config.num_hidden_layers == 2


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_part_of_a_split_file_is_refused_by_name(missing: int, llama: Content, tmp_path: Path) -> None:
    llama.save(tmp_path / "tiny.gguf", split_max_tensors=8)
    gone = tmp_path / f"tiny-0000{missing}-of-00003.gguf"
    gone.unlink()
    with pytest.raises(ModelLoadError, match=f"part . of 3.*missing: .*{gone.name}"):
        load(tmp_path / f"tiny-0000{1 + missing % 3}-of-00003.gguf")


def test_part_under_another_name_or_in_another_place_is_refused(llama: Content, tmp_path: Path) -> None:
    llama.save(tmp_path / "tiny.gguf", split_max_tensors=8)
    first, second, third = sorted(tmp_path.glob("tiny-*.gguf"))
    (tmp_path / "alone.gguf").write_bytes(second.read_bytes())
    with pytest.raises(ModelLoadError, match=r"alone\.gguf.*part 2 of 3.*-00002-of-00003\.gguf"):
        load(tmp_path / "alone.gguf")
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelLoadError, match=r"00003-of-00003\.gguf is not part 3 of 3"):
        load(first)


def _with_version(data: bytes, version: bytes) -> bytes:
    return data[:4] + version + data[8:]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (lambda data: b"PK\3\4" + data[4:], r"is not a GGUF file: it begins with b'PK"),
        (lambda data: _with_version(data, b"\0\0\0\3"), "is big-endian"),
        (lambda data: _with_version(data, b"\1\0\0\0"), "GGUF version 1"),
        (lambda data: data[:10], "truncated: it ends within its header"),
        (lambda data: data[:200], "truncated: it ends within metadata key"),
        (lambda data: data[: data.index(b"token_embd.weight")], "truncated: it ends within the description of tensor"),
        (lambda data: data[:-1000], r"truncated: it has \d+ bytes and ends within tensor"),
        (lambda data: data + b"\0" * 32, "32 bytes after its last tensor"),
        (lambda data: data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), "attn_q.weight' twice"),
        (lambda data: data.replace(b"general.name", b"general.type"), "the metadata key 'general.type' twice"),
        (lambda data: data.replace(b"general.name", b"general.\xff\xff\xff\xff"), "damaged at metadata key"),
    ],
)
def test_broken_file_is_refused_with_the_reason(
    broken: Callable[[bytes], bytes], reason: str, llama: Content, tmp_path: Path
) -> None:
    path = llama.save(tmp_path / "tiny.gguf")
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load(path)
    assert "tiny.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_tensor_type_is_refused_with_the_tensor(llama: Content, tmp_path: Path) -> None:
    path = llama.save(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    end = data.index(b"output_norm.weight") + len(b"output_norm.weight")
    data[end + 12 : end + 16] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"'output_norm\.weight' of type 99"):
        load(path)


def test_tensor_type_that_cannot_be_dequantized_is_refused(llama: Content, tmp_path: Path) -> None:
    tensors = {**llama.tensors, "output_norm.weight": llama.tensors["output_norm.weight"].astype(np.float64)}
    path = Content("llama", llama.metadata, tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"'output_norm\.weight' of type F64, which cannot be dequantized"):
        load(path)
