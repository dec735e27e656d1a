"""The C++ library's functions and structures as ctypes sees them; mirrors `library.cpp`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p


class StepCall(ctypes.Structure):
    """A step: S sequences, T tokens. Pointers to int64 (S + 1,), int64 (S,), int32 (S, stride), int64 (T,)."""

    _fields_ = (
        ("num_sequences", c_int64),
        ("num_tokens", c_int64),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("block_table_stride", c_int64),
        ("slot_mapping", c_void_p),
    )


class AttentionCall(ctypes.Structure):
    """One layer's attention in a step. Strides are in elements; the head dimension is dense."""

    _fields_ = (
        ("step", StepCall),
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("output", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("inputs_are_float32", c_int32),
        ("cache_is_float32", c_int32),
        ("num_query_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Linear(ctypes.Structure):
    """A packed matrix; see `gemm.hpp`."""

    _fields_ = (
        ("data", c_void_p),
        ("column_scale", c_void_p),
        ("column_offset", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("depth", c_int64),
        ("largest_norm", c_float),
        ("format", c_int32),
    )


class Layer(ctypes.Structure):
    """A decoder layer; see `decoder.hpp`."""

    _fields_ = (
        ("query_key_value", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("input_norm", c_void_p),
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("window", c_int64),
    )


class Decoder(ctypes.Structure):
    """A whole decoder; see `decoder.hpp`."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_query_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("rotary_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("block_size", c_int64),
        ("cache_is_float32", c_int32),
        ("embedding_is_float32", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
    )


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tells ctypes the types of all functions."""
    library.minivllm_create.argtypes = (c_int32,)
    library.minivllm_create.restype = c_void_p
    library.minivllm_destroy.argtypes = (c_void_p,)
    library.minivllm_destroy.restype = None
    library.minivllm_begin_step.argtypes = (c_void_p,)
    library.minivllm_begin_step.restype = None
    library.minivllm_attention.argtypes = (c_void_p, POINTER(AttentionCall))
    library.minivllm_attention.restype = None
    library.minivllm_touch_pages.argtypes = (c_void_p, c_int64, c_int64)
    library.minivllm_touch_pages.restype = c_void_p
    library.minivllm_are_touched.argtypes = (c_void_p,)
    library.minivllm_are_touched.restype = c_int32
    library.minivllm_stop_touching.argtypes = (c_void_p,)
    library.minivllm_stop_touching.restype = None
    library.minivllm_pack.argtypes = (
        c_int32,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int32,
    )
    library.minivllm_pack.restype = c_float
    library.minivllm_panel_bytes.argtypes = (c_int32, c_int64)
    library.minivllm_panel_bytes.restype = c_int64
    library.minivllm_stretches.argtypes = (c_int32, c_int64)
    library.minivllm_stretches.restype = c_int64
    library.minivllm_has_integer_dot.argtypes = ()
    library.minivllm_has_integer_dot.restype = c_int32
    library.minivllm_has_tiles.argtypes = ()
    library.minivllm_has_tiles.restype = c_int32
    library.minivllm_forbid_tiles.argtypes = ()
    library.minivllm_forbid_tiles.restype = None
    library.minivllm_linear.argtypes = (c_void_p, POINTER(Linear), c_void_p, c_int64, c_void_p, c_int64, c_int64)
    library.minivllm_linear.restype = None
    library.minivllm_decode.argtypes = (c_void_p, POINTER(Decoder), POINTER(StepCall), c_void_p, c_void_p, c_void_p)
    library.minivllm_decode.restype = None
    return library
