"""top_k, top_p and min_p, exactly, without sorting the vocabulary.

Each keeps a prefix of the tokens sorted by logit, descending, and by token id among equals: top_k the first k, top_p
the shortest prefix with a share of at least p of what is left, min_p the tokens at least min_p times as likely as the
first. A lower bound of the kept logits is found first, and only the candidates that reach it are sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from minivllm.core.sampling.ops import FloatArray, IdArray, Workspace, select_rows, unnormalized_softmax
from minivllm.core.sampling_params import SamplingParams

BLOCK = 64
"""Tokens per block of the vocabulary, whose maxima give the lower bounds."""

TOP_P_CANDIDATES = 64
"""Candidates with which top_p starts. Only a flat distribution needs more."""

Weights = npt.NDArray[np.float64]


def has_filter(params: SamplingParams, width: int) -> bool:
    return 0 < params.top_k < width or params.top_p < 1 or params.min_p > 0


def filter_candidates(
    logits: torch.Tensor, maxima: torch.Tensor, params: list[SamplingParams], workspace: Workspace
) -> tuple[IdArray, Weights]:
    """Applies top_k, top_p and min_p.

    Args:
        logits: (rows, vocab) float32, before temperature.
        maxima: (rows,) the largest logits.
        params: one per row, each with a filter.

    Returns:
        token ids and weights, (rows, most candidates of a row), sorted by logit; weight 0 where a token is not kept.
    """
    largest = maxima.cpu().numpy()
    totals = _totals(logits, maxima, params, workspace)
    rows = [_sort(*found) for found in _candidates(logits, _lower_bounds(logits, largest, params))]
    for row, one in enumerate(params):
        if not math.isnan(totals[row]) and one.min_p == 0:
            share = one.top_p * totals[row]
            if _weights(rows[row][1], largest[row], one).sum() < share:
                rows[row] = _top_p_candidates(logits[row].cpu().numpy(), largest[row], one, share)
    num_candidates = max(len(ids) for ids, _ in rows)
    token_ids = np.zeros((len(rows), num_candidates), dtype=np.int64)
    relative = np.full((len(rows), num_candidates), -math.inf)
    for row, (ids, values) in enumerate(rows):
        token_ids[row, : len(ids)] = ids
        relative[row, : len(ids)] = values - largest[row]
    weights = np.exp(relative / np.array([[one.temperature] for one in params]))
    _apply_filters(weights, params, totals[:, None])
    return token_ids, weights


def _apply_filters(weights: Weights, params: list[SamplingParams], totals: Weights) -> None:
    """Sets the weights that top_k, then top_p, then min_p remove to 0, in place.

    Args:
        weights: (rows, candidates), sorted, relative to the largest.
        totals: (rows, 1) of which top_p is a share; NaN for the sum of what top_k keeps.
    """
    top_k = np.array([[one.top_k if one.top_k > 0 else math.inf] for one in params])
    top_p = np.array([[one.top_p] for one in params])
    weights[np.arange(weights.shape[1]) >= top_k] = 0
    totals = np.where(np.isnan(totals), weights.sum(axis=-1, keepdims=True), totals)
    preceding = np.cumsum(weights, axis=-1) - weights
    weights[(preceding >= top_p * totals) & (top_p < 1)] = 0
    weights[weights < np.array([[one.min_p] for one in params])] = 0


def topk_per_row(logits: torch.Tensor, counts: Items[int]) -> list[tuple[IdArray, FloatArray]]:
    """Returns (ids, logits) of the `counts[row]` likeliest tokens of each row, sorted."""
    rows = [_sort(*found) for found in _candidates(logits, _topk_lower_bounds(logits, counts))]
    return [(ids[:count], values[:count]) for (ids, values), count in zip(rows, counts, strict=True)]


def _totals(logits: torch.Tensor, maxima: torch.Tensor, params: list[SamplingParams], workspace: Workspace) -> Weights:
    """Returns the sum of each row's weights where top_p applies to the full vocabulary, else NaN."""
    totals = np.full(len(params), math.nan)
    rows = [row for row, one in enumerate(params) if one.top_p < 1 and not 0 < one.top_k < logits.shape[1]]
    if rows:
        temperatures = [params[row].temperature for row in rows]
        picked = select_rows(logits, rows)
        _, sums = unnormalized_softmax(picked, select_rows(maxima, rows), temperatures, workspace)
        totals[rows] = sums.sum(-1).cpu().numpy()
    return totals


def _lower_bounds(logits: torch.Tensor, largest: FloatArray, params: list[SamplingParams]) -> FloatArray:
    """Returns a logit per row below which the filters keep nothing; for top_p alone an estimate."""
    width = logits.shape[1]
    counts = [one.top_k if 0 < one.top_k < width else 0 if one.min_p > 0 else TOP_P_CANDIDATES for one in params]
    bounds = _topk_lower_bounds(logits, counts)
    for row, one in enumerate(params):
        if counts[row] == 0:
            # Slightly lower than min_p's bound because of rounding; `_apply_filters` is exact.
            bounds[row] = largest[row] + one.temperature * math.log(one.min_p) * (1 + 1e-5) - 1e-4
    return bounds


def _topk_lower_bounds(logits: torch.Tensor, counts: Items[int]) -> FloatArray:
    """Returns a bound per row that at least `counts[row]` tokens reach, and few more.

    The k-th largest block maximum is such a bound, as k blocks contain a token that large.
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


def _candidates(logits: torch.Tensor, bounds: FloatArray) -> list[tuple[IdArray, FloatArray]]:
    """Returns (ids ascending, logits) of the tokens of each row that reach its bound."""
    if logits.device.type != "cpu":
        return _candidates_on_device(logits, bounds)
    rows = logits.numpy()  # numpy's search per row is several times faster
    return [(ids := np.flatnonzero(row >= bound), row[ids]) for row, bound in zip(rows, bounds, strict=True)]


def _candidates_on_device(logits: torch.Tensor, bounds: FloatArray) -> list[tuple[IdArray, FloatArray]]:
    """Searches all rows at once and copies only the candidates to the host."""
    places = (logits >= torch.from_numpy(bounds).to(logits.device)[:, None]).nonzero(as_tuple=True)
    values = logits[places].cpu().numpy()
    row_of, ids = places[0].cpu().numpy(), places[1].cpu().numpy()
    splits = np.searchsorted(row_of, np.arange(1, len(bounds)))
    return list(zip(np.split(ids, splits), np.split(values, splits), strict=True))


def _sort(ids: IdArray, values: FloatArray) -> tuple[IdArray, FloatArray]:
    """Sorts by logit, descending, and among equals by id, as one integer key that contains both.

    The bits of floats sort as their values once those of negative floats are flipped.
    """
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)
    flipped = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = np.sort((~flipped << 32) + ids)
    bits = (~(keys >> 32)).astype(np.int32)
    return keys & 0xFFFFFFFF, np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).view(np.float32)


def _weights(logits: FloatArray, largest: np.float32, params: SamplingParams) -> Weights:
    weights: Weights = np.exp((logits - largest).astype(np.float64) / params.temperature)
    return weights


def _top_p_candidates(
    row: FloatArray, largest: np.float32, params: SamplingParams, share: float
) -> tuple[IdArray, FloatArray]:
    """Returns a sorted prefix of the row that weighs more than `share`, or all of it; tries ever lower bounds."""
    for exponent in (5, 8, 11, 15):
        ids = np.flatnonzero(row >= largest - np.float32(exponent * params.temperature))
        if _weights(row[ids], largest, params).sum() > share * (1 + 1e-6):
            return _sort(ids, row[ids])
    return _sort(np.arange(len(row)), row)
