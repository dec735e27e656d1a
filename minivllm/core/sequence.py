"""One sample of one request, on its way through the engine."""

from __future__ import annotations

import enum
import itertools
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.core.sampling_params import SamplingParams

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
    """Prompt, generated tokens and block table of one sample.

    Always: tokens `num_computed_tokens .. num_tokens` are still to be computed. Prefill, a chunk of it, decode and
    recompute after a preemption are that one operation with different lengths. The last token sampled is in
    `output_token_ids` at once, and in the cache one step later.

    Args:
        request_id: unique among the live sequences.
        prompt_token_ids: at least one.
        arrival_time: seconds of `time.monotonic()`; orders requests of one priority.
        priority: lower goes first.
        cache_salt: sequences share cached blocks only with those of the same salt.
    """

    __slots__ = (
        "arrival_number",
        "arrival_time",
        "block_hashes",
        "block_table",
        "block_table_row",
        "cache_salt",
        "computed_high_water",
        "finish_reason",
        "first_admission_hits",
        "first_refusal",
        "index",
        "max_output_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "output_token_ids",
        "parent_request_id",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampler_state",
        "sampling_params",
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
        parent_request_id: str | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.sampling_params = sampling_params
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.arrival_number = next(_arrivals)
        self.priority = priority
        self.cache_salt = cache_salt
        self.parent_request_id = request_id if parent_request_id is None else parent_request_id
        self.index = index
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        # The ledger's side: written by the BlockManager only.
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.block_hashes: list[Any] = []
        # Written by the worker only: the sampler's state, and the row of the worker's BlockTable.
        self.sampler_state: Any = None
        self.block_table_row: Any = None
        # Log probabilities of the prompt need its logits, so its tokens must be computed, not found.
        self.skip_prefix_lookup = sampling_params.prompt_logprobs is not None
        # The scheduler's side: what ends the sequence, and how its waits and preemptions went.
        self.stop_token_ids: frozenset[int] = frozenset(sampling_params.stop_token_ids)
        self.max_output_tokens = sampling_params.max_tokens
        self.first_admission_hits: int | None = None
        self.first_refusal: str | None = None
        self.times_bypassed = 0
        self.num_preemptions = 0
        self.computed_high_water = 0

    @property
    def context_len(self) -> int:
        return self.num_tokens

    @property
    def last_token_id(self) -> int:
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order among running sequences: priority, then arrival."""
        return self.priority, self.arrival_time, self.arrival_number

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append_token(self, token_id: int) -> None:
        """Adds a token just sampled. It is not cached yet: it is the input of the next step."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens start..end of prompt and output together."""
        split = self.num_prompt_tokens
        if end <= split:
            return self.prompt_token_ids[start:end]
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - split]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"generated={len(self.output_token_ids)}, cached={self.num_computed_tokens}, blocks={self.block_table})"
        )
