"""The shapes of all answers, for openapi.json. Answers are built as plain dicts; tests hold them against these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Answer):
    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int


class UsageInfo(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobsInfo(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobsInfo | None
    finish_reason: Literal["stop", "length"]


class CompletionResponse(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunkChoice(CompletionChoice):
    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionChunk(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None


class TokenAlternative(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenAlternative):
    top_logprobs: list[TokenAlternative]


class ChatLogprobsInfo(Answer):
    content: list[ChatTokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str


class CalledTool(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsInfo | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletionResponse(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class ToolDelta(Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobsInfo | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(Answer):
    prompt: str


class TokenizerInfoResponse(Answer):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class HealthResponse(Answer):
    status: Literal["ok"]


class VersionResponse(Answer):
    version: str


def schemas() -> dict[str, Any]:
    """All of them as JSON schemas, by name, as they stand in openapi.json."""
    from pydantic.json_schema import models_json_schema

    kinds = [
        (kind, "serialization")
        for kind in (
            ErrorResponse,
            CompletionResponse,
            CompletionChunk,
            ChatCompletionResponse,
            ChatCompletionChunk,
            ModelCard,
            ModelList,
            TokenizeResponse,
            DetokenizeResponse,
            TokenizerInfoResponse,
            HealthResponse,
            VersionResponse,
        )
    ]
    _, document = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    definitions: dict[str, Any] = document["$defs"]
    return definitions
