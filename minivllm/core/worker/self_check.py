"""Compares a model type without tests of its own with transformers before it serves requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from minivllm.core.attention import ATTENTION_NAME, choose_backend
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.models.backbone import Backbone, TransformersBackbone
from minivllm.core.models.loader import LoadedModel
from minivllm.core.models.support import TESTED_MODEL_TYPES, unsupported
from minivllm.core.worker.dummy_step import dummy_step

logger = logging.getLogger(__name__)

# Largest difference relative to the norm of the logits: far above rounding, far below a missing feature.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_PROMPT_LENS = (11, 5)
_CHUNKS = (((0, 5), (0, 4)), ((5, 11), (4, 5)))


@torch.inference_mode()
def check_against_transformers(model: LoadedModel, backbone: TransformersBackbone, block_size: int) -> None:
    """Compares two prompts, in packed chunks through a small KV pool, with one eager forward pass each.

    Skips model types in `TESTED_MODEL_TYPES`. In 16 bits, rounding alone can make a mixture-of-experts model choose
    other experts; a model whose logits differ is then compared again in float32.

    Raises:
        ModelLoadError: the logits differ.
    """
    if model.model_type in TESTED_MODEL_TYPES:
        return
    difference = _difference(model, backbone, block_size)
    if not difference <= _TOLERANCE[model.dtype] and model.dtype != torch.float32:
        exact = replace(model, dtype=torch.float32)
        attention = choose_backend(backbone.attention.name, model.layers, torch.float32, model.device)
        with _computed_in_float32(model.model):
            in_float32 = _difference(exact, TransformersBackbone(exact, attention), block_size)
        if in_float32 <= _TOLERANCE[torch.float32]:
            logger.info("%s: rounding alone changes its logits by %.0e", model.name, difference)
            difference = in_float32
    if not difference <= _TOLERANCE[model.dtype]:
        feature = f"something that paged attention lacks (its logits differ by {difference:.1%})"
        raise unsupported(model.name, model.model.config, feature)
    compared = f"compared with transformers on {sum(_PROMPT_LENS)} tokens, the logits differ by {difference:.1e}"
    logger.info("%s: model type %s has no tests of its own; %s", model.name, model.model_type, compared)


def _difference(model: LoadedModel, backbone: Backbone, block_size: int) -> float:
    """Returns the norm of the difference of both logits, relative to the norm of transformers' logits."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in _PROMPT_LENS]
    longest = max(_PROMPT_LENS)
    kv_cache = KVCachePool(model.kv_cache_spec(block_size), 2 * -(-longest // block_size), model.device)
    for chunk in _CHUNKS:
        ours = dummy_step(
            backbone,
            kv_cache,
            query_lens=[end - start for start, end in chunk],
            seq_lens=[end for _, end in chunk],
            token_ids=[token for prompt, span in zip(prompts, chunk, strict=True) for token in prompt[slice(*span)]],
            max_seq_len=longest,
        )
    theirs = torch.stack([_eager_logits(model, prompt) for prompt in prompts])
    return float((ours.float() - theirs).norm() / theirs.norm())


@contextmanager
def _computed_in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Runs each module with its weights and inputs converted to float32, one module at a time to save memory."""
    stored: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(tensor: Any) -> Any:
        is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return tensor.float() if is_float else tensor

    def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                stored[parameter], parameter.data = parameter.data, parameter.data.float()
        return tuple(map(widen, args)), {name: widen(value) for name, value in kwargs.items()}

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in stored:
                parameter.data = stored.pop(parameter)

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in owners]
    handles += [module.register_forward_hook(after, always_call=True) for module in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _eager_logits(model: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    model.model.set_attn_implementation("eager")
    try:
        logits = model.model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits
        return logits[0, -1].float()  # type: ignore[no-any-return]
    finally:
        model.model.set_attn_implementation(ATTENTION_NAME)
