"""Which transformers models can be served: what is lacking is refused by name, when loading, never answered wrongly.

Three nets, one behind the other. `check_config` reads the configuration before any weight is loaded. `probe` runs two
tokens through the loaded model and records what each layer really asks of attention, so that nothing is guessed from
the names of configuration fields. The model runner at last compares a model type that is not in `PROVEN_MODEL_TYPES`
with transformers' own attention, through the pool, before it serves.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from minivllm.core.attention.base import ATTENTION_NAME, AttentionLayer
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.lm_head import LMHead

logger = logging.getLogger(__name__)

PROVEN_MODEL_TYPES = frozenset(
    {"gemma", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3"}
)
"""Model types that the tests compare with transformers in every detail; others are compared when they are loaded."""

_PROBE_NAME = "minivllm_probe"

# What transformers hands to every attention function, and what does not change the result of ours.
_HARMLESS_ARGUMENTS = frozenset(
    {"cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "logits_to_keep", "max_length_k"}
    | {"max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states", "position_embeddings"}
    | {"position_ids", "return_dict", "use_cache"}
)

_NAMES_OF_ARGUMENTS = {"s_aux": "attention sinks", "position_bias": "a position bias", "head_mask": "a head mask"}


def refuse(name: str, config: PreTrainedConfig, lacking: str) -> ModelLoadError:
    architecture = (getattr(config, "architectures", None) or [config.model_type])[0]
    return ModelLoadError(f"{name!r} ({architecture}) cannot be served: it needs {lacking}")


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Refuses what the configuration alone gives away.

    Raises:
        ModelLoadError: names the architecture and what it needs.
    """
    lacking = _lacking(config)
    if lacking is not None:
        raise refuse(name, config, lacking)


def _lacking(config: PreTrainedConfig) -> str | None:
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "an encoder, and only decoders are supported"
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    unknown = sorted(layer_types - {"full_attention", "sliding_attention"})
    if unknown:
        return f"layers of type {', '.join(unknown)}, and only full and sliding-window attention are supported"
    if getattr(text_config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA)"
    if getattr(text_config, "use_bidirectional_attention", None) or not getattr(text_config, "is_causal", True):
        return "attention to later tokens, and only causal attention is supported"
    model_class = _model_class(config)
    if model_class is None:
        if getattr(config, "auto_map", None):
            return None  # Code that comes with the model; looked at once it is loaded.
        return "a class of causal language models that this version of transformers does not have"
    if getattr(model_class, "_is_stateful", False):
        return "a recurrent state (Mamba, RWKV and hybrids), which the KV pool does not hold"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its own attention code or cache, which transformers does not let another attention replace"
    return None


def _model_class(config: PreTrainedConfig) -> Any:
    try:
        return AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return None


def context_limit(name: str, config: PreTrainedConfig) -> int | None:
    """Longest context for which the model's positions are right; None when it sets no limit.

    Rotary embeddings whose frequencies depend on the longest sequence of a batch would let one request change
    another's result, and K that is cached would stay at the old frequencies. They are served as far as the frequencies
    do not change.
    """
    text_config = config.get_text_config(decoder=True)
    limit: int | None = getattr(text_config, "max_position_embeddings", None)
    for rope in _rope_parameters(text_config):
        rope_type = rope.get("rope_type", "default")
        if rope_type == "longrope":
            original = rope.get("original_max_position_embeddings")
            if original is None:
                raise refuse(name, config, "longrope without original_max_position_embeddings")
            if limit is None or original < limit:
                logger.warning(
                    "%s: longrope changes its frequencies beyond %d tokens, so the context ends there", name, original
                )
                limit = original
        elif "dynamic" in rope_type and limit is None:
            raise refuse(name, config, "dynamic rotary embeddings without max_position_embeddings")
    return limit


def _rope_parameters(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [nested for nested in parameters.values() if isinstance(nested, dict)]


class _Recorder:
    """What the layers of one model asked for, in the order they did."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionLayer] = {}
        self.lacking: str | None = None

    def look(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        others: dict[str, Any],
    ) -> None:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            self.lacking = f"layers that cannot be told apart (layer_idx={index!r})"
        elif attention_mask is not None:
            self.lacking = "an attention mask of its own"
        elif not getattr(module, "is_causal", True) or others.get("is_causal") is False:
            self.lacking = "attention to later tokens, and only causal attention is supported"
        elif key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            self.lacking = f"K and V of different shapes ({tuple(key.shape)} and {tuple(value.shape)})"
        elif query.shape[2] != key.shape[2]:
            self.lacking = "keys that do not belong to a token of the text"
        for argument, value_ in others.items():
            if argument not in _HARMLESS_ARGUMENTS and value_ is not None and value_ is not False:
                self.lacking = _NAMES_OF_ARGUMENTS.get(argument, f"the attention argument {argument!r}")
        if self.lacking is None:
            scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            shape = (query.shape[1], key.shape[1], query.shape[-1])
            self.layers[int(index)] = AttentionLayer(*shape, scale, sliding_window, softcap)  # type: ignore[arg-type]


_recorder: ContextVar[_Recorder | None] = ContextVar("minivllm_probe", default=None)


def _probe_attention(
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
    recorder = _recorder.get()
    if recorder is None:
        raise RuntimeError("the probe's attention was called outside of a probe")
    recorder.look(module, query, key, value, attention_mask, scaling, sliding_window, softcap, others)
    # What comes out matters to nobody; its shape does.
    shared = query.shape[1] // key.shape[1]
    output = functional.scaled_dot_product_attention(query, key.repeat_interleave(shared, dim=1), query, is_causal=True)
    return output.transpose(1, 2).contiguous(), None


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[_Recorder]:
    """The model attends by `_probe_attention` meanwhile."""
    AttentionInterface.register(_PROBE_NAME, _probe_attention)
    recorder = _Recorder()
    token = _recorder.set(recorder)
    model.set_attn_implementation(_PROBE_NAME)
    try:
        with torch.inference_mode():
            yield recorder
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        _recorder.reset(token)


def _two_tokens(model: PreTrainedModel) -> dict[str, Any]:
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    return {"input_ids": tokens, "position_ids": positions, "use_cache": False}


def probe(name: str, model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """Runs two tokens through the model and returns what each layer asks of attention.

    Raises:
        ModelLoadError: something that we cannot give; names it.
    """
    config = model.config
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise refuse(name, config, "positions of its own making, and packed sequences need them given")
    with _probing(model) as recorder:
        try:
            model.base_model(**_two_tokens(model))
        except Exception as error:
            if recorder.lacking is None:
                raise refuse(name, config, f"more than tokens and positions to run ({error})") from error
    lacking = recorder.lacking or _unlike(recorder.layers, config)
    if lacking is not None:
        raise refuse(name, config, lacking)
    return tuple(recorder.layers[index] for index in sorted(recorder.layers))


def find_head(name: str, model: PreTrainedModel) -> LMHead:
    """The model's head, compared with the model's own logits on two tokens.

    Raises:
        ModelLoadError: there is none, or it does something to the logits that we do not know.
    """
    head = LMHead.of(model)
    if head is None:
        raise refuse(name, model.config, "a projection to logits that can be found")
    with _probing(model):
        own = model(**_two_tokens(model)).logits[0]
    with _probing(model):
        ours = head(model.base_model(**_two_tokens(model)).last_hidden_state[0])
    if ours.shape != own.shape or not (ours.float() - own.float()).norm() <= 1e-2 * own.float().norm():
        raise refuse(name, model.config, "a treatment of its logits that is not known")
    return head


def _unlike(layers: dict[int, AttentionLayer], config: PreTrainedConfig) -> str | None:
    """What the layers together ask for and we lack."""
    if not layers or sorted(layers) != list(range(len(layers))):
        return f"layers without attention between those with it (attention in layers {sorted(layers)})"
    if len({(layer.num_kv_heads, layer.head_size) for layer in layers.values()}) > 1:
        return "layers with different numbers or sizes of KV heads"
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        return None
    for index, layer in layers.items():
        # A window that only the mask knows would be lost, and one that the mask does not know would be too much.
        if (layer_types[index] == "sliding_attention") != (layer.sliding_window is not None):
            return f"a sliding window that does not reach its attention function (layer {index})"
    return None
