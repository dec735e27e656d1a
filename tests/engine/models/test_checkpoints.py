"""A checkpoint gives the logits of transformers' eager forward pass, or is refused with the tensor and the reason."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, LlamaConfig, LlavaConfig, PreTrainedConfig, Qwen3MoeConfig

from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.checkpoint import IGNORABLE
from minivllm.core.models.loader import load_model
from tests.engine.running import WatchedRun, greedy
from tests.engine.tiny_models import TINY, VOCAB_SIZE, reference_logits, reference_model, save_tiny

Tensors = dict[str, torch.Tensor]
GOOD = tempfile.TemporaryDirectory(prefix="checkpoints-")
PROMPT = [5, 17, 3, 88, 41, 2, 9]
LAYER = "model.layers.1."
DOWN = LAYER + "mlp.down_proj.weight"
NORM = LAYER + "input_layernorm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.2.w1.weight"


def llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**TINY["llama"]().to_dict(), **changes})


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    **TINY,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    ),
}


@functools.cache
def good(name: str) -> tuple[Path, Tensors, torch.Tensor]:
    """Returns the folder of a good checkpoint, its tensors, and transformers' logits of `PROMPT`."""
    folder = save_tiny(CONFIGS[name](), Path(GOOD.name, name))
    return folder, load_file(folder / "model.safetensors"), reference_logits(reference_model(folder), PROMPT)


def write(folder: Path, name: str, tensors: Tensors, **config: Any) -> Path:
    """Writes a checkpoint with the configuration of the good one."""
    fields = json.loads((good(name)[0] / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def config_for(folder: Path, **changes: Any) -> EngineConfig:
    fixed = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4, "num_blocks": 12}
    return EngineConfig(model=str(folder), **(fixed | changes))


def served_logits(folder: Path, **changes: Any) -> torch.Tensor:
    """Returns the logits from which the engine samples the token after `PROMPT`."""
    run = WatchedRun(config_for(folder, **changes))
    run.add("r", PROMPT, greedy(1))
    run.run()
    return run.logits["r"][0]


def assert_equal(folder: Path, name: str) -> None:
    torch.testing.assert_close(served_logits(folder), good(name)[2][-1], atol=1e-4, rtol=1e-4)


# ---- tensors -------------------------------------------------------------------------------------------------------


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if not any(end in key for end in ends)}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key.replace(old, new): tensor for key, tensor in tensors.items()}


def replaced(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: change(tensors[key])}


def added(key: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: tensor}


def poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return poison


REFUSED: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "no down_proj": ("llama", without(DOWN), rf"lacks {DOWN}"),
    "no lm_head, untied": ("llama", without("lm_head"), r"lacks lm_head\.weight"),
    "no norm": ("llama", without(NORM), rf"lacks {NORM}"),
    "no bias": ("qwen2", without("1.self_attn.q_proj.bias"), r"lacks model\.layers\.1\.self_attn\.q_proj\.bias"),
    "no embeddings": ("llama", without("embed_tokens"), r"lacks model\.embed_tokens\.weight"),
    "no embeddings, tied": ("llama-tied", without("embed_tokens"), r"embed_tokens\.weight"),
    "no layer": ("llama", without(LAYER), r"lacks 9 tensors \(model\.layers\.1\..* and 5 more\)"),
    "foreign prefix": (
        "llama",
        lambda tensors: {f"net.{key}": each for key, each in tensors.items()},
        "lacks 30 tensors",
    ),
    "layer of another number": ("llama", renamed("layers.2.", "layers.5."), r"lacks 9 tensors \(model\.layers\.2"),
    "unknown bias": (
        "llama",
        added(LAYER + "self_attn.q_proj.bias", torch.ones(48)),
        "q_proj.bias, which LlamaForCausalLM",
    ),
    "one layer more": ("llama", added("model.layers.3.mlp.down_proj.weight", torch.ones(48, 64)), "has model.layers.3"),
    "no experts of a layer": (
        "mixtral",
        without("1.block_sparse_moe.experts"),
        r"lacks model\.layers\.1\.mlp\.experts",
    ),
    "no tensor of an expert": ("mixtral", without(EXPERT), rf"lacks {EXPERT}"),
    "no expert": (
        "mixtral",
        without("experts.1."),
        r"lacks 9 tensors \(model\.layers\.0\.block_sparse_moe\.experts\.1\.w1",
    ),
    "no last expert": (
        "mixtral",
        without("experts.3."),
        r"experts\.down_proj has the shape \(3, 48, 64\).*\(4, 48, 64\)",
    ),
    "expert of another number": ("mixtral", renamed("experts.1.", "experts.4."), r"lacks 9 tensors"),
    "expert of another shape": (
        "mixtral",
        replaced(EXPERT, lambda each: each[:8]),
        rf"{EXPERT} has the shape \(8, 48\)",
    ),
    "wrong shape": (
        "llama",
        replaced(DOWN, lambda each: each[:, :-1]),
        rf"{DOWN} has the shape \(48, 63\).*\(48, 64\)",
    ),
    "wrong vocabulary": (
        "llama",
        replaced("model.embed_tokens.weight", lambda each: each[:-1]),
        r"embed_tokens\.weight has the shape \(96, 48\), and the model needs \(97, 48\)",
    ),
    "NaN": ("llama", replaced(DOWN, poisoned(torch.nan)), rf"1 of 3072 values of the tensor {DOWN} are not finite"),
    "infinite": ("llama", replaced(NORM, poisoned(-torch.inf)), rf"{NORM} are not finite"),
    "float8 without scales": ("llama", replaced(DOWN, lambda each: each.to(torch.float8_e4m3fn)), rf"F8_E4M3: {DOWN}"),
    "int8 without scales": ("llama", replaced(DOWN, lambda each: each.to(torch.int8)), rf"quantized \(I8: {DOWN}"),
    "int32": ("llama", replaced(DOWN, lambda each: each.to(torch.int32)), rf"quantized \(I32: {DOWN}"),
    "int8 with scales of no known method": (
        "llama",
        lambda tensors: tensors | {DOWN: tensors[DOWN].to(torch.int8), DOWN + "_scale": torch.ones(48)},
        rf"quantized \(I8: {DOWN}",
    ),
    "embeddings twice": ("llama", added("embed_tokens.weight", torch.ones(97, 48)), r"has embed_tokens\.weight twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_checkpoint_that_does_not_fill_the_model_is_refused_by_tensor_name(case: str, tmp_path: Path) -> None:
    name, change, message = REFUSED[case]
    write(tmp_path, name, change(good(name)[1]))
    with pytest.raises(ModelLoadError, match=message):
        load_model(config_for(tmp_path))


SERVED: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "tied, lm_head left out": ("llama-tied", without("lm_head")),
    "tied, embeddings left out": (
        "llama-tied",
        lambda tensors: without("embed")(tensors) | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
    ),
    "tied, a copy as lm_head": (
        "llama-tied",
        lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    ),
    "rotary frequencies": ("llama", added(LAYER + "self_attn.rotary_emb.inv_freq", torch.full((4,), torch.nan))),
    "causal masks": ("gpt2", added("transformer.h.0.attn.bias", torch.ones(1, 1, 256, 256).tril().bool())),
    "masked bias": ("gpt_neox", added("gpt_neox.layers.0.attention.masked_bias", torch.tensor(-1e9))),
    "image part": ("llama", added("vision_tower.layers.0.mlp.fc1.weight", torch.ones(4, 4))),
    "scales of an 8-bit KV cache": ("llama", added(LAYER + "self_attn.k_scale", torch.ones(1))),
    "names of the base model": (
        "gpt2",
        lambda tensors: {key.removeprefix("transformer."): each for key, each in tensors.items()},
    ),
    "experts": ("mixtral", dict),
    "experts of Qwen": ("qwen3_moe", dict),
}


@pytest.mark.parametrize("case", SERVED)
def test_checkpoint_with_ignorable_or_tied_tensors_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    name, change = SERVED[case]
    assert_equal(write(tmp_path, name, change(good(name)[1])), name)


def test_ignorable_tensors_have_a_reason_each() -> None:
    assert all(IGNORABLE.values())


def test_values_beyond_float16_are_refused_there(tmp_path: Path) -> None:
    write(tmp_path, "llama", replaced(DOWN, poisoned(1e6))(good("llama")[1]))
    load_model(config_for(tmp_path))
    with pytest.raises(ModelLoadError, match=rf"{DOWN} are not finite \(NaN or infinite in float16"):
        load_model(config_for(tmp_path, dtype="float16"))


def test_refusal_is_logged_without_a_table_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "llama", without(DOWN)(good("llama")[1]))
    with pytest.raises(ModelLoadError):
        load_model(config_for(tmp_path))
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize("drop", [(), (DOWN,)], ids=["complete", "incomplete"])
def test_pytorch_checkpoint_is_checked_alike(drop: tuple[str, ...], tmp_path: Path) -> None:
    tensors = without(*drop)(good("llama")[1]) if drop else good("llama")[1]
    write(tmp_path, "llama", tensors)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    if not drop:
        assert_equal(tmp_path, "llama")
        return
    with pytest.raises(ModelLoadError, match=rf"lacks {DOWN}"):
        load_model(config_for(tmp_path))


def write_shards(folder: Path, *shards: Tensors) -> Path:
    """Writes a checkpoint of several files with an index."""
    write(folder, "llama", {})
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_sharded_checkpoint_is_complete_or_refused(tmp_path: Path) -> None:
    items = list(good("llama")[1].items())
    first, second = dict(items[:10]), dict(items[10:])
    assert_equal(write_shards(tmp_path / "good", first, second), "llama")
    repeated = write_shards(tmp_path / "repeated", first, second | dict(items[:1]))
    with pytest.raises(ModelLoadError, match=rf"model-1\.safetensors' repeats {items[0][0]}"):
        load_model(config_for(repeated))
    lost = write_shards(tmp_path / "lost", first, second)
    (lost / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors"):
        load_model(config_for(lost))


# ---- random changes ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_change_of_one_tensor_is_refused_or_without_effect(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llama", "llama-tied", "qwen2", "gemma", "gpt2", "mixtral", "qwen3_moe"]))
    tensors = dict(good(name)[1])
    key = data.draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(key)
    action = data.draw(st.sampled_from(["drop", "rename", "reshape", "poison", "add"]))
    if action == "rename":
        parts = key.split(".")
        place = data.draw(st.integers(0, len(parts) - 1))
        parts[place] = data.draw(
            st.sampled_from(["7", "weight", "bias", "inv_freq", "model", "attn", parts[place] + "_"])
        )
        tensors.setdefault(".".join(parts), tensor)
    elif action == "reshape":
        shapes = [tensor[:-1], tensor[..., 1:], tensor.unsqueeze(0), tensor[..., None]]
        tensors[key] = data.draw(st.sampled_from(shapes)).contiguous()
    elif action == "poison":
        place, value = data.draw(st.integers(0, tensor.numel() - 1)), data.draw(st.sampled_from([torch.nan, torch.inf]))
        tensors[key] = tensor.clone()
        tensors[key].view(-1)[place] = value
    elif action == "add":
        tensors |= {key: tensor, data.draw(st.sampled_from(["x.", "model.x.", "visual."])) + key: torch.ones(3)}
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), name, tensors)
        try:
            ours = served_logits(path)
        except ModelLoadError:
            return
        torch.testing.assert_close(ours, good(name)[2][-1], atol=1e-4, rtol=1e-4)


# ---- quantization --------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def in_float8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Returns a checkpoint in blocks of 16 x 16 with scales, and what its numbers mean."""
    stored, exact = {}, {}
    for key, tensor in tensors.items():
        stored[key] = exact[key] = tensor
        if "_proj" in key:
            rows, columns = tensor.shape
            blocks = tensor.reshape(rows // 16, 16, columns // 16, 16)
            scales = blocks.abs().amax(dim=(1, 3)) / 448
            stored[key] = (blocks / scales[:, None, :, None]).reshape(tensor.shape).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scales
            exact[key] = (stored[key].float().reshape(blocks.shape) * scales[:, None, :, None]).reshape(tensor.shape)
    return stored, exact


def test_float8_checkpoint_gives_the_logits_of_its_numbers_times_its_scales(tmp_path: Path) -> None:
    stored, exact = in_float8(good("llama")[1])
    write(tmp_path / "float8", "llama", stored, quantization_config=FP8)
    write(tmp_path / "exact", "llama", exact)
    expected = reference_logits(reference_model(tmp_path / "exact"), PROMPT)[-1]
    torch.testing.assert_close(served_logits(tmp_path / "float8"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("block", "cut", "reason"),
    [
        ([8, 16], slice(None), "and blocks of"),
        ([16, 16], (slice(None), slice(1)), "and blocks of"),
        ([16, 16], 0, "and blocks of"),
    ],
    ids=["other blocks", "fewer scales", "one row of scales"],
)
def test_float8_scales_of_other_blocks_are_refused(block: list[int], cut: Any, reason: str, tmp_path: Path) -> None:
    stored, _ = in_float8(good("llama")[1])
    stored[f"{DOWN}_scale_inv"] = stored[f"{DOWN}_scale_inv"][cut].contiguous()
    write(tmp_path, "llama", stored, quantization_config={**FP8, "weight_block_size": block})
    with pytest.raises(ModelLoadError, match=reason):
        load_model(config_for(tmp_path))


def test_float8_blocks_that_do_not_divide_a_weight_are_refused(tmp_path: Path) -> None:
    stored, _ = in_float8(good("llama")[1])
    rows, columns = stored[DOWN].shape
    block = [rows - 8, columns - 8]
    scales = {key: torch.ones(2, 2) for key in stored if key.endswith("_scale_inv")}
    kept = {key: tensor for key, tensor in (stored | scales).items() if "_proj" not in key or key.startswith(DOWN)}
    exact = {key: tensor for key, tensor in good("llama")[1].items() if key not in kept}
    write(tmp_path, "llama", kept | exact, quantization_config={**FP8, "weight_block_size": block})
    with pytest.raises(ModelLoadError, match=rf"{DOWN} has the shape .* do not divide"):
        load_model(config_for(tmp_path))


def test_float8_checkpoint_without_a_scale_is_refused(tmp_path: Path) -> None:
    stored, _ = in_float8(good("llama")[1])
    write(tmp_path, "llama", without(f"{DOWN}_scale_inv")(stored), quantization_config=FP8)
    with pytest.raises(ModelLoadError, match=rf"8-bit weights {DOWN} have no scales"):
        load_model(config_for(tmp_path))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "exl9"}, "the quantization method 'exl9'"),
        ({"bits": 4}, "quantization method that its quantization_config does not name"),
        ({"quant_method": "gptq", "bits": 4}, "(?i)gptq"),
        ({"quant_method": "awq", "bits": 4}, "(?i)awq|gptqmodel"),
        ({"quant_method": "compressed-tensors"}, "compressed.tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
    ids=["unknown", "unnamed", "gptq", "awq", "compressed-tensors", "bitsandbytes"],
)
def test_quantization_method_without_support_is_named(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "llama", good("llama")[1], quantization_config=quantization)
    with pytest.raises(ModelLoadError, match=message):
        load_model(config_for(tmp_path))


# ---- files ---------------------------------------------------------------------------------------------------------

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer.model"])
def test_git_lfs_pointer_is_named(file: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", good("llama")[1])
    (tmp_path / file).write_text(POINTER)
    with pytest.raises(ModelLoadError, match=rf"{file}' is a Git LFS pointer.*git lfs pull"):
        load_model(config_for(tmp_path))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "is empty"),
        (5, "is truncated"),
        (100, "is truncated"),
        (-1, "is truncated or damaged: it has"),
        (1, "damaged"),
    ],
    ids=["empty", "in the length", "in the header", "last byte", "a byte more"],
)
def test_cut_safetensors_file_is_named(size: int, message: str, tmp_path: Path) -> None:
    write(tmp_path, "llama", good("llama")[1])
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content + b"x" if size == 1 else content[:size])
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors' {message}|model\.safetensors' is.*{message}"):
        load_model(config_for(tmp_path))


def test_adapter_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "llama", good("llama")[1])
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"adapter \(LoRA\)"):
        load_model(config_for(tmp_path))


def test_folder_with_a_tokenizer_alone_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"a tokenizer but no model: config\.json is missing"):
        load_model(config_for(tmp_path))


# ---- models of several parts ---------------------------------------------------------------------------------------

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def test_text_part_of_a_vision_model_is_served_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = {**_TEXT, "head_dim": 8}
    save_tiny(Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=1), tmp_path)
    expected = reference_logits(reference_model(tmp_path), PROMPT)[-1]
    torch.testing.assert_close(served_logits(tmp_path), expected, atol=1e-4, rtol=1e-4)
    assert "has an image part; its text part is served" in caplog.text


def test_vision_model_without_a_text_class_says_that_its_text_part_is_not_served(tmp_path: Path) -> None:
    vision = {"model_type": "clip_vision_model", **_VISION}
    LlavaConfig(text_config={"model_type": "llama", **_TEXT}, vision_config=vision).save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=r"llava\) cannot be served: it has an image part; its text part is not served"
    ):
        load_model(config_for(tmp_path))
