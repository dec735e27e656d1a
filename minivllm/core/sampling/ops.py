"""The sampler's arithmetic: many rows at once, each row by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minivllm.core.outputs import TokenLogprobs
from minivllm.core.sampling.rng import exponential_noise
from minivllm.core.sampling.topk_topp import Kept, likeliest

BLOCK = 256
"""Tokens of the vocabulary that are looked at together: maxima and sums of blocks are cheap, of rows they are not."""

LEAST_EXPONENT = -80.0
"""Below this a weight counts as 0. torch's exp on CPUs takes 30 times as long over what underflows, and over -inf."""

LEAST_WEIGHT = math.exp(LEAST_EXPONENT) * (1 + 1e-4)

Array = npt.NDArray[Any]


class Workspace:
    """Memory for one (rows, vocab) matrix of float32, kept between steps: fresh pages cost more than the arithmetic."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def take(self, rows: int, width: int, device: torch.device) -> torch.Tensor:
        """(rows, width) of whatever was there before; valid until the next call."""
        if self._memory.numel() < rows * width or self._memory.device != device:
            self._memory = torch.empty(rows * width, dtype=torch.float32, device=device)
        return self._memory[: rows * width].view(rows, width)


def block_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest value, its lowest index) of each row; NaN where a row holds one.

    As `logits.max(dim=-1)`, and 20 times as fast on a CPU: maxima of blocks vectorise, a search for an index does not.
    """
    rows, width = logits.shape
    body = width - width % BLOCK
    if body == 0 or logits.device.type != "cpu":
        values, indices = logits.max(dim=-1)
        return values, indices
    blocks = logits[:, :body].unflatten(1, (-1, BLOCK))
    block_values, block_index = blocks.amax(dim=-1).max(dim=-1)
    inside = blocks[torch.arange(rows), block_index].argmax(dim=-1)
    index = block_index * BLOCK + inside
    if body == width:
        return block_values, index
    tail_values, tail_index = logits[:, body:].max(dim=-1)
    from_tail = (tail_values > block_values) | (tail_values.isnan() & ~block_values.isnan())
    return torch.where(from_tail, tail_values, block_values), torch.where(from_tail, tail_index + body, index)


def weigh(
    logits: torch.Tensor, maxima: torch.Tensor, temperatures: list[float], workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp((logit - maximum) / temperature), and its sums over blocks of `BLOCK` tokens.

    Args:
        logits: (rows, vocab) float32; not changed.

    Returns:
        weights (rows, blocks, BLOCK), filled up with zeros, in the workspace; sums (rows, blocks) in float64.
    """
    rows, width = logits.shape
    padded = width + -width % BLOCK
    weights = workspace.take(rows, padded, logits.device)
    inverse = torch.tensor([1 / value for value in temperatures], dtype=torch.float32, device=logits.device)
    inner = weights[:, :width]
    torch.sub(logits, maxima[:, None], out=inner)
    inner.mul_(inverse[:, None]).clamp_min_(LEAST_EXPONENT).exp_()
    torch.nn.functional.threshold(inner, LEAST_WEIGHT, 0.0, inplace=True)
    weights[:, width:] = 0
    blocks = weights.view(rows, -1, BLOCK)
    return blocks, blocks.sum(dim=-1).double()


def draw_from_all(weights: torch.Tensor, sums: torch.Tensor, seeds: Items[int], positions: Items[int]) -> torch.Tensor:
    """One index a row, with probability proportional to its weight.

    Two exponential races (the Gumbel-max trick): one among blocks of the vocabulary by their sums, one inside the
    winner. That is exact and needs a few hundred random numbers a row instead of one a token. As each number belongs to
    a place in the vocabulary, rounding errors of the logits almost never change the choice; inverting a cumulative
    sum, they would whenever they move the sum past a rare token.

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


def draw_from_kept(kept: Kept, seeds: Items[int], positions: Items[int]) -> list[int]:
    """The same from the tokens that the filters kept, in one race: the noise belongs to the token id."""
    winners = (kept.weights / exponential_noise(seeds, positions, kept.token_ids)).argmax(axis=-1)
    chosen: list[int] = kept.token_ids[np.arange(len(winners)), winners].tolist()
    return chosen


def scatter_rows(
    logits: torch.Tensor,
    entries: Items[tuple[int, tuple[Array, ...]]],
    change: Callable[[Array, tuple[Array, ...]], Array],
) -> None:
    """Changes logits at given places, for all rows in one gather and one scatter.

    Args:
        logits: (rows, width) float32, contiguous; changed in place.
        entries: (row, (token ids, more columns...)) with arrays of one length; token ids distinct in a row.
        change: (values, columns) -> new values, on the arrays of all rows joined.
    """
    width = logits.shape[1]
    places = torch.from_numpy(np.concatenate([columns[0] + row * width for row, columns in entries]))
    joined = tuple(np.concatenate(parts) for parts in zip(*(columns[1:] for _, columns in entries), strict=True))
    flat = logits.view(-1)
    places = places.to(logits.device)
    values = change(flat[places].cpu().numpy(), joined)
    flat[places] = torch.from_numpy(values.astype(np.float32)).to(logits.device)


def rule_out(logits: torch.Tensor, bits: npt.NDArray[np.uint8], workspace: Workspace) -> None:
    """Sets logits to -inf, in place, where a token's bit is 0.

    Args:
        logits: (rows, width).
        bits: (rows, bytes), lowest bit first; a token beyond them may not come either.
    """
    rows, width = logits.shape
    num_bytes = (width + 7) // 8
    bits = np.pad(bits, ((0, 0), (0, max(0, num_bytes - bits.shape[1]))))[:, :num_bytes]
    # Eight bounds by a table for each byte: several times as fast on a CPU as to unpack and to select.
    index = torch.from_numpy(bits).to(logits.device).int().view(-1)
    bounds = workspace.take(rows, num_bytes * 8, logits.device)
    torch.index_select(_BOUNDS_OF_BYTE.to(logits.device), 0, index, out=bounds.view(-1, 8))
    torch.minimum(logits, bounds[:, :width], out=logits)


def _bounds_of_byte() -> torch.Tensor:
    """(256, 8): of each byte's bits, lowest first, inf for 1 and -inf for 0."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf)))


_BOUNDS_OF_BYTE = _bounds_of_byte()


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Log probabilities of the given tokens and of the likeliest at their places.

    Args:
        logits: (rows, vocab), raw.
        token_ids: one a row.
        num_top: how many alternatives each row wants, 0 for none.
    """
    logits = logits.float()
    normaliser = _log_sum_exp(logits)
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - normaliser
    own_list = own.squeeze(1).tolist()
    if not any(num_top):
        return [TokenLogprobs(token_id, value) for token_id, value in zip(token_ids, own_list, strict=True)]
    found = likeliest(logits, [min(count, logits.shape[1]) for count in num_top])
    offsets = normaliser.squeeze(1).tolist()
    return [
        TokenLogprobs(token_id, value, tuple(zip(ids.tolist(), (values - offset).tolist(), strict=True)))
        for token_id, value, (ids, values), offset in zip(token_ids, own_list, found, offsets, strict=True)
    ]


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """(rows, 1). Not `logsumexp`, which is several times slower on a CPU."""
    largest = logits.amax(dim=-1, keepdim=True)
    return (logits - largest).exp_().sum(dim=-1, keepdim=True).log_() + largest
