"""NativeBackend: paged attention on CPUs in C++."""

from __future__ import annotations

import ctypes

import torch

from minivllm.core import native
from minivllm.core.attention.base import AttentionBackend, AttentionLayer
from minivllm.core.attention.metadata import AttentionMetadata
from minivllm.core.native import bindings

_DTYPES = (torch.float32, torch.bfloat16)


class NativeBackend(AttentionBackend):
    """Reads K and V in the pool without gathering them; scores and softmax are float32. See `attention.hpp`."""

    name = "native"

    def __init__(self, layers: tuple[AttentionLayer, ...]) -> None:
        super().__init__(layers)
        library = native.library()
        if library is None:
            raise RuntimeError(native.why_not())
        self._library = library
        self._workspace = bindings.Workspace(library)

    @classmethod
    def why_not(cls, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it is for CPUs, not for {device}"
        if dtype not in _DTYPES:
            return f"it keeps K and V in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if any(layer.num_query_heads % layer.num_kv_heads for layer in layers):
            return "its KV heads must serve equally many query heads"
        return native.why_not()

    def forward(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        query, key, value = (_with_dense_rows(states.to(query.dtype)) for states in (query, key, value))
        key_cache = metadata.kv_cache.key_cache[layer_index]
        value_cache = metadata.kv_cache.value_cache[layer_index]
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        layer = self.layers[layer_index]
        call = bindings.AttentionCall(
            metadata.plan(self._begin_step),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            *key_cache.stride()[:2],
            query.dtype == torch.float32,
            key_cache.dtype == torch.float32,
            query.shape[1],
            key.shape[1],
            query.shape[2],
            key_cache.shape[2],
            layer.sliding_window or 0,
            layer.scale,
            layer.softcap or 0.0,
        )
        self._library.minivllm_attention(self._workspace.handle(), ctypes.byref(call))
        return output

    def _begin_step(self, metadata: AttentionMetadata) -> bindings.AttentionMetadata:
        self._library.minivllm_begin_step(self._workspace.handle())
        return bindings.AttentionMetadata.of(metadata)


def _with_dense_rows(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()
