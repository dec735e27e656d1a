"""Request bodies as pydantic models, and their conversion to SamplingParams."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from minivllm.actors.openai.protocol.errors import invalid_request, shorten, wrong_field
from minivllm.core.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams, StructuredOutput

DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` in /v1/completions, as in OpenAI's API."""

Body = TypeVar("Body", bound="RequestBody")


def whole(value: Any) -> Any:
    """Returns `4.0` as the integer that it is in JSON, in a list too; other values as they are."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(item) if isinstance(item, float) else item for item in value]
    return value


Integer = Annotated[int, BeforeValidator(whole)]

# fail_fast: one error for a long list of invalid items.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), BeforeValidator(whole)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def sampling_field(name: str, description: str) -> Any:
    """Returns an optional field with the bounds of the same field of SamplingParams."""
    limits = SamplingParams.model_fields[name].metadata
    bounds: dict[str, Any] = {
        key: getattr(limit, key) for limit in limits for key in ("ge", "gt", "le", "lt") if hasattr(limit, key)
    }
    return Field(None, description=description, **bounds)


def documented_as(kind: Any) -> WithJsonSchema:
    """Returns the schema of `kind` for a field that is checked later, by a check with better errors than pydantic's."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


class StrictModel(BaseModel):
    """Types are strict: `"1"` is not a number."""

    model_config = ConfigDict(strict=True, validate_by_name=True, validate_by_alias=True)


class RequestBody(StrictModel):
    """Base of all bodies: unknown fields are ignored, and null means absent."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields of the API that this server does not support, with the values that change nothing."""
    _is_large: bool = PrivateAttr(default=False)

    @property
    def is_large(self) -> bool:
        """Whether work on the body may take too long for the event loop."""
        return self._is_large

    def mark_large(self) -> None:
        self._is_large = True

    @model_validator(mode="before")
    @classmethod
    def _check_unsupported(cls, fields: object) -> object:
        if not isinstance(fields, Mapping):
            raise ValueError("the body must be a JSON object")
        for name, neutral in cls.unsupported.items():
            value = fields.get(name)
            if value is not None and value not in neutral:
                raise ValueError(f"{name}: not supported by this server (got {shorten(value)})")
        return fields


def parse(kind: type[Body], fields: object) -> Body:
    """Validates the body of a handle call; FastAPI does the same for HTTP. Raises InvalidRequestError."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False, include_context=False)) from None


# ---- structured output


def _grammar(kind: Any, value: object) -> StructuredOutput | None:
    """Returns the grammar of a field, or None without a value. A JSON schema may be an object or text."""
    if value is None:
        return None
    return StructuredOutput(kind=kind, value=value if isinstance(value, str) else json.dumps(value))


class JsonSchemaFormat(StrictModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="of the object; only with type json_object"
    )

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs the field json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"the field json_schema needs type json_schema, not {self.type}")
        if self.type != "json_object" and self.schema_ is not None:
            raise ValueError(f"the field schema needs type json_object, not {self.type}")
        if isinstance(self.schema_, dict) and "object" not in _types(self.schema_):
            raise ValueError("the schema of a json_object must allow objects")
        return self

    def structured(self) -> StructuredOutput | None:
        if self.json_schema is not None:
            return _grammar("json_schema", self.json_schema.schema_)
        if self.type == "text":
            return None
        if isinstance(self.schema_, dict):
            return _grammar("json_schema", {**self.schema_, "type": "object"})
        return StructuredOutput(kind="json_object") if self.schema_ is not False else _grammar("json_schema", False)


def _types(schema: dict[str, Any]) -> list[Any]:
    types = schema.get("type", "object")
    return types if isinstance(types, list) else [types]


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: exactly one of the fields."""

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.grammars()) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object must be given")
        return self

    def grammars(self) -> list[StructuredOutput]:
        values = {"json_schema": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [_grammar(kind, value) for kind, value in values.items()]
        given.append(_grammar("json_object", "" if self.json_object else None))
        return [grammar for grammar in given if grammar is not None]


# ---- completions and chat completions

_NOT_EMPTY = Field(min_length=1)
_Text = Annotated[str, _NOT_EMPTY]
_PromptIds = Annotated[list[Annotated[int, Field(ge=0)]], _NOT_EMPTY]
_Prompts = _Text | Annotated[list[_Text], _NOT_EMPTY] | _PromptIds | Annotated[list[_PromptIds], _NOT_EMPTY]
_Stop = _Text | Annotated[list[_Text], Field(max_length=MAX_STOP_STRINGS)] | None
_TOKEN_ID = "^[0-9]{1,18}$"
_LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"propertyNames": {"pattern": _TOKEN_ID}}),
]


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(None, description="one more chunk with the usage, before [DONE]")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")


class GenerationBody(RequestBody):
    """Fields of both completions and chat completions: OpenAI's API with vLLM's extensions."""

    model: str | None = Field(None, description="the served model; optional")
    n: Integer | None = sampling_field("n", "samples per prompt")
    temperature: float | None = sampling_field("temperature", "0 is greedy")
    top_p: float | None = sampling_field("top_p", "probability mass of the most likely tokens to sample from")
    top_k: Integer | None = sampling_field("top_k", "number of most likely tokens to sample from; -1 and 0 disable it")
    min_p: float | None = sampling_field("min_p", "least probability, relative to the most likely token")
    presence_penalty: float | None = sampling_field("presence_penalty", "subtracted once from logits of output tokens")
    frequency_penalty: float | None = sampling_field("frequency_penalty", "subtracted per occurrence")
    repetition_penalty: float | None = sampling_field("repetition_penalty", "divides logits of tokens already seen")
    logit_bias: Annotated[dict[str, float] | None, documented_as(_LogitBias | None)] = Field(
        None, description="token id -> bias added to its logit"
    )
    seed: Integer | None = sampling_field("seed", "makes sampling repeatable; choice k of n uses seed + k")
    min_tokens: Integer | None = sampling_field("min_tokens", "output tokens before EOS or a stop token may end it")
    stop: Annotated[str | Texts | None, documented_as(_Stop)] = Field(None, description="texts that end the output")
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="only together with stream")
    priority: Integer | None = Field(None, ge=-(2**31), lt=2**31, description="lower goes first")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="prefixes are shared among requests with the same salt"
    )
    user: str | None = Field(None, description="accepted and not used")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_token_ids": (),
        "bad_words": ([],),
        "detokenize": (True,),
        "early_stopping": (False,),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
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
        """Returns the grammar and the name of the field that asks for it. Raises InvalidRequestError for several."""
        asked = {
            "response_format": self.response_format.structured() if self.response_format else None,
            "structured_outputs": self.structured_outputs.grammars()[0] if self.structured_outputs else None,
            "guided_json": _grammar("json_schema", self.guided_json),
            "guided_regex": _grammar("regex", self.guided_regex),
            "guided_choice": _grammar("choice", self.guided_choice),
            "guided_grammar": _grammar("grammar", self.guided_grammar),
        }
        names = [name for name, grammar in asked.items() if grammar is not None]
        if len(names) > 1:
            raise wrong_field(names[1], f"{' and '.join(names)} exclude each other")
        return (asked[names[0]], names[0]) if names else (None, "response_format")

    def _sampling_params(
        self, defaults: Mapping[str, Any], renamed: Mapping[str, str] | None = None, **computed: Any
    ) -> SamplingParams:
        """Returns the fields that SamplingParams has too over `defaults`, and `computed` over both.

        Raises InvalidRequestError naming the field of this API: `renamed` maps fields of SamplingParams to it.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        values = {**defaults, **given}
        for key in self.logit_bias or ():
            if not re.fullmatch(_TOKEN_ID, key):
                raise wrong_field("logit_bias", f"the keys must be token ids, not {shorten(key)}")
        if self.logit_bias:
            values["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
            if len(values["logit_bias"]) < len(self.logit_bias):
                raise wrong_field("logit_bias", "two keys are the same token id")
        try:
            return SamplingParams(**(values | computed))
        except ValidationError as error:
            raise invalid_request(error.errors(include_url=False, include_context=False), renamed) from None


_SAMPLING_FIELDS = GenerationBody.model_fields.keys() & SamplingParams.model_fields.keys() - {"logit_bias"}
"""Fields with the same name and meaning as in SamplingParams."""


class CompletionRequest(GenerationBody):
    """Body of `POST /v1/completions`."""

    # Checked in serving/completions.py: pydantic's union reports an error per branch and token of a long prompt.
    prompt: Annotated[Any, documented_as(_Prompts)] = Field(
        description="a text, several texts, the token ids of one prompt, or of several"
    )
    max_tokens: Integer | None = Field(None, ge=0, description="default 16; 0 only with echo, to score the prompt")
    logprobs: Integer | None = sampling_field(
        "logprobs", "log probabilities of each token and of this many most likely"
    )
    echo: bool | None = Field(None, description="put the prompt before the output")
    add_special_tokens: bool | None = Field(None, description="such as BOS before a text prompt; default true")
    best_of: Integer | None = Field(None, description="only the value of n")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**GenerationBody.unsupported, "suffix": ("",)}

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: not supported by this server, except with the value of n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1 (0 only scores a prompt, together with echo)")
        return self

    def to_sampling_params(self, defaults: Mapping[str, Any], grammar: StructuredOutput | None) -> SamplingParams:
        scores_prompt = self.echo and (self.logprobs is not None or self.max_tokens == 0)
        return self._sampling_params(
            defaults,
            max_tokens=DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=(self.logprobs or 0) if scores_prompt else None,
            structured_output=grammar,
        )


class FunctionCall(StrictModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT_SCHEMA = {
    "description": "a text, or text parts that are joined",
    "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}],
}


class ChatMessage(StrictModel):
    """One message of the conversation. Unknown fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(StrictModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: Integer | None = Field(None, ge=1, description="default: up to the context length")
    max_completion_tokens: Integer | None = Field(
        None, ge=1, description="the newer name of max_tokens; takes precedence"
    )
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS, description="only together with logprobs")
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="besides those of the template; default false")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, description="for templates that use them")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationBody.unsupported,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"], []),
        "prediction": (),
        "reasoning_effort": ("none",),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: excludes add_generation_prompt")
        return self

    def to_sampling_params(self, defaults: Mapping[str, Any], grammar: StructuredOutput | None) -> SamplingParams:
        """`grammar` constrains the output: that of `structured()`, or of a forced tool call."""
        newer = self.max_completion_tokens
        max_tokens = self.max_tokens if newer is None else newer
        return self._sampling_params(
            defaults,
            renamed={} if newer is None else {"max_tokens": "max_completion_tokens"},
            max_tokens=defaults.get("max_tokens") if max_tokens is None else max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured_output=grammar,
        )


# ---- tokenizer routes


class TokenizeRequest(RequestBody):
    """Body of `POST /tokenize`: either `prompt`, or `messages` as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: exactly one of prompt and messages must be given")
        return self


class DetokenizeRequest(RequestBody):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="default false")
