"""Schemas of all responses, for openapi.json. Responses are built as plain dicts; tests validate them against these."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

Kind = TypeVar("Kind")
Choice = TypeVar("Choice")


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class UsageInfo(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choices(ResponseModel, Generic[Kind, Choice]):
    """What responses and chunks have in common."""

    id: str
    object: Kind
    created: int
    model: str
    choices: list[Choice]


class CompletionLogprobsInfo(ResponseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobsInfo | None
    finish_reason: Literal["stop", "length"]


class CompletionResponse(Choices[Literal["text_completion"], CompletionChoice]):
    usage: UsageInfo


class CompletionChunkChoice(CompletionChoice):
    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class CompletionChunk(Choices[Literal["text_completion"], CompletionChunkChoice]):
    usage: UsageInfo | None = None


class TokenAlternative(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenAlternative):
    top_logprobs: list[TokenAlternative]


class ChatLogprobsInfo(ResponseModel):
    content: list[ChatTokenLogprob]


class CalledFunction(ResponseModel):
    name: str
    arguments: str


class CalledTool(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobsInfo | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletionResponse(Choices[Literal["chat.completion"], ChatChoice]):
    usage: UsageInfo


class FunctionDelta(ResponseModel):
    name: str | None = None
    arguments: str


class ToolDelta(ResponseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobsInfo | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletionChunk(Choices[Literal["chat.completion.chunk"], ChatChunkChoice]):
    usage: UsageInfo | None = None


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str


class TokenizerInfoResponse(ResponseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class HealthResponse(ResponseModel):
    status: Literal["ok"]


class VersionResponse(ResponseModel):
    version: str
