"""GGUF architectures: which metadata key is which field of a transformers config, which tensor which parameter.

Source of keys, tensor names and defaults: llama.cpp's converter (`conversion/`) and its loader (`src/llama-model.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.gguf.keys import Keys
from minivllm.core.models.gguf.tensor_names import (
    ATTENTION,
    COHERE,
    GATED_MLP,
    GPT2,
    GRANITE_MOE,
    LAYER,
    LLAMA,
    LLAMA_MOE,
    NORMS_AROUND,
    NORMS_BEFORE,
    PERMUTED,
    QK_NORMS,
    SHARED_EXPERT,
    Tensors,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps to one transformers model type.

    Attributes:
        keys: required metadata keys and their config fields, besides those of every architecture.
        optional: config fields of keys that may be absent, with the value that holds then.
        accepted: keys of features that this architecture always or never has, with the values that say so.
        ignored: keys that say nothing about models of this architecture.
        fixed: config fields that the file does not tell.
        biases: config fields that say whether there are biases, and a tensor of the first layer that tells.
        tensors: parameters of the model and the tensors that fill them, as in `tensor_names`.
        permuted: parameters whose rows the converter reordered so that the two halves of a rotation are neighbours.
        transposed: parameters that have inputs first.
        norm_offset: what the converter added to the weights of norms.
        rotation: how much of a head rotary embeddings may rotate: the "whole", a "part" or "none".
        window_period: all layers have a sliding window but each `window_period`-th, unless the file tells them itself.
        longest_without_base: up to this context a file may lack the base of the rotation, which is then 10000.
        adjust: sets config fields that no table can tell.
    """

    model_type: str
    when: Callable[[GGUFFile], bool] = lambda file: True
    keys: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    tensors: Tensors
    permuted: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    norm_offset: int = 0
    rotation: Literal["whole", "part", "none"] = "whole"
    window_period: int | None = None
    longest_without_base: int = 0
    adjust: Callable[[Keys, dict[str, Any]], None] = lambda keys, config: None


_RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_SOFTMAX_GATE = {"{arch}.expert_gating_func": (1,), "{arch}.expert_weights_norm": (True,)}

_LLAMA_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
_GRANITE_KEYS = {
    **_RMS_NORM,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_OF_OTHER_GRANITE_4 = (
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)
"""Keys of experts and Mamba layers, which the converter also writes for those of Granite 4 that have neither."""


def _has(key: str) -> Callable[[GGUFFile], bool]:
    return lambda file: bool(file.metadata.get(f"{file.architecture}.{key}"))


def _llama(keys: Keys, config: dict[str, Any]) -> None:
    is_llama3 = config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500_000.0}
    if is_llama3 and config["max_position_embeddings"] == 131_072 and "rope_freqs.weight" not in keys.file.tensors:
        raise keys.file.error("is Llama 3.1 or later by its keys, and lacks the tensor 'rope_freqs.weight'")


def _gemma2(keys: Keys, config: dict[str, Any]) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(keys, config, layers_of_largest=46)


def _gemma3(keys: Keys, config: dict[str, Any]) -> None:
    config["query_pre_attn_scalar"] = _query_scalar(keys, config, layers_of_largest=62)
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _query_scalar(keys: Keys, config: dict[str, Any], layers_of_largest: int) -> int:
    """Returns the head size, and for the largest model of the family the width per head, which differ there only."""
    if scale := keys.get("attention.scale", None):
        return round(float(scale) ** -2)
    is_largest = config["num_hidden_layers"] == layers_of_largest
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


def _olmo3(keys: Keys, config: dict[str, Any]) -> None:
    full = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", full["rope_theta"])}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


_WINDOWS_OF_PHI3 = {4096: 2047, 131_072: 0}
"""Sliding window by context length, as llama.cpp has it."""


def _phi3(keys: Keys, config: dict[str, Any]) -> None:
    context = config["max_position_embeddings"]
    # The first files of Phi-3 lack the window.
    default = (_WINDOWS_OF_PHI3[context],) if context in _WINDOWS_OF_PHI3 else ()
    config["sliding_window"] = keys.get("attention.sliding_window", *default) or None  # 0 is Phi-4, without one
    keys.get("rope.dimension_count")  # without it the rotated part of a head would be unknown
    original = keys.get("rope.scaling.original_context_length", context)
    config["original_max_position_embeddings"] = original
    if config["rope_parameters"]["rope_type"] == "default" and original < context:
        raise keys.file.error("lacks the tensors rope_factors_long.weight and rope_factors_short.weight")


def _ministral3(keys: Keys, config: dict[str, Any]) -> None:
    config["rope_parameters"]["llama_4_scaling_beta"] = keys.get("attention.temperature_scale")
    keys.get("rope.scaling.yarn_log_multiplier")


_UNUSED_MLP = {"feed_forward_length": ("intermediate_size", 0)}  # of layers without experts, which there are none
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
            tensors=LLAMA_MOE,
            permuted=PERMUTED,
        ),
        Architecture(
            model_type="mistral",
            when=_has("attention.sliding_window"),
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            tensors=LLAMA,
            permuted=PERMUTED,
        ),
        Architecture(  # biases of queries, keys and values alone
            model_type="qwen2",
            when=lambda file: "blk.0.attn_q.bias" in file.tensors and "blk.0.attn_output.bias" not in file.tensors,
            keys=_RMS_NORM,
            fixed=_NO_WINDOW,
            tensors=LLAMA,
            permuted=PERMUTED,
            longest_without_base=4096,
        ),
        Architecture(
            model_type="llama",
            keys=_RMS_NORM,
            biases=_LLAMA_BIASES,
            tensors=LLAMA,
            permuted=PERMUTED,
            longest_without_base=4096,  # Llama 1 and 2
            adjust=_llama,
        ),
    ),
    "qwen2": (Architecture(model_type="qwen2", keys=_RMS_NORM, fixed=_NO_WINDOW, tensors=LLAMA),),
    "qwen2moe": (
        Architecture(
            model_type="qwen2_moe",
            keys={
                **_RMS_NORM,
                **_EXPERTS,
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            },
            optional=_UNUSED_MLP,
            accepted={**_SOFTMAX_GATE, "{arch}.expert_weights_norm": (False,)},
            fixed={**_NO_WINDOW, "norm_topk_prob": False},
            tensors={**LLAMA_MOE, **SHARED_EXPERT},
        ),
    ),
    "qwen3": (
        Architecture(
            model_type="qwen3",
            keys=_RMS_NORM,
            fixed=_NO_WINDOW,
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**LLAMA, **QK_NORMS},
        ),
    ),
    "qwen3moe": (
        Architecture(
            model_type="qwen3_moe",
            keys={**_RMS_NORM, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
            optional=_UNUSED_MLP,
            accepted=_SOFTMAX_GATE,
            fixed={**_NO_WINDOW, "norm_topk_prob": True},
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**LLAMA_MOE, **QK_NORMS},
        ),
    ),
    "gemma": (
        Architecture(
            model_type="gemma",
            keys=_RMS_NORM,
            fixed=_GEMMA_FIXED,
            tensors=LLAMA,
            norm_offset=1,
            longest_without_base=8192,
        ),
    ),
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
            tensors={**ATTENTION, **NORMS_AROUND, **GATED_MLP},
            norm_offset=1,
            longest_without_base=8192,
            window_period=2,
            adjust=_gemma2,
        ),
    ),
    "gemma3": (
        Architecture(
            model_type="gemma3_text",
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            optional={"final_logit_softcapping": ("final_logit_softcapping", None)},
            fixed=_GEMMA_FIXED,
            tensors={**ATTENTION, **NORMS_AROUND, **QK_NORMS, **GATED_MLP},
            norm_offset=1,
            window_period=6,
            adjust=_gemma3,
        ),
    ),
    "phi3": (
        Architecture(
            model_type="phi3",
            keys=_RMS_NORM,
            longest_without_base=4096,
            tensors={
                **ATTENTION,
                **NORMS_BEFORE,
                f"{LAYER}.self_attn.qkv_proj": "blk.*.attn_qkv",
                f"{LAYER}.mlp.gate_up_proj": "blk.*.ffn_up",
                f"{LAYER}.mlp.down_proj": "blk.*.ffn_down",
            },
            rotation="part",
            adjust=_phi3,
        ),
    ),
    "starcoder2": (
        Architecture(
            model_type="starcoder2",
            keys={"attention.layer_norm_epsilon": "norm_epsilon"},
            optional={"attention.sliding_window": ("sliding_window", None)},
            fixed={"hidden_act": "gelu_pytorch_tanh"},
            biases={"use_bias": "blk.0.attn_q.bias"},
            tensors={
                **ATTENTION,
                **NORMS_BEFORE,
                f"{LAYER}.mlp.c_fc": "blk.*.ffn_up",
                f"{LAYER}.mlp.c_proj": "blk.*.ffn_down",
            },
        ),
    ),
    "smollm3": (
        Architecture(
            model_type="smollm3",
            keys=_RMS_NORM,
            fixed={**_NO_WINDOW, "no_rope_layer_interval": 4},
            biases=_LLAMA_BIASES,
            tensors=LLAMA,
            permuted=PERMUTED,
        ),
    ),
    "granite": (
        Architecture(
            model_type="granite",
            keys=_GRANITE_KEYS,
            ignored=_OF_OTHER_GRANITE_4,
            accepted={"{arch}.rope.scaling.finetuned": (True,)},
            biases=_LLAMA_BIASES,
            tensors=LLAMA,
            permuted=PERMUTED,
        ),
    ),
    "granitemoe": (
        Architecture(
            model_type="granitemoeshared",
            keys={**_GRANITE_KEYS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            optional={"expert_shared_feed_forward_length": ("shared_intermediate_size", 0)},
            accepted={**_SOFTMAX_GATE, "{arch}.rope.scaling.finetuned": (True,)},
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**ATTENTION, **NORMS_BEFORE, **GRANITE_MOE},
            permuted=PERMUTED,
        ),
    ),
    "olmo2": (
        Architecture(
            model_type="olmo3",
            when=_has("attention.sliding_window"),
            keys={**_RMS_NORM, "attention.sliding_window": "sliding_window"},
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**ATTENTION, **NORMS_AROUND, **QK_NORMS, **GATED_MLP},
            window_period=4,
            adjust=_olmo3,
        ),
        Architecture(
            model_type="olmo2",
            keys=_RMS_NORM,
            biases={"attention_bias": "blk.0.attn_q.bias"},
            tensors={**ATTENTION, **NORMS_AROUND, **QK_NORMS, **GATED_MLP},
        ),
    ),
    "mistral3": (
        Architecture(
            model_type="ministral3",
            when=lambda file: (
                _has("attention.temperature_scale")(file) or _has("rope.scaling.yarn_log_multiplier")(file)
            ),
            keys=_RMS_NORM,
            tensors=LLAMA,
            permuted=PERMUTED,
            adjust=_ministral3,
        ),
        Architecture(
            model_type="mistral",
            keys=_RMS_NORM,
            fixed={"sliding_window": None},
            tensors=LLAMA,
            permuted=PERMUTED,
        ),
    ),
    "command-r": (
        Architecture(
            model_type="cohere",
            keys={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
            biases={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
            tensors={**COHERE, **QK_NORMS},
        ),
    ),
    "cohere2": (
        Architecture(
            model_type="cohere2",
            keys={
                "attention.layer_norm_epsilon": "layer_norm_eps",
                "logit_scale": "logit_scale",
                "attention.sliding_window": "sliding_window",
            },
            tensors=COHERE,
            window_period=4,
        ),
    ),
    "olmo": (
        Architecture(
            model_type="olmo",
            optional={"attention.clamp_kqv": ("clip_qkv", None)},
            accepted={"{arch}.attention.layer_norm_epsilon": (9.999999747378752e-06,)},  # 1e-5 in float32
            tensors={**ATTENTION, **GATED_MLP},
            permuted=PERMUTED,
        ),
    ),
    "olmoe": (
        Architecture(
            model_type="olmoe",
            keys={**_RMS_NORM, **_EXPERTS},
            accepted={**_SOFTMAX_GATE, "{arch}.expert_weights_norm": (False,)},
            fixed={"norm_topk_prob": False},
            tensors={**LLAMA_MOE, **QK_NORMS},
        ),
    ),
    "arcee": (
        Architecture(
            model_type="arcee",
            keys=_RMS_NORM,
            fixed={"hidden_act": "relu2"},
            biases=_LLAMA_BIASES,
            tensors=LLAMA,
            permuted=PERMUTED,
        ),
    ),
    "seed_oss": (
        Architecture(
            model_type="seed_oss",
            keys=_RMS_NORM,
            biases={**_LLAMA_BIASES, "attention_out_bias": "blk.0.attn_output.bias"},
            tensors={**LLAMA, f"{LAYER}.post_attention_layernorm": "blk.*.post_attention_norm"},
        ),
    ),
    "gpt2": (
        Architecture(
            model_type="gpt2",
            keys={"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
            tensors=GPT2,
            transposed=frozenset(name for name in GPT2 if ".c_" in name),
            rotation="none",
        ),
    ),
}
