"""Results of the model runner and outputs of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.core.errors import MinivllmError
from minivllm.core.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token, and of the likeliest tokens at its position, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SampleResult:
    """Result of one scheduled sequence.

    `token_id` is None unless one was sampled. `prompt_logprobs` are those of the prompt tokens whose predecessor was
    computed in this step. `error` ends this sample only.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: MinivllmError | None = None


@dataclass(slots=True)
class RequestOutput:
    """New output of one sample of one request. Every sample has exactly one output with `finished=True`, its last.

    `new_token_ids` are those sampled since the last output, EOS included. `index` is the number of the sample, 0
    unless `n > 1`. `num_cached_tokens` counts the prompt tokens that the first admission found in the prefix cache.
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: MinivllmError | None = None
    stop_token_id: int | None = None
    """The token of `stop_token_ids` or the EOS that ended the sample, if one did."""
