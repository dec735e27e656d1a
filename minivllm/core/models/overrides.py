"""Applies `hf_overrides` to the configuration of a model."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from minivllm.core.errors import ModelLoadError

_ROPE = "rope_parameters"
_ROPE_KEYS = frozenset({*RopeParameters.__annotations__, "type"})
_OF_LAYER_TYPES = frozenset({"max_window_layers", "num_hidden_layers", "sliding_window_pattern", "use_sliding_window"})
_OF_ROPE = ("rope_theta", "partial_rotary_factor")


def apply_overrides(
    config: PreTrainedConfig, fields: dict[str, Any], overrides: dict[str, Any], name: str = "hf_overrides"
) -> PreTrainedConfig:
    """Returns a configuration of the same class, made of `fields` with `overrides` merged into them.

    Args:
        config: what `fields` alone give; its class knows the names of fields.
        fields: the content of config.json, so that the class derives other fields from overridden ones.
        overrides: nested dictionaries are merged; "rope_scaling" is the older name of "rope_parameters".

    Raises:
        ModelLoadError: an unknown field, or a value without effect; names it.
    """
    if _ROPE in overrides and "rope_scaling" in overrides:
        raise ModelLoadError(f"{name}: 'rope_scaling' is the older name of {_ROPE!r}; set one of them")
    if "rope_scaling" in overrides and not overrides["rope_scaling"]:
        overrides = {**overrides, "rope_scaling": {"rope_type": "default"}}  # none
    fields, overrides = _with_rope_parameters(fields), _with_rope_parameters(overrides)
    for key in _OF_ROPE:
        if key in overrides and key not in fields:  # newer files have them in `rope_parameters`, which has priority
            overrides = _merge(overrides, {_ROPE: {key: overrides[key]}})
            del overrides[key]
    known = {*fields, *config.to_dict(), *getattr(type(config), "attribute_map", ()), _ROPE, *_OF_ROPE}
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    _check_names(overrides, known, name)
    if isinstance(rope := overrides.get(_ROPE), dict):
        _check_names(rope, {*_ROPE_KEYS, *(fields.get(_ROPE) or ()), *layer_types}, f"{name}.{_ROPE}")
        by_layer = [key for key, value in (getattr(config, _ROPE, None) or {}).items() if isinstance(value, dict)]
        if by_layer and (flat := sorted(rope.keys() - by_layer)):
            raise ModelLoadError(f"{name}.{_ROPE}: set {', '.join(flat)} within {' or '.join(by_layer)}")
        for layer_type, nested in rope.items():
            if isinstance(nested, dict):
                _check_names(nested, _ROPE_KEYS, f"{name}.{_ROPE}.{layer_type}")
    merged = _merge(fields, overrides)
    if "layer_types" not in overrides and overrides.keys() & _OF_LAYER_TYPES:
        merged.pop("layer_types", None)  # derived again
    for key, value in overrides.items():
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig) and isinstance(value, dict):
            merged[key] = apply_overrides(part, fields.get(key) or {}, value, f"{name}.{key}").to_dict()
    result: PreTrainedConfig = type(config).from_dict(merged)
    for key, value in overrides.items():
        effective = getattr(type(result) if key == "model_type" else result, key, value)
        if not isinstance(value, dict) and effective != value:
            raise ModelLoadError(f"{name}: {key!r} is {effective!r} whatever is set")
    return result


def _with_rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with `rope_scaling` and its `type` under their present names."""
    fields = dict(fields)
    if (rope := fields.pop("rope_scaling", None)) and not fields.get(_ROPE):
        fields[_ROPE] = rope
    if isinstance(rope := fields.get(_ROPE), dict) and "type" in rope:
        fields[_ROPE] = {"rope_type": rope["type"], **{key: value for key, value in rope.items() if key != "type"}}
    return fields


def _merge(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _check_names(overrides: dict[str, Any], known: Collection[str], where: str) -> None:
    for key in overrides:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ModelLoadError(f"{where}: the model's configuration has no field {key!r}{hint}")
