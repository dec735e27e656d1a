"""Loads a causal language model of transformers, ready to run on paged attention."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
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
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.gguf import gguf_read_once
from minivllm.core.models.lm_head import LMHead
from minivllm.core.models.location import ModelLocation, resolve_model
from minivllm.core.models.support import check_config, context_limit, find_head, probe

logger = logging.getLogger(__name__)

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config may set for requests that do not say."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, and what the engine must know of it.

    Attributes:
        model: the unmodified transformers class, in inference mode, on its device.
        head: hidden states to logits.
        layers: what each layer asks of attention.
        eos_token_ids: those of generation_config and config together.
        generation_defaults: sampling fields that the model's makers set, as `SamplingParams` names them.
        max_model_len: longest context that the model's positions reach; None when it sets no limit.
    """

    name: str
    model: PreTrainedModel
    head: LMHead
    layers: tuple[AttentionLayer, ...]
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, float] = field(default_factory=dict)
    max_model_len: int | None = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.head.vocab_size

    @property
    def model_type(self) -> str:
        return str(self.model.config.get_text_config(decoder=True).model_type)

    def hidden_states(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Last hidden states (T, hidden_size) of packed tokens (T,); call it within `set_forward_context`."""
        output = self.model.base_model(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        states: torch.Tensor = output.last_hidden_state
        return states[0]


def choose_device(device: str) -> torch.device:
    """Raises ModelLoadError when CUDA is asked for and not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ModelLoadError(f"device={device!r}: torch sees no such CUDA device here")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it (CUDA, AVX-512 BF16, AMX), and float32 elsewhere."""
    if dtype != "auto":
        named: torch.dtype = getattr(torch, dtype)
        return named
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16")
    return torch.bfloat16 if fast else torch.float32


def default_num_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


_ONE_AT_A_TIME = threading.Lock()
"""transformers changes settings of the whole process while it builds a model, and puts them back afterwards."""


def load_model(config: EngineConfig) -> LoadedModel:
    """Finds, checks and loads the model that `config` names.

    Raises:
        ModelLoadError: it is not there, cannot be read, or needs what we lack; the message says which.
    """
    started = time.monotonic()
    location = resolve_model(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    with _ONE_AT_A_TIME, gguf_read_once():
        model_config = _load_config(config, location)
        check_config(config.model, model_config)
        limit = context_limit(config.model, model_config)
        model = _load_weights(config, location, model_config, dtype, device)
    layers = probe(config.model, model)
    generation_config = _load_generation_config(config, location, model)
    loaded = LoadedModel(
        name=config.model,
        model=model,
        head=find_head(config.model, model),
        layers=layers,
        dtype=dtype,
        device=device,
        eos_token_ids=_eos_token_ids(generation_config, model.config),
        generation_defaults=_generation_defaults(generation_config),
        max_model_len=limit,
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


def _load_config(config: EngineConfig, location: ModelLocation) -> PreTrainedConfig:
    with _load_errors(config, location):
        return AutoConfig.from_pretrained(location.path, trust_remote_code=config.trust_remote_code, **_where(location))


def _load_weights(
    config: EngineConfig,
    location: ModelLocation,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    common: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": config.trust_remote_code,
    }
    with _load_errors(config, location), _logged_progress(config.model):
        if config.load_format == "dummy":
            logger.info("%s: random weights (load_format=dummy)", config.model)
            torch.manual_seed(config.seed or 0)
            model = AutoModelForCausalLM.from_config(model_config, **common).to(device)
        else:
            logger.info("%s: loading from %s", config.model, location.gguf_path or location.path)
            # Straight to the device, so that the host never holds more than a part of the weights.
            placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
            if location.gguf_file is not None and hasattr(transformers, "GgufConfig"):
                # Later versions of transformers keep the weights packed, for kernels of their own, unless told not to.
                placement["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(
                location.path, config=model_config, **common, **placement, **_where(location)
            )
    # No `.to(dtype)`: it would round the frequencies of rotary embeddings, which stay in float32 in any model.
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def _where(location: ModelLocation) -> dict[str, str]:
    settings = {"gguf_file": location.gguf_file, "revision": location.revision}
    return {name: value for name, value in settings.items() if value is not None}


@contextmanager
def _load_errors(config: EngineConfig, location: ModelLocation) -> Iterator[None]:
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        where = "" if location.is_local else " (not a folder here, so it was looked for on the Hugging Face hub)"
        raise ModelLoadError(f"cannot load the model {config.model!r}{where}: {error}") from error


class _LoggedProgress:
    """Stands in for a tqdm bar and writes a log line every few seconds instead."""

    def __init__(self, name: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        self._name = name
        self._items = arguments[0] if arguments else settings.get("iterable", ())
        self._what = str(settings.get("desc") or "loading").strip(". ").lower()
        self._total = settings.get("total") or (len(self._items) if hasattr(self._items, "__len__") else 0)
        self._done = 0
        self._next_line = time.monotonic() + 2.0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()
        self._log()

    def __enter__(self) -> _LoggedProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        self._done += count
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 2.0
            self._log()

    def close(self) -> None:
        """tqdm's name for the end of a bar."""

    def __getattr__(self, _: str) -> Any:
        return lambda *args, **kwargs: None  # set_description, set_postfix, refresh and the like

    def _log(self) -> None:
        share = f"{100 * self._done // self._total} % of {self._total}" if self._total else str(self._done)
        logger.info("%s: %s, %s", self._name, self._what, share)


@contextmanager
def _logged_progress(name: str) -> Iterator[None]:
    """Turns the progress bars of transformers into log lines while a model loads."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loading

    previous_hook = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: _LoggedProgress(name, args, kwargs))
    previous_bar = gguf_loading.tqdm  # The one bar that does not ask the hook.
    gguf_loading.tqdm = lambda *args, **kwargs: _LoggedProgress(name, args, kwargs)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous_hook)
        gguf_loading.tqdm = previous_bar


def _load_generation_config(config: EngineConfig, location: ModelLocation, model: PreTrainedModel) -> GenerationConfig:
    if config.load_format == "auto" and model.generation_config is not None:
        return model.generation_config
    try:
        return GenerationConfig.from_pretrained(location.path, revision=location.revision or "main")
    except OSError:
        return GenerationConfig.from_model_config(model.config)


def _eos_token_ids(generation_config: GenerationConfig, model_config: PreTrainedConfig) -> frozenset[int]:
    found: set[int] = set()
    text_config = model_config.get_text_config(decoder=True)
    for source in (generation_config.eos_token_id, getattr(text_config, "eos_token_id", None)):
        if isinstance(source, int):
            found.add(source)
        elif source is not None:
            found.update(int(token_id) for token_id in source)
    return frozenset(found)


def _generation_defaults(generation_config: GenerationConfig) -> dict[str, float]:
    """Only what the makers set; values at which a filter is off say nothing."""
    values = generation_config.to_diff_dict()
    if values.get("do_sample") is False:
        return {}
    return {name: values[name] for name in GENERATION_DEFAULTS if values.get(name) is not None}
