"""Checks that a checkpoint fills a model: each parameter comes from a tensor, each tensor is used or ignorable.

transformers initializes a missing parameter with random numbers, skips a tensor it does not know, and reads 8-bit
weights without scales as numbers. All of these load without an error, and the model then answers nonsense.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.core.errors import ModelLoadError
from minivllm.core.models.location import ModelLocation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IGNORABLE = {
    r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$": "rotary frequencies, computed from the configuration",
    r"(^|\.)embed_positions\.weights$": "sinusoidal positions, computed from the configuration",
    r"(^|\.)position_ids$": "the numbers 0, 1, 2, ...",
    r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask)$": "a causal mask, computed by the attention",
    r"(^|\.)(self_attn|attn|attention)\.([kv]_proj\.)?[kv]_scale$": "scales of an 8-bit KV cache, and ours has 16 bits",
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.": (
        "the image or audio part of a model whose text part is served"
    ),
    r"(^|\.)mtp(_\w+)?\.": "heads that predict several tokens, for speculative decoding",
    r"(^|\.)v_head\.": "the value head of reinforcement learning",
    r"(^|\.)_extra_state$": "the training state of TransformerEngine",
}
"""Tensors that do not change the logits: pattern of their names, and why."""

_IGNORABLE = re.compile("|".join(f"({pattern})" for pattern in IGNORABLE))
_SAFETENSORS_INDEX = "model.safetensors.index.json"
_WEIGHT_FILES = ("model.safetensors", _SAFETENSORS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_8_BIT = frozenset({"F8_E4M3", "F8_E5M2", "I8", "float8_e4m3fn", "float8_e5m2", "int8"})
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"})
_EXPERT = re.compile(r"^(.*\bexperts\.)(\d+)(\..+)$")
_MOST_NAMES = 4


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about a tensor: its dtype as the file spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]


# ---- before loading ------------------------------------------------------------------------------------------------


def weight_files(location: ModelLocation, config: PreTrainedConfig) -> list[Path]:
    """Returns the files that `from_pretrained` reads, downloaded if they are on the hub. Empty if there are none."""
    from transformers.utils import cached_file

    explicit = getattr(config, "transformers_weights", None)
    for name in (explicit,) if explicit else _WEIGHT_FILES:
        options = {"revision": location.revision, "_raise_exceptions_for_missing_entries": False}
        found = cached_file(location.path, name, **options)
        if found is None:
            continue
        if not name.endswith(".index.json"):
            return [Path(found)]
        shards = sorted(set(json.loads(Path(found).read_text())["weight_map"].values()))
        return [Path(str(cached_file(location.path, shard, revision=location.revision))) for shard in shards]
    return []


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Returns the header of each tensor of a checkpoint, by name. Reads no weights.

    Raises:
        ModelLoadError: a file is empty, truncated or no checkpoint, or two files have one tensor.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        found = read_safetensors_header(file) if file.suffix == ".safetensors" else _read_pickle_header(file)
        if both := sorted(headers.keys() & found.keys()):
            raise ModelLoadError(f"{str(file)!r} repeats {_names(both)} of another file of this model")
        headers |= found
    return headers


def read_safetensors_header(file: Path) -> dict[str, TensorHeader]:
    """Returns the tensors of a file and checks its size, without importing torch; raises as `read_headers`."""
    size = file.stat().st_size
    if size == 0:
        raise ModelLoadError(f"{str(file)!r} is empty")
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ModelLoadError(f"{str(file)!r} is truncated or no safetensors file: its header is not complete")
        try:
            entries = json.loads(opened.read(length))
            entries.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            headers = {name: TensorHeader(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ModelLoadError(f"{str(file)!r} is no safetensors file: its header cannot be read") from error
    if 8 + length + end != size:
        raise ModelLoadError(
            f"{str(file)!r} is truncated or damaged: it has {size:,} bytes, and its header says {8 + length + end:,}"
        )
    return headers


def _read_pickle_header(file: Path) -> dict[str, TensorHeader]:
    import torch

    try:
        tensors = torch.load(file, map_location="meta", weights_only=True)
        named = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    except Exception as error:
        raise ModelLoadError(f"{str(file)!r} is truncated or no checkpoint of PyTorch: {error}") from error
    return {
        name: TensorHeader(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in named.items()
    }


def check_headers(name: str, headers: Mapping[str, TensorHeader], config: PreTrainedConfig) -> None:
    """Checks what transformers does not: numbers that need scales, and complete sets of experts.

    Raises:
        ModelLoadError: names the first tensors concerned.
    """
    used = {key: header for key, header in headers.items() if not _IGNORABLE.search(key)}
    if quantization_of(config) is None:
        packed = [key for key, header in used.items() if header.dtype not in _PLAIN]
        if packed:
            raise ModelLoadError(
                f"{name!r} cannot be served: its weights are quantized ({used[packed[0]].dtype}: {_names(packed)}), "
                "and its config.json has no quantization_config that says how"
            )
    else:
        scales = {key for key in used if re.search(r"scale|SCB|absmax", key)}
        stems = {key.rpartition(".")[0] for key in scales} | {re.sub(r"_?scale.*$", "", key) for key in scales}
        lost = [
            key
            for key, header in used.items()
            if header.dtype in _8_BIT and key not in scales and key not in stems and key.rpartition(".")[0] not in stems
        ]
        if lost:
            raise ModelLoadError(f"{name!r} cannot be served: its 8-bit weights {_names(lost)} have no scales")
        for key, reason in _wrong_scales(used, quantization_of(config)):
            raise ModelLoadError(f"{name!r} cannot be served: {key} {reason}")
    if lost := list(_missing_experts(used)):
        raise ModelLoadError(f"{name!r} cannot be served: its checkpoint lacks {_names(lost)}")
    for key, shapes in _unequal_experts(used):
        raise ModelLoadError(f"{name!r} cannot be served: {key} has the shape {shapes[0]}, other experts {shapes[1]}")


def _wrong_scales(headers: Mapping[str, TensorHeader], quantization: Any) -> Iterator[tuple[str, str]]:
    """Yields float8 weights whose grid of scales transformers would lay over the wrong numbers, and why.

    It takes the size of a block from the shapes, which is right only if the blocks divide the weight evenly.
    """
    fields = quantization if isinstance(quantization, dict) else vars(quantization)
    block = fields.get("weight_block_size")
    if fields.get("quant_method") != "fp8" or block is None:
        return
    for key, header in headers.items():
        scale = headers.get(f"{key}_scale_inv") or headers.get(f"{key}_scale")
        if header.dtype not in _8_BIT or scale is None or len(header.shape) != 2:
            continue
        needed = tuple(-(-size // each) for size, each in zip(header.shape, block, strict=True))
        if scale.shape != needed:
            yield key, f"has scales of the shape {scale.shape}, and blocks of {block} need {needed}"
        elif any(size % each for size, each in zip(header.shape, block, strict=True)):
            yield key, f"has the shape {header.shape}, which blocks of {block} do not divide: use it in 16 bits"


def quantization_of(config: PreTrainedConfig) -> Any:
    """Returns the quantization_config of a model or of its text part, or None."""
    own = getattr(config, "quantization_config", None)
    return own or getattr(config.get_text_config(decoder=True), "quantization_config", None)


def _experts(headers: Mapping[str, TensorHeader]) -> dict[str, dict[int, dict[str, tuple[int, ...]]]]:
    """Returns the shapes of tensors in lists of experts: prefix, index, rest of the name."""
    groups: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for key, header in headers.items():
        if match := _EXPERT.match(key):
            prefix, index, rest = match.groups()
            groups.setdefault(prefix, {}).setdefault(int(index), {})[rest] = header.shape
    return groups


def _missing_experts(headers: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yields the tensors that leave gaps in a list of experts. transformers stacks experts in order of their numbers,
    so that a gap would give the following ones the place of their predecessor."""
    for prefix, experts in _experts(headers).items():
        rests = sorted({rest for expert in experts.values() for rest in expert})
        for index in range(max(experts) + 1):
            yield from (f"{prefix}{index}{rest}" for rest in rests if rest not in experts.get(index, {}))


def _unequal_experts(headers: Mapping[str, TensorHeader]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for prefix, experts in _experts(headers).items():
        for rest, shape in experts[0].items():
            for index, expert in experts.items():
                if expert[rest] != shape:
                    yield f"{prefix}{index}{rest}", (expert[rest], shape)


# ---- after loading -------------------------------------------------------------------------------------------------


def check_loaded(name: str, model: PreTrainedModel, info: Mapping[str, Any], file_keys: Iterable[str]) -> None:
    """Checks a loaded model against its checkpoint.

    Args:
        info: the loading information of `from_pretrained`, with `ignore_mismatched_sizes=True`.
        file_keys: names of the tensors in the file.

    Raises:
        ModelLoadError: a tensor is missing, unknown, repeated, of a wrong shape or not finite; names it.
    """
    keys, prefix = set(file_keys), model.base_model_prefix
    if twice := sorted(key for key in keys if f"{prefix}.{key}" in keys):
        raise ModelLoadError(f"{name!r} cannot be served: its checkpoint has {_names(twice)} twice, also as {prefix}.*")
    for key, given, expected in sorted(info["mismatched_keys"]):
        raise ModelLoadError(
            f"{name!r} cannot be served: the tensor {key} has the shape {tuple(given)}, and the model needs "
            f"{tuple(expected)}"
        )
    if missing := sorted(set(info["missing_keys"]) | set(_hidden_missing(model, keys))):
        raise ModelLoadError(f"{name!r} cannot be served: its checkpoint lacks {_names(missing)}")
    if unknown := sorted(key for key in info["unexpected_keys"] if not is_ignorable(key, model.config)):
        raise ModelLoadError(
            f"{name!r} cannot be served: its checkpoint has {_names(unknown)}, "
            f"which {type(model).__name__} does not use"
        )
    check_finite(name, model)


def is_ignorable(key: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor does not change the logits: `IGNORABLE`, or a layer that only predicts further tokens."""
    if _IGNORABLE.search(key):
        return True
    text_config = config.get_text_config(decoder=True)
    layer = re.search(r"(^|\.)layers\.(\d+)\.", key)
    extra_layers = getattr(text_config, "num_nextn_predict_layers", None) or 0
    first = getattr(text_config, "num_hidden_layers", 0)
    return layer is not None and first <= int(layer[2]) < first + extra_layers


def check_finite(name: str, model: PreTrainedModel) -> None:
    """Raises ModelLoadError naming the first tensor with NaN or infinite values."""
    import torch

    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        ends = torch.stack(torch.aminmax(tensor))  # NaN if one value is; the fastest pass that torch has
        if not torch.isfinite(ends).all():
            wrong = int((~torch.isfinite(tensor)).sum())
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{name!r} cannot be served: {wrong} of {tensor.numel()} values of the tensor {key} are not finite "
                f"(NaN or infinite in {dtype})"
            )


def _hidden_missing(model: PreTrainedModel, file_keys: set[str]) -> Iterator[str]:
    """Yields the missing tensors that transformers does not report, since the model's class initializes them itself."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    if not patterns:
        return
    hidden, prefix = re.compile("|".join(f"({pattern})" for pattern in patterns)), model.base_model_prefix
    tied = getattr(model, "all_tied_weights_keys", {})
    for key in model.state_dict():
        if hidden.search(key) and key not in tied and not {key, key.removeprefix(f"{prefix}.")} & file_keys:
            yield key


def _names(keys: Iterable[str]) -> str:
    """Returns the first names, and the number of the others."""
    keys = list(keys)
    more = len(keys) - _MOST_NAMES
    text = ", ".join(islice(keys, _MOST_NAMES))
    return f"{len(keys)} tensors ({text} and {more} more)" if more > 0 else text
