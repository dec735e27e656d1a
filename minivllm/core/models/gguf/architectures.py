"""GGUF architectures: which metadata key is which field of a transformers config, which tensor which parameter.

Source of keys, tensor names and defaults: llama.cpp's converter (`conversion/`) and its loader (`src/llama-model.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.gguf.keys import Keys
from minivllm.core.models.gguf.rope import rope_parameters

Tensors = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps to one transformers model type.

    Attributes:
        keys: required metadata keys and their config fields, besides `COMMON_KEYS`.
        optional: config fields of keys that may be absent, with the value that holds then.
        accepted: keys of features that this architecture always or never has, with the values that say so.
        fixed: config fields that the file does not tell.
        biases: config fields that say whether there are biases, and a tensor of the first layer that tells.
        tensors: parameters of the model and the tensors that fill them, several of them one after the other along the
            last dimension but one. `*` is a layer; without a suffix it holds for `.weight` and `.bias`.
        permuted: parameters whose rows the converter reordered so that the two halves of a rotation are neighbours.
        transposed: parameters that have inputs first.
        norm_offset: what the converter added to the weights of norms.
        rotates_part: the rotation may cover a part of a head.
        adjust: sets config fields that no table can tell.
    """

    model_type: str
    when: Callable[[GGUFFile], bool] = lambda file: True
    keys: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    tensors: Tensors
    permuted: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    norm_offset: int = 0
    rotates_part: bool = False
    adjust: Callable[[Keys, dict[str, Any]], None] = lambda keys, config: None


COMMON_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

_RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SOFTMAX_GATE = {"{arch}.expert_gating_func": (1,)}

_LAYER = "model.layers.*"
_ATTENTION: Tensors = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    f"{_LAYER}.self_attn.q_proj": "blk.*.attn_q",
    f"{_LAYER}.self_attn.k_proj": "blk.*.attn_k",
    f"{_LAYER}.self_attn.v_proj": "blk.*.attn_v",
    f"{_LAYER}.self_attn.o_proj": "blk.*.attn_output",
}
_NORMS_BEFORE: Tensors = {
    f"{_LAYER}.input_layernorm": "blk.*.attn_norm",
    f"{_LAYER}.post_attention_layernorm": "blk.*.ffn_norm",
}
_QK_NORMS: Tensors = {
    f"{_LAYER}.self_attn.q_norm": "blk.*.attn_q_norm",
    f"{_LAYER}.self_attn.k_norm": "blk.*.attn_k_norm",
}
_GATED_MLP: Tensors = {
    f"{_LAYER}.mlp.gate_proj": "blk.*.ffn_gate",
    f"{_LAYER}.mlp.up_proj": "blk.*.ffn_up",
    f"{_LAYER}.mlp.down_proj": "blk.*.ffn_down",
}
_EXPERT_TENSORS = ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")
_MOE: Tensors = {
    f"{_LAYER}.mlp.gate": "blk.*.ffn_gate_inp",
    f"{_LAYER}.mlp.experts.gate_up_proj": _EXPERT_TENSORS,
    f"{_LAYER}.mlp.experts.down_proj": "blk.*.ffn_down_exps.weight",
}
_SHARED_EXPERT: Tensors = {
    f"{_LAYER}.mlp.shared_expert_gate": "blk.*.ffn_gate_inp_shexp",
    f"{_LAYER}.mlp.shared_expert.gate_proj": "blk.*.ffn_gate_shexp",
    f"{_LAYER}.mlp.shared_expert.up_proj": "blk.*.ffn_up_shexp",
    f"{_LAYER}.mlp.shared_expert.down_proj": "blk.*.ffn_down_shexp",
}
_GRANITE_MOE: Tensors = {
    f"{_LAYER}.block_sparse_moe.router": "blk.*.ffn_gate_inp",
    f"{_LAYER}.block_sparse_moe.experts.gate_up_proj": _EXPERT_TENSORS,
    f"{_LAYER}.block_sparse_moe.experts.down_proj": "blk.*.ffn_down_exps.weight",
    f"{_LAYER}.shared_mlp.input_linear": ("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
    f"{_LAYER}.shared_mlp.output_linear": "blk.*.ffn_down_shexp",
}
_NORMS_AROUND: Tensors = {
    f"{_LAYER}.input_layernorm": "blk.*.attn_norm",
    f"{_LAYER}.post_attention_layernorm": "blk.*.post_attention_norm",
    f"{_LAYER}.pre_feedforward_layernorm": "blk.*.ffn_norm",
    f"{_LAYER}.post_feedforward_layernorm": "blk.*.post_ffw_norm",
}
_LLAMA = {**_ATTENTION, **_NORMS_BEFORE, **_GATED_MLP}
_LLAMA_MOE = {**_ATTENTION, **_NORMS_BEFORE, **_MOE}
_PERMUTED = frozenset({f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.self_attn.k_proj"})
_LLAMA_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
_GRANITE_KEYS = {
    **_RMS_NORM,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _has(key: str) -> Callable[[GGUFFile], bool]:
    return lambda file: bool(file.metadata.get(f"{file.architecture}.{key}"))


def _layer_types(keys: Keys, config: dict[str, Any], period: int | None) -> None:
    """Sets which layers have a sliding window: all but each `period`-th, unless the file tells the layers itself."""
    pattern = keys.get("attention.sliding_window_pattern", period)
    layers = range(config["num_hidden_layers"])
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in layers]
    elif len(pattern) != len(layers):
        raise keys.file.error(f"has a sliding_window_pattern of {len(pattern)} layers and {len(layers)} layers")
    config["layer_types"] = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]


def _llama(keys: Keys, config: dict[str, Any]) -> None:
    is_llama3 = config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500_000.0}
    if is_llama3 and config["max_position_embeddings"] == 131_072 and "rope_freqs.weight" not in keys.file.tensors:
        raise keys.file.error("is Llama 3.1 or later by its keys, and lacks the tensor 'rope_freqs.weight'")


def _gemma2(keys: Keys, config: dict[str, Any]) -> None:
    _layer_types(keys, config, period=2)
    _query_scale(keys, config, layers_of_largest=46)


def _gemma3(keys: Keys, config: dict[str, Any]) -> None:
    _layer_types(keys, config, period=6)
    _query_scale(keys, config, layers_of_largest=62)
    keys.get("rope.freq_base")  # the common default is that of the other layers
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _query_scale(keys: Keys, config: dict[str, Any], layers_of_largest: int) -> None:
    """Sets the scale of the queries, which only the largest model of the family does not take from the head size."""
    if config["num_hidden_layers"] == layers_of_largest:
        default = config["hidden_size"] / config["num_attention_heads"]
    else:
        default = config["head_dim"]
    scale = keys.get("attention.scale", None)
    config["query_pre_attn_scalar"] = scale**-2 if scale else default


def _olmo3(keys: Keys, config: dict[str, Any]) -> None:
    _layer_types(keys, config, period=4)
    full = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", full["rope_theta"])}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


def _phi3(keys: Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = config["sliding_window"] or None  # 0 is Phi-4, without one
    keys.get("rope.dimension_count")  # without it the rotated part of a head would be unknown
    original = keys.get("rope.scaling.original_context_length")
    config["original_max_position_embeddings"] = original
    if config["rope_parameters"]["rope_type"] == "default" and original < config["max_position_embeddings"]:
        raise keys.file.error("lacks the tensors rope_factors_long.weight and rope_factors_short.weight")


def _starcoder2(keys: Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = keys.get("attention.sliding_window", None)


_GEMMA_FIXED = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}

ARCHITECTURES: dict[str, tuple[Architecture, ...]] = {
    "llama": (
        Architecture(
            model_type="mixtral",
            when=_has("expert_count"),
            keys={**_RMS_NORM, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            optional={"attention.sliding_window": ("sliding_window", None)},
            accepted=_SOFTMAX_GATE,
            tensors=_LLAMA_MOE,
            permuted=_PERMUTED,
        ),
        Architecture(
            model_type="mistral",
            when=_has("attention.sliding_window"),
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            tensors=_LLAMA,
            permuted=_PERMUTED,
        ),
        Architecture(
            model_type="llama",
            keys=_RMS_NORM,
            biases=_LLAMA_BIASES,
            tensors=_LLAMA,
            permuted=_PERMUTED,
            adjust=_llama,
        ),
    ),
    "qwen2": (Architecture(model_type="qwen2", keys=_RMS_NORM, fixed=_NO_WINDOW, tensors=_LLAMA),),
    "qwen2moe": (
        Architecture(
            model_type="qwen2_moe",
            keys={
                **_RMS_NORM,
                **_EXPERTS,
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            accepted=_SOFTMAX_GATE,
            fixed={**_NO_WINDOW, "norm_topk_prob": False},
            tensors={**_LLAMA_MOE, **_SHARED_EXPERT},
        ),
    ),
    "qwen3": (
        Architecture(
            model_type="qwen3",
            keys=_RMS_NORM,
            fixed=_NO_WINDOW,
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**_LLAMA, **_QK_NORMS},
        ),
    ),
    "qwen3moe": (
        Architecture(
            model_type="qwen3_moe",
            keys={**_RMS_NORM, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
            accepted=_SOFTMAX_GATE,
            fixed={**_NO_WINDOW, "norm_topk_prob": True},
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**_LLAMA_MOE, **_QK_NORMS},
        ),
    ),
    "gemma": (Architecture(model_type="gemma", keys=_RMS_NORM, fixed=_GEMMA_FIXED, tensors=_LLAMA, norm_offset=1),),
    "gemma2": (
        Architecture(
            model_type="gemma2",
            keys={
                **_RMS_NORM,
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
                "attention.sliding_window": "sliding_window",
            },
            fixed=_GEMMA_FIXED,
            tensors={**_ATTENTION, **_NORMS_AROUND, **_GATED_MLP},
            norm_offset=1,
            adjust=_gemma2,
        ),
    ),
    "gemma3": (
        Architecture(
            model_type="gemma3_text",
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            optional={"final_logit_softcapping": ("final_logit_softcapping", None)},
            fixed=_GEMMA_FIXED,
            tensors={**_ATTENTION, **_NORMS_AROUND, **_QK_NORMS, **_GATED_MLP},
            norm_offset=1,
            adjust=_gemma3,
        ),
    ),
    "phi3": (
        Architecture(
            model_type="phi3",
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            tensors={
                **_ATTENTION,
                **_NORMS_BEFORE,
                f"{_LAYER}.self_attn.qkv_proj": "blk.*.attn_qkv",
                f"{_LAYER}.mlp.gate_up_proj": "blk.*.ffn_up",
                f"{_LAYER}.mlp.down_proj": "blk.*.ffn_down",
            },
            rotates_part=True,
            adjust=_phi3,
        ),
    ),
    "starcoder2": (
        Architecture(
            model_type="starcoder2",
            keys={"attention.layer_norm_epsilon": "norm_epsilon"},
            fixed={"hidden_act": "gelu_pytorch_tanh"},
            biases={"use_bias": "blk.0.attn_q.bias"},
            tensors={
                **_ATTENTION,
                **_NORMS_BEFORE,
                f"{_LAYER}.mlp.c_fc": "blk.*.ffn_up",
                f"{_LAYER}.mlp.c_proj": "blk.*.ffn_down",
            },
            adjust=_starcoder2,
        ),
    ),
    "smollm3": (
        Architecture(
            model_type="smollm3",
            keys=_RMS_NORM,
            fixed={**_NO_WINDOW, "no_rope_layer_interval": 4},
            biases=_LLAMA_BIASES,
            tensors=_LLAMA,
            permuted=_PERMUTED,
        ),
    ),
    "granite": (
        Architecture(
            model_type="granite",
            keys=_GRANITE_KEYS,
            accepted={"{arch}.rope.scaling.finetuned": (True,)},
            biases=_LLAMA_BIASES,
            tensors=_LLAMA,
            permuted=_PERMUTED,
        ),
    ),
    "granitemoe": (
        Architecture(
            model_type="granitemoeshared",
            keys={**_GRANITE_KEYS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            optional={"expert_shared_feed_forward_length": ("shared_intermediate_size", 0)},
            accepted={**_SOFTMAX_GATE, "{arch}.rope.scaling.finetuned": (True,)},
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**_ATTENTION, **_NORMS_BEFORE, **_GRANITE_MOE},
            permuted=_PERMUTED,
        ),
    ),
    "olmo2": (
        Architecture(
            model_type="olmo3",
            when=_has("attention.sliding_window"),
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**_ATTENTION, **_NORMS_AROUND, **_QK_NORMS, **_GATED_MLP},
            adjust=_olmo3,
        ),
        Architecture(
            model_type="olmo2",
            keys=_RMS_NORM,
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**_ATTENTION, **_NORMS_AROUND, **_QK_NORMS, **_GATED_MLP},
        ),
    ),
}


def choose_architecture(file: GGUFFile) -> Architecture:
    """Returns the table for a file; raises ModelLoadError if there is none."""
    if not file.architecture:
        raise file.error("lacks the metadata key 'general.architecture'")
    for architecture in ARCHITECTURES.get(file.architecture, ()):
        if architecture.when(file):
            return architecture
    raise file.error(
        f"has the architecture {file.architecture!r}, which is not read from GGUF files "
        f"({', '.join(ARCHITECTURES)} are)"
    )


def config_fields(file: GGUFFile) -> tuple[str, dict[str, Any]]:
    """Returns the transformers model type of a file and the fields of its config.

    Raises:
        ModelLoadError: an unknown architecture, or a metadata key is missing, not understood or cannot be served.
    """
    architecture = choose_architecture(file)
    keys = Keys(file)
    config: dict[str, Any] = dict(architecture.fixed)
    for key, name in {**COMMON_KEYS, **architecture.keys}.items():
        config[name] = keys.get(key)
    for key, (name, default) in architecture.optional.items():
        config[name] = keys.get(key, default)
    config["num_key_value_heads"] = keys.get("attention.head_count_kv", config["num_attention_heads"])
    head_dim = keys.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise file.error("has keys and values of different sizes, which cannot be served")
    config["head_dim"] = head_dim
    config["rope_parameters"] = rope_parameters(keys, head_dim, architecture.rotates_part)
    config |= {name: tensor in file.tensors for name, tensor in architecture.biases.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["vocab_size"] = _vocab_size(file, keys)
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = None  # batches are packed, not padded
    architecture.adjust(keys, config)
    keys.accept(dict(architecture.accepted))
    keys.check_all_used()
    return architecture.model_type, config


def _vocab_size(file: GGUFFile, keys: Keys) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("lacks the tensor 'token_embd.weight'")
    size = embedding.shape[0]
    if keys.get("vocab_size", size) != size:
        raise file.error(f"has a vocab_size of {keys.get('vocab_size')} and embeddings of {size} tokens")
    return size
