"""top_k, top_p and min_p, exactly, without sorting the vocabulary.

Tokens stand in one order: by logit, the largest first, and among equals by id. top_k keeps the first k of it, top_p the
shortest start of what is left that has a share of at least p of it, min_p those at least min_p times as likely as the
first. So what is kept is always a start of the order. A bound is found first below which nothing can be kept; only what
is above it is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minivllm.core.sampling_params import SamplingParams

BLOCK = 64
"""Tokens of the vocabulary whose maximum is taken together."""

FIRST_TRY = 64
"""Likeliest tokens among which top_p is tried first. Only a flat distribution needs more."""

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that rows may draw: both (rows, most tokens of a row), weights 0 where a row has fewer."""

    token_ids: IdArray
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class _Row:
    """The first tokens of a row, in order."""

    token_ids: IdArray
    logits: Logits


def has_filter(params: SamplingParams, width: int) -> bool:
    return 0 < params.top_k < width or params.top_p < 1 or params.min_p > 0


def needs_total(params: SamplingParams, width: int) -> bool:
    """Whether top_p asks for a share of the whole row, not of what top_k left."""
    return params.top_p < 1 and not 0 < params.top_k < width


def keep(logits: torch.Tensor, maxima: torch.Tensor, totals: FloatArray, params: list[SamplingParams]) -> Kept:
    """What each row keeps.

    Args:
        logits: (rows, vocab) float32, before temperature.
        maxima: (rows,) the largest of each.
        totals: (rows,) the sum of exp((logit - maximum) / temperature) over the row, where `needs_total`.
        params: one a row, each with a filter.
    """
    width = logits.shape[1]
    largest = maxima.cpu().numpy()
    bounds = _bounds(logits, largest, params)
    rows = [_in_order(ids, values) for ids, values in _not_below(logits, bounds)]
    for place, (row, one) in enumerate(zip(rows, params, strict=True)):
        if needs_total(one, width) and one.min_p == 0:
            share = one.top_p * totals[place]
            if _weights(row.logits, largest[place], one).sum() < share:
                rows[place] = _heavy_part(logits[place].cpu().numpy(), largest[place], one, share)
    return _cut(rows, largest, totals, params, width)


def likeliest(logits: torch.Tensor, counts: Items[int]) -> list[tuple[IdArray, Logits]]:
    """(ids, logits) of the first `counts[row]` tokens of each row, in order."""
    found = _not_below(logits, _least_of_first(logits, counts))
    rows = [_in_order(ids, values) for ids, values in found]
    return [(row.token_ids[:count], row.logits[:count]) for row, count in zip(rows, counts, strict=True)]


def _bounds(logits: torch.Tensor, largest: Logits, params: list[SamplingParams]) -> Logits:
    """(rows,) a logit below which the row keeps nothing; for top_p alone a guess."""
    width = logits.shape[1]
    bounds = np.zeros(len(params), dtype=np.float32)
    counts = dict[int, int]()
    for row, one in enumerate(params):
        if 0 < one.top_k < width:
            counts[row] = one.top_k
        elif one.min_p > 0:
            # A little lower, as it is rounded: the exact cut comes later.
            bounds[row] = largest[row] + one.temperature * math.log(one.min_p) * (1 + 1e-5) - 1e-4
        else:
            counts[row] = FIRST_TRY
    if counts:
        rows = list(counts)
        picked = logits if len(rows) == len(params) else logits[rows]
        bounds[rows] = _least_of_first(picked, list(counts.values()))
    return bounds


def _least_of_first(logits: torch.Tensor, counts: Items[int]) -> Logits:
    """(rows,) a bound that at least `counts[row]` tokens reach, and not many more.

    The k-th largest maximum of a block is one: k blocks hold a token that large.
    """
    width = logits.shape[1]
    num_blocks = width // BLOCK
    bounds = np.full(len(counts), -math.inf, dtype=np.float32)
    if any(0 < count <= num_blocks for count in counts):
        blocks = logits[:, : num_blocks * BLOCK].unflatten(1, (num_blocks, BLOCK))
        maxima = np.sort(blocks.amax(dim=-1).cpu().numpy(), axis=-1)
    for row, count in enumerate(counts):
        if count == 0:
            bounds[row] = math.inf
        elif count <= num_blocks:
            bounds[row] = maxima[row, num_blocks - count]
        elif count < width:
            bounds[row] = np.partition(logits[row].cpu().numpy(), width - count)[width - count]
    return bounds


def _not_below(logits: torch.Tensor, bounds: Logits) -> list[tuple[IdArray, Logits]]:
    """(ids ascending, logits) of the tokens of each row that reach its bound."""
    if logits.device.type == "cpu":
        return _not_below_on_cpu(logits.numpy(), bounds)
    return _not_below_on_device(logits, bounds)


def _not_below_on_cpu(logits: Logits, bounds: Logits) -> list[tuple[IdArray, Logits]]:
    """Row by row, where numpy is several times faster than torch's search through the whole."""
    found = []
    for row, bound in zip(logits, bounds, strict=True):
        ids = np.flatnonzero(row >= bound)
        found.append((ids, row[ids]))
    return found


def _not_below_on_device(logits: torch.Tensor, bounds: Logits) -> list[tuple[IdArray, Logits]]:
    """All rows in one search, so that little is copied, and once."""
    places = (logits >= torch.from_numpy(bounds).to(logits.device)[:, None]).nonzero(as_tuple=True)
    values = logits[places].cpu().numpy()
    row_of, ids = places[0].cpu().numpy(), places[1].cpu().numpy()
    ends = np.searchsorted(row_of, np.arange(len(bounds)), side="right")
    starts = [0, *ends[:-1]]
    return [(ids[start:end], values[start:end]) for start, end in zip(starts, ends, strict=True)]


def _in_order(ids: IdArray, values: Logits) -> _Row:
    """Sorts by logit, the largest first, and among equals by id: by one integer that holds both.

    The bits of a float sort as its value does once those of negative ones are flipped.
    """
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)
    flipped = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = np.sort((~flipped << 32) + ids)
    bits = (~(keys >> 32)).astype(np.int32)
    return _Row(keys & 0xFFFFFFFF, np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).view(np.float32))


def _weights(logits: Logits, largest: np.float32, params: SamplingParams) -> FloatArray:
    weights: FloatArray = np.exp((logits - largest).astype(np.float64) / params.temperature)
    return weights


def _heavy_part(row: Logits, largest: np.float32, params: SamplingParams, share: float) -> _Row:
    """A start of the order that weighs more than `share`, or all of it: less and less is left off."""
    for logarithm in (5, 8, 11, 15):
        ids = np.flatnonzero(row >= largest - np.float32(logarithm * params.temperature))
        if _weights(row[ids], largest, params).sum() > share * (1 + 1e-6):
            return _in_order(ids, row[ids])
    return _in_order(np.arange(len(row)), row)


def _cut(rows: list[_Row], largest: Logits, totals: FloatArray, params: list[SamplingParams], width: int) -> Kept:
    """Cuts each row to what it keeps, all rows at once."""
    longest = max(len(row.token_ids) for row in rows)
    token_ids = np.zeros((len(rows), longest), dtype=np.int64)
    relative = np.full((len(rows), longest), -math.inf)
    for place, row in enumerate(rows):
        token_ids[place, : len(row.token_ids)] = row.token_ids
        relative[place, : len(row.logits)] = row.logits - largest[place]
    top_k = np.array([[one.top_k if 0 < one.top_k < width else width] for one in params])
    top_p = np.array([[one.top_p] for one in params])
    min_p = np.array([[one.min_p] for one in params])
    is_whole = np.array([[needs_total(one, width)] for one in params])
    number = np.arange(longest)
    weights = np.exp(relative / np.array([[one.temperature] for one in params]))
    weights[number >= top_k] = 0
    share = top_p * np.where(is_whole, totals[:, None], weights.sum(axis=-1, keepdims=True))
    before = np.cumsum(weights, axis=-1) - weights
    dropped = ((before >= share) & (top_p < 1)) | (weights < min_p)
    dropped[:, 0] = False  # the first is always kept, whatever the rounding
    weights[dropped] = 0
    return Kept(token_ids, weights)
