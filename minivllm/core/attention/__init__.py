"""Attention over the paged KV pool: one file for each backend, and the choice between them."""

from __future__ import annotations

import importlib
import logging

import torch

from minivllm.core.attention.base import (
    ATTENTION_NAME,
    AttentionBackend,
    AttentionLayer,
    PagedContext,
    attention_context,
    paged_attention,
)
from minivllm.core.errors import ModelLoadError

__all__ = [
    "ATTENTION_NAME",
    "AttentionBackend",
    "AttentionLayer",
    "PagedContext",
    "attention_context",
    "backend_names",
    "choose_backend",
    "register_with_transformers",
]

logger = logging.getLogger(__name__)

# In the order of preference of `auto`: module and class, imported only when they are tried.
_BACKENDS = {
    "native": ("minivllm.core.native.backend", "NativeBackend"),
    "sdpa": ("minivllm.core.attention.reference", "SdpaBackend"),
    "reference": ("minivllm.core.attention.reference", "ReferenceBackend"),
}


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def choose_backend(
    name: str, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first that can serve these layers here.

    Raises:
        ModelLoadError: no such backend, or it cannot serve this model, with the reason.
    """
    if name != "auto":
        if name not in _BACKENDS:
            raise ModelLoadError(f"attention_backend={name!r} is none of auto, {', '.join(_BACKENDS)}")
        reason, backend = _try(name, layers, dtype, device)
        if backend is None:
            raise ModelLoadError(f"attention_backend={name!r} cannot serve this model here: {reason}")
        return backend
    for candidate in _BACKENDS:
        reason, backend = _try(candidate, layers, dtype, device)
        if backend is not None:
            logger.info("attention backend: %s", candidate)
            return backend
        logger.info("attention backend %s is not used: %s", candidate, reason)
    raise ModelLoadError("no attention backend can serve this model here")


def _try(
    name: str, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device
) -> tuple[str | None, AttentionBackend | None]:
    module_name, class_name = _BACKENDS[name]
    backend_class: type[AttentionBackend] = getattr(importlib.import_module(module_name), class_name)
    reason = backend_class.why_not(layers, dtype, device)
    return reason, None if reason else backend_class(layers, dtype, device)


def register_with_transformers() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known to transformers. May be called any number of times."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
