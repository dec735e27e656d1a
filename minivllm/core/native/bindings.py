"""The ctypes mirror of the C++ library: its structures, its functions, and the workspace of its calls."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import Any, Self

import torch

from minivllm.core.attention import metadata as attention


def _fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Expands ("a b", type) to ("a", type), ("b", type)."""
    return tuple((name, field_type) for names, field_type in groups for name in names.split())


class AttentionMetadata(ctypes.Structure):
    """Mirrors `attention_plan.hpp`. `tensors` keeps the memory behind the pointers alive."""

    _fields_ = _fields(
        ("num_sequences num_tokens", c_int64),
        ("query_start_loc seq_lens block_tables", c_void_p),
        ("block_table_stride", c_int64),
        ("slot_mapping", c_void_p),
    )
    tensors: tuple[Any, ...]

    @classmethod
    def of(cls, metadata: attention.AttentionMetadata) -> Self:
        starts, lens = metadata.query_start_loc, metadata.seq_lens
        tables, slots = metadata.block_tables.contiguous(), metadata.slot_mapping.contiguous()
        pointers = (starts.ctypes.data, lens.ctypes.data, tables.data_ptr())
        result = cls(len(lens), slots.shape[0], *pointers, tables.stride(0), slots.data_ptr())
        result.tensors = (starts, lens, tables, slots)
        return result


class AttentionCall(ctypes.Structure):
    """Mirrors `library.cpp`."""

    _fields_ = _fields(
        ("metadata", AttentionMetadata),
        ("query key value output", c_void_p),
        ("query_token_stride query_head_stride key_token_stride key_head_stride", c_int64),
        ("value_token_stride value_head_stride", c_int64),
        ("key_cache value_cache", c_void_p),
        ("block_stride head_stride", c_int64),
        ("inputs_are_float32 cache_is_float32", c_int32),
        ("num_query_heads num_kv_heads head_size block_size window", c_int32),
        ("scale softcap", c_float),
    )


class PackedLinear(ctypes.Structure):
    """Packed weight (num_outputs, depth) and bias of a linear layer. Mirrors `gemm_packing.hpp`.

    `tensors` keeps the memory behind the pointers alive; `columns` is `num_outputs` padded to full panels.
    """

    _fields_ = _fields(
        ("data column_scale compensation bias", c_void_p),
        ("columns depth", c_int64),
        ("max_norm", c_float),
        ("format", c_int32),
    )
    num_outputs: int
    tensors: list[Any]


class Layer(ctypes.Structure):
    """Mirrors `decoder.hpp`."""

    _fields_ = _fields(
        ("qkv_proj o_proj gate_up_proj down_proj", PackedLinear),
        ("input_layernorm post_attention_layernorm q_norm k_norm key_cache value_cache", c_void_p),
        ("window", c_int64),
    )


class Decoder(ctypes.Structure):
    """Mirrors `decoder.hpp`."""

    _fields_ = _fields(
        ("layers", POINTER(Layer)),
        ("embedding final_norm rope_cos rope_sin", c_void_p),
        ("num_layers hidden_size intermediate_size num_query_heads num_kv_heads head_size rotary_size", c_int64),
        ("block_stride head_stride block_size", c_int64),
        ("cache_is_float32 embedding_is_float32", c_int32),
        ("epsilon scale", c_float),
    )


# Result type and argument types of each function of `library.cpp`, without the prefix `minivllm_`.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "create_workspace": (c_void_p, c_int32),
    "destroy_workspace": (None, c_void_p),
    "begin_step": (None, c_void_p),
    "attention": (None, c_void_p, POINTER(AttentionCall)),
    "prefault": (c_void_p, c_void_p, c_int64, c_int64),
    "prefault_is_done": (c_int32, c_void_p),
    "stop_prefault": (None, c_void_p),
    "pack": (c_float, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32),
    "panel_bytes": (c_int64, c_int32, c_int64),
    "num_segments": (c_int64, c_int32, c_int64),
    "has_integer_dot": (c_int32,),
    "has_amx": (c_int32,),
    "disable_amx": (None,),
    "gemm": (None, c_void_p, POINTER(PackedLinear), c_void_p, c_int64, c_void_p, c_int64, c_int64),
    "forward": (None, c_void_p, POINTER(Decoder), POINTER(AttentionMetadata), c_void_p, c_void_p, c_void_p),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the types of all functions of `library`; returns it."""
    for name, (result_type, *argument_types) in _FUNCTIONS.items():
        function = getattr(library, f"minivllm_{name}")
        function.restype, function.argtypes = result_type, argument_types
    return library


class Workspace:
    """Memory and plans that C++ calls reuse. Each model has one; one thread at a time may use it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._num_threads = 0
        self._handle = 0
        self._destroy: weakref.finalize[..., Workspace] | None = None

    def handle(self) -> int:
        """Returns the C++ workspace, recreated when torch's number of threads has changed."""
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:
            if self._destroy is not None:
                self._destroy()
            self._num_threads = num_threads
            self._handle = int(self._library.minivllm_create_workspace(num_threads))
            self._destroy = weakref.finalize(self, self._library.minivllm_destroy_workspace, self._handle)
        return self._handle
