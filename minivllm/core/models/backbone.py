"""What turns a step into hidden states, and hidden states into logits: the choice between the ways to do it.

NativeBody         Llama-like models on a CPU: the whole decoder is one C++ call
TransformersBody   any model, any device: transformers' own code on paged attention; with `compile: on` through
                   torch.compile, on CPUs with the projections in C++ where that is possible
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Protocol

import torch

from minivllm.core.attention import AttentionBackend, set_forward_context
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.loader import LoadedModel
from minivllm.core.models.quantization import PackedProjection, pack_projections, quantize_with_torch
from minivllm.core.native import library
from minivllm.core.native.decoder import NativeDecoder, why_not_decoder
from minivllm.core.native.packing import NumberFormat, fastest_16_bit_format

logger = logging.getLogger(__name__)


class ModelBody(Protocol):
    """A model that is ready to run steps."""

    name: str

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        """Last hidden states (T, hidden_size); K and V of the tokens are in the pool afterwards."""
        ...

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(R, hidden_size) to (R, vocab_size)."""
        ...


class TransformersBody:
    """transformers' own code."""

    name = "transformers"

    def __init__(self, model: LoadedModel, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def compile(self) -> None:
        """Lets torch compile the decoder when it is first run, for any number of tokens."""
        base = self._model.model.base_model
        base.forward = torch.compile(base.forward, dynamic=True)
        self.name = "transformers, compiled"
        logger.info("the first steps compile the model: minutes the first time, later starts find it on disk")

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        with set_forward_context(self._attention, model_input.attention):
            return self._model.hidden_states(model_input.input_ids, model_input.positions)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Asked for anew: the projection may have been replaced.
        return replace(self._model.head, projection=self._model.model.get_output_embeddings())(hidden_states)


class NativeBody:
    """One C++ call for the decoder, one for the output projection."""

    name = "native"

    def __init__(self, model: LoadedModel, kv_cache: KVCachePool, number_format: NumberFormat, max_positions: int):
        started = time.monotonic()
        self._decoder = NativeDecoder(
            model.model, model.layers, kv_cache, number_format=number_format, max_positions=max_positions
        )
        # In 8 bits the output projection would cost as much accuracy as all layers together.
        head_format = self._decoder.sensitive_format
        self._head = replace(model.head, projection=PackedProjection(model.head.projection, head_format))
        logger.info(
            "weights packed for the native decoder in %.1f s (%s)",
            time.monotonic() - started,
            number_format.name.lower(),
        )

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        return self._decoder.hidden_states(model_input)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._head(hidden_states)


def number_format_for(dtype: torch.dtype, quantization: str | None) -> NumberFormat | None:
    """The products that suit the CPU; None: those of torch."""
    found = library()
    if found is None:
        return None
    if quantization == "int8":
        return NumberFormat.INT8
    return fastest_16_bit_format(found) if dtype == torch.bfloat16 else None


def choose_body(
    config: EngineConfig, model: LoadedModel, attention: AttentionBackend, kv_cache: KVCachePool, max_positions: int
) -> ModelBody:
    """The fastest way that can serve this model here and that `config` allows.

    Raises:
        ModelLoadError: the quantization that was asked for cannot be had here.
    """
    body = _choose(config, model, attention, kv_cache, max_positions)
    logger.info("model body: %s", body.name)
    return body


def _choose(
    config: EngineConfig, model: LoadedModel, attention: AttentionBackend, kv_cache: KVCachePool, max_positions: int
) -> ModelBody:
    plain = TransformersBody(model, attention)
    if model.device.type != "cpu":
        if config.quantization is not None:
            raise ModelLoadError(
                f"quantization={config.quantization!r} is for CPUs, and the model is on {model.device}"
            )
        if config.compile == "on":
            plain.compile()
        return plain
    number_format = None if config.compile == "off" else number_format_for(model.dtype, config.quantization)
    if number_format is not None:
        reason = why_not_decoder(model.model, model.layers, model.dtype)
        if reason is None and attention.name == "native":
            return NativeBody(model, kv_cache, number_format, max_positions)
        logger.info("the native decoder is not used: %s", reason or f"attention_backend is {attention.name!r}")
        pack_projections(model.model, number_format)
    elif config.quantization == "int8":
        quantize_with_torch(model.model)
    if config.compile == "on":
        plain.compile()
    return plain
