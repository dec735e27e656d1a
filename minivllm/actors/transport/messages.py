"""What travels between the deployments: small, picklable records of plain data."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.config import EngineConfig
from minivllm.core.errors import MinivllmError
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.stats import EngineStats


class ChannelClosedError(MinivllmError):
    """The engine does not know this channel, or no longer: it is another incarnation than the one connected to."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to the engine, in token ids.

    `request_id` must be unique among the live requests: whoever takes ids from clients makes internal ones.
    `Engine.generate` answers with a stream of `list[RequestOutput]` (see `minivllm.core.outputs`): one list each
    time the consumer asks, merged from all that has happened since it last did. The stream ends after every
    sample's output with `finished=True`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What never changes while one engine lives. `config` is the resolved one: nothing in it is left to default."""

    model: str
    max_model_len: int
    vocab_size: int
    """Width of the logits: a token id at or above it is refused."""
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    config: EngineConfig
    version: str
    engine_id: str
    """Names this incarnation: an engine that replaces a failed one has another."""
    started_at: float
    """Seconds since the epoch, when the engine was ready."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """SamplingParams fields that the model's generation_config sets: for what a request leaves unsaid."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound, and their sum. The last entry of `counts` is for what no bound covers."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        return Histogram(self.bounds, list(self.counts), self.sum)


@dataclass(slots=True)
class EngineSnapshot:
    """All that the engine tells of itself at one moment. Counters are cumulative over this incarnation.

    `number` grows by one with each snapshot of one `engine_id`, so that a late one is told from a new one.
    """

    stats: EngineStats
    engine_id: str = ""
    number: int = 0
    time: float = 0.0
    """Seconds since the epoch."""
    started_at: float = 0.0
    model: str = ""
    is_dead: bool = False
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """By name: time_to_first_token_seconds, inter_token_latency_seconds, request_latency_seconds."""
