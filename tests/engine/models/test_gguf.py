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
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.gguf.architectures import ARCHITECTURES
from minivllm.core.models.gguf.dequantize import dequantize
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.gguf.weights import load_config
from minivllm.core.models.loader import load_model
from minivllm.core.models.location import resolve_model
from tests.engine.gguf_files import Content, converted, random_model
from tests.engine.gguf_models import COMMON, MODELS, MOE, PAGE, QUANTIZATIONS, page
from tests.engine.running import WatchedRun, greedy
from tests.engine.tiny_models import VOCAB_SIZE, reference_logits

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


@pytest.mark.parametrize(
    "name",
    [
        "gemma3, linear rope of the layers without window",
        "llama, factors of Llama 3.1",
        "llama, experts of mixtral",
        "mistral3, yarn and temperature scale",
        "phi3, partial rotation and longrope",
    ],
)
def test_engine_generates_what_the_original_model_does(name: str, tmp_path: Path) -> None:
    original = random_model(MODELS[name]())
    path = converted(original).save(tmp_path / "tiny.gguf")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4, "num_blocks": 40}
    run = WatchedRun(EngineConfig(model=str(path), max_num_batched_tokens=11, **options))
    run.add("one", TOKENS, greedy(8))
    run.run_on()
    token_ids = list(TOKENS)
    for _ in range(8):
        token_ids.append(int(reference_logits(original, token_ids)[-1].argmax()))
    assert run.tokens["one"] == token_ids[len(TOKENS) :]


# -- nothing without an effect -----------------------------------------------------------------------------------------

ABSENCE_HAS_A_MEANING = {
    "output.weight": "the head is the embeddings",
    "rope_freqs.weight": "Llama before 3.1",
    "llama.attention.sliding_window": "every layer sees all tokens",
    "llama.rope.freq_base": "10000, up to the context of Llama 2",
    "llama.rope.scaling.yarn_attn_factor": "follows from the factor",
    "llama.rope.scaling.yarn_beta_fast": "32",
    "llama.rope.scaling.yarn_beta_slow": "1",
    "olmo.attention.clamp_kqv": "no clipping, as in most of the family",
}
"""What a complete file of another model may lack: without it, such a file looks like a good one."""


@pytest.fixture(scope="module")
def originals() -> dict[str, tuple[Content, torch.Tensor]]:
    """Content and logits of each model, made once."""
    models = {name: random_model(make_config()) for name, make_config in MODELS.items()}
    return {name: (converted(model), eager_logits(model)) for name, model in models.items()}


@given(data=st.data())
@settings(max_examples=400, deadline=None)
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
        ("llama.block_count", 2**32 - 1),
        ("llama.embedding_length", 2**32 - 1),
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


@pytest.mark.parametrize("used", [0, 99])
def test_number_of_used_experts_is_refused_outside_of_its_range(used: int, tmp_path: Path) -> None:
    content = converted(random_model(MODELS["llama, experts of mixtral"]()))
    metadata = {**content.metadata, "llama.expert_used_count": used}
    path = Content("llama", metadata, content.tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=rf"experts and uses {used} of them"):
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


def test_dense_granite_4_is_granite(tmp_path: Path) -> None:
    original = random_model(MODELS["granite"]())
    content = converted(original)
    content.metadata |= {
        "granite.attention.head_count_kv": [2, 2],
        "granite.expert_count": 0,
        "granite.expert_used_count": 0,
        "granite.expert_shared_feed_forward_length": 64,
        "granite.rope.scaling.finetuned": True,
        "granite.ssm.conv_kernel": 4,
    }
    assert_same_logits(eager_logits(load(content.save(tmp_path / "tiny.gguf"))), eager_logits(original))


def test_tensor_of_another_shape_is_refused_with_both_shapes(llama: Content, tmp_path: Path) -> None:
    tensors = {**llama.tensors, "blk.1.ffn_up.weight": llama.tensors["blk.1.ffn_up.weight"][:-1]}
    path = Content("llama", llama.metadata, tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.ffn_up\.weight' of shape \[63, 48\].*\[64, 48\]"):
        load(path)


@pytest.mark.parametrize("cut", [(slice(3),), (0,), (slice(None), slice(23)), (..., slice(47))])
def test_experts_of_another_shape_are_refused_with_all_shapes(cut: tuple[Any, ...], tmp_path: Path) -> None:
    content = converted(random_model(MODELS["qwen3moe"]()))
    content.tensors["blk.1.ffn_up_exps.weight"] = content.tensors["blk.1.ffn_up_exps.weight"][cut]
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.ffn_up_exps\.weight' of shape .*gate_up_proj has the shape"):
        load(content.save(tmp_path / "tiny.gguf"))


def test_llama_3_1_without_its_rope_factors_is_refused(tmp_path: Path) -> None:
    content = converted(random_model(MODELS["llama, factors of Llama 3.1"]()))
    content.metadata |= {"llama.rope.freq_base": 500_000.0, "llama.context_length": 131_072}
    del content.tensors["rope_freqs.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks the tensor 'rope_freqs\.weight'"):
        load(content.save(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("family", "num_layers", "expected"), [("gemma2", 46, 8.0), ("gemma3", 62, 8.0)])
def test_largest_gemma_scales_queries_by_width_per_head(
    family: str, num_layers: int, expected: float, tmp_path: Path
) -> None:
    content = converted(random_model(next(make() for name, make in MODELS.items() if name.startswith(family))))
    content.metadata[f"{family}.block_count"] = num_layers
    norm = content.tensors["blk.0.attn_norm.weight"]
    content.tensors |= {f"blk.{layer}.attn_norm.weight": norm for layer in range(num_layers)}
    file = GGUFFile.open(content.save(tmp_path / "tiny.gguf"))
    assert load_config(file).query_pre_attn_scalar == expected


@pytest.mark.parametrize(("context", "window"), [(4096, 2047), (131_072, None)])
def test_first_files_of_phi3_have_the_window_of_their_context(context: int, window: int | None, tmp_path: Path) -> None:
    content = converted(random_model(MODELS["phi3"]()))
    content.metadata |= {"phi3.context_length": context, "phi3.rope.scaling.original_context_length": context}
    del content.metadata["phi3.attention.sliding_window"]
    assert load_config(GGUFFile.open(content.save(tmp_path / "tiny.gguf"))).sliding_window == window


def renamed(content: Content, architecture: str) -> Content:
    """Returns the same content under another architecture."""
    prefix = f"{content.architecture}."
    metadata = {key.replace(prefix, f"{architecture}."): value for key, value in content.metadata.items()}
    return Content(architecture, {**metadata, "general.architecture": architecture}, content.tensors)


def test_mistral3_without_yarn_is_mistral(tmp_path: Path) -> None:
    original = random_model(MODELS["llama, as mistral"]())
    path = renamed(converted(original), "mistral3").save(tmp_path / "tiny.gguf")
    assert_same_logits(eager_logits(load(path)), eager_logits(original))


def test_llama_with_biases_of_queries_keys_and_values_alone_is_served(tmp_path: Path) -> None:
    original = random_model(MODELS["qwen2"]())
    original.config.model_type = "llama"  # converted with its permutation
    path = converted(original).save(tmp_path / "tiny.gguf")
    assert load(path).config.model_type == "qwen2"
    assert_same_logits(eager_logits(load(path)), eager_logits(original))


def test_moe_model_needs_no_width_of_layers_without_experts(tmp_path: Path) -> None:
    original = random_model(MODELS["qwen3moe"]())
    content = converted(original)
    del content.metadata["qwen3moe.feed_forward_length"]
    assert_same_logits(eager_logits(load(content.save(tmp_path / "tiny.gguf"))), eager_logits(original))


def test_eos_and_recommended_sampling_come_from_the_file(llama: Content, tmp_path: Path) -> None:
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.mirostat": 0}
    path = Content("llama", {**llama.metadata, **sampling}, llama.tensors).save(tmp_path / "tiny.gguf")
    loaded = load_model(EngineConfig(model=str(path), dtype="float32", device="cpu"))
    assert loaded.eos_token_ids == {2}
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 7}


@pytest.mark.parametrize("architecture", ["llama4", "glm4", "no-such-architecture"])
def test_unknown_architecture_is_refused_with_its_name(architecture: str, llama: Content, tmp_path: Path) -> None:
    metadata = {**llama.metadata, "general.architecture": architecture}
    path = Content(architecture, metadata, llama.tensors).save(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=f"architecture '{architecture}', which is not read from GGUF") as caught:
        load(path)
    assert ("safetensors version" in str(caught.value)) is (architecture == "glm4")


def test_every_architecture_and_quantization_is_documented() -> None:
    assert set(ARCHITECTURES) == {
        converted(random_model(make_config())).architecture for make_config in MODELS.values()
    }
    assert PAGE.read_text() == page(), "run: python -m tests.engine.gguf_models"


# -- quantized weights -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide() -> Content:
    """A model whose rows have one block of 256 values, as the K quantizations need."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    return converted(random_model(LlamaConfig(**{**COMMON, **sizes})))


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
    content = converted(random_model(Qwen3MoeConfig(**{**COMMON, **MOE, **sizes}, head_dim=16)))
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
