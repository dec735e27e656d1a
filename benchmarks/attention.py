"""Benchmarks one layer of attention: each backend on the same paged batches, with the shapes of the default model.

python -m benchmarks.attention
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common import arguments, num_threads, print_environment, print_table, write_json
from minivllm.core.attention import BACKENDS, AttentionLayer, choose_backend
from minivllm.core.attention.base import AttentionBackend
from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.attention.metadata import AttentionMetadata, ModelInput

QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
LAYERS = 30
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """Context length and query length of each sequence."""

    name: str
    contexts: list[int]
    queries: list[int]

    @property
    def kv_bytes(self) -> int:
        """Bytes of bfloat16 K and V that a layer must read."""
        return sum(self.contexts) * KV_HEADS * HEAD_SIZE * 2 * 2


def batches() -> list[Batch]:
    rng = random.Random(1)
    ragged = [rng.randint(100, 700) for _ in range(64)]
    return [
        Batch("decode, 64 of 100..700", ragged, [1] * 64),
        Batch("decode, 8 of 300", [300] * 8, [1] * 8),
        Batch("decode, 1 of 3000", [3000], [1]),
        Batch("prefill, 512", [512], [512]),
        Batch("prefill, 512 after 1500", [2012], [512]),
        Batch("mixed, 32 decodes and 2 x 240", [*ragged[:32], 240, 240], [1] * 32 + [240, 240]),
    ]


def make_metadata(batch: Batch, layers: int) -> AttentionMetadata:
    """Builds attention metadata, with blocks in random order in a pool of random K and V."""
    counts = [-(-context // BLOCK_SIZE) for context in batch.contexts]
    spec = KVCacheSpec(layers, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, torch.bfloat16)
    pool = KVCachePool(spec, sum(counts), CPU)
    pool.tensor.normal_()
    order = list(range(sum(counts)))
    random.Random(0).shuffle(order)
    tables = np.full((len(counts), max(counts)), pool.padding_block_id, dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [order.pop() for _ in range(count)]
    ends, queries = np.array(batch.contexts), np.array(batch.queries)
    return ModelInput.build([0] * sum(batch.queries), ends - queries, ends, tables, pool).attention


def seconds_per_layer(backend: AttentionBackend, batch: Batch, repeats: int) -> float:
    """Returns the best of `repeats`. Runs all layers in turn, so that no layer finds its K and V in the CPU cache."""
    metadata = make_metadata(batch, LAYERS)
    tokens = sum(batch.queries)
    query = torch.randn(tokens, QUERY_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    key, value = (torch.randn(tokens, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for layer in range(LAYERS):
            backend.forward(layer, query, key, value, metadata)
        best = min(best, (time.perf_counter() - started) / LAYERS)
    return best


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(num_threads())
    print_environment()
    layers = (AttentionLayer(QUERY_HEADS, KV_HEADS, HEAD_SIZE, 0.125),) * LAYERS
    results = []
    rows = []
    for batch in batches():
        times = {}
        for name in BACKENDS:
            backend = choose_backend(name, layers, torch.bfloat16, CPU)
            times[name] = seconds_per_layer(backend, batch, 5 if name == "native" else 1)
        fastest = min(times.values())
        rows.append(
            (batch.name, *(f"{1000 * times[name]:.3f}" for name in times), f"{batch.kv_bytes / fastest / 1e9:.1f}")
        )
        results.append({"batch": batch.name, "seconds": times, "kv_bytes": batch.kv_bytes})
    print_table(("one layer, bfloat16", *(f"{name}, ms" for name in BACKENDS), "KV, GB/s"), rows)
    write_json(options.json, "attention", results)


if __name__ == "__main__":
    main()
