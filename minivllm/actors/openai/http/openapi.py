"""openapi.json: what FastAPI cannot know, since bodies and answers are read and written by our own code."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from minivllm.actors.openai.protocol import responses
from minivllm.actors.openai.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_REFERENCE = "#/components/schemas/{model}"
_TRUE_FOR_ALL = {
    401: "No valid API key, where the server asks for one",
    500: "The server failed at this request",
    503: "The model is loading, or the engine has failed",
}
_TRUE_FOR_BODIES = {
    400: "The request is wrong; `param` names the field",
    413: "The body is larger than `max_request_bytes`",
    415: "The body is not declared as JSON",
}
_TRUE_FOR_MODELS = {404: "No such model"}
_TRUE_FOR_GENERATION = {429: "Too many requests wait; `Retry-After` says when to ask again"}


def completions() -> dict[str, Any]:
    return _post(
        "Complete a text", "CompletionRequest", "CompletionResponse", "CompletionChunk", errors=_TRUE_FOR_GENERATION
    )


def chat_completions() -> dict[str, Any]:
    return _post(
        "Answer in a chat",
        "ChatCompletionRequest",
        "ChatCompletionResponse",
        "ChatCompletionChunk",
        errors=_TRUE_FOR_GENERATION,
    )


def tokenize() -> dict[str, Any]:
    return _post("Token ids of a text or a chat", "TokenizeRequest", "TokenizeResponse")


def detokenize() -> dict[str, Any]:
    return _post("Text of token ids", "DetokenizeRequest", "DetokenizeResponse")


def tokenizer_info() -> dict[str, Any]:
    return _get("Special tokens and chat template", "TokenizerInfoResponse")


def models() -> dict[str, Any]:
    return _get("The served model", "ModelList")


def model() -> dict[str, Any]:
    return _get("One model", "ModelCard", errors=_TRUE_FOR_MODELS)


def health() -> dict[str, Any]:
    return _get("200 while the engine works", "HealthResponse")


def version() -> dict[str, Any]:
    return _get("Version of the server", "VersionResponse")


def metrics() -> dict[str, Any]:
    route = _get("Figures of the engine in Prometheus' text format", "VersionResponse")
    route["responses"][200] = {
        "description": "Prometheus text",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    return route


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document; made once."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, requests = models_json_schema(
            [
                (kind, "validation")
                for kind in (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)
            ],
            ref_template=_REFERENCE,
        )
        # FastAPI describes errors of its own validation, which never happens: no route takes parameters that it checks.
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        made["components"] = {
            "schemas": {**requests["$defs"], **responses.schemas()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        }
        app.openapi_schema = made
    return app.openapi_schema


def _post(
    summary: str, body: str, answer: str, chunk: str | None = None, errors: dict[int, str] | None = None
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _reference(answer)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event_schema(chunk)}
    described = _TRUE_FOR_BODIES | _TRUE_FOR_MODELS | (errors or {}) | _TRUE_FOR_ALL
    return {
        "summary": summary,
        "response_model": None,
        "responses": {200: {"description": "The answer", "content": content}, **_errors(described)},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}},
            "security": [{}, {"bearer": []}],
        },
    }


def _event_schema(chunk: str) -> dict[str, Any]:
    """Of each event of a stream."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(chunk)}
    return {
        "type": "object",
        "description": f"server-sent events with a {chunk} each, at the end [DONE]; an error is an ErrorResponse",
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _get(summary: str, answer: str, errors: dict[int, str] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(answer)}}
    return {
        "summary": summary,
        "response_model": None,
        "responses": {
            200: {"description": "The answer", "content": content},
            **_errors((errors or {}) | _TRUE_FOR_ALL),
        },
        "openapi_extra": {"security": [{}, {"bearer": []}]},
    }


def _errors(described: dict[int, str]) -> dict[int, Any]:
    content = {"application/json": {"schema": _reference("ErrorResponse")}}
    return {status: {"description": text, "content": content} for status, text in sorted(described.items())}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=name)}
