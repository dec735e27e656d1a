"""The torch attention backends against token-by-token attention in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from minivllm.core.attention import AttentionLayer, reference
from minivllm.core.attention.base import AttentionBackend
from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.attention.metadata import AttentionMetadata, ModelInput
from minivllm.core.attention.reference import ReferenceBackend, SdpaBackend
from tests.engine.running import poison

CPU = torch.device("cpu")
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass
class Step:
    """One step: computes the last `queries[i]` of `contexts[i]` tokens; K and V of the earlier ones are written."""

    contexts: list[int]
    queries: list[int]
    block_size: int = 4
    num_query_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.4

    def run(self, backend_class: type[AttentionBackend]) -> float:
        """Returns the largest error relative to the largest value of the exact result."""
        generator = torch.Generator().manual_seed(0)
        total = sum(self.contexts)

        def states(heads: int) -> torch.Tensor:
            values = torch.randn(total, heads, self.head_size, generator=generator, dtype=torch.float64)
            return values.to(self.dtype)

        query, key, value = states(self.num_query_heads), states(self.num_kv_heads), states(self.num_kv_heads)
        layer = AttentionLayer(
            self.num_query_heads, self.num_kv_heads, self.head_size, self.scale, self.window, self.softcap
        )
        backend = backend_class((layer,))
        pool, tables = self._pool()
        self._write_earlier_tokens(pool, tables, key, value)
        ends = np.cumsum(self.contexts)
        due = np.concatenate([np.arange(end - q, end) for end, q in zip(ends, self.queries, strict=True)])
        output = backend.forward(0, query[due], key[due], value[due], self._input(pool, tables).attention)
        assert output.dtype == self.dtype
        assert output.is_contiguous()
        exact = self._exact(query, key, value)[due]
        return float((output.double() - exact).abs().max() / exact.abs().max())

    def _pool(self) -> tuple[KVCachePool, list[list[int]]]:
        counts = [-(-context // self.block_size) for context in self.contexts]
        spec = KVCacheSpec(1, self.num_kv_heads, self.head_size, self.block_size, self.dtype)
        pool = KVCachePool(spec, sum(counts) + 3, CPU)
        poison(pool)
        blocks = list(range(pool.num_blocks))
        random.Random(0).shuffle(blocks)
        return pool, [[blocks.pop() for _ in range(count)] for count in counts]

    def _slots(self, tables: list[list[int]], sequence: int, start: int, end: int) -> list[int]:
        size = self.block_size
        return [tables[sequence][token // size] * size + token % size for token in range(start, end)]

    def _write_earlier_tokens(
        self, pool: KVCachePool, tables: list[list[int]], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        first = 0
        for sequence, (context, queries) in enumerate(zip(self.contexts, self.queries, strict=True)):
            slots = torch.tensor(self._slots(tables, sequence, 0, context - queries), dtype=torch.long)
            for cache, source in ((pool.key_cache[0], key), (pool.value_cache[0], value)):
                rows = source[first : first + context - queries]
                cache[slots // self.block_size, :, slots % self.block_size] = rows
            first += context

    def _input(self, pool: KVCachePool, tables: list[list[int]]) -> ModelInput:
        longest = max(map(len, tables))
        rows = [table + [pool.padding_block_id] * (longest - len(table)) for table in tables]
        ends, queries = np.array(self.contexts), np.array(self.queries)
        token_ids = list(range(sum(self.queries)))
        return ModelInput.build(token_ids, ends - queries, ends, np.array(rows, dtype=np.int32), pool)

    def _exact(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(query.shape, dtype=torch.float64)
        shared = self.num_query_heads // self.num_kv_heads
        first = 0
        for context in self.contexts:
            for token in range(context):
                oldest = 0 if self.window is None else max(0, token - self.window + 1)
                seen = slice(first + oldest, first + token + 1)
                for head in range(self.num_query_heads):
                    scores = key[seen, head // shared].double() @ query[first + token, head].double() * self.scale
                    if self.softcap is not None:
                        scores = torch.tanh(scores / self.softcap) * self.softcap
                    output[first + token, head] = scores.softmax(0) @ value[seen, head // shared].double()
            first += context
        return output


RAGGED = {"contexts": [1, 9, 30, 17, 5, 30, 64], "queries": [1, 1, 7, 17, 1, 30, 1]}


@pytest.mark.parametrize("backend_class", [ReferenceBackend, SdpaBackend])
@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
def test_ragged_batches_match_float64_attention(backend_class: type[AttentionBackend], dtype: torch.dtype) -> None:
    assert Step(**RAGGED, dtype=dtype).run(backend_class) < MAX_ERROR[dtype]


@pytest.mark.parametrize("backend_class", [ReferenceBackend, SdpaBackend])
@pytest.mark.parametrize("window", [1, 4, 5, 13, 100])
def test_sliding_window_matches_float64_attention(backend_class: type[AttentionBackend], window: int) -> None:
    assert Step(**RAGGED, window=window).run(backend_class) < 1e-5


@pytest.mark.parametrize("window", [None, 6])
def test_softcap_is_applied_before_the_mask(window: int | None) -> None:
    assert Step(**RAGGED, softcap=0.7, window=window).run(ReferenceBackend) < 1e-5


@pytest.mark.parametrize("backend_class", [ReferenceBackend, SdpaBackend])
@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize(("num_query_heads", "num_kv_heads", "head_size"), [(4, 4, 5), (8, 1, 80), (3, 3, 64)])
def test_every_block_size_and_head_shape_matches_float64_attention(
    backend_class: type[AttentionBackend], block_size: int, num_query_heads: int, num_kv_heads: int, head_size: int
) -> None:
    step = Step(
        contexts=[7, 21, 16],
        queries=[1, 9, 16],
        block_size=block_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
    )
    assert step.run(backend_class) < 1e-5


@pytest.mark.parametrize("window", [None, 6])
def test_result_is_independent_of_tile_and_group_sizes(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_TILE_QUERIES", 4)
    monkeypatch.setattr(reference, "MAX_GROUP_KEYS", 70)
    monkeypatch.setattr(reference, "MAX_GROUP_SCORES", 100)
    assert Step(**RAGGED, window=window).run(ReferenceBackend) < 1e-5


def test_groups_stay_within_the_key_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = enumerate([64] * 40 + [20, 3])
    tiles = [reference.Tile(1, -(-context // 4), index, index, context, 0) for index, context in contexts]
    monkeypatch.setattr(reference, "MAX_GROUP_KEYS", 640)
    groups = list(reference.stack(tiles, block_size=4))
    assert [len(group) for group in groups] == [10, 10, 10, 10, 1, 1]


def test_model_input_packs_the_last_tokens_of_each_sequence() -> None:
    """Covers consecutive positions of different sequences: position 5 of one, then position 6 of the next."""
    step = Step(contexts=[6, 7, 3, 20], queries=[1, 1, 3, 4])
    pool, tables = step._pool()
    model_input = step._input(pool, tables)
    metadata = model_input.attention
    spans = [(5, 6), (6, 7), (0, 3), (16, 20)]
    assert model_input.input_ids.tolist() == list(range(9))
    assert model_input.positions.tolist() == [token for span in spans for token in range(*span)]
    assert model_input.last_rows.tolist() == [0, 1, 4, 8]
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 5, 9]
    assert metadata.seq_lens.tolist() == [6, 7, 3, 20]
    slots = [slot for index, span in enumerate(spans) for slot in step._slots(tables, index, *span)]
    assert metadata.slot_mapping.tolist() == slots


def test_plans_are_made_once_per_step_and_argument() -> None:
    step = Step(contexts=[6], queries=[1])
    metadata = step._input(*step._pool()).attention
    made: list[str] = []

    def make(_: AttentionMetadata, argument: str) -> str:
        made.append(argument)
        return argument

    assert [metadata.plan(make, argument) for argument in ("a", "b", "a")] == ["a", "b", "a"]
    assert made == ["a", "b"]
