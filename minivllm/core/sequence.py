"""Sequence: the state of one sample of one request in the engine."""

from __future__ import annotations

import enum
import itertools
import sys
import time
from dataclasses import KW_ONLY, dataclass, field
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


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Prompt, output tokens and block table of one sample.

    Tokens `num_computed_tokens .. num_tokens` are still to be computed. Prefill, a chunk of it, decode and recompute
    after a preemption are that one operation with different lengths. The K and V of a sampled token are written in the
    step after the one that samples it.
    """

    request_id: str  # unique among the live requests
    prompt_token_ids: list[int]  # at least one; copied
    sampling_params: SamplingParams
    _: KW_ONLY
    arrival_time: float | None = None  # seconds of `time.monotonic()`; orders requests of equal priority
    priority: int = 0  # lower goes first
    cache_salt: str | None = None  # cached blocks are shared only between sequences of the same salt
    index: int = 0  # of the sample within its request (n > 1)

    seq_id: str = field(init=False)
    output_token_ids: list[int] = field(init=False, default_factory=list)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    status: SequenceStatus = field(init=False, default=SequenceStatus.WAITING)
    finish_reason: FinishReason | None = field(init=False, default=None)
    arrival_number: int = field(init=False, default_factory=_arrivals.__next__)

    # Written by the block manager only.
    block_table: list[int] = field(init=False, default_factory=list)
    num_computed_tokens: int = field(init=False, default=0)
    block_hashes: list[Any] = field(init=False, default_factory=list)
    # Written by the worker only: the sampler's state, and the row of the worker's BlockTable.
    sampler_state: Any = field(init=False, default=None)
    block_table_row: Any = field(init=False, default=None)
    # Written by the scheduler only.
    stop_token_ids: frozenset[int] = field(init=False)
    max_output_tokens: int = field(init=False)
    num_cached_tokens: int = field(init=False, default=0)
    rejection_reason: RejectionReason | None = field(init=False, default=None)
    times_bypassed: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    num_computed_before_preemption: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        params = self.sampling_params
        self.prompt_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(self.prompt_token_ids)
        self.seq_id = self.request_id if params.n == 1 else f"{self.request_id}/{self.index}"
        if self.arrival_time is None:
            self.arrival_time = time.monotonic()
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.max_output_tokens = sys.maxsize if params.max_tokens is None else params.max_tokens

    @property
    def skip_prefix_lookup(self) -> bool:
        """Log probabilities of the prompt need the logits of its tokens, so these must be computed."""
        return self.sampling_params.prompt_logprobs is not None

    @property
    def context_len(self) -> int:
        return self.num_tokens

    @property
    def last_token_id(self) -> int:
        return self.output_token_ids[-1] if self.output_token_ids else self.prompt_token_ids[-1]

    @property
    def rank(self) -> tuple[int, float | None, int]:
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
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - split)]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={len(self.output_token_ids)}, computed={self.num_computed_tokens}, blocks={self.block_table})"
        )
