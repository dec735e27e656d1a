"""Seeded random traffic for `WatchedEngine`. One episode is one engine, configured from the seed, and many steps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.errors import EngineOverloadedError, NeverFitsError
from minivllm.core.kv_cache import block_pool
from tests.core.fakes import FakeModel
from tests.core.harness import WatchedEngine


@dataclass
class Tally:
    """Counts events over all episodes, so that a run can show that it met preemptions, cache hits and rejections."""

    steps: int = 0
    tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def take(self, watched: WatchedEngine) -> None:
        stats = watched.engine.stats()
        self.steps += watched.steps
        self.tokens += stats.computed_tokens_total
        self.counts.update(
            episodes=1,
            requests=stats.requests_total,
            preemptions=stats.preemptions_total,
            hit_tokens=stats.prefix_cache_hit_tokens_total,
            recomputed_tokens=stats.recomputed_tokens_total,
        )
        self.counts.update({f"ended_{reason}": count for reason, count in stats.finished.items()})
        self.counts.update({f"rejected_{reason}": count for reason, count in stats.rejections.items()})


class Episode:
    """Runs one engine of random sizes under random load.

    Every fourth seed uses one constant block hash; the outputs stay the same.
    """

    def __init__(self, seed: int) -> None:
        generator = self.generator = random.Random(seed)
        self.collides = seed % 4 == 3
        self.block_size = generator.choice([1, 2, 3, 4, 8, 16])
        self.num_blocks = generator.choice([4, 8, 12, 20, 40])
        self.watched = WatchedEngine(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            model=FakeModel(eos_per_mille=generator.choice([0, 30, 200])),
            max_num_seqs=generator.choice([1, 2, 4, 8, 16]),
            max_num_batched_tokens=generator.choice([1, 2, 5, 16, 64, 256]),
            long_prefill_token_threshold=generator.choice([None, None, 1, 7]),
            enable_prefix_caching=generator.random() < 0.75,
            watermark=generator.choice([0.0, 0.01, 0.1, 0.3]),
            max_head_bypasses=generator.choice([0, 1, 8]),
            max_waiting_requests=generator.choice([None, 3, 20]),
            max_waiting_tokens=generator.choice([None, None, 200]),
            validate_blocks=generator.random() < 0.5,
        )
        self.watched.keep_ended = False
        longest = min(self.watched.max_model_len - 1, 120)
        self.stems = [[generator.randrange(1, 97)] * longest, *(self._tokens(longest) for _ in range(3))]
        self.max_live_samples = generator.choice([1, 3, 10, 30])
        self.recent: list[str] = []

    def run(self, steps: int) -> None:
        """Runs `steps` steps under load, then steps until every request has ended."""
        real_hash = block_pool.hash_block
        if self.collides:
            block_pool.hash_block = lambda *_: b"constant"  # type: ignore[assignment]
        try:
            for _ in range(steps):
                self._apply_random_events()
                self.watched.step()
            self.watched.runner.during_execute = None
            self.watched.drain()
        finally:
            block_pool.hash_block = real_hash

    def _tokens(self, count: int) -> list[int]:
        return [self.generator.randrange(1, 97) for _ in range(count)]

    def _apply_random_events(self) -> None:
        draw = self.generator.random
        while len(self.watched.live) < self.max_live_samples and draw() < 0.7:
            if not self._add():
                break
        if self.recent and draw() < 0.05:
            self.watched.abort(self.generator.choice(self.recent), self.generator.choice([None, None, 0, 1]))
        if self.recent and draw() < 0.02:
            name = self.generator.choice(self.recent)
            self.watched.during_next_step(lambda: self.watched.abort(name))
        if draw() < 0.02:
            self.watched.engine.reset_prefix_cache()

    def _add(self) -> bool:
        choose = self.generator.choice
        stem = choose(self.stems)
        prompt = stem[: self.generator.randrange(len(stem) + 1)] if self.generator.random() < 0.7 else []
        prompt = [*prompt, *self._tokens(self.generator.randrange(1, 6))]
        params: dict[str, Any] = {
            "max_tokens": choose([None, 1, 3, 10, 40]),
            "n": choose([1, 1, 1, 1, 2, 4]),
            "ignore_eos": choose([False, True]),
            "logprobs": choose([None, None, 1]),
            "prompt_logprobs": choose([None, None, None, None, 0]),
            "stop_token_ids": choose([(), (), (5, 6)]),
            "priority": choose([0, 0, 0, -1, 2]),
            "cache_salt": choose([None, None, None, "a", "b"]),
            "fail_after": choose([None] * 12 + [0, 3]),
        }
        try:
            name = self.watched.add(prompt, **params)
        except (NeverFitsError, EngineOverloadedError):
            return False
        self.recent = [*self.recent[-30:], name]
        return True
