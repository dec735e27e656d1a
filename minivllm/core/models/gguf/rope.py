"""Rotary position embeddings: a file's keys and tensors become transformers' `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

from minivllm.core.models.gguf.dequantize import dequantize
from minivllm.core.models.gguf.keys import Keys

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def rope_parameters(keys: Keys, head_dim: int, rotates_part: bool) -> dict[str, Any]:
    """Returns `rope_parameters` without the factors of `rope_freqs.weight`, which divide the frequencies afterwards."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0)}
    dimensions = keys.get("rope.dimension_count", head_dim)
    if dimensions != head_dim:
        rope["partial_rotary_factor"] = dimensions / head_dim
        if not rotates_part or int(head_dim * rope["partial_rotary_factor"]) != dimensions:
            raise keys.file.error(f"rotates {dimensions} of {head_dim} dimensions of a head, which cannot be served")
    return rope | _scaling(keys)


def _scaling(keys: Keys) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", None)
    factors = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name in keys.file.tensors]
    if factors or kind == "longrope":
        return _longrope(keys, factors)
    if kind == "yarn":
        return _yarn(keys)
    if kind not in (None, "none", "linear"):
        raise keys.file.error(f"has the rope scaling {kind!r}, which is not understood")
    if kind is not None:
        keys.get("rope.scaling.original_context_length", None)  # says nothing to the other kinds
    if kind == "linear":
        factor = keys.get("rope.scaling.factor")
    else:  # linear scaling needs no type; its older key has another name
        factor = keys.get("rope.scaling.factor", None) or keys.get("rope.scale_linear", None)
    return {"rope_type": "linear", "factor": factor} if factor and factor != 1 and kind != "none" else {}


def _longrope(keys: Keys, found: list[str]) -> dict[str, Any]:
    if len(found) != 2 or keys.get("rope.scaling.type", "longrope") != "longrope":
        raise keys.file.error(f"has longrope without both {LONG_FACTORS} and {SHORT_FACTORS}, or of another type")
    long, short = (dequantize(keys.file.tensors[name]).tolist() for name in found)
    keys.get("rope.scaling.factor", None)  # the context lengths tell it
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "attention_factor": keys.get("rope.scaling.attn_factor", None),
    }


def _yarn(keys: Keys) -> dict[str, Any]:
    prefix = keys.file.architecture
    keys.accept({f"{prefix}.rope.scaling.yarn_ext_factor": (1.0,)})
    factor = keys.get("rope.scaling.factor")
    attention_factor = keys.get("rope.scaling.yarn_attn_factor", None)
    if attention_factor is None:
        log_multiplier = keys.get("rope.scaling.yarn_log_multiplier", 0.0)
        per_log = 0.1 * math.log(factor) if factor > 1 else 0.0
        attention_factor = (1 + per_log) / (1 + per_log * log_multiplier)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "attention_factor": attention_factor * keys.get("rope.scaling.attn_factor", 1.0),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow", 1.0),
    }
