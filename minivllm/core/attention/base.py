"""What an attention backend is, and how a transformers model reaches the one that serves it.

A model is loaded with `attn_implementation=ATTENTION_NAME`. Each of its layers then calls `paged_attention`, which
finds the backend and the `ModelInput` of the running step in a context variable that the model runner sets around the
forward pass. Several engines in one process, or several threads, do not see each other's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from minivllm.core.attention.metadata import ModelInput

ATTENTION_NAME = "minivllm_paged"


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer asks of attention. `sliding_window` counts the token itself; `softcap` is that of the scores."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


class AttentionBackend(ABC):
    """Writes K and V of a step into the pool and attends to what the block tables name. Owned by one model runner."""

    name: ClassVar[str]

    def __init__(self, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.layers = layers
        self.dtype = dtype
        self.device = device

    @classmethod
    @abstractmethod
    def why_not(cls, layers: tuple[AttentionLayer, ...], dtype: torch.dtype, device: torch.device) -> str | None:
        """None when this backend can serve such layers here, else the reason, as a clause for an error message."""

    # Most backends work out nothing ahead, so this is no abstract method.
    def begin_step(self, model_input: ModelInput) -> None:  # noqa: B027
        """Called once before the layers of a step, outside of anything compiled: plan, split the work."""

    @abstractmethod
    def forward(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        model_input: ModelInput,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Writes `key` and `value` at the slot mapping of `model_input`, then attends.

        Token t of a sequence attends to tokens max(0, t - sliding_window + 1) .. t of it. Slots that are not among
        the first context_len tokens of a sequence may hold anything, NaN included, and must not matter.

        Args:
            query: (T, num_query_heads, head_size), any strides.
            key, value: (T, num_kv_heads, head_size), any strides.
            scale: factor of the scores, before `softcap`: score = softcap * tanh(score / softcap).

        Returns:
            (T, num_query_heads, head_size), contiguous, in the type of `query`.
        """


class AttentionCall(Protocol):
    """What a context answers a layer's call with."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The running step: which backend serves it, and on what input."""

    backend: AttentionBackend
    model_input: ModelInput

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return self.backend.forward(
            layer_index,
            query,
            key,
            value,
            self.model_input,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )


_current: ContextVar[AttentionCall | None] = ContextVar("minivllm_attention", default=None)


@contextmanager
def attention_context(context: AttentionCall) -> Iterator[None]:
    """Within it, the attention layers of this thread's model are served by `context`."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> AttentionCall:
    context = _current.get()
    if context is None:
        raise RuntimeError("paged attention was called outside of a step of the model runner")
    return context


def _attend_in_context(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_index: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return current_context().attend(layer_index, query, key, value, scale, sliding_window, softcap)


def _result_like(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


# An operator that a compiler takes as it is: it sees neither the pool nor the context. Defined by hand because
# `torch.library.custom_op` costs several times as much a call, and a step makes one call for each layer.
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, int layer_index, float scale, int? sliding_window, "
    "float? softcap) -> Tensor"
)
_library.impl("paged_attention", _attend_in_context, "CompositeExplicitAutograd")
torch.library.register_fake("minivllm::paged_attention", _result_like, lib=_library)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls for ATTENTION_NAME; `architecture.probe` has checked what it may ignore.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query, key, value: (1, heads, T, head_size).

    Returns:
        (1, T, query heads, head_size), and no attention weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = torch.ops.minivllm.paged_attention if torch.compiler.is_compiling() else _attend_in_context
    layer_index: Any = module.layer_idx
    output = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer_index,
        scale,
        sliding_window,
        softcap,
    )
    return output.unsqueeze(0), None
