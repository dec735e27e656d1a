"""Fills the parameters of a transformers model from the tensors of a GGUF file."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from minivllm.core.models.gguf.architectures import Architecture, choose_architecture, config_fields
from minivllm.core.models.gguf.dequantize import can_dequantize, dequantize, dequantize_blocks
from minivllm.core.models.gguf.file import GGUFFile, GGUFTensor
from minivllm.core.models.gguf.keys import listed
from minivllm.core.models.gguf.rope import LONG_FACTORS, SHORT_FACTORS

_VALUES_AT_ONCE = 1 << 18
"""Dequantized together: enough that numpy's work exceeds Python's, few enough for the CPU's cache."""

_ROPE_FREQS = "rope_freqs.weight"
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LAYER = re.compile(r"\.(\d+)\.")


def load_config(file: GGUFFile) -> PreTrainedConfig:
    """Returns the transformers config of a file; raises as `config_fields`."""
    model_type, fields = config_fields(file)
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def load_generation_config(file: GGUFFile) -> GenerationConfig:
    """Returns the EOS token and the recommended sampling; other samplers of `general.sampling.*` do not exist here."""
    sampling = {
        name: file.metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in file.metadata
    }
    return GenerationConfig(eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"), do_sample=True, **sampling)


def load_model(file: GGUFFile, config: PreTrainedConfig, device: torch.device, **options: Any) -> PreTrainedModel:
    """Returns the model of `config` with the weights of `file`.

    Args:
        options: arguments of `AutoModelForCausalLM.from_config`.

    Raises:
        ModelLoadError: a parameter has no tensor, a tensor no parameter, or their shapes differ; names them.
    """
    with no_init_weights(), device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    used = _fill_parameters(model, file, choose_architecture(file))
    used |= _apply_rope_freqs(model, file)
    if unused := sorted(file.tensors.keys() - used):
        raise file.error(f"has tensors that a {config.model_type} model has no place for: {listed(unused)}")
    return model


@torch.no_grad()
def _fill_parameters(model: PreTrainedModel, file: GGUFFile, architecture: Architecture) -> set[str]:
    """Fills every parameter. Returns the names of the tensors used."""
    used = {LONG_FACTORS, SHORT_FACTORS}  # in the config
    head_dim = model.config.head_dim
    for name, parameter in model.named_parameters():
        place, sources = _sources(name, architecture)
        if missing := [source for source in sources if source not in file.tensors]:
            raise file.error(f"lacks the tensor {missing[0]!r}, of which the model makes {name}")
        tensors = [file.tensors[source] for source in sources]
        target = parameter.T if place in architecture.transposed and parameter.ndim > 1 else parameter
        target = _checked(file, name, target, tensors)
        sizes = [tensor.shape[-2] for tensor in tensors] if len(tensors) > 1 else []
        parts = target.split(sizes, dim=-2) if sizes else (target,)
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0
        for tensor, part in zip(tensors, parts, strict=True):
            data = tensor.data
            if place in architecture.permuted:
                data = _unpermuted(data, tensor.shape[0], head_dim)
            _fill(part, data, tensor.type, offset)
        used |= set(sources)
    return used


def _sources(name: str, architecture: Architecture) -> tuple[str, tuple[str, ...]]:
    """Returns the key of a parameter in the table, and the names of its tensors."""
    layer = _LAYER.search(name)
    pattern = _LAYER.sub(".*.", name, count=1)
    place, _, suffix = pattern.rpartition(".")
    found = architecture.tensors.get(pattern)
    if found is None:
        found = architecture.tensors.get(place, place)
    else:
        place, suffix = pattern, ""
    stems = (found,) if isinstance(found, str) else found
    names = (f"{stem}.{suffix}" if suffix else stem for stem in stems)
    return place, tuple(source.replace("*", layer[1]) if layer else source for source in names)


def _checked(file: GGUFFile, name: str, target: torch.Tensor, tensors: list[GGUFTensor]) -> torch.Tensor:
    """Returns the target in the shape of its tensors, which may lack dimensions of size 1."""
    shape = list(tensors[0].shape)
    if len(tensors) > 1:
        shape[-2] = sum(tensor.shape[-2] for tensor in tensors)
    names = " and ".join(repr(tensor.name) for tensor in tensors)
    if [size for size in shape if size > 1] != [size for size in target.shape if size > 1]:
        raise file.error(f"has {names} of shape {shape}, and {name} has the shape {list(target.shape)}")
    for tensor in tensors:
        if not can_dequantize(tensor.type):
            raise file.error(f"has tensor {tensor.name!r} of type {tensor.type.name}, which cannot be dequantized")
    return target if list(target.shape) == shape else target.view(shape)


def _unpermuted(data: npt.NDArray[np.uint8], num_rows: int, head_dim: int) -> npt.NDArray[np.uint8]:
    """Moves rows from `first half, second half` alternating to one half of each head after the other."""
    return data.reshape(num_rows // head_dim, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)


def _fill(target: torch.Tensor, data: npt.NDArray[np.uint8], kind: GGMLQuantizationType, offset: int) -> None:
    """Writes the values less `offset` in the dtype of `target`, some rows at a time: never all in float32."""
    if target.ndim > 2:
        for part, part_data in zip(target, data, strict=True):
            _fill(part, part_data, kind, offset)
        return
    target, data = target.view(-1, target.shape[-1]) if target.ndim < 2 else target, data.reshape(-1, data.shape[-1])
    step = max(1, _VALUES_AT_ONCE // target.shape[-1])
    for start in range(0, len(data), step):
        part = target[start : start + step]
        values = dequantize_blocks(data[start : start + step], kind).reshape(part.shape)
        if offset:
            values = values - offset
        # torch warns of read-only arrays, as views of the mapped file are
        part.copy_(torch.from_numpy(values if values.flags.writeable else values.copy()))


def _apply_rope_freqs(model: PreTrainedModel, file: GGUFFile) -> set[str]:
    """Divides the rotary frequencies by the factors of `rope_freqs.weight`, which Llama 3.1 and later have."""
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    if _ROPE_FREQS not in file.tensors or not hasattr(rotary, "inv_freq"):
        return set()
    factors = torch.tensor(dequantize(file.tensors[_ROPE_FREQS]), device=rotary.inv_freq.device)
    if factors.shape != rotary.inv_freq.shape:
        num_frequencies = len(rotary.inv_freq)
        raise file.error(f"has {_ROPE_FREQS!r} of {len(factors)} factors, and there are {num_frequencies} frequencies")
    rotary.inv_freq /= factors
    rotary.original_inv_freq /= factors
    return {_ROPE_FREQS}
