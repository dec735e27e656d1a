"""NativeDecoder: the forward pass of a Llama-like transformers model as one C++ call per step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minivllm.core.attention.base import AttentionLayer
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.native import bindings, library, why_not
from minivllm.core.native.packing import PANEL_WIDTH, Arena, NumberFormat, empty_float32, fastest_16_bit_format, pack

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types with these layers: RMSNorm, q, k and v projections, optional norms of the heads, RoPE, attention, output
projection, residual; RMSNorm, silu(gate) * up, down projection, residual."""

GATE_WIDTH = PANEL_WIDTH // 2
"""Gate and up columns alternate in runs of this length, so that the epilogue finds both in one panel."""

NUM_SENSITIVE_LAYERS = 2
"""First layers whose q, k and v projections stay in 16 bits under int8. Their inputs are embeddings with outliers; in
8 bits the default model would lose three times as much accuracy."""

_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


def why_not_decoder(model: Any, layers: tuple[AttentionLayer, ...], dtype: torch.dtype) -> str | None:
    """Returns why `NativeDecoder` cannot run this transformers model, as a clause, or None if it can."""
    config = model.config
    if model.device.type != "cpu":
        return "it is for CPUs"
    if getattr(model, "is_quantized", False):
        return "the projections of transformers' quantization have no plain weights"
    if config.model_type not in MODEL_TYPES or not type(model).__module__.startswith("transformers.models."):
        return f"it does not know the layers of {config.model_type!r}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"it has no products in {str(dtype).removeprefix('torch.')}"
    if config.hidden_act != "silu" or config.hidden_size % 4 or config.intermediate_size % GATE_WIDTH:
        return "its feed-forward layers are of another kind"
    if model.base_model.rotary_emb.rope_type not in _FIXED_ROPE_TYPES:
        return f"its RoPE is of another kind ({model.base_model.rotary_emb.rope_type})"
    if len({layer.scale for layer in layers}) > 1 or any(layer.softcap for layer in layers):
        return "its layers scale their scores differently"
    if layers[0].head_size % 4:
        return "its heads are too small"
    return why_not()


class NativeDecoder:
    """Runs embedding, layers and final norm on packed copies of the weights.

    Frees the model's own projection weights layer by layer, so that memory never contains all of them twice.

    Attributes:
        sensitive_format: number format of the weights that int8 would harm most.

    Args:
        model: a model for which `why_not_decoder` returns None.
        max_positions: maximum context length.
    """

    def __init__(
        self,
        model: Any,
        layers: tuple[AttentionLayer, ...],
        kv_cache: KVCachePool,
        number_format: NumberFormat,
        max_positions: int,
    ) -> None:
        native = library()
        if native is None:
            raise RuntimeError(why_not())
        self._library = native
        self._number_format = number_format
        self.sensitive_format = fastest_16_bit_format(native) if number_format is NumberFormat.INT8 else number_format
        self._workspace = bindings.Workspace(native)
        self._arena = Arena()
        self._referenced: list[Any] = []  # keeps the memory behind the structures' pointers alive
        self._layers = (bindings.Layer * len(layers))()
        for index, (module, layer) in enumerate(zip(model.base_model.layers, layers, strict=True)):
            self._layers[index] = self._layer(module, layer, kv_cache, index)
            for child in module.modules():
                if isinstance(child, nn.Linear):
                    child.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self._decoder = self._describe(model, layers[0], kv_cache, max_positions)

    def hidden_states(self, model_input: ModelInput) -> torch.Tensor:
        """Returns the last hidden states (T, hidden_size) float32; writes the tokens' K and V to the pool."""
        metadata = bindings.AttentionMetadata.of(model_input.attention)
        output = empty_float32(model_input.input_ids.shape[0], self._decoder.hidden_size)
        self._library.minivllm_forward(
            self._workspace.handle(),
            ctypes.byref(self._decoder),
            ctypes.byref(metadata),
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
        # By the model's own module: (max_positions, rotary_size / 2) float32.
        positions = torch.arange(max_positions, device="cpu").unsqueeze(0)
        tables = base.rotary_emb(torch.zeros(1, dtype=torch.float32, device="cpu"), positions)
        cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous() for table in tables)
        self._referenced += [embedding, cos, sin]
        cache = kv_cache.key_cache[0]
        return bindings.Decoder(
            layers=self._layers,
            embedding=embedding.data_ptr(),
            final_norm=self._float32(base.norm.weight),
            rope_cos=cos.data_ptr(),
            rope_sin=sin.data_ptr(),
            num_layers=len(self._layers),
            hidden_size=model.config.hidden_size,
            intermediate_size=model.config.intermediate_size,
            num_query_heads=layer.num_query_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            rotary_size=2 * cos.shape[1],
            block_stride=cache.stride(0),
            head_stride=cache.stride(1),
            block_size=kv_cache.block_size,
            cache_is_float32=cache.dtype == torch.float32,
            embedding_is_float32=embedding.dtype == torch.float32,
            epsilon=base.norm.variance_epsilon,
            scale=layer.scale,
        )

    def _layer(self, module: Any, layer: AttentionLayer, kv_cache: KVCachePool, index: int) -> bindings.Layer:
        attention, mlp = module.self_attn, module.mlp
        number_format = self._number_format
        qkv_format = self.sensitive_format if index < NUM_SENSITIVE_LAYERS else number_format
        head_norms = {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
        return bindings.Layer(
            qkv_proj=self._pack(qkv_format, attention.q_proj, attention.k_proj, attention.v_proj),
            o_proj=self._pack(number_format, attention.o_proj),
            gate_up_proj=self._pack(number_format, mlp.gate_proj, mlp.up_proj, combine=interleave),
            down_proj=self._pack(number_format, mlp.down_proj),
            input_layernorm=self._float32(module.input_layernorm.weight),
            post_attention_layernorm=self._float32(module.post_attention_layernorm.weight),
            **{name: self._float32(norm.weight) for name, norm in head_norms.items()},
            key_cache=kv_cache.key_cache[index].data_ptr(),
            value_cache=kv_cache.value_cache[index].data_ptr(),
            window=layer.sliding_window or 0,
        )

    def _pack(
        self,
        number_format: NumberFormat,
        *projections: Any,
        combine: Callable[[tuple[torch.Tensor, ...]], torch.Tensor] = torch.cat,
    ) -> bindings.PackedLinear:
        """Packs one projection that computes several, its output columns ordered by `combine`."""
        weights, biases = zip(*((projection.weight, projection.bias) for projection in projections), strict=True)
        bias = None if biases[0] is None else combine(biases)
        packed = pack(self._library, combine(weights), bias, number_format, self._arena)
        self._referenced.append(packed)
        return packed

    def _float32(self, weight: torch.Tensor) -> int:
        """Returns the address of a float32 copy that lives as long as the decoder."""
        copy = weight.detach().float().contiguous().clone()
        self._referenced.append(copy)
        return copy.data_ptr()


def interleave(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Interleaves the rows of tensors (N, ...) in runs of GATE_WIDTH."""
    runs = [tensor.reshape(-1, GATE_WIDTH, *tensor.shape[1:]) for tensor in tensors]
    return torch.stack(runs, dim=1).flatten(0, 2)
