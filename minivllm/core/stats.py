"""EngineStats, one plain, picklable snapshot of the engine, and the counters it is made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineStats:
    """Gauges are as of now; everything named `*_total` or held in a dict only grows while the engine lives."""

    # gauges
    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_cached_blocks: int = 0
    """Free blocks that still hold a cached prefix (part of `num_free_blocks`)."""
    num_running: int = 0
    num_waiting: int = 0
    block_size: int = 0
    max_model_len: int = 0

    # counters
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    computed_tokens_total: int = 0
    """Tokens that went through the model: prefill, decode and recompute."""
    prefix_cache_query_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    recomputed_tokens_total: int = 0
    """Tokens computed a second time after a preemption."""
    preemptions_total: int = 0
    integrity_violations_total: int = 0
    requests_total: int = 0
    rejections: dict[str, int] = field(default_factory=dict)
    """By reason: no_free_blocks, watermark, max_num_seqs, token_budget, never_fits, queue_full."""
    finished: dict[str, int] = field(default_factory=dict)
    """Ended samples by finish reason."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since the start; they only grow."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    integrity_violations: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
