"""The bodies of all requests, as pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from minivllm.actors.openai.protocol.fields import GenerationBody, RequestBody, TokenIds, like_sampling
from minivllm.core.sampling_params import MAX_LOGPROBS

_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "description": "a text, several texts, the token ids of one prompt, or of several",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1},
    ],
}
_CONTENT_SCHEMA = {
    "description": "a text, or text parts that are joined",
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
        {"type": "null"},
    ],
}


class CompletionRequest(GenerationBody):
    """Body of `POST /v1/completions`."""

    # Checked by our own code: pydantic's union would report every branch, for every token of a long prompt.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(None, ge=0, description="default 16; 0 only with echo, to score the prompt")
    logprobs: int | None = like_sampling("logprobs", "log probabilities of the tokens and of so many likeliest")
    echo: bool | None = Field(None, description="the prompt stands before the output")
    add_special_tokens: bool | None = Field(None, description="such as BOS before a text prompt; default true")
    best_of: int | None = Field(None, description="only the value of n")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of: not supported by this server, except with the value of n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1 (0 only scores a prompt, together with echo)")
        return self

    @classmethod
    def unsupported(cls) -> Mapping[str, tuple[Any, ...]]:
        return {**super().unsupported(), "suffix": ("",)}


class FunctionCall(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of the history. Unknown fields reach the template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="default: as far as the context reaches")
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of max_tokens, and before it")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="only together with logprobs")
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="besides those of the template; default false")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, description="for templates that know them")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: excludes add_generation_prompt")
        return self

    @classmethod
    def unsupported(cls) -> Mapping[str, tuple[Any, ...]]:
        return {**super().unsupported(), **_UNSUPPORTED_IN_CHAT}


_UNSUPPORTED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class TokenizeRequest(RequestBody):
    """Body of `POST /tokenize`: either `prompt`, or `messages` as in a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages must be given")
        return self


class DetokenizeRequest(RequestBody):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="default false")
