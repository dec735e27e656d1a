"""Writes GGUF files from transformers models, with the keys, names and layouts of llama.cpp's converter.

Nothing here uses the reader's tables: tensor names come from `gguf.get_tensor_name_map`, as in the converter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.engine.tiny_models import VOCAB_SIZE

Array = npt.NDArray[Any]

ARCHITECTURE_OF = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "granitemoeshared": "granitemoe",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "mistral3", "arcee", "olmo")
_WITH_WINDOW = ("mistral", "cohere2", "mixtral", "gemma2", "gemma3_text", "phi3", "olmo3")


@dataclass
class Content:
    """What a file holds: arrays are in torch's order; `types` has those tensors that are not float32."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, Array]
    types: dict[str, GGMLQuantizationType] = field(default_factory=dict)

    def save(self, path: Path, **options: Any) -> Path:
        """Writes the file; `options` are those of `gguf.GGUFWriter`, such as `split_max_tensors`."""
        writer = gguf.GGUFWriter(path, self.architecture, **options)
        if "general.architecture" not in self.metadata:
            writer.kv_data[0].pop("general.architecture")
        for key, value in self.metadata.items():
            add: dict[type, Callable[..., None]] = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }
            if key not in ("general.architecture", "general.alignment"):
                add[type(value)](key, value)
        for name, data in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=self.types.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def quantized(self, kind: GGMLQuantizationType, seed: int = 0) -> Content:
        """Returns a copy with matrices of that type, of random blocks where the gguf package cannot quantize."""
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(seed)
        copy = Content(self.architecture, self.metadata, dict(self.tensors), {})
        for name, data in self.tensors.items():
            if data.ndim < 2 or data.shape[-1] % block_size:
                continue
            try:
                blocks = gguf.quants.quantize(data, kind)
            except NotImplementedError:
                # As small bytes, so that a scale in float16 is finite wherever it is in the block.
                shape = (*data.shape[:-1], data.shape[-1] // block_size * block_bytes)
                blocks = random.integers(0, 0x30, shape, dtype=np.uint8)
            copy.tensors[name], copy.types[name] = blocks, kind
        assert copy.types
        return copy

    def dequantized(self) -> Content:
        """Returns a copy in float32."""
        tensors = {
            name: gguf.quants.dequantize(data, self.types[name]) if name in self.types else data
            for name, data in self.tensors.items()
        }
        return Content(self.architecture, self.metadata, tensors)


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model of random weights, norms and biases included, deterministic per config."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def converted(model: PreTrainedModel) -> Content:
    """Returns what llama.cpp's converter would write for a model."""
    config = model.config
    architecture = ARCHITECTURE_OF.get(config.model_type, config.model_type)
    arch_id = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    tensors: dict[str, Array] = {}
    for name, tensor in _plain_tensors(model):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        tensors[new_name] = _as_converted(architecture, config, name, tensor).numpy()
    tensors |= _rope_tensors(config)
    return Content(architecture, {**_metadata(architecture, config), **_tokenizer()}, tensors)


def _plain_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters by the names that checkpoints have, without a tied head, fused experts in parts."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=-2)
            yield f"{base}.gate_proj.weight".replace("block_sparse_moe", "mlp"), gate
            yield f"{base}.up_proj.weight".replace("block_sparse_moe", "mlp"), up
        elif last == "down_proj":
            yield f"{name}.weight".replace("block_sparse_moe", "mlp"), tensor
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2, dim=-2)
            yield name.replace("shared_mlp.input_linear", "mlp.shared_expert.gate_proj"), gate
            yield name.replace("shared_mlp.input_linear", "mlp.shared_expert.up_proj"), up
        elif name.endswith("router.weight"):
            yield name.replace("router", "router.layer"), tensor
        else:
            yield name, tensor


def _as_converted(architecture: str, config: PreTrainedConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if architecture in _PERMUTED and ".q_proj." in name:
        return _permuted(tensor, config.num_attention_heads)
    if architecture in _PERMUTED and ".k_proj." in name:
        return _permuted(tensor, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    return tensor.squeeze() if "shared_expert_gate" in name else tensor


def _permuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    return dict(parameters.get("full_attention", parameters))


def _rope_tensors(config: PreTrainedConfig) -> dict[str, Array]:
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope["long_factor"], np.float32),
            "rope_factors_short.weight": np.array(rope["short_factor"], np.float32),
        }
    if rope.get("rope_type") != "llama3":
        return {}
    dim, original = _head_dim(config), rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        length = 2 * math.pi / frequency
        smooth = (original / length - low) / (high - low)
        within = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if length < original / high else rope["factor"] if length > original / low else within)
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def _metadata(architecture: str, config: PreTrainedConfig) -> dict[str, Any]:
    rope = _rope(config)
    rope_type = rope.get("rope_type")
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.value_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": _layer_norm_eps(config),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": _sliding_theta(config),
        "expert_count": getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None)
        or getattr(config, "shared_intermediate_size", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None) or getattr(config, "logit_scale", None),
        "attention.clamp_kqv": getattr(config, "clip_qkv", None),
    }
    if config.model_type in _WITH_WINDOW and (config.sliding_window or architecture == "phi3"):
        found["attention.sliding_window"] = config.sliding_window or 0
    if config.model_type == "olmo3":
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        found["attention.sliding_window_pattern"] = pattern
    if architecture in _PERMUTED and architecture != "olmo":
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": _head_dim(config)}
    if architecture == "phi3":
        found["rope.dimension_count"] = int(_head_dim(config) * rope["partial_rotary_factor"])
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        if rope_type == "longrope":
            original = rope["original_max_position_embeddings"]
            ratio = config.max_position_embeddings / original
            found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(ratio) / math.log(original))
    elif rope_type in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope_type, "rope.scaling.factor": float(rope["factor"])}
    if rope_type == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found["rope.scaling.yarn_attn_factor"] = rope.get("attention_factor")
        found["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
        found["rope.scaling.yarn_beta_slow"] = rope.get("beta_slow")
    if architecture in ("gemma", "gemma2"):
        found["rope.freq_base"] = None
    if architecture == "mistral3" and rope_type == "yarn":
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if architecture in ("command-r", "cohere2"):
        found["rope.scaling.type"] = "none"
    if architecture == "olmo":
        found["attention.layer_norm_epsilon"] = 1e-5
    general = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": "Tiny",
        "general.file_type": 0,
        "general.quantization_version": 2,
    }
    return general | {f"{architecture}.{key}": value for key, value in found.items() if value is not None}


def _layer_norm_eps(config: PreTrainedConfig) -> float | None:
    for name in ("norm_epsilon", "layer_norm_epsilon", "layer_norm_eps"):
        if (value := getattr(config, name, None)) is not None:
            return float(value)
    return None


def _sliding_theta(config: PreTrainedConfig) -> float | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    return (parameters.get("sliding_attention") or {}).get("rope_theta")


def _tokenizer() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"<{token_id}>" for token_id in range(VOCAB_SIZE)],
        "tokenizer.ggml.token_type": [1] * VOCAB_SIZE,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
