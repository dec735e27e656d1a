"""SamplingParams: how to sample a request, validated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by so little overflows and could pick nothing else anyway."""

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP_STRINGS = 64

Finite = Annotated[float, Field(allow_inf_nan=False)]


class StructuredOutput(BaseModel):
    """A grammar that the output must follow. `value` is the JSON schema, the regular expression, the JSON list of
    choices or the Lark grammar, as text; empty for `json_object`.

    `calls` are Lark rules, the first one named `calls`, of what the output may be instead.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""
    calls: str = ""


class SamplingParams(BaseModel):
    """How to sample one request. Immutable; a bad value raises a ValidationError (a ValueError) naming the field.

    `max_tokens=None` means: as far as the context reaches. `max_tokens=0` is only for scoring a prompt
    (`prompt_logprobs`). `top_k` of -1 or 0 and `min_p` of 0 switch the filter off. Choice k of `n` uses `seed + k`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(16, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: Finite = Field(1.0, ge=0, le=2)
    top_p: Finite = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: Finite = Field(0.0, ge=0, le=1)
    presence_penalty: Finite = Field(0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(0.0, ge=-2, le=2)
    repetition_penalty: Finite = Field(1.0, gt=0, le=2)
    logit_bias: dict[int, Finite] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: tuple[str, ...] = Field((), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    structured_output: StructuredOutput | None = None

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return () if value is None else (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop", "stop_token_ids")
    @classmethod
    def _check_items(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        for item in value:
            if item == "":
                raise ValueError("a stop string must not be empty")
            if isinstance(item, int) and item < 0:
                raise ValueError("a token id must not be negative")
        return value

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _bias_in_range(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token_id, bias in (value or {}).items():
            if token_id < 0:
                raise ValueError(f"token id {token_id} must not be negative")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {token_id} must be between -100 and 100, not {bias}")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> SamplingParams:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens: must be at least 1 (0 only scores a prompt, with prompt_logprobs)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
