"""Cost of scheduling and effect of the admission policy, at the sizes of a big GPU but without a model.

    python -m benchmarks.scheduler [--quick] [--json FILE] [--only cost|blocks|policy]

Scheduler and block manager run alone; a "step" is `schedule()` plus `update_from_output()` with invented tokens. Three
tables:

* cost: microseconds per step and per sequence for pure decoding, and under Poisson arrivals with shared prefixes; and
  their growth with running sequences, pool size and cached blocks.
* blocks: nanoseconds per block for taking, freeing, hitting, evicting and caching, on pools of different sizes.
* policy: a busy chat service in simulated time: preemptions, wasted recompute, waiting time and KV use against the
  watermark, and against reserving blocks for the full `max_tokens` of every request at admission.

Times are CPU time of this thread, so that other processes do not affect them.
"""

from __future__ import annotations

import gc
import heapq
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from minivllm.core.config import EngineConfig
from minivllm.core.kv_cache.block_manager import BlockManager, PrefixMatch
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.scheduler import Scheduler
from minivllm.core.sequence import Sequence
from minivllm.core.stats import RejectionReason

BLOCK_SIZE = 16
POOL = 100_000
RUNNING = 256
CONTEXT = 2000
SHARED_PREFIX = 512
VOCABULARY = 50_000


def make_scheduler(
    num_blocks: int = POOL,
    *,
    max_num_seqs: int = RUNNING,
    watermark: float = 0.01,
    budget: int = 8192,
    manager_class: type[BlockManager] = BlockManager,
) -> Scheduler:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        max_waiting_requests=None,
        watermark=watermark,
        max_model_len=min(16_384, num_blocks * BLOCK_SIZE),
    )
    manager = manager_class(num_blocks, BLOCK_SIZE, enable_prefix_caching=True, watermark=watermark)
    return Scheduler(config, manager)


def make_prompt(generator: random.Random, length: int, prefixes: list[list[int]]) -> list[int]:
    """A prompt of this length, three times in four beginning with one of the shared prefixes."""
    start = generator.choice(prefixes)[:length] if generator.random() < 0.75 else []
    return [*start, *(generator.randrange(VOCABULARY) for _ in range(length - len(start)))]


def make_prefixes(generator: random.Random, count: int = 20) -> list[list[int]]:
    return [[generator.randrange(VOCABULARY) for _ in range(SHARED_PREFIX)] for _ in range(count)]


# ---------------------------------------------------------------- cost of a step


def fill(scheduler: Scheduler, count: int, context: int, seed: int = 0) -> None:
    """Brings `count` sequences of `context` tokens to the point where each decodes one token per step."""
    generator = random.Random(seed)
    prefixes = make_prefixes(generator)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for number in range(count):
        # Lengths differ, so that the sequences reach block boundaries in different steps.
        prompt = make_prompt(generator, context - number % (4 * BLOCK_SIZE), prefixes)
        scheduler.add(Sequence(f"running-{number}", prompt, params))
    while scheduler.num_waiting or any(one.num_computed_tokens < one.num_tokens - 1 for one in scheduler.running):
        step_once(scheduler)


def leave_cached(scheduler: Scheduler, num_blocks: int) -> None:
    """Fills the pool with cached blocks of sequences that have ended."""
    manager = scheduler.block_manager
    length = 400 * BLOCK_SIZE
    for number in range(num_blocks * BLOCK_SIZE // length):
        tokens = list(range(number * length, (number + 1) * length))
        sequence = Sequence(f"ended-{number}", tokens, SamplingParams())
        manager.allocate_for_prefill(sequence, length)
        manager.mark_computed(sequence, length)
        manager.free_sequence(sequence)


def step_once(scheduler: Scheduler) -> tuple[float, int, int]:
    """One step: (microseconds of CPU, sequences, tokens)."""
    start = time.thread_time_ns()
    step = scheduler.schedule()
    scheduled = time.thread_time_ns()
    tokens = [7 if one.samples else None for one in step.sequences]
    resumed = time.thread_time_ns()
    scheduler.update_from_output(step, tokens)
    spent = time.thread_time_ns() - resumed + scheduled - start
    return spent / 1000, len(step.sequences), step.num_tokens


def decode_cost(
    running: int = RUNNING, pool: int = POOL, cached: int = 0, steps: int = 300, context: int = CONTEXT
) -> dict[str, float]:
    """Microseconds of pure decoding steps."""
    scheduler = make_scheduler(pool, max_num_seqs=running)
    leave_cached(scheduler, cached)
    fill(scheduler, running, context)
    evictable = sum(owner.state == "cached" for owner in scheduler.block_manager.owners())
    gc.collect()
    spent = sorted(step_once(scheduler)[0] for _ in range(steps))
    return {
        "running": running,
        "pool": pool,
        "cached": evictable,
        "median_us": statistics.median(spent),
        "p99_us": spent[int(len(spent) * 0.99)],
        "us_per_sequence": statistics.median(spent) / running,
    }


def mixed_cost(steps: int, arrivals_per_step: float = 2.0) -> dict[str, float]:
    """Microseconds of steps with chunked prefill: requests of about 2,000 tokens arrive by a Poisson process.

    The rate keeps about 256 running: each prefills for a step or two and decodes for about 120.
    """
    generator = random.Random(1)
    prefixes = make_prefixes(generator)
    scheduler = make_scheduler()
    spent, sequences, computed = [], [], []
    arrival, number = 0.0, 0
    for step in range(steps):
        while arrival <= step:
            arrival += generator.expovariate(arrivals_per_step)
            number += 1
            length = max(1, int(generator.gauss(CONTEXT, 200)))
            params = SamplingParams(max_tokens=generator.randrange(60, 180), ignore_eos=True)
            scheduler.add(Sequence(f"request-{number}", make_prompt(generator, length, prefixes), params))
        microseconds, count, tokens = step_once(scheduler)
        if step >= steps // 3:  # the first third fills the pool
            spent.append(microseconds)
            sequences.append(count)
            computed.append(tokens)
    stats = scheduler.stats
    return {
        "requests": number,
        "mean_running": statistics.mean(sequences),
        "mean_tokens": statistics.mean(computed),
        "median_us": statistics.median(spent),
        "p99_us": sorted(spent)[int(len(spent) * 0.99)],
        "us_per_sequence": statistics.mean(spent) / statistics.mean(sequences),
        "hit_share": stats.prefix_cache_hit_tokens_total / max(1, stats.prefix_cache_query_tokens_total),
    }


def measure_cost(quick: bool) -> dict[str, Any]:
    steps = 100 if quick else 400
    sizes = (16, 64, 256) if quick else (16, 64, 256, 1024)
    by_running = [
        decode_cost(running=running, pool=max(POOL, running * CONTEXT // 10), steps=steps) for running in sizes
    ]
    by_pool = [
        decode_cost(pool=pool, steps=steps) for pool in (35_000, 100_000, 300_000, 1_000_000)[: 2 if quick else 4]
    ]
    by_cached = [decode_cost(cached=cached, steps=steps) for cached in (0, 10_000, 30_000, 65_000)]
    mixed = mixed_cost(300 if quick else 1500)
    table("A decode step by running sequences (2,000 tokens each)", by_running)
    table("... by pool size (256 running)", by_pool)
    table("... by cached blocks in the pool (256 running)", by_cached)
    table("A mixed step: Poisson arrivals, three prompts in four begin with one of 20 shared prefixes", [mixed])
    return {"by_running": by_running, "by_pool": by_pool, "by_cached": by_cached, "mixed": mixed}


# ---------------------------------------------------------------- cost of a block


def _timed(action: Callable[[], None]) -> int:
    start = time.thread_time_ns()
    action()
    return time.thread_time_ns() - start


def block_cost(pool: int, count: int = 1000) -> dict[str, float]:
    """Nanoseconds per block of each operation, on a pool that is full of cached blocks where that matters."""
    manager = BlockManager(pool, BLOCK_SIZE, enable_prefix_caching=True)
    tokens = list(range(count * BLOCK_SIZE + 1))
    result: dict[str, float] = {"pool": pool}
    taken: list[int] = []

    def take() -> None:
        taken[:] = manager.allocate_blocks(count)

    def free() -> None:
        manager.free_blocks(taken)

    takes, frees = [], []
    for _ in range(20):
        takes.append(_timed(take))
        frees.append(_timed(free))
    result["take_ns"], result["free_ns"] = min(takes) / count, min(frees) / count

    cachings = []
    for number in range(5):
        # Each time another prefix, the wanted one last.
        first = Sequence("first", [number - 4, *tokens[1:]] if number < 4 else tokens, SamplingParams())
        manager.allocate_for_prefill(first, len(tokens))
        cachings.append(_timed(lambda one=first: manager.mark_computed(one, len(tokens))))
        manager.free_sequence(first)
        if number < 4:
            manager.reset_prefix_cache()
    result["hash_and_cache_ns"] = min(cachings) / count
    hits, releases = [], []
    again = Sequence("again", tokens, SamplingParams())
    for _ in range(20):
        hits.append(_timed(lambda: manager.allocate_for_prefill(again, len(tokens))))
        releases.append(_timed(lambda: manager.free_sequence(again)))
    result["hit_ns"], result["release_ns"] = min(hits) / count, min(releases) / count

    fill_with_cached(manager, keep_free=0)
    evictions = []
    for _ in range(5):
        evictions.append(_timed(take))
        free()
        fill_with_cached(manager, keep_free=0)
    result["evict_ns"] = min(evictions) / count
    return result


def fill_with_cached(manager: BlockManager, keep_free: int) -> None:
    """Turns unhashed free blocks into cached ones, with prefixes of their own."""
    fill_with_cached.number = getattr(fill_with_cached, "number", 0)  # type: ignore[attr-defined]
    while len(manager.pool.free) > keep_free:
        length = min(500, len(manager.pool.free) - keep_free) * BLOCK_SIZE
        fill_with_cached.number += 1  # type: ignore[attr-defined]
        start = fill_with_cached.number * 1_000_000  # type: ignore[attr-defined]
        sequence = Sequence("filler", list(range(start, start + length)), SamplingParams())
        manager.allocate_for_prefill(sequence, length)
        manager.mark_computed(sequence, length)
        manager.free_sequence(sequence)


def measure_blocks(quick: bool) -> dict[str, Any]:
    rows = [block_cost(pool) for pool in (2_000, 10_000, 100_000, 400_000)[: 3 if quick else 4]]
    table("Nanoseconds per block, by pool size", rows)
    return {"by_pool": rows}


# ---------------------------------------------------------------- what the policy does


class ReservingBlockManager(BlockManager):
    """Admits a request only if prompt and full `max_tokens` of it and of all that run would fit: no preemptions."""

    def admission_rejection(self, sequence: Any, match: PrefixMatch, reserved: int = 0) -> RejectionReason | None:
        # A shared block counts for each of its sequences: the promise must hold when the others have ended.
        promised = sum(self._blocks_at_the_end(table.sequence) for table in self._tables.values())
        if promised + self._blocks_at_the_end(sequence) > self.num_blocks:
            return RejectionReason.NO_FREE_BLOCKS
        return super().admission_rejection(sequence, match, reserved)

    def _blocks_at_the_end(self, sequence: Any) -> int:
        total = sequence.num_prompt_tokens + (sequence.sampling_params.max_tokens or 0)
        return -(-total // self.block_size)


@dataclass
class Workload:
    """Requests of a chat service: `max_tokens` is far more than what is used."""

    requests: int
    per_second: float
    seed: int = 7

    def arrivals(self) -> Iterable[tuple[float, Sequence, int]]:
        """Yields (time of arrival, sequence, tokens until it ends by itself)."""
        generator = random.Random(self.seed)
        prefixes = make_prefixes(generator)
        now = 0.0
        for number in range(self.requests):
            now += generator.expovariate(self.per_second)
            length = min(8000, int(generator.lognormvariate(6.9, 0.7)))
            used = max(1, min(2047, int(generator.expovariate(1 / 400))))
            params = SamplingParams(max_tokens=2048)
            yield now, Sequence(f"request-{number}", make_prompt(generator, max(8, length), prefixes), params), used


def step_seconds(num_tokens: int) -> float:
    """A step of a big GPU, roughly: 12 ms for the weights, and 25 microseconds per token."""
    return 0.012 + 25e-6 * num_tokens


def simulate(
    workload: Workload, num_blocks: int, watermark: float, manager_class: type[BlockManager] = BlockManager
) -> dict[str, float]:
    """Runs the workload to its end in simulated time."""
    end_token = VOCABULARY
    scheduler = make_scheduler(num_blocks, watermark=watermark, budget=2048, manager_class=manager_class)
    scheduler.eos_token_ids = frozenset({end_token})
    arrivals = list(workload.arrivals())
    heapq.heapify(arrivals)
    uses: dict[str, int] = {}
    arrived: dict[str, float] = {}
    first_token: dict[str, float] = {}
    now = use_time = used_block_time = running_time = 0.0
    latencies = []
    while arrivals or scheduler.has_unfinished():
        while arrivals and (arrivals[0][0] <= now or not scheduler.has_unfinished()):
            arrival, sequence, used = heapq.heappop(arrivals)
            now = max(now, arrival)
            uses[sequence.request_id], arrived[sequence.request_id] = used, arrival
            sequence.arrival_time = arrival
            scheduler.add(sequence)
        step = scheduler.schedule()
        seconds = step_seconds(step.num_tokens)
        now += seconds
        use_time += seconds
        used_block_time += seconds * (num_blocks - scheduler.block_manager.get_num_free_blocks())
        running_time += seconds * len(step.sequences)
        tokens = [sampled(one, uses, end_token) for one in step.sequences]
        for output in scheduler.update_from_output(step, tokens):
            first_token.setdefault(output.request_id, now)
            if output.finished:
                latencies.append(now - arrived[output.request_id])
    return summary(scheduler, now, first_token, arrived, latencies) | {
        "kv_use_%": 100 * used_block_time / use_time / num_blocks,
        "mean_running": running_time / use_time,
    }


def sampled(scheduled: Any, uses: dict[str, int], end_token: int) -> int | None:
    if not scheduled.samples:
        return None
    sequence = scheduled.sequence
    return end_token if len(sequence.output_token_ids) + 1 >= uses[sequence.request_id] else 7


def summary(
    scheduler: Scheduler,
    seconds: float,
    first_token: dict[str, float],
    arrived: dict[str, float],
    latencies: list[float],
) -> dict[str, float]:
    waits = sorted(first_token[name] - arrived[name] for name in arrived)
    stats = scheduler.stats
    return {
        "tokens_per_s": stats.generated_tokens_total / seconds,
        "preemptions": stats.preemptions_total,
        "wasted_%": 100 * stats.recomputed_tokens_total / stats.computed_tokens_total,
        "wait_mean_s": statistics.mean(waits),
        "wait_p99_s": waits[int(len(waits) * 0.99)],
        "latency_mean_s": statistics.mean(latencies),
    }


def measure_policy(quick: bool) -> dict[str, Any]:
    """A pool of 8,000 blocks (128,000 tokens): memory, not the number of sequences, is what runs out."""
    num_blocks = 8_000
    workload = Workload(requests=400 if quick else 2500, per_second=12)
    rows = []
    for watermark in (0.0, 0.01, 0.05, 0.10):
        row = simulate(workload, num_blocks, watermark)
        rows.append({"policy": f"watermark {watermark:.0%}"} | row)
    rows.append({"policy": "full max_tokens"} | simulate(workload, num_blocks, 0.0, ReservingBlockManager))
    table(f"{workload.requests} requests at {workload.per_second:g}/s on {num_blocks:,} blocks, simulated time", rows)
    return {"requests": workload.requests, "per_second": workload.per_second, "num_blocks": num_blocks, "rows": rows}


# ---------------------------------------------------------------- report


def table(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    heads = list(rows[0])
    cells = [heads, *([show(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(argv: list[str] | None = None) -> int:
    parser = common.arguments("Cost and effect of scheduling, without a model.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: under a minute")
    parser.add_argument("--only", choices=["cost", "blocks", "policy"], help="run one of the three parts")
    options = parser.parse_args(argv)
    parts: dict[str, Callable[[bool], dict[str, Any]]] = {
        "cost": measure_cost,
        "blocks": measure_blocks,
        "policy": measure_policy,
    }
    common.print_environment()
    figures = {name: measure(options.quick) for name, measure in parts.items() if options.only in (None, name)}
    common.write_json(options.json, "scheduler", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
