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
    return library
