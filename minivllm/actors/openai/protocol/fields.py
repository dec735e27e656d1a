"""What completions and chat have in common: sampling, streaming, structured output, and what we refuse by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from minivllm.actors.openai.protocol.errors import invalid_request, shorten
from minivllm.core.errors import InvalidRequestError
from minivllm.core.sampling_params import MAX_STOP_STRINGS, SamplingParams, StructuredOutput

Body = TypeVar("Body", bound="RequestBody")

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
"""A list of a million wrong items is refused for its first."""
Texts = Annotated[list[str], Field(fail_fast=True)]


def like_sampling(name: str, description: str) -> Any:
    """A field that may be null or absent, and else lies within the bounds that SamplingParams sets."""
    bounds: dict[str, Any] = {}
    for limit in SamplingParams.model_fields[name].metadata:
        for attribute, kind in (
            ("ge", annotated_types.Ge),
            ("gt", annotated_types.Gt),
            ("le", annotated_types.Le),
            ("lt", annotated_types.Lt),
        ):
            if isinstance(limit, kind):
                bounds[attribute] = getattr(limit, attribute)
    return Field(None, description=description, **bounds)


class RequestBody(BaseModel):
    """Types are strict (`"1"` is no number), unknown fields are accepted, and a null is as good as silence."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=(), validate_by_name=True)

    @classmethod
    def unsupported(cls) -> Mapping[str, tuple[Any, ...]]:
        """Fields of the API that we know and cannot serve, each with the values that ask for nothing."""
        return {}


def parse(kind: type[Body], fields: object) -> Body:
    """The request in `fields`, or InvalidRequestError naming the field at fault."""
    if not isinstance(fields, Mapping):
        raise InvalidRequestError("the body must be a JSON object")
    for name, harmless in kind.unsupported().items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise InvalidRequestError(f"{name}: not supported by this server (got {shorten(value)})", param=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error) from None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="one more chunk with the usage, before [DONE]")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")


# ----------------------------------------------------------------------------------------------------------------
# Structured output
# ----------------------------------------------------------------------------------------------------------------


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True, validate_by_name=True, validate_by_alias=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs the field json_schema")
        return self

    def structured(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return StructuredOutput(kind="json_object")
        if self.type == "json_schema" and self.json_schema is not None:
            return StructuredOutput(kind="json_schema", value=schema_text(self.json_schema.schema_))
        return None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of the fields."""

    model_config = ConfigDict(strict=True, validate_by_name=True, validate_by_alias=True)

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object must be given")
        return self

    def structured(self) -> StructuredOutput:
        if self.json_ is not None:
            return StructuredOutput(kind="json_schema", value=schema_text(self.json_))
        if self.regex is not None:
            return StructuredOutput(kind="regex", value=self.regex)
        if self.choice is not None:
            return StructuredOutput(kind="choice", value=json.dumps(self.choice))
        if self.grammar is not None:
            return StructuredOutput(kind="grammar", value=self.grammar)
        return StructuredOutput(kind="json_object")


def schema_text(schema: object) -> str:
    """A JSON schema as text, whichever way the client gave it."""
    return schema if isinstance(schema, str) else json.dumps(schema)


# ----------------------------------------------------------------------------------------------------------------
# The fields of every generation
# ----------------------------------------------------------------------------------------------------------------

_LOGIT_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        {"type": "null"},
    ],
    "description": "token id -> what is added to its logit",
}


class GenerationBody(RequestBody):
    """Sampling, stopping, streaming and structured output, as in OpenAI's API and vLLM's additions to it."""

    model: str | None = Field(None, description="the served model; may be left out")
    n: int | None = like_sampling("n", "samples of each prompt")
    temperature: float | None = like_sampling("temperature", "0 is greedy")
    top_p: float | None = like_sampling("top_p", "the likeliest tokens that make up this share of the probability")
    top_k: int | None = like_sampling("top_k", "the likeliest so many tokens; -1 and 0 switch it off")
    min_p: float | None = like_sampling("min_p", "tokens at least this share as likely as the likeliest")
    presence_penalty: float | None = like_sampling("presence_penalty", "taken from logits of tokens already generated")
    frequency_penalty: float | None = like_sampling("frequency_penalty", "the same, for each time")
    repetition_penalty: float | None = like_sampling("repetition_penalty", "divides logits of tokens already seen")
    logit_bias: Annotated[dict[str, float] | None, WithJsonSchema(_LOGIT_BIAS_SCHEMA)] = None
    seed: int | None = like_sampling("seed", "makes sampling repeatable; choice k of n uses seed + k")
    min_tokens: int | None = like_sampling("min_tokens", "no EOS and no stop token before so many")
    stop: str | Texts | None = Field(
        None,
        description="texts that end the output",
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        },
    )
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="only together with stream")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower goes first")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024, description="cached prefixes are shared within")
    user: str | None = Field(None, description="accepted and not used")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def structured(self) -> tuple[StructuredOutput | None, str]:
        """The grammar asked for, and the field that asked."""
        found: list[tuple[StructuredOutput, str]] = []
        if self.response_format is not None and (plain := self.response_format.structured()):
            found.append((plain, "response_format"))
        if self.structured_outputs is not None:
            found.append((self.structured_outputs.structured(), "structured_outputs"))
        if self.guided_json is not None:
            found.append((StructuredOutput(kind="json_schema", value=schema_text(self.guided_json)), "guided_json"))
        if self.guided_regex is not None:
            found.append((StructuredOutput(kind="regex", value=self.guided_regex), "guided_regex"))
        if self.guided_choice is not None:
            found.append((StructuredOutput(kind="choice", value=json.dumps(self.guided_choice)), "guided_choice"))
        if self.guided_grammar is not None:
            found.append((StructuredOutput(kind="grammar", value=self.guided_grammar), "guided_grammar"))
        if len(found) > 1:
            names = " and ".join(name for _, name in found)
            raise InvalidRequestError(f"{found[1][1]}: {names} exclude each other", param=found[1][1])
        return found[0] if found else (None, "response_format")

    @classmethod
    def unsupported(cls) -> Mapping[str, tuple[Any, ...]]:
        return _UNSUPPORTED


_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "detokenize": (True,),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
