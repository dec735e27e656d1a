"""Backbones: run the model's layers on a step, and turn hidden states into logits.

NativeBackbone         Llama-like models on a CPU: the decoder is one C++ call
TransformersBackbone   any model, any device: transformers' own code on paged attention; with `compile: on` through
                       torch.compile, on CPUs with packed projections where possible
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from minivllm.core.attention import AttentionBackend, set_forward_context
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.lm_head import LMHead
from minivllm.core.models.loader import LoadedModel
from minivllm.core.models.quantization import PackedProjection, pack_projections, quantize_with_torch
from minivllm.core.native import library
from minivllm.core.native.decoder import NativeDecoder, why_not_decoder
from minivllm.core.native.packing import NumberFormat, fastest_16_bit_format

logger = logging.getLogger(__name__)


class Backbone(ABC):
    """A model that is ready to run steps."""

    name: str
    _head: LMHead

    @abstractmethod
    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        """Writes K and V of the tokens into the pool. Returns their last hidden states (T, hidden_size)."""

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns (R, vocab_size) of (R, hidden_size)."""
        return self._head(hidden_states)


class TransformersBackbone(Backbone):
    """Runs transformers' own code, with `compile` through torch.compile for any number of tokens."""

    def __init__(self, model: LoadedModel, attention: AttentionBackend, *, compile: bool = False) -> None:  # noqa: A002
        self.name = "transformers, compiled" if compile else "transformers"
        self.attention = attention
        self._base = model.model.base_model
        # Read again, since packing and quantization replace the output projection.
        self._head = replace(model.head, projection=model.model.get_output_embeddings())
        if compile:
            self._base.forward = torch.compile(self._base.forward, dynamic=True)
            logger.info("the first steps compile the model: minutes the first time, later starts find it on disk")

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        input_ids, positions = model_input.input_ids.unsqueeze(0), model_input.positions.unsqueeze(0)
        with set_forward_context(self.attention, model_input.attention):
            output = self._base(input_ids=input_ids, position_ids=positions, use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states[0]


class NativeBackbone(Backbone):
    """Runs the decoder as one C++ call and the output projection as another."""

    name = "native"

    def __init__(
        self, model: LoadedModel, kv_cache: KVCachePool, number_format: NumberFormat, max_positions: int
    ) -> None:
        started = time.monotonic()
        self._decoder = NativeDecoder(model.model, model.layers, kv_cache, number_format, max_positions)
        # In 8 bits, the output projection would lose as much accuracy as all layers together.
        head_format = self._decoder.sensitive_format
        self._head = replace(model.head, projection=PackedProjection(model.head.projection, head_format))
        seconds, name = time.monotonic() - started, number_format.name.lower()
        logger.info("weights packed for the native decoder in %.1f s (%s)", seconds, name)

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        return self._decoder.hidden_states(model_input)


def number_format_for(dtype: torch.dtype, quantization: str | None) -> NumberFormat | None:
    """Returns the number format of the C++ products, or None for the products of torch."""
    native = library()
    if native is None:
        return None
    if quantization == "int8":
        return NumberFormat.INT8
    return fastest_16_bit_format(native) if dtype == torch.bfloat16 else None


def choose_backbone(
    config: EngineConfig, model: LoadedModel, attention: AttentionBackend, kv_cache: KVCachePool
) -> Backbone:
    """Returns the fastest backbone for this model that `config` allows. May replace the projections of the model.

    Raises:
        ModelLoadError: `config.quantization` is not possible here.
    """
    on_cpu = model.device.type == "cpu"
    if config.quantization is not None and not on_cpu:
        raise ModelLoadError(f"quantization={config.quantization!r} is for CPUs, and the model is on {model.device}")
    packs = on_cpu and config.compile != "off"
    number_format = number_format_for(model.dtype, config.quantization) if packs else None
    if number_format is not None:
        reason = why_not_decoder(model.model, model.layers, model.dtype)
        if reason is None and attention.name == "native":
            return NativeBackbone(model, kv_cache, number_format, min(model.max_model_len, kv_cache.num_tokens))
        logger.info("the native decoder is not used: %s", reason or f"attention_backend is {attention.name!r}")
        pack_projections(model.model, number_format)
    elif config.quantization == "int8":
        quantize_with_torch(model.model)
    return TransformersBackbone(model, attention, compile=config.compile == "on")
