"""AttentionBackend, and the attention function through which a transformers model reaches it.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention` in each layer. It finds the backend and
the metadata of the running step in a context variable, so that engines in several threads do not share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from minivllm.core.attention.metadata import AttentionMetadata

ATTENTION_NAME = "minivllm_paged"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention parameters of one layer.

    Attributes:
        scale: factor of the scores.
        sliding_window: token t of a sequence attends to its tokens max(0, t - sliding_window + 1) .. t; None: 0 .. t.
        softcap: after scaling, score = softcap * tanh(score / softcap).
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionBackend(ABC):
    """Writes a step's K and V into the pool and attends through the block tables. Used by one model runner."""

    name: ClassVar[str]

    def __init__(self, layers: tuple[AttentionLayer, ...]) -> None:
        self.layers = layers

    @classmethod
    def why_not(cls, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device) -> str | None:
        """Returns why this backend cannot serve such layers here, as a clause for an error message, or None."""
        return None

    @abstractmethod
    def forward(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Writes `key` and `value` at the slot mapping, then attends as `layers[layer_index]` says.

        Slots beyond the seq_len of a sequence may contain anything, NaN included, and do not change the result.

        Args:
            query: (T, num_query_heads, head_size), any strides.
            key, value: (T, num_kv_heads, head_size), any strides.

        Returns:
            (T, num_query_heads, head_size), contiguous, in the dtype of `query`.
        """


_forward_context: ContextVar[tuple[AttentionBackend, AttentionMetadata] | None] = ContextVar(
    "minivllm_forward_context", default=None
)


@contextmanager
def set_forward_context(backend: AttentionBackend, metadata: AttentionMetadata) -> Iterator[None]:
    """Within it, `paged_attention` in this thread uses `backend` on `metadata`."""
    token = _forward_context.set((backend, metadata))
    try:
        yield
    finally:
        _forward_context.reset(token)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_index: int) -> torch.Tensor:
    context = _forward_context.get()
    if context is None:
        raise RuntimeError("paged attention was called outside of a forward context")
    backend, metadata = context
    return backend.forward(layer_index, query, key, value, metadata)


# An operator that is opaque to torch.compile, which sees neither the pool nor the context. Defined by hand because
# `torch.library.custom_op` costs several times as much per call, and a step makes one call per layer.
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define("paged_attention(Tensor query, Tensor key, Tensor value, int layer_index) -> Tensor")
_library.impl("paged_attention", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("minivllm::paged_attention", lambda query, *_: query.new_empty(query.shape), lib=_library)


def paged_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Serves the attention layers of transformers. `support.find_attention_layers` has recorded the other arguments.

    Args:
        module: the attention layer; its `layer_idx` is the layer's index.
        query, key, value: (1, heads, T, head_size).

    Returns:
        (1, T, query heads, head_size), and no attention weights.
    """
    attend = torch.ops.minivllm.paged_attention if torch.compiler.is_compiling() else _attend
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    layer_index: Any = module.layer_idx
    return attend(query, key, value, layer_index).unsqueeze(0), None
