"""Attention over the paged KV pool: one file per backend, and the choice between them."""

from __future__ import annotations

import importlib
import logging

import torch

from minivllm.core.attention.base import ATTENTION_NAME, AttentionBackend, AttentionLayer, set_forward_context
from minivllm.core.errors import ModelLoadError

__all__ = ["ATTENTION_NAME", "BACKENDS", "AttentionBackend", "AttentionLayer", "choose_backend", "set_forward_context"]

logger = logging.getLogger(__name__)

BACKENDS = {
    "native": ("minivllm.core.native.backend", "NativeBackend"),
    "sdpa": ("minivllm.core.attention.reference", "SdpaBackend"),
    "reference": ("minivllm.core.attention.reference", "ReferenceBackend"),
}
"""Module and class by name, in the order of preference of "auto". A module is imported when its backend is tried."""


def choose_backend(
    name: str, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """Returns the backend called `name`, or for "auto" the first that can serve these layers here.

    Raises:
        ModelLoadError: no such backend, or it cannot serve this model, with the reason.
    """
    if name != "auto" and name not in BACKENDS:
        raise ModelLoadError(f"attention_backend={name!r} is none of auto, {', '.join(BACKENDS)}")
    for candidate in BACKENDS if name == "auto" else (name,):
        module_name, class_name = BACKENDS[candidate]
        backend_class: type[AttentionBackend] = getattr(importlib.import_module(module_name), class_name)
        reason = backend_class.why_not(layers, dtype, device)
        if reason is None:
            logger.info("attention backend: %s", candidate)
            return backend_class(layers)
        if name != "auto":
            raise ModelLoadError(f"attention_backend={name!r} cannot serve this model here: {reason}")
        logger.info("attention backend %s is not used: %s", candidate, reason)
    raise ModelLoadError("no attention backend can serve this model here")
