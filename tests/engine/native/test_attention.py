"""The C++ attention backend against a float64 reference: ragged batches, scattered blocks, NaN in unused slots."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from minivllm.core import native
from minivllm.core.attention import AttentionLayer
from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.native.backend import NativeBackend
from tests.engine.native.portable_library import portable_library
from tests.engine.running import poison

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass
class Case:
    """One random step; `contexts` and `queries` are the total and the newly computed tokens per sequence."""

    contexts: list[int]
    queries: list[int]
    block_size: int = 16
    head_size: int = 64
    num_kv_heads: int = 2
    group: int = 3
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    seed: int = 0


def round_up(count: int, block_size: int) -> int:
    return -(-count // block_size)


class Bench:
    """A pool with its expected K and V, and steps that write them through the backend under test."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        layer = AttentionLayer(
            case.group * case.num_kv_heads, case.num_kv_heads, case.head_size, 0.125, case.window, case.softcap
        )
        self.backend = NativeBackend((layer,))
        blocks = [round_up(context, case.block_size) for context in case.contexts]
        spec = KVCacheSpec(1, case.num_kv_heads, case.head_size, case.block_size, case.dtype)
        self.pool = KVCachePool(spec, sum(blocks) + 3, CPU)
        poison(self.pool)
        order = list(range(sum(blocks) + 3))
        random.Random(case.seed).shuffle(order)
        self.tables = [[order.pop() for _ in range(count)] for count in blocks]
        self.keys = [self.random(context, case.num_kv_heads) for context in case.contexts]
        self.values = [self.random(context, case.num_kv_heads) for context in case.contexts]

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.case.head_size, generator=self.generator).to(self.case.dtype)

    def step(self, ranges: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs tokens start..end of sequences, given as (sequence, start, end). Returns queries and output, packed."""
        case = self.case
        width = max(round_up(end, case.block_size) for _, _, end in ranges)
        tables = np.full((len(ranges), width), self.pool.padding_block_id, dtype=np.int32)
        for row, (sequence, _, end) in enumerate(ranges):
            table = self.tables[sequence][: round_up(end, case.block_size)]
            tables[row, : len(table)] = table
        starts, ends = (np.array([span[index] for span in ranges]) for index in (1, 2))
        num_tokens = int((ends - starts).sum())
        metadata = ModelInput.build([0] * num_tokens, starts, ends, tables, self.pool).attention
        query = self.random(num_tokens, case.group * case.num_kv_heads)
        key = torch.cat([self.keys[sequence][start:end] for sequence, start, end in ranges])
        value = torch.cat([self.values[sequence][start:end] for sequence, start, end in ranges])
        return query, self.backend.forward(0, query, key, value, metadata)

    def oracle(self, query: torch.Tensor, sequence: int, start: int, end: int) -> torch.Tensor:
        """Computes attention of queries (end - start, heads, head_size) in float64."""
        case = self.case
        keys = self.keys[sequence][:end].double().repeat_interleave(case.group, dim=1)
        values = self.values[sequence][:end].double().repeat_interleave(case.group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * 0.125
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        at = torch.arange(start, end).unsqueeze(1)
        key_at = torch.arange(end).unsqueeze(0)
        hidden = key_at > at
        if case.window is not None:
            hidden |= key_at <= at - case.window
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def fill_caches(self) -> None:
        """Writes the tokens before the last step, at most 700 of a sequence per step."""
        for sequence, (context, count) in enumerate(zip(self.case.contexts, self.case.queries, strict=True)):
            for start in range(0, context - count, 700):
                self.step([(sequence, start, min(start + 700, context - count))])

    def check(self) -> None:
        self.fill_caches()
        ranges = [
            (sequence, context - count, context)
            for sequence, (context, count) in enumerate(zip(self.case.contexts, self.case.queries, strict=True))
        ]
        query, output = self.step(ranges)
        row = 0
        for sequence, start, end in ranges:
            got = output[row : row + end - start].double()
            wanted = self.oracle(query[row : row + end - start], sequence, start, end)
            error = float((got - wanted).norm() / wanted.norm())
            assert error < MAX_ERROR[self.case.dtype], f"sequence {sequence}, tokens {start}..{end}: error {error}"
            row += end - start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 128])
def test_every_block_size_matches_the_reference(block_size, dtype):
    Bench(Case([1, 15, 16, 17, 65, 300, 129], [1, 15, 1, 2, 65, 1, 7], block_size, dtype=dtype)).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256, 40, 6, 7])
def test_every_head_size_matches_the_reference(head_size, dtype):
    Bench(Case([1, 33, 200, 70], [1, 1, 3, 70], head_size=head_size, dtype=dtype)).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", range(1, 9))
def test_grouped_query_heads_match_the_reference(group, dtype):
    Bench(Case([5, 130, 64, 250], [1, 40, 64, 1], group=group, num_kv_heads=3, dtype=dtype)).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 5000])
def test_sliding_window_matches_the_reference(window, dtype):
    Bench(Case([1, 400, 350, 1200], [1, 1, 350, 90], window=window, dtype=dtype)).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softcap_matches_the_reference(dtype):
    bench = Bench(Case([1, 300, 70], [1, 1, 70], softcap=0.7, dtype=dtype))
    bench.check()
    bench = Bench(Case([300], [1], softcap=0.7, dtype=dtype))
    bench.backend.layers = (dataclasses.replace(bench.backend.layers[0], softcap=None),)
    with pytest.raises(AssertionError, match="error"):
        bench.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_context_split_across_threads_matches_the_reference(dtype):
    """With few heads and one long sequence, the threads split its context."""
    Bench(Case([3000], [1], num_kv_heads=1, group=8, dtype=dtype)).check()
    Bench(Case([3000, 4], [2, 1], num_kv_heads=1, group=1, dtype=dtype)).check()
    Bench(Case([2900, 2999], [1, 5], num_kv_heads=1, group=2, window=2000, dtype=dtype)).check()


@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_batches_match_the_reference(seed):
    chance = random.Random(seed)
    contexts = [int(math.exp(chance.uniform(0, math.log(3000)))) for _ in range(chance.randint(1, 8))]
    queries = [chance.choice([1, 1, chance.randint(1, min(context, 500))]) for context in contexts]
    case = Case(
        contexts,
        queries,
        block_size=chance.choice([1, 8, 16, 32, 128]),
        head_size=chance.choice([64, 80, 96, 128, 256]),
        num_kv_heads=chance.randint(1, 3),
        group=chance.randint(1, 8),
        dtype=chance.choice([torch.float32, torch.bfloat16]),
        window=chance.choice([None, None, chance.randint(1, 600)]),
        seed=seed,
    )
    Bench(case).check()


def test_large_scores_do_not_overflow_the_softmax():
    bench = Bench(Case([300, 90], [1, 90]))
    for keys in bench.keys:
        keys *= 100
    bench.check()


def test_non_contiguous_projections_match_the_reference():
    bench = Bench(Case([90, 33], [90, 33], dtype=torch.bfloat16))
    forward = bench.backend.forward

    def with_strides(layer, query, key, value, metadata):
        fused = torch.cat([query, key, value], dim=1).transpose(0, 1).contiguous().transpose(0, 1)
        heads = query.shape[1], key.shape[1]
        query, key, value = fused.split((*heads, heads[1]), dim=1)
        assert not query.is_contiguous()
        return forward(layer, query, key, value, metadata)

    bench.backend.forward = with_strides
    bench.check()


def test_more_threads_than_work_items_match_the_reference():
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        Bench(Case([2000, 3], [1, 1], num_kv_heads=1, group=1)).check()
    finally:
        torch.set_num_threads(before)


def test_portable_build_matches_the_reference(monkeypatch):
    monkeypatch.setattr(native, "library", portable_library)
    for dtype in (torch.float32, torch.bfloat16):
        Bench(Case([300, 40, 1], [1, 40, 1], softcap=20.0, dtype=dtype)).check()
