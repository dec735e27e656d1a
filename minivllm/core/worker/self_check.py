"""Compares a model type that no test of ours knows with transformers' own attention, before it serves anybody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from minivllm.core.attention import ATTENTION_NAME
from minivllm.core.models.support import PROVEN_MODEL_TYPES, refuse
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.output import ScheduledSequence
from minivllm.core.sequence import Sequence

if TYPE_CHECKING:
    from minivllm.core.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Share of the logits' norm by which the two may differ. Rounding is far below, a feature that was missed far above.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

_LENGTHS = (11, 5)
_CHUNKS = (((0, 5), (0, 4)), ((5, 11), (4, 5)))


def check_unproven(runner: ModelRunner) -> None:
    """Two short texts, in chunks of one packed batch through the pool, against a whole forward pass of each.

    Raises:
        ModelLoadError: the results differ.
    """
    model = runner.model
    block_size = runner.config.block_size
    if model.model_type in PROVEN_MODEL_TYPES:
        return
    blocks_each = -(-max(_LENGTHS) // block_size)
    if runner.num_blocks < 2 * blocks_each:
        logger.warning("%s: not compared with transformers, the KV pool is too small for it", model.name)
        return
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS]
    ours = _through_the_pool(runner, texts, blocks_each)
    theirs = torch.stack([_whole(runner, text) for text in texts])
    difference = float((ours - theirs).norm() / theirs.norm())
    if not difference <= _TOLERANCE[model.dtype]:
        raise refuse(
            model.name,
            model.model.config,
            f"something that paged attention lacks (its logits differ by {difference:.1%})",
        )
    logger.info(
        "%s: models of type %s are not among those that are tested in detail; compared with transformers on %d tokens, "
        "the logits differ by %.1e",
        model.name,
        model.model_type,
        sum(_LENGTHS),
        difference,
    )


@torch.inference_mode()
def _through_the_pool(runner: ModelRunner, texts: list[list[int]], blocks_each: int) -> torch.Tensor:
    """Logits (2, vocab_size) of the last tokens."""
    params = SamplingParams(max_tokens=1)
    sequences = [Sequence(f"self-check-{index}", text, params) for index, text in enumerate(texts)]
    for index, sequence in enumerate(sequences):
        sequence.block_table = list(range(index * blocks_each, (index + 1) * blocks_each))
    rows = []
    for chunk in _CHUNKS:
        scheduled = [
            ScheduledSequence(sequence, start, end, samples=False)
            for sequence, (start, end) in zip(sequences, chunk, strict=True)
        ]
        model_input = runner.make_input(scheduled)
        last = torch.from_numpy(model_input.last_rows).to(runner.device)
        rows.append(runner.forward(model_input)[last])
    for sequence in sequences:
        runner.release(sequence)
    return runner.body.logits(rows[-1]).float()


@torch.inference_mode()
def _whole(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    model = runner.model.model
    model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model(input_ids=torch.tensor([text], device=runner.device), use_cache=False).logits
        return logits[0, -1].float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
