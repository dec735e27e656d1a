"""Loads a causal language model of transformers, ready to run on paged attention."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from minivllm.core.attention import ATTENTION_NAME, AttentionLayer
from minivllm.core.attention.base import paged_attention
from minivllm.core.attention.kv_pool import KVCacheSpec
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.checkpoint import check_finite, check_headers, check_loaded, read_headers, weight_files
from minivllm.core.models.gguf import weights as gguf
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.lm_head import LMHead
from minivllm.core.models.location import ModelLocation, resolve_model
from minivllm.core.models.overrides import apply_overrides
from minivllm.core.models.support import (
    check_supported,
    context_limit,
    find_attention_layers,
    find_lm_head,
    other_parts,
)
from minivllm.core.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

AttentionInterface.register(ATTENTION_NAME, paged_attention)

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config that apply to requests that do not set them."""

UNLIMITED_CONTEXT = 2**20
"""`max_model_len` of a model that sets no limit; the KV pool is the limit then."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model and what the engine needs to know of it.

    Attributes:
        model: the unmodified transformers class, in inference mode, on its device.
        head: hidden states to logits.
        layers: attention parameters per layer.
        eos_token_ids: those of generation_config and config together.
        generation_defaults: sampling fields that generation_config sets, as `SamplingParams` names them.
        max_model_len: longest context that the model's positions support.
    """

    name: str
    model: PreTrainedModel
    head: LMHead
    layers: tuple[AttentionLayer, ...]
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, float]
    max_model_len: int

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.head.vocab_size

    @property
    def model_type(self) -> str:
        return str(self.model.config.get_text_config(decoder=True).model_type)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        layer = self.layers[0]
        return KVCacheSpec(len(self.layers), layer.num_kv_heads, layer.head_size, block_size, self.dtype)


def choose_device(device: str) -> torch.device:
    """Returns the device; raises ModelLoadError when there is no such CUDA device."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ModelLoadError(f"device={device!r}: torch sees no such CUDA device here")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype; "auto" is bfloat16 on hardware that computes in it (CUDA, AVX-512 BF16, AMX), else float32."""
    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    return torch.bfloat16 if fast else torch.float32


_LOAD_LOCK = threading.Lock()
"""Held while a model loads: transformers changes process-wide settings then, and so do `_no_progress_bars` and
`find_attention_layers`."""


def load_model(config: EngineConfig) -> LoadedModel:
    """Finds, loads and checks the model that `config` names.

    Raises:
        ModelLoadError: it does not exist, cannot be read, or needs an unsupported feature, which the message names.
    """
    started = time.monotonic()
    location = resolve_model(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    with _LOAD_LOCK, _load_errors(config, location), _no_progress_bars():
        gguf_file = None if location.gguf_path is None else GGUFFile.open(location.gguf_path)
        model_config = _load_config(config, location, gguf_file)
        check_supported(config.model, model_config)
        max_model_len = context_limit(config.model, model_config, config.max_model_len) or UNLIMITED_CONTEXT
        model = _load_weights(config, location, gguf_file, model_config, dtype, device)
        layers = find_attention_layers(config.model, model)
        head = find_lm_head(config.model, model)
        if gguf_file is not None:
            generation_config = gguf.load_generation_config(gguf_file)
        else:
            generation_config = _load_generation_config(config, location, model)
        eos_token_ids = _eos_token_ids(head.vocab_size, generation_config, model.config.get_text_config(decoder=True))
        generation_defaults = _generation_defaults(generation_config)
    if parts := other_parts(model_config):
        logger.warning("%s has %s; its text part is served", config.model, parts)
    loaded = LoadedModel(
        name=config.model,
        model=model,
        head=head,
        layers=layers,
        dtype=dtype,
        device=device,
        eos_token_ids=eos_token_ids,
        generation_defaults=generation_defaults,
        max_model_len=max_model_len,
    )
    logger.info(
        "%s loaded in %.1f s: %s, %.1f M parameters, %s on %s",
        config.model,
        time.monotonic() - started,
        type(model).__name__,
        sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        str(dtype).removeprefix("torch."),
        device,
    )
    return loaded


def _load_config(config: EngineConfig, location: ModelLocation, gguf_file: GGUFFile | None) -> PreTrainedConfig:
    if gguf_file is not None:
        model_config = gguf.load_config(gguf_file)
        fields = model_config.to_dict()
    else:
        options = {**location.options, "trust_remote_code": config.trust_remote_code}
        model_config = AutoConfig.from_pretrained(location.path, **options)
        fields, _ = type(model_config).get_config_dict(location.path, **location.options)
    return apply_overrides(model_config, fields, config.hf_overrides) if config.hf_overrides else model_config


def _load_weights(
    config: EngineConfig,
    location: ModelLocation,
    gguf_file: GGUFFile | None,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": config.trust_remote_code,
    }
    if config.load_format == "dummy":
        logger.info("%s: random weights (load_format=dummy)", config.model)
        torch.manual_seed(config.seed or 0)
        model = AutoModelForCausalLM.from_config(model_config, **options).to(device)
    elif gguf_file is not None:
        logger.info("%s: loading from %s", config.model, ", ".join(str(path) for path in gguf_file.paths))
        model = gguf.load_model(gguf_file, model_config, device, **options)
        check_finite(config.model, model)
    else:
        logger.info("%s: loading from %s", config.model, location.path)
        # Straight to the device: the host never holds all of the weights.
        if device.type != "cpu":
            options["device_map"] = {"": device}
        model = _load_checkpoint(config.model, location, model_config, options)
    # No `.to(dtype)`: it would round the frequencies of rotary embeddings, which transformers keeps in float32.
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _load_checkpoint(
    name: str, location: ModelLocation, model_config: PreTrainedConfig, options: dict[str, Any]
) -> PreTrainedModel:
    headers = read_headers(weight_files(location, model_config))
    check_headers(name, headers, model_config)
    with _no_load_report():
        model, info = AutoModelForCausalLM.from_pretrained(
            location.path,
            config=model_config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded` refuses them with both shapes
            **options,
            **location.options,
        )
    check_loaded(name, model, info, headers)
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Leaves out the table of missing and unknown tensors that transformers logs."""

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    report_logger = logging.getLogger("transformers.modeling_utils")
    report_logger.addFilter(is_no_report)
    try:
        yield
    finally:
        report_logger.removeFilter(is_no_report)


@contextmanager
def _load_errors(config: EngineConfig, location: ModelLocation) -> Iterator[None]:
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        where = "" if location.is_local else " (not a local folder, so looked up on the Hugging Face hub)"
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"cannot load the model {config.model!r}{where}: {reason}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disables the progress bars of transformers. Those of hub downloads stay."""
    previous = transformers_logging.set_tqdm_hook(lambda tqdm, args, kwargs: tqdm(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _load_generation_config(config: EngineConfig, location: ModelLocation, model: PreTrainedModel) -> GenerationConfig:
    file = Path(location.path) / "generation_config.json"
    if file.is_file():
        try:
            json.loads(file.read_text())  # transformers takes a damaged file for a missing one
        except ValueError as error:
            raise ModelLoadError(f"{str(file)!r} cannot be read: {error}") from error
    if config.load_format == "auto" and model.generation_config is not None:
        return model.generation_config
    try:
        return GenerationConfig.from_pretrained(location.path, revision=location.revision or "main")
    except OSError:
        return GenerationConfig.from_model_config(model.config)


def _eos_token_ids(vocab_size: int, *configs: GenerationConfig | PreTrainedConfig) -> frozenset[int]:
    """Returns the EOS tokens of all `configs`, each of which has none, one or a list. Leaves out those never sampled.

    Raises:
        ModelLoadError: an EOS that is no token id.
    """
    found: list[Any] = []
    for config in configs:
        token_ids = getattr(config, "eos_token_id", None)
        found += token_ids if isinstance(token_ids, list | tuple) else [token_ids]
    for token_id in found:
        if token_id is not None and type(token_id) is not int:
            raise ModelLoadError(f"eos_token_id: {token_id!r} is no token id")
    return frozenset(token_id for token_id in found if token_id is not None and 0 <= token_id < vocab_size)


def _generation_defaults(generation_config: GenerationConfig) -> dict[str, float]:
    """Returns the fields that differ from transformers' own defaults. Raises ModelLoadError for an invalid one."""
    values = generation_config.to_diff_dict()
    if values.get("do_sample") is False:
        return {}
    defaults = {name: values[name] for name in GENERATION_DEFAULTS if values.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']!r})"
        raise ModelLoadError(f"the sampling defaults of the model are wrong: {reason}") from error
    return defaults
