"""Messages between the deployments: small, picklable records of plain data."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from minivllm.actors.config import LiveSettings
from minivllm.core.config import EngineConfig
from minivllm.core.errors import MinivllmError
from minivllm.core.outputs import RequestOutput
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.stats import EngineStats

TIME_TO_FIRST_TOKEN = "time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "inter_token_latency_seconds"
REQUEST_LATENCY = "request_latency_seconds"

HISTOGRAM_HELP = {
    TIME_TO_FIRST_TOKEN: "From the arrival at the engine to the first token",
    INTER_TOKEN_LATENCY: "Between two tokens of one sequence",
    REQUEST_LATENCY: "From the arrival at the engine to the end of the request",
}
_HISTOGRAM_BOUNDS = {
    TIME_TO_FIRST_TOKEN: (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0),
    INTER_TOKEN_LATENCY: (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    REQUEST_LATENCY: (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 900.0),
}

ChannelMessage = LiveSettings | list[RequestOutput]
"""What a channel carries from the engine to a client: the settings, at first and after each change, and outputs."""


class ChannelClosedError(MinivllmError):
    """The engine does not know this channel: it has ended, or the engine has been replaced."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The arguments of `LLMEngine.add_request`. `request_id` must be unique among the live requests."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What never changes while one engine lives. `config` has every default resolved."""

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
    """A replacement of a failed engine has another one."""
    started_at: float
    """Seconds since the epoch, when the engine was ready."""
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """SamplingParams fields that the model's generation_config sets, for requests that leave them out."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations by inclusive upper bound, and their sum. The last count is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def empty_histograms() -> dict[str, Histogram]:
    """Returns the latency histograms of a new engine, by metric name."""
    return {name: Histogram.empty(bounds) for name, bounds in _HISTOGRAM_BOUNDS.items()}


@dataclass(slots=True)
class EngineSnapshot:
    """The engine's statistics at one moment. Counters are cumulative over the life of one engine.

    `number` grows by one with each snapshot of one `engine_id`, which puts late snapshots in order.
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
    settings: LiveSettings = field(default_factory=LiveSettings)
