"""Decides which transformers models can be served. Others raise a ModelLoadError that names the unsupported feature.

There are three checks. `check_supported` reads the configuration before any weight is loaded. `find_attention_layers`
and `find_lm_head` run two tokens through the loaded model, because configuration fields do not show what a layer passes
to its attention function. `worker/self_check.py` compares model types outside `TESTED_MODEL_TYPES` with transformers.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from minivllm.core.attention.base import ATTENTION_NAME, AttentionLayer
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.checkpoint import quantization_of
from minivllm.core.models.lm_head import LMHead

logger = logging.getLogger(__name__)

TESTED_MODEL_TYPES = frozenset(
    {"gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3"}
)
"""Model types that the tests compare with transformers; other types are compared when they are loaded."""

_RECORDER_NAME = "minivllm_recorder"

# Arguments of attention functions that do not change the result.
_HARMLESS_ARGUMENTS = frozenset(
    {"cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "logits_to_keep", "max_length_k"}
    | {"max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states"}
    | {"output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache"}
)

_FEATURE_OF_ARGUMENT = {"s_aux": "attention sinks", "position_bias": "a position bias", "head_mask": "a head mask"}


_MEDIA = {"vision_config": "an image part", "audio_config": "an audio part"}
"""Fields of configurations of models that also read other things than text."""


def unsupported(name: str, config: PreTrainedConfig, feature: str) -> ModelLoadError:
    """Returns the error for a model that needs `feature`."""
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    media = other_parts(config)
    reason = (
        f"it has {media}; its text part is not served, since it needs {feature}" if media else f"it needs {feature}"
    )
    return ModelLoadError(f"{name!r} ({architecture}) cannot be served: {reason}")


def other_parts(config: PreTrainedConfig) -> str:
    """Returns what a model has besides its text part, as "an image part"; empty for a model of text alone."""
    return " and ".join(part for field, part in _MEDIA.items() if getattr(config, field, None) is not None)


def check_supported(name: str, config: PreTrainedConfig) -> None:
    """Checks the configuration.

    Raises:
        ModelLoadError: it needs an unsupported feature; names the architecture and the feature.
    """
    feature = _unsupported_feature(config) or _unsupported_quantization(config)
    if feature is not None:
        raise unsupported(name, config, feature)


def _unsupported_quantization(config: PreTrainedConfig) -> str | None:
    quantization = quantization_of(config)
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = fields.get("quant_method")
    if method is None and not (fields.get("load_in_8bit") or fields.get("load_in_4bit")):
        return "a quantization method that its quantization_config does not name (quant_method)"
    if not AutoHfQuantizer.supports_quant_method(fields):
        return f"the quantization method {method!r}, which this version of transformers does not have"
    return None


def _unsupported_feature(config: PreTrainedConfig) -> str | None:
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "an encoder, and only decoders are supported"
    if getattr(text_config, "num_kv_shared_layers", None):
        return f"layers that share the K and V of others ({text_config.num_kv_shared_layers} of them)"
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unknown:
        return f"layers of type {', '.join(unknown)}, and only full and sliding-window attention are supported"
    if getattr(text_config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA)"
    if getattr(text_config, "use_bidirectional_attention", None) or not getattr(text_config, "is_causal", True):
        return "attention to later tokens, and only causal attention is supported"
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        if getattr(config, "auto_map", None):
            return None  # Remote code, checked after it is loaded.
        return "a class of causal language models that this version of transformers does not have"
    if getattr(model_class, "_is_stateful", False):
        return "a recurrent state (Mamba, RWKV and hybrids), which the KV pool does not hold"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its own attention code or cache, which transformers does not let another attention replace"
    return None


def context_limit(name: str, config: PreTrainedConfig, wanted: int | None = None) -> int | None:
    """Returns the longest context that the model's positions support, or None without a limit.

    YaRN and linear scaling reach `factor` times the original context; `max_position_embeddings` may be that already.
    Where rotary frequencies depend on the longest sequence of a batch, the context ends before they change: otherwise
    one request would change another's result, and cached K would have the old frequencies.

    Raises:
        ModelLoadError: `wanted` tokens are beyond that end, or the configuration does not say where it is.
    """
    text_config = config.get_text_config(decoder=True)
    limit: int | None = getattr(text_config, "max_position_embeddings", None)
    is_flat = "rope_type" in (getattr(text_config, "rope_parameters", None) or {})
    for rope in _rope_parameters(text_config):
        rope_type, original = rope.get("rope_type", "default"), rope.get("original_max_position_embeddings")
        if rope_type == "longrope" or "dynamic" in rope_type:
            end = original if rope_type == "longrope" else limit
            if end is None:
                field = "original_max_position_embeddings" if rope_type == "longrope" else "max_position_embeddings"
                raise unsupported(name, config, f"{rope_type} rotary embeddings without {field}")
            reason = f"{rope_type} rotary embeddings change their frequencies beyond {end} tokens"
            if wanted is not None and wanted > end:
                raise ModelLoadError(f"max_model_len is {wanted}, but {reason}; the largest possible is {end}")
            if rope_type != "longrope" or limit is None or end < limit:
                logger.warning("%s: %s, so the context ends there", name, reason)
            limit = end if limit is None else min(limit, end)
        elif rope_type == "yarn" or (rope_type == "linear" and is_flat):
            base = original or getattr(text_config, "max_position_embeddings", None) or 0
            limit = max(limit or 0, int(base * float(rope.get("factor") or 1.0))) or None
    return limit


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Returns the rope parameters, one entry per kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [nested for nested in parameters.values() if isinstance(nested, dict)]


class _UnsupportedError(Exception):
    """Raised by `_record_attention`, with the feature that the layer needs."""


def _record_attention(
    layers: dict[int, AttentionLayer],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Serves the attention layers of transformers, and adds the parameters of the calling layer to `layers`."""
    for argument, given in others.items():
        if argument not in _HARMLESS_ARGUMENTS and given is not None and given is not False:
            raise _UnsupportedError(_FEATURE_OF_ARGUMENT.get(argument, f"the attention argument {argument!r}"))
    index: Any = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index in layers:
        raise _UnsupportedError(f"layers that cannot be distinguished (layer_idx={index!r})")
    if attention_mask is not None:
        raise _UnsupportedError("an attention mask of its own")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise _UnsupportedError("attention to later tokens, and only causal attention is supported")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise _UnsupportedError(f"K and V of different shapes ({tuple(key.shape)} and {tuple(value.shape)})")
    if query.shape[2] != key.shape[2]:
        raise _UnsupportedError("keys that do not belong to a token of the text")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layers[index] = AttentionLayer(query.shape[1], key.shape[1], query.shape[-1], scale, sliding_window, softcap)
    # Only the shape of the result matters.
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    output = functional.scaled_dot_product_attention(query, key, query, is_causal=True)
    return output.transpose(1, 2).contiguous(), None


@torch.inference_mode()
def _run_two_tokens(model: PreTrainedModel, part: torch.nn.Module) -> tuple[Any, dict[int, AttentionLayer]]:
    """Runs two tokens through a part of `model`. Returns its output and the attention layers by index."""
    layers: dict[int, AttentionLayer] = {}
    AttentionInterface.register(_RECORDER_NAME, partial(_record_attention, layers))
    model.set_attn_implementation(_RECORDER_NAME)
    try:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        positions = torch.arange(2, device=model.device).unsqueeze(0)
        return part(input_ids=tokens, position_ids=positions, use_cache=False), layers
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def find_attention_layers(name: str, model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """Runs two tokens through the model and returns the attention parameters of each layer. One call at a time.

    Raises:
        ModelLoadError: a layer needs an unsupported feature; names it.
    """
    config = model.config
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise unsupported(name, config, "positions of its own making, and packed sequences need them given")
    try:
        _, layers = _run_two_tokens(model, model.base_model)
    except _UnsupportedError as error:
        raise unsupported(name, config, str(error)) from None
    except Exception as error:
        raise unsupported(name, config, f"more than tokens and positions to run ({error})") from error
    feature = _unsupported_combination(layers, config)
    if feature is not None:
        raise unsupported(name, config, feature)
    return tuple(layers[index] for index in sorted(layers))


def find_lm_head(name: str, model: PreTrainedModel) -> LMHead:
    """Returns the model's head, after comparing it with the model's own logits of two tokens. One call at a time.

    Raises:
        ModelLoadError: there is none, or the model processes its logits in an unknown way.
    """
    head = LMHead.from_model(model)
    if head is None:
        raise unsupported(name, model.config, "a projection to logits that can be found")
    theirs = _run_two_tokens(model, model)[0].logits[0].float()
    with torch.inference_mode():
        ours = head(_run_two_tokens(model, model.base_model)[0].last_hidden_state[0]).float()
    if not theirs.isfinite().all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelLoadError(f"{name!r} cannot be served: its logits are not finite (NaN or infinite) in {dtype}")
    if ours.shape != theirs.shape or not (ours - theirs).norm() <= 1e-2 * theirs.norm():
        raise unsupported(name, model.config, "a treatment of its logits that is not known")
    return head


def _unsupported_combination(layers: dict[int, AttentionLayer], config: PreTrainedConfig) -> str | None:
    if not layers or sorted(layers) != list(range(len(layers))):
        return f"layers without attention between those with it (attention in layers {sorted(layers)})"
    if len({(layer.num_kv_heads, layer.head_size) for layer in layers.values()}) > 1:
        return "layers with different numbers or sizes of KV heads"
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        return None
    for index, layer in layers.items():
        # The window must be both an argument of the attention function and in the mask that transformers would use.
        if (layer_types[index] == "sliding_attention") != (layer.sliding_window is not None):
            return f"a sliding window that does not reach its attention function (layer {index})"
    return None
