"""Operations of the sampler on (rows, vocab) logits. Each row is computed independently of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from minivllm.core.sampling.rng import exponential_noise

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

BLOCK = 256
"""Tokens per block of the vocabulary. Maxima and sums of blocks are much cheaper on a CPU than those of rows."""

MIN_EXPONENT = -80.0
"""Exponents below this give weight 0: torch's exp on CPUs is 30 times slower for results that underflow."""

MIN_WEIGHT = math.exp(MIN_EXPONENT) * (1 + 1e-4)


class Workspace:
    """A reusable (rows, width) buffer of float32: mapping fresh pages in each step costs more than the arithmetic."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def take(self, rows: int, width: int, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized (rows, width) tensor, valid until the next call."""
        if self._memory.numel() < rows * width or self._memory.device != device:
            self._memory = torch.empty(rows * width, dtype=torch.float32, device=device)
        return self._memory[: rows * width].view(rows, width)


def select_rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Returns these rows; does not copy if they are all rows."""
    return tensor if rows == list(range(tensor.shape[0])) else tensor[rows]


def block_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (largest value, its lowest index) per row; the value is NaN if a row contains one.

    The same as `logits.max(dim=-1)` and 20 times faster on a CPU, where maxima of blocks are vectorized.
    """
    rows, width = logits.shape
    body = width - width % BLOCK
    if body == 0 or logits.device.type != "cpu":
        values, indices = logits.max(dim=-1)
        return values, indices
    blocks = logits[:, :body].unflatten(1, (-1, BLOCK))
    block_values, block_index = blocks.amax(dim=-1).max(dim=-1)
    index = block_index * BLOCK + blocks[torch.arange(rows), block_index].argmax(dim=-1)
    if body == width:
        return block_values, index
    tail_values, tail_index = logits[:, body:].max(dim=-1)
    from_tail = (tail_values > block_values) | (tail_values.isnan() & ~block_values.isnan())
    return torch.where(from_tail, tail_values, block_values), torch.where(from_tail, tail_index + body, index)


def unnormalized_softmax(
    logits: torch.Tensor, maxima: torch.Tensor, temperatures: list[float], workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes exp((logit - maximum) / temperature), and its sums over blocks of `BLOCK` tokens.

    Args:
        logits: (rows, vocab) float32; not changed.

    Returns:
        weights (rows, blocks, BLOCK), padded with zeros, in the workspace; sums (rows, blocks) in float64.
    """
    rows, width = logits.shape
    padded = width + -width % BLOCK
    weights = workspace.take(rows, padded, logits.device)
    inverse = torch.tensor([1 / value for value in temperatures], dtype=torch.float32, device=logits.device)
    inner = weights[:, :width]
    torch.sub(logits, maxima[:, None], out=inner)
    inner.mul_(inverse[:, None]).clamp_min_(MIN_EXPONENT).exp_()
    torch.nn.functional.threshold(inner, MIN_WEIGHT, 0.0, inplace=True)
    weights[:, width:] = 0
    blocks = weights.view(rows, -1, BLOCK)
    return blocks, blocks.sum(dim=-1).double()


def random_sample(weights: torch.Tensor, sums: torch.Tensor, seeds: Items[int], positions: Items[int]) -> torch.Tensor:
    """Samples one index per row, with probability proportional to its weight.

    Runs two exponential races (the Gumbel-max trick): one among the blocks by their sums, one inside the winning block.
    The result is exact and needs a few hundred random numbers per row. Each number belongs to a place in the
    vocabulary, so rounding errors of the logits almost never change the sampled token, as they would with a cumulative
    sum.

    Args:
        weights: (rows, blocks, BLOCK), not negative, some positive in each row.
        sums: (rows, blocks).
    """
    rows, num_blocks, _ = weights.shape
    columns = np.arange(num_blocks + BLOCK, dtype=np.int64)
    noise = torch.from_numpy(exponential_noise(seeds, positions, columns)).to(weights.device)
    block_index = (sums / noise[:, :num_blocks]).argmax(dim=-1)
    inside = weights[torch.arange(rows, device=weights.device), block_index].double() / noise[:, num_blocks:]
    return block_index * BLOCK + inside.argmax(dim=-1)


def random_sample_candidates(
    token_ids: IdArray, weights: npt.NDArray[np.float64], seeds: Items[int], positions: Items[int]
) -> list[int]:
    """Samples one of the token ids per row by one exponential race; the noise belongs to the token id."""
    winners = (weights / exponential_noise(seeds, positions, token_ids)).argmax(axis=-1)
    sampled: list[int] = token_ids[np.arange(len(winners)), winners].tolist()
    return sampled


def update_logits(logits: torch.Tensor, updates: Items[tuple[int, IdArray, float, FloatArray]]) -> None:
    """Applies a repetition penalty to logits of given tokens, then adds to them, in place.

    All rows share one gather and one scatter.

    Args:
        logits: (rows, width) float32, contiguous.
        updates: (row, token ids, repetition penalty, what is added to each); the token ids of a row are distinct.
    """
    rows, token_ids, penalties, added = zip(*updates, strict=True)
    lengths = [len(ids) for ids in token_ids]
    places = torch.from_numpy(np.concatenate(token_ids) + np.repeat(rows, lengths) * logits.shape[1]).to(logits.device)
    repetition = np.repeat(np.array(penalties, dtype=np.float32), lengths)
    flat = logits.view(-1)
    values = flat[places].cpu().numpy()
    values = np.where(values > 0, values / repetition, values * repetition) + np.concatenate(added)
    flat[places] = torch.from_numpy(values).to(logits.device)


def apply_token_bitmask(
    logits: torch.Tensor, rows: list[int], bitmask: npt.NDArray[np.int32], workspace: Workspace
) -> None:
    """Sets logits of these rows to -inf, in place, where a token's bit is 0.

    Args:
        logits: (all rows, width).
        rows: ascending.
        bitmask: (len(rows), words), lowest bit first, as in llguidance and xgrammar; masks tokens beyond it.
    """
    width = logits.shape[1]
    num_bytes = (width + 7) // 8
    masks = bitmask.view(np.uint8)
    masks = np.pad(masks, ((0, 0), (0, max(0, num_bytes - masks.shape[1]))))[:, :num_bytes]
    # Eight upper bounds per byte from a table: several times faster on a CPU than to unpack the bits and to select.
    index = torch.from_numpy(masks).to(logits.device).int().view(-1)
    bounds = workspace.take(len(rows), num_bytes * 8, logits.device)
    torch.index_select(_BOUNDS_OF_BYTE.to(logits.device), 0, index, out=bounds.view(-1, 8))
    if len(rows) == len(logits):
        torch.minimum(logits, bounds[:, :width], out=logits)
    else:
        logits[rows] = torch.minimum(logits[rows], bounds[:, :width])


_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS_OF_BYTE = torch.from_numpy(np.where(_BITS_OF_BYTE == 1, np.float32(np.inf), np.float32(-np.inf)))
"""(256, 8): inf for each bit of the byte that is 1, -inf for 0; lowest bit first."""
