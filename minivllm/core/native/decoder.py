"""A Llama-like decoder that runs as one C++ call a step, made from the modules of transformers' own model."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from minivllm.core.attention.base import AttentionLayer
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.native import bindings, library, why_not
from minivllm.core.native.packing import Arena, NumberFormat, PackedLinear, cpu_floats, format_of_16_bits, pack
from minivllm.core.native.steps import describe_step
from minivllm.core.native.workspace import Workspace

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Their layers are all: norm, one projection each for queries, keys and values, optional norms of heads, rotation,
attention, projection, residual; norm, silu(gate) * up, projection, residual."""

GATE_WIDTH = 16
"""Gates and ups alternate in runs of so many columns, so that both of an output stand in one panel."""

SENSITIVE_LAYERS = 2
"""In 8 bits, so many first layers keep queries, keys and values in 16: their inputs are embeddings, whose few large
elements leave the others too few bits. Without this the default model loses three times as much accuracy."""

_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


def why_not_decoder(model: Any, layers: tuple[AttentionLayer, ...], dtype: torch.dtype) -> str | None:
    """None when `NativeDecoder` computes what this model of transformers does, else the reason, as a clause."""
    config = model.config
    if model.device.type != "cpu":
        return "it is for CPUs"
    if config.model_type not in MODEL_TYPES or not type(model).__module__.startswith("transformers.models."):
        return f"it does not know the layers of {config.model_type!r}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"it has no products in {str(dtype).removeprefix('torch.')}"
    if config.hidden_act != "silu" or config.hidden_size % 4 or config.intermediate_size % GATE_WIDTH:
        return "its feed-forward layers are of another kind"
    if model.base_model.rotary_emb.rope_type not in _FIXED_ROTATIONS:
        return f"its rotation is of another kind ({model.base_model.rotary_emb.rope_type})"
    if len({layer.scale for layer in layers}) > 1 or any(layer.softcap for layer in layers):
        return "its layers scale their scores differently"
    if layers[0].head_size % 4:
        return "its heads are too small"
    return why_not()


class NativeDecoder:
    """Owns packed copies of the weights and keeps the transformers model's embedding and norms.

    The model's own weights are freed, layer by layer: memory never holds all of them twice.

    Attributes:
        sensitive_format: the number format of what 8 bits would harm most.

    Args:
        model: what `why_not_decoder` has no objection to.
        layers: what each layer asks of attention.
        kv_cache: the pool that steps are run on.
        number_format: of the products of the layers.
        max_positions: longest context that will come.
    """

    def __init__(
        self,
        model: Any,
        layers: tuple[AttentionLayer, ...],
        kv_cache: KVCachePool,
        *,
        number_format: NumberFormat,
        max_positions: int,
    ) -> None:
        found = library()
        if found is None:
            raise RuntimeError(why_not())
        self._library = found
        self._number_format = number_format
        self.sensitive_format = format_of_16_bits(found) if number_format is NumberFormat.INT8 else number_format
        self._workspace = Workspace(found)
        self._arena = Arena()
        self._kept: list[Any] = []
        self.hidden_size = int(model.config.hidden_size)
        self._layers = (bindings.Layer * len(layers))()
        for index, (module, layer) in enumerate(zip(model.base_model.layers, layers, strict=True)):
            self._layers[index] = self._layer(module, layer, kv_cache, index)
            free_weights(module)
        self._decoder = self._describe(model, layers[0], kv_cache, max_positions)

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        """Last hidden states (T, hidden_size) float32; K and V of the tokens are in the pool afterwards."""
        step, _kept = describe_step(model_input.attention)
        output = cpu_floats(model_input.input_ids.shape[0], self.hidden_size)
        self._library.minivllm_decode(
            self._workspace.handle(),
            ctypes.byref(self._decoder),
            ctypes.byref(step),
            model_input.input_ids.data_ptr(),
            model_input.positions.data_ptr(),
            output.data_ptr(),
        )
        return output

    def _describe(
        self, model: Any, layer: AttentionLayer, kv_cache: KVCachePool, max_positions: int
    ) -> bindings.Decoder:
        base = model.base_model
        embedding = base.embed_tokens.weight
        cosines, sines = rotation_tables(base.rotary_emb, max_positions)
        self._kept += [embedding, cosines, sines]
        cache = kv_cache.key_cache[0]
        return bindings.Decoder(
            layers=self._layers,
            embedding=embedding.data_ptr(),
            final_norm=self._float(base.norm.weight),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            num_layers=len(self._layers),
            hidden_size=self.hidden_size,
            intermediate_size=model.config.intermediate_size,
            num_query_heads=layer.num_query_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            rotary_size=2 * cosines.shape[1],
            block_stride=cache.stride(0),
            head_stride=cache.stride(1),
            block_size=kv_cache.block_size,
            cache_is_float32=cache.dtype == torch.float32,
            embedding_is_float32=embedding.dtype == torch.float32,
            epsilon=base.norm.variance_epsilon,
            scale=layer.scale,
        )

    def _layer(self, module: Any, layer: AttentionLayer, kv_cache: KVCachePool, index: int) -> bindings.Layer:
        attention, feed_forward = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = torch.cat([projection.weight for projection in projections])
        biases = [projection.bias for projection in projections]
        bias = None if biases[0] is None else torch.cat(biases)
        gate_up = [interleave(each.weight) for each in (feed_forward.gate_proj, feed_forward.up_proj)]
        gate_up_bias = None
        if feed_forward.gate_proj.bias is not None:
            gate_up_bias = torch.stack(
                [interleave(each.bias) for each in (feed_forward.gate_proj, feed_forward.up_proj)], dim=1
            ).reshape(-1)
        gate_up_weight = torch.stack(gate_up, dim=1).reshape(-1, self.hidden_size)
        number_format = self._number_format
        first_format = self.sensitive_format if index < SENSITIVE_LAYERS else number_format
        return bindings.Layer(
            query_key_value=self._pack(weight, bias, first_format).description,
            output=self._pack(attention.o_proj.weight, attention.o_proj.bias, number_format).description,
            gate_up=self._pack(gate_up_weight, gate_up_bias, number_format).description,
            down=self._pack(feed_forward.down_proj.weight, feed_forward.down_proj.bias, number_format).description,
            input_norm=self._float(module.input_layernorm.weight),
            attention_norm=self._float(module.post_attention_layernorm.weight),
            query_norm=self._norm_of_heads(attention, "q_norm"),
            key_norm=self._norm_of_heads(attention, "k_norm"),
            key_cache=kv_cache.key_cache[index].data_ptr(),
            value_cache=kv_cache.value_cache[index].data_ptr(),
            window=layer.sliding_window or 0,
        )

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, number_format: NumberFormat) -> PackedLinear:
        packed = pack(self._library, weight, bias, number_format, self._arena)
        self._kept.append(packed)
        return packed

    def _norm_of_heads(self, attention: nn.Module, name: str) -> int | None:
        norm = getattr(attention, name, None)
        return None if norm is None else self._float(norm.weight)

    def _float(self, weight: torch.Tensor) -> int:
        """Address of a float32 copy that lives as long as this."""
        copy = weight.detach().float().contiguous().clone()
        self._kept.append(copy)
        return copy.data_ptr()


def free_weights(module: nn.Module) -> None:
    """Lets go of the weights of all projections in a module."""
    for each in module.modules():
        if isinstance(each, nn.Linear):
            each.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """(N, ...) as (N / GATE_WIDTH, GATE_WIDTH, ...): stacked with another along dim 1, the two alternate."""
    return rows.reshape(-1, GATE_WIDTH, *rows.shape[1:])


def rotation_tables(rotary: nn.Module, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (num_positions, rotary_size / 2) float32, by the model's own rule."""
    positions = torch.arange(num_positions, device="cpu").unsqueeze(0)
    cosines, sines = rotary(torch.zeros(1, dtype=torch.float32, device="cpu"), positions)
    half = cosines.shape[-1] // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
