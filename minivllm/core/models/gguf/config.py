"""The config of a transformers model from the metadata keys of a GGUF file."""

from __future__ import annotations

from typing import Any

from minivllm.core.models.gguf.architectures import ARCHITECTURES, Architecture
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.gguf.keys import Keys
from minivllm.core.models.gguf.rope import rope_parameters

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}

_SERVED_FROM_SAFETENSORS = frozenset(
    {"afmoe", "apertus", "ernie4_5", "ernie4_5-moe", "exaone-moe", "exaone4", "glm4", "glm4moe", "gptneox"}
    | {"hunyuan-dense", "hunyuan-moe", "jais2", "minimax-m2", "nemotron", "phi2", "starcoder"}
)


def choose_architecture(file: GGUFFile) -> Architecture:
    """Returns the table for a file; raises ModelLoadError if there is none."""
    if not file.architecture:
        raise file.error("lacks the metadata key 'general.architecture'")
    for architecture in ARCHITECTURES.get(file.architecture, ()):
        if architecture.when(file):
            return architecture
    hint = "; its safetensors version can be served" if file.architecture in _SERVED_FROM_SAFETENSORS else ""
    raise file.error(
        f"has the architecture {file.architecture!r}, which is not read from GGUF files "
        f"({', '.join(ARCHITECTURES)} are){hint}"
    )


def config_fields(file: GGUFFile) -> tuple[str, dict[str, Any]]:
    """Returns the transformers model type of a file and the fields of its config.

    Raises:
        ModelLoadError: an unknown architecture, or a metadata key is missing, not understood or cannot be served.
    """
    architecture = choose_architecture(file)
    keys = Keys(file)
    config: dict[str, Any] = dict(architecture.fixed)
    for key, name in {**_KEYS, **architecture.keys}.items():
        if key not in architecture.optional:
            config[name] = keys.get(key)
    for key, (name, default) in architecture.optional.items():
        config[name] = keys.get(key, default)
    config["vocab_size"] = _vocab_size(keys)
    config["num_key_value_heads"] = keys.get("attention.head_count_kv", config["num_attention_heads"])
    head_dim = keys.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    if keys.get("attention.value_length", head_dim) != head_dim:
        raise file.error("has keys and values of different sizes, which cannot be served")
    config["head_dim"] = head_dim
    if architecture.rotation != "none":
        config["rope_parameters"] = rope_parameters(
            keys,
            head_dim,
            rotates_part=architecture.rotation == "part",
            longest_without_base=architecture.longest_without_base,
        )
    config |= {name: tensor in file.tensors for name, tensor in architecture.biases.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = None  # batches are packed, not padded
    if architecture.window_period is not None:
        config["layer_types"] = _layer_types(keys, config["num_hidden_layers"], architecture.window_period)
    count = keys.get("expert_count", 0) if "expert_count" in architecture.keys else 0
    if count and not 1 <= keys.get("expert_used_count", 0) <= count:
        raise file.error(f"has {count} experts and uses {keys.get('expert_used_count', 0)} of them")
    architecture.adjust(keys, config)
    for key in architecture.ignored:
        keys.get(key, None)
    keys.accept(architecture.accepted)
    keys.check_all_used()
    return architecture.model_type, config


def _vocab_size(keys: Keys) -> int:
    """Returns the number of embeddings; first compares the sizes of the model with them, before any is allocated."""
    file = keys.file
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("lacks the tensor 'token_embd.weight'")
    layers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    size, width = embedding.shape[0], embedding.shape[-1]
    for key, found in (("vocab_size", size), ("embedding_length", width), ("block_count", len(layers))):
        if (stated := keys.get(key, found)) != found:
            raise file.error(f"has {file.architecture}.{key} = {stated}, and its tensors have {found}")
    return size


def _layer_types(keys: Keys, num_layers: int, period: int) -> list[str]:
    pattern = keys.get("attention.sliding_window_pattern", period)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    elif len(pattern) != num_layers:
        raise keys.file.error(f"has a sliding_window_pattern of {len(pattern)} layers and {num_layers} layers")
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
