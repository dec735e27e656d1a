"""Sequence: the state of one sample of one request in the engine."""

from __future__ import annotations

import enum
import itertools
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.core.sampling_params import SamplingParams
    from minivllm.core.stats import RejectionReason

_arrivals = itertools.count()


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """Prompt, output tokens and block table of one sample.

    Tokens `num_computed_tokens .. num_tokens` are still to be computed. Prefill, a chunk of it, decode and recompute
    after a preemption are that one operation with different lengths. The K and V of a sampled token are written in the
    step after the one that samples it.

    Args:
        request_id: unique among the live requests.
        prompt_token_ids: at least one.
        arrival_time: seconds of `time.monotonic()`; orders requests of equal priority.
        priority: lower goes first.
        cache_salt: sequences share cached blocks only with those of the same salt.
        index: number of the sample within its request (n > 1).
    """

    __slots__ = (
        "arrival_number",
        "arrival_time",
        "block_hashes",
        "block_table",
        "block_table_row",
        "cache_salt",
        "finish_reason",
        "index",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed_before_preemption",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "rejection_reason",
        "request_id",
        "sampler_state",
        "sampling_params",
        "seq_id",
        "skip_prefix_lookup",
        "status",
        "stop_token_ids",
        "times_bypassed",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.seq_id = request_id if sampling_params.n == 1 else f"{request_id}/{index}"
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.sampling_params = sampling_params
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.arrival_number = next(_arrivals)
        self.priority = priority
        self.cache_salt = cache_salt
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        # Written by the block manager only.
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.block_hashes: list[Any] = []
        # Written by the worker only: the sampler's state, and the row of the worker's BlockTable.
        self.sampler_state: Any = None
        self.block_table_row: Any = None
        # Log probabilities of the prompt need the logits of its tokens, so these must be computed.
        self.skip_prefix_lookup = sampling_params.prompt_logprobs is not None
        # Written by the scheduler only.
        self.stop_token_ids: frozenset[int] = frozenset(sampling_params.stop_token_ids)
        self.max_output_tokens = sys.maxsize if sampling_params.max_tokens is None else sampling_params.max_tokens
        self.num_cached_tokens = 0
        self.rejection_reason: RejectionReason | None = None
        self.times_bypassed = 0
        self.num_preemptions = 0
        self.num_computed_before_preemption = 0

    @property
    def context_len(self) -> int:
        return self.num_tokens

    @property
    def last_token_id(self) -> int:
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    @property
    def rank(self) -> tuple[int, float, int]:
        """Orders running sequences: by priority, then by arrival."""
        return self.priority, self.arrival_time, self.arrival_number

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append_token(self, token_id: int) -> None:
        """Adds a sampled token, the input of the next step."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def token_ids(self, start: int, end: int) -> list[int]:
        """Returns tokens start..end of prompt and output together."""
        split = self.num_prompt_tokens
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={len(self.output_token_ids)}, computed={self.num_computed_tokens}, blocks={self.block_table})"
        )
