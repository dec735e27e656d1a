"""Compares a model type without tests of its own with transformers before it serves requests."""

from __future__ import annotations

import logging

import torch

from minivllm.core.attention import ATTENTION_NAME
from minivllm.core.attention.kv_pool import KVCachePool
from minivllm.core.models.backbone import Backbone
from minivllm.core.models.loader import LoadedModel
from minivllm.core.models.support import TESTED_MODEL_TYPES, unsupported
from minivllm.core.worker.dummy_step import dummy_step

logger = logging.getLogger(__name__)

# Largest difference relative to the norm of the logits: far above rounding, far below a missing feature.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_PROMPT_LENS = (11, 5)
_CHUNKS = (((0, 5), (0, 4)), ((5, 11), (4, 5)))


@torch.inference_mode()
def check_against_transformers(model: LoadedModel, backbone: Backbone, block_size: int) -> None:
    """Compares two prompts, in packed chunks through a small KV pool, with one eager forward pass each.

    Skips model types in `TESTED_MODEL_TYPES`.

    Raises:
        ModelLoadError: the logits differ.
    """
    if model.model_type in TESTED_MODEL_TYPES:
        return
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
    difference = float((ours.float() - theirs).norm() / theirs.norm())
    if not difference <= _TOLERANCE[model.dtype]:
        feature = f"something that paged attention lacks (its logits differ by {difference:.1%})"
        raise unsupported(model.name, model.model.config, feature)
    compared = f"compared with transformers on {sum(_PROMPT_LENS)} tokens, the logits differ by {difference:.1e}"
    logger.info("%s: model type %s has no tests of its own; %s", model.name, model.model_type, compared)


def _eager_logits(model: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    model.model.set_attn_implementation("eager")
    try:
        logits = model.model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits
        return logits[0, -1].float()  # type: ignore[no-any-return]
    finally:
        model.model.set_attn_implementation(ATTENTION_NAME)
