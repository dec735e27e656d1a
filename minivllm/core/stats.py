"""EngineStats: one plain, picklable snapshot of the engine. A new counter is one line here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any


class RejectionReason(StrEnum):
    """Why a request was not admitted. The first four end; a request is refused for the last two."""

    NO_FREE_BLOCKS = "no_free_blocks"
    WATERMARK = "watermark"
    MAX_NUM_SEQS = "max_num_seqs"
    TOKEN_BUDGET = "token_budget"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"


def _metric(kind: str, metric: str, help_text: str) -> Any:
    return field(default=0, metadata={"type": kind, "metric": metric, "help": help_text})


_gauge, _counter = partial(_metric, "gauge"), partial(_metric, "counter")


@dataclass(slots=True)
class EngineStats:
    """Gauges are current values. Fields named `*_total` and dicts are counters, which only grow.

    The metadata of a field are the name and help text of its Prometheus metric; fields without are not exported singly.
    """

    num_free_blocks: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    num_cached_blocks: int = 0
    """Free blocks that keep a cached prefix (part of `num_free_blocks`)."""
    num_running: int = _gauge("num_requests_running", "Sequences that hold KV blocks and are computed in steps")
    num_waiting: int = _gauge("num_requests_waiting", "Sequences that wait for admission, preempted ones included")
    max_model_len: int = _gauge("max_model_len", "Longest prompt and output together, in tokens")
    block_size: int = _gauge("kv_block_size", "Tokens in one KV block")

    # The limits in force; sys.maxsize where there is none.
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_waiting_requests: int = 0
    max_waiting_tokens: int = 0

    steps_total: int = _counter("engine_steps", "Forward passes")
    requests_total: int = _counter("requests", "Requests that were accepted")
    prompt_tokens_total: int = _counter("prompt_tokens", "Prompt tokens of accepted requests")
    generated_tokens_total: int = _counter("generated_tokens", "Tokens sampled")
    computed_tokens_total: int = _counter(
        "computed_tokens", "Tokens that went through the model: prefill, decode and recompute"
    )
    recomputed_tokens_total: int = _counter("recomputed_tokens", "Tokens computed once more after a preemption")
    prefix_cache_query_tokens_total: int = _counter(
        "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache"
    )
    prefix_cache_hit_tokens_total: int = _counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache")
    preemptions_total: int = _counter("preemptions", "Running sequences whose blocks were taken back")
    integrity_violations_total: int = _counter("integrity_violations", "Broken invariants of the block manager")
    rejections: dict[str, int] = field(default_factory=Counter)
    """By RejectionReason. A request counts once per wait, under its first reason."""
    finished: dict[str, int] = field(default_factory=Counter)
    """Ended samples by finish reason."""
