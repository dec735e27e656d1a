"""Reads a file's metadata keys and notes which were read, so that none is left without an effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minivllm.core.models.gguf.file import GGUFFile

IGNORED_PREFIXES = {
    "tokenizer.": "the tokenizer's, read with it",
    "general.base_model.": "description",
    "general.dataset.": "description",
    "general.source.": "description",
    "general.sampling.": "defaults of requests, read with the generation config",
    "quantize.": "how the file was quantized",
    "mradermacher.": "who quantized the file",
}
"""Prefixes of keys that do not change the model, each with the reason."""

IGNORED_KEYS = {
    "general.architecture": "chooses the table",
    "general.alignment": "read with the tensors",
    "general.file_type": "description: each tensor has its own type",
    "general.name": "description",
    "general.author": "description",
    "general.version": "description",
    "general.organization": "description",
    "general.finetune": "description",
    "general.basename": "description",
    "general.description": "description",
    "general.quantized_by": "description",
    "general.size_label": "description",
    "general.parameter_count": "description",
    "general.license": "description",
    "general.license.name": "description",
    "general.license.link": "description",
    "general.url": "description",
    "general.doi": "description",
    "general.uuid": "description",
    "general.repo_url": "description",
    "general.tags": "description",
    "general.languages": "description",
    "general.datasets": "description",
    "general.base_model": "description",
}
"""Keys that do not change the model, each with the reason."""

ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "{arch}.attention.causal": (True,),
    "{arch}.attention.clamp_kqv": (0.0,),
    "{arch}.attention.max_alibi_bias": (0.0,),
    "{arch}.attention.sliding_window": (0,),
    "{arch}.expert_count": (0,),
    "{arch}.expert_used_count": (0,),
    "{arch}.expert_group_count": (0, 1),
    "{arch}.expert_group_used_count": (0, 1),
    "{arch}.expert_weights_scale": (0.0, 1.0),
    "{arch}.leading_dense_block_count": (0,),
    "{arch}.nextn_predict_layers": (0,),
    "{arch}.pooling_type": (0,),
    "{arch}.rope.scaling.finetuned": (True, False),  # whether the model was trained so
    "{arch}.tensor_data_layout": ("Meta AI original pth", "HF"),  # the layout before conversion
}
"""Keys of features that a model can do without, with the values that leave them off."""

_REQUIRED = object()


class Keys:
    """Metadata of one file, by key without the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file.metadata

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Returns a value; a list of one value per layer is that value if they are equal.

        Raises:
            ModelLoadError: the file lacks the key and there is no default, or the layers differ.
        """
        full = f"{self.file.architecture}.{key}"
        value = self.file.metadata.get(full, default)
        if value is _REQUIRED:
            raise self.file.error(f"lacks the metadata key {full!r}")
        self._used.add(full)
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            if len(set(value)) != 1:
                raise self.file.error(f"has different layers, which cannot be served: {full} = {value}")
            value = value[0]
        return value

    def accept(self, values: dict[str, tuple[Any, ...]]) -> None:
        """Raises ModelLoadError where a key is present and has none of the given values."""
        for pattern, accepted in values.items():
            key = pattern.format(arch=self.file.architecture)
            if key in self._used or key not in self.file.metadata:
                continue
            if self.file.metadata[key] not in accepted:
                raise self.file.error(f"has {key} = {self.file.metadata[key]!r}, which cannot be served")
            self._used.add(key)

    def check_all_used(self) -> None:
        """Raises ModelLoadError if the file has a key that has no effect here; names it."""
        self.accept(ACCEPTED_VALUES)
        ignored = tuple(IGNORED_PREFIXES)
        left = [key for key in self.file.metadata if key not in self._used and key not in IGNORED_KEYS]
        if unknown := [key for key in left if not key.startswith(ignored)]:
            raise self.file.error(f"has metadata that is not understood: {listed(unknown)}")


def listed(names: Iterable[str], most: int = 5) -> str:
    """Returns the first names and the number of the others, for an error."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
