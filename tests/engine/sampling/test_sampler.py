"""Sampler: results against a float64 reference, and independence of the rows of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.core.errors import InvalidRequestError, RequestFailedError
from minivllm.core.outputs import SampleResult
from minivllm.core.sampling import sampler as sampler_module
from minivllm.core.sampling.ops import (
    BLOCK,
    Workspace,
    apply_token_bitmask,
    block_argmax,
    random_sample,
    unnormalized_softmax,
)
from minivllm.core.sampling.sampler import Sampler
from minivllm.core.sampling.topk_topp import (
    _candidates,
    _candidates_on_device,
    filter_candidates,
    has_filter,
    topk_per_row,
)
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence

EOS = 2


def sequence(request_id: str = "r", prompt: tuple[int, ...] = (1,), index: int = 0, **params: Any) -> Sequence:
    return Sequence(request_id, list(prompt), SamplingParams(max_tokens=None, **params), index=index)


def sampler_for(*sequences: Sequence, vocab: int = 1000, seed: int | None = None) -> Sampler:
    sampler = Sampler(vocab, frozenset({EOS}), seed=seed)
    for one in sequences:
        sampler.prepare(one)
    return sampler


def tokens(results: list[SampleResult]) -> list[int | None]:
    return [result.token_id for result in results]


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# -- argmax and top tokens ------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3 * BLOCK + 7),
    st.integers(0, 2**32),
    st.sampled_from(["plain", "ties", "tail", "nan", "lowest"]),
)
def test_block_argmax_returns_the_first_maximum(rows: int, width: int, seed: int, kind: str) -> None:
    logits = random_logits(rows, width, seed)
    if kind == "ties":
        logits = logits.round()
    if kind == "tail":
        logits[:, -1] = 100.0
    if kind == "lowest":
        logits[:] = -math.inf
    if kind == "nan":
        logits[0, seed % width] = math.nan
    values, indices = block_argmax(logits)
    for row in range(rows):
        plain = logits[row].numpy()
        if np.isnan(plain).any():
            assert math.isnan(float(values[row]))
        else:
            assert int(indices[row]) == int(np.argmax(plain))
            assert float(values[row]) == float(plain.max())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**32), st.booleans(), st.data())
def test_likeliest_tokens_are_sorted_with_ties_by_token_id(width: int, seed: int, ties: bool, data: Any) -> None:
    logits = random_logits(2, width, seed)
    if ties:
        logits = logits.round()
    counts = [data.draw(st.integers(0, width)), data.draw(st.integers(0, width))]
    for row, (ids, values) in enumerate(topk_per_row(logits, counts)):
        plain = logits[row].numpy()
        expected = np.lexsort((np.arange(width), -plain))[: counts[row]]
        assert ids.tolist() == expected.tolist()
        assert values.tolist() == plain[expected].tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**32))
def test_device_and_cpu_threshold_searches_agree(rows: int, width: int, seed: int) -> None:
    """Runs both searches on this machine, rows without a hit included."""
    logits = random_logits(rows, width, seed).round()
    bounds = random_logits(1, rows, seed + 1)[0].numpy() + 3
    on_cpu = _candidates(logits, bounds)
    on_device = _candidates_on_device(logits, bounds)
    for (ids, values), (other_ids, other_values) in zip(on_cpu, on_device, strict=True):
        assert ids.tolist() == other_ids.tolist()
        assert values.tolist() == other_values.tolist()


# -- filters -------------------------------------------------------------------------------------


def kept_by_definition(logits: np.ndarray, params: SamplingParams) -> tuple[list[int], float]:
    """Returns the kept ids in order, and the margin of the closest decision."""
    scaled = logits.astype(np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = probabilities[order]
    if 0 < params.top_k < len(weights):
        weights = weights[: params.top_k]
    share = np.cumsum(weights) / weights.sum()
    before = share - weights / weights.sum()
    keep_mask = (before < params.top_p) if params.top_p < 1 else np.ones(len(weights), dtype=bool)
    margin = float(np.abs(before[1:] - params.top_p).min(initial=1.0)) if params.top_p < 1 else 1.0
    keep_mask &= weights >= params.min_p
    if params.min_p:
        margin = min(margin, float(np.abs(weights / params.min_p - 1).min(initial=1.0)))
    keep_mask[0] = True
    return order[: len(weights)][keep_mask].tolist(), margin


def kept_by_us(logits: torch.Tensor, params: list[SamplingParams]) -> list[list[int]]:
    found = filter_candidates(logits, block_argmax(logits)[0], params, Workspace())
    return [ids[weights > 0].tolist() for ids, weights in zip(*found, strict=True)]


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 7, 40, 63, 64, 65, 500, 10**6]),
        "top_p": st.sampled_from([1.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 0.99999]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0]),
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(filters, min_size=1, max_size=4),
    st.sampled_from([5, 64, 100, 700, 3000]),
    st.sampled_from([0.3, 3.0, 10.0]),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_filters_keep_the_tokens_of_their_definition(
    choices: list[dict[str, Any]], vocab: int, scale: float, seed: int, coarse: bool
) -> None:
    params = [SamplingParams(**choice) for choice in choices if has_filter(SamplingParams(**choice), vocab)]
    if not params:
        return
    logits = random_logits(len(params), vocab, seed, scale)
    if coarse:
        logits = logits.bfloat16().float()  # many ties
    for row, kept in enumerate(kept_by_us(logits, params)):
        expected, margin = kept_by_definition(logits[row].numpy(), params[row])
        if margin > 1e-5:  # closer decisions depend on rounding
            positive = [
                token for token in expected if (logits[row, token] - logits[row].max()) / params[row].temperature > -700
            ]
            assert kept == positive


def test_top_k_one_returns_the_first_of_equal_maxima() -> None:
    row = sequence(top_k=1, temperature=2.0)
    logits = torch.zeros(1, 1000)
    logits[0, [40, 41, 700]] = 5.0
    assert tokens(sampler_for(row).sample(logits, [row])) == [40]


def test_tiny_top_p_is_greedy() -> None:
    row = sequence(top_p=1e-9)
    logits = random_logits(1, 1000)
    assert tokens(sampler_for(row).sample(logits, [row])) == [int(logits.argmax())]


def test_masked_and_underflowing_logits_have_zero_weight() -> None:
    logits = random_logits(2, 1000, scale=1.0)
    logits[:, ::3] = -torch.inf
    logits[1, 0] = 200.0  # all other weights underflow
    weights, _ = unnormalized_softmax(logits, block_argmax(logits)[0], [0.8, 0.5], Workspace())
    rows = weights.flatten(1)[:, :1000]
    assert (rows[:, 3::3] == 0).all()
    assert rows[1, 0] == 1
    assert rows[1, 1:].count_nonzero() == 0
    expected = torch.exp((logits[0].double() - logits[0].max()) / 0.8)
    assert torch.allclose(rows[0].double(), expected, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 3), min_size=1), st.integers(1, 300), st.integers(0, 10), st.integers(0, 2**32))
def test_bitmask_allows_exactly_the_tokens_with_a_set_bit(masked: set[int], width: int, words: int, seed: int) -> None:
    rows = sorted(masked)
    random = np.random.default_rng(seed)
    bitmask = random.integers(-(2**31), 2**31, (len(rows), words), dtype=np.int32)
    logits = random_logits(rows[-1] + 1, width, seed)
    allowed = np.ones((len(logits), width), dtype=bool)
    allowed[rows] = False
    unpacked = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :width]
    allowed[rows, : unpacked.shape[1]] = unpacked == 1
    expected = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
    apply_token_bitmask(logits, rows, bitmask, Workspace())
    assert torch.equal(logits, expected)


# -- the distribution ----------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the statistic in standard deviations above its mean; merges cells with few expected counts."""
    total = counts.sum()
    rare = probabilities * total < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(probabilities[~rare], probabilities[rare].sum()) * total
    used = expected > 0
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("vocab", [300, 2 * BLOCK, 5 * BLOCK + 3])
def test_token_frequencies_match_the_softmax(vocab: int) -> None:
    draws = 15_000
    logits = random_logits(1, vocab, scale=2.0)
    weights, sums = unnormalized_softmax(logits, block_argmax(logits)[0], [0.8], Workspace())
    found = random_sample(
        weights.expand(draws, -1, -1), sums.expand(draws, -1), list(range(draws)), [7] * draws
    ).numpy()
    counts = np.bincount(found, minlength=vocab)[:vocab]
    assert counts.sum() == draws
    assert chi_square(counts, torch.softmax(logits[0].double() / 0.8, -1).numpy()) < 5


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "temperature": 1.4}],
    ids=str,
)
def test_token_frequencies_match_the_filtered_distribution(params: dict[str, Any], vary: str) -> None:
    vocab, rows, rounds = 400, 100, 50
    row_logits = random_logits(1, vocab, scale=1.5)
    sampling = SamplingParams(**params)
    kept = kept_by_definition(row_logits[0].numpy(), sampling)[0]
    probabilities = np.zeros(vocab)
    probabilities[kept] = torch.softmax(row_logits[0, kept].double() / sampling.temperature, -1).numpy()
    counts = np.zeros(vocab)
    for number in range(rounds):
        fixed = vary == "position"
        sequences = [
            sequence(f"{number}-{row}", seed=3 if fixed else number * rows + row, **params) for row in range(rows)
        ]
        for row, one in enumerate(sequences):
            one.output_token_ids = [5] * (number * rows + row if fixed else 0)
        results = sampler_for(*sequences, vocab=vocab).sample(row_logits.expand(rows, -1), sequences)
        counts += np.bincount([token or 0 for token in tokens(results)], minlength=vocab)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities) < 5


def test_consecutive_tokens_are_independent() -> None:
    """Pairs (token at position i, token at i + 1) of one seeded request are uniform."""
    row = sequence(seed=11)
    sampler = sampler_for(row, vocab=4)
    logits = torch.zeros(1, 4)
    found: list[int] = []
    for _ in range(3000):
        found += [token for token in tokens(sampler.sample(logits, [row])) if token is not None]
        row.append_token(found[-1])
    pairs = np.bincount(np.array(found[:-1]) * 4 + np.array(found[1:]), minlength=16)
    assert chi_square(pairs, np.full(16, 1 / 16)) < 5


# -- independence --------------------------------------------------------------------------------

neighbours = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
            "top_k": st.sampled_from([1, 10, 100]),
            "top_p": st.sampled_from([0.5, 0.95]),
            "min_p": st.sampled_from([0.1]),
            "repetition_penalty": st.sampled_from([0.5, 1.5]),
            "presence_penalty": st.sampled_from([-1.0, 2.0]),
            "frequency_penalty": st.sampled_from([1.0]),
            "logit_bias": st.just({5: 50.0, 9: -100.0}),
            "logprobs": st.sampled_from([0, 3]),
            "min_tokens": st.just(4),
            "seed": st.integers(0, 10),
        },
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(neighbours, neighbours, st.integers(0, 6), st.integers(0, 2**32), st.booleans())
def test_row_result_is_independent_of_the_batch(
    ours: list[dict[str, Any]], others: list[dict[str, Any]], history: int, seed: int, broken: bool
) -> None:
    """Compares seeded and greedy rows with all parameters alone and beside rows with invalid logits."""
    vocab = 700
    ours = [one if one.get("temperature") == 0.0 else {"seed": 3, **one} for one in ours]
    if not ours:
        return
    mine = [sequence(f"m{place}", (1, 7, 9), **one) for place, one in enumerate(ours)]
    theirs = [sequence(f"t{place}", (4, 4), **one) for place, one in enumerate(others)]
    for one in mine + theirs:
        for token in range(history):
            one.append_token(token * 5)
    logits = random_logits(len(mine) + len(theirs), vocab, seed)
    if broken and theirs:
        logits[len(mine), 17] = math.nan
    alone = []
    for row, one in enumerate(mine):
        alone += sampler_for(one, vocab=vocab).sample(logits[row : row + 1], [one])
    together = sampler_for(*theirs, *mine, vocab=vocab)
    order = torch.cat([torch.arange(len(mine), len(mine) + len(theirs)), torch.arange(len(mine))])
    results = together.sample(logits[order], theirs + mine)
    assert tokens(results[len(theirs) :]) == tokens(alone)
    for result, expected in zip(results[len(theirs) :], alone, strict=True):
        assert result.error is None
        assert (result.logprobs is None) == (expected.logprobs is None)
        if result.logprobs and expected.logprobs:
            assert result.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in result.logprobs.top] == [token for token, _ in expected.logprobs.top]
    if broken and theirs:
        assert isinstance(results[0].error, RequestFailedError)


def test_seeded_token_is_stable_under_rounding_of_the_logits() -> None:
    """Another batch changes the logits by rounding; sampling by cumulative sum would flip many tokens."""
    rows = [sequence(f"{number}", seed=number) for number in range(300)]
    logits = random_logits(300, 5000, scale=1.0)
    noisy = logits + 1e-5 * random_logits(300, 5000, seed=1, scale=1.0)
    plain = tokens(sampler_for(*rows, vocab=5000).sample(logits, rows))
    shaken = tokens(sampler_for(*rows, vocab=5000).sample(noisy, rows))
    assert sum(first != second for first, second in zip(plain, shaken, strict=True)) <= 1


def test_sample_k_uses_seed_plus_k() -> None:
    children = [sequence(f"c{k}", index=k, seed=40) for k in range(5)]
    singles = [sequence(f"s{k}", seed=40 + k) for k in range(5)]
    logits = random_logits(1, 1000, scale=1.0).expand(5, -1)
    as_children = tokens(sampler_for(*children).sample(logits, children))
    assert as_children == tokens(sampler_for(*singles).sample(logits, singles))
    assert len(set(as_children)) > 1


def test_unseeded_requests_differ() -> None:
    rows = [sequence(f"{number}") for number in range(20)]
    logits = torch.zeros(1, 1000).expand(20, -1)
    first = tokens(sampler_for(*rows).sample(logits, rows))
    assert len(set(first)) > 10
    assert first != tokens(sampler_for(*rows).sample(logits, rows))


def test_engine_seed_makes_unseeded_requests_reproducible() -> None:
    rows = [sequence(f"{number}") for number in range(20)]
    logits = torch.zeros(1, 1000).expand(20, -1)
    runs = [tokens(sampler_for(*rows, seed=seed).sample(logits, rows)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) > 10


def test_resampling_at_the_same_position_gives_the_same_token() -> None:
    """Holds after a preemption, and where a failed batch is sampled again row by row."""
    row = sequence(seed=1)
    sampler = sampler_for(row)
    logits = random_logits(1, 1000, scale=1.0)
    first = tokens(sampler.sample(logits, [row]))
    assert tokens(sampler.sample(logits, [row])) == first
    sampler.release(row)
    sampler.prepare(row)
    assert tokens(sampler.sample(logits, [row])) == first


# -- penalties, bias, min_tokens -----------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 19), min_size=1, max_size=10),
    st.lists(st.integers(0, 19), max_size=80),
    st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    st.sampled_from([-2.0, 0.0, 0.7]),
    st.sampled_from([-2.0, 0.0, 0.4]),
    st.dictionaries(st.integers(0, 19), st.floats(-100, 100, allow_nan=False, width=32), max_size=4),
    st.integers(0, 2**32),
    st.integers(0, 80),
)
def test_penalties_and_bias_match_their_definition(
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    seed: int,
    sampled_before: int,
) -> None:
    """Token counts are updated incrementally from the first step in which the sampler sees the sequence."""
    row = sequence(
        "r",
        tuple(prompt),
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias or None,
    )
    sampler = sampler_for(row, vocab=20)
    logits = random_logits(1, 20, seed)
    for place, token in enumerate(output):
        if place == sampled_before:
            sampler.sample(logits, [row])
        row.append_token(token)
    expected = logits[0].double().numpy()
    for token in set(prompt) | set(output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    for token, value in bias.items():
        expected[token] += value
    best_two = np.sort(expected)[-2:]
    if best_two[1] - best_two[0] > 1e-3:
        assert tokens(sampler.sample(logits, [row])) == [int(expected.argmax())]


def test_min_tokens_masks_eos_and_stop_tokens() -> None:
    row = sequence(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    sampler = sampler_for(row, vocab=10)
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 7], logits[0, 4] = 9.0, 8.0, 1.0
    found = []
    for _ in range(3):
        found += tokens(sampler.sample(logits, [row]))
        row.append_token(4)
    assert found == [4, 4, EOS]


def test_min_tokens_does_not_mask_an_ignored_eos() -> None:
    row = sequence(temperature=0.0, min_tokens=2, ignore_eos=True)
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 9.0
    assert tokens(sampler_for(row, vocab=10).sample(logits, [row])) == [EOS]


def test_bias_of_100_decides_and_leaves_the_input_logits_unchanged() -> None:
    row = sequence(temperature=1.0, logit_bias={33: 100.0})
    logits = random_logits(1, 1000)
    before = logits.clone()
    assert tokens(sampler_for(row).sample(logits, [row])) == [33]
    assert torch.equal(logits, before)


# -- log probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    plain = sequence("a", temperature=0.0, logprobs=4)
    heated = sequence("b", temperature=1.7, top_k=3, logprobs=2, logit_bias={8: 100.0}, repetition_penalty=1.5, seed=1)
    bare = sequence("c", temperature=0.0, logprobs=0)
    none = sequence("d", temperature=0.0)
    rows = [plain, heated, bare, none]
    logits = random_logits(4, 1000).to(dtype)
    results = sampler_for(*rows).sample(logits, rows)
    expected = torch.log_softmax(logits.double(), -1)
    for row, count in ((0, 4), (1, 2), (2, 0)):
        entry = results[row].logprobs
        assert entry is not None
        assert entry.token_id == results[row].token_id
        assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-5)
        assert [token for token, _ in entry.top] == [
            ids.tolist() for ids, _ in topk_per_row(logits.float(), [count] * 4)
        ][row]
        for token, value in entry.top:
            assert value == pytest.approx(float(expected[row, token]), abs=1e-5)
    assert results[1].token_id == 8
    assert results[3].logprobs is None


# -- rejections and failures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field"),
    [({"logit_bias": {1000: 1.0}}, "logit_bias"), ({"stop_token_ids": (3, 10**9)}, "stop_token_ids")],
    ids=["logit_bias", "stop_token_ids"],
)
def test_token_ids_outside_the_vocabulary_are_rejected_by_field(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampler_for(sequence(**params), vocab=1000)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 1}, {"seed": 1}, {"top_k": 5}], ids=str
)
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_row_with_invalid_logits_fails_alone(params: dict[str, Any], value: float | None) -> None:
    rows = [sequence("a", **params), sequence("b", **params), sequence("c", temperature=0.0)]
    logits = random_logits(3, 1000)
    if value is None:
        logits[1] = -math.inf
    else:
        logits[1, 999] = value
    results = sampler_for(*rows).sample(logits, rows)
    assert isinstance(results[1].error, RequestFailedError)
    assert results[1].token_id is None
    assert results[0].error is None is results[2].error
    assert results[2].token_id == int(logits[2].argmax())


def test_exception_in_one_row_fails_only_that_row(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler_module.update_logits

    def fails_on_token_77(logits: torch.Tensor, updates: Any) -> None:
        if any(77 in token_ids for _, token_ids, *_ in updates):
            raise ZeroDivisionError
        real(logits, updates)

    monkeypatch.setattr(sampler_module, "update_logits", fails_on_token_77)
    rows = [sequence("a", logit_bias={5: 100.0}), sequence("b", logit_bias={77: 100.0}), sequence("c", seed=4)]
    logits = random_logits(3, 1000)
    results = sampler_for(*rows).sample(logits, rows)
    assert results[0].token_id == 5
    assert isinstance(results[1].error, RequestFailedError)
    assert results[2].token_id == sampler_for(rows[2]).sample(logits[2:], [rows[2]])[0].token_id


def test_row_with_all_tokens_masked_fails() -> None:
    row = sequence(temperature=0.0, min_tokens=1, stop_token_ids=(0, 1))
    results = sampler_for(row, vocab=3).sample(torch.zeros(1, 3), [row])
    assert isinstance(results[0].error, RequestFailedError)


def test_rejected_duplicate_id_keeps_the_state_of_the_live_request() -> None:
    """State belongs to the sequence, so a second sequence with its id does not share it."""
    live, duplicate = sequence("same", seed=None), sequence("same", seed=None)
    sampler = sampler_for(live)
    logits = torch.zeros(1, 1000)
    first = tokens(sampler.sample(logits, [live]))
    sampler.prepare(duplicate)
    sampler.release(duplicate)
    assert tokens(sampler.sample(logits, [live])) == first


def test_release_drops_the_state_and_is_idempotent() -> None:
    row = sequence()
    sampler = sampler_for(row)
    sampler.release(row)
    sampler.release(row)
    assert row.sampler_state is None


def test_unprepared_sequence_fails_alone() -> None:
    prepared, released = sequence("a", seed=1), sequence("b", temperature=0.0)
    sampler = sampler_for(prepared, released)
    sampler.release(released)
    results = sampler.sample(random_logits(2, 1000), [prepared, released])
    assert isinstance(results[1].error, RequestFailedError)
    assert "not prepared" in str(results[1].error)
    assert results[0].error is None


def test_new_sequence_with_a_used_id_starts_without_state() -> None:
    """Penalties and the grammar of an ended request do not reach a later one of the same id."""
    ended = sequence("same", frequency_penalty=2.0, temperature=0.0)
    sampler = sampler_for(ended, vocab=10)
    logits = torch.zeros(1, 10)
    logits[0, 4] = 1.0
    for expected in (4, 0):
        assert tokens(sampler.sample(logits, [ended])) == [expected]
        ended.append_token(expected)
    later = sequence("same", frequency_penalty=2.0, temperature=0.0)
    sampler.prepare(later)
    assert tokens(sampler.sample(logits, [later])) == [4]


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 2.0])
def test_smallest_repetition_penalty_selects_the_top_prompt_token(temperature: float) -> None:
    row = sequence(prompt=(1, 5, 9), repetition_penalty=5e-324, temperature=temperature, seed=0)
    logits = random_logits(1, 1000)
    logits[0, [1, 5, 9]] = torch.tensor([2.0, 7.0, 0.0])
    assert tokens(sampler_for(row).sample(logits, [row])) == [5]
