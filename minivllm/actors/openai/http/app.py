"""make_http_app: the routes. FastAPI finds the route and draws the documentation; bodies and answers are ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

import minivllm
from minivllm.actors.metrics.prometheus import CONTENT_TYPE, render_prometheus
from minivllm.actors.openai.http import openapi
from minivllm.actors.openai.http.answers import JsonAnswer, StreamAnswer, WholeAnswer, error_answer
from minivllm.actors.openai.http.middleware import ApiKeyMiddleware, RequestIdMiddleware
from minivllm.actors.openai.protocol.errors import (
    RequestTooLargeError,
    UnsupportedMediaTypeError,
    shorten,
)
from minivllm.actors.openai.serving.chat import Chat
from minivllm.actors.openai.serving.completions import Completion
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.openai.serving.tokenize import detokenize, tokenize, tokenizer_info
from minivllm.core.errors import InvalidRequestError, MinivllmError

DRAIN_TIMEOUT_S = 10.0
DRAIN_BYTES = 256 * 1024**2
"""A client reads our refusal only after it has sent its body: so much of one that is too large is read and dropped."""


class Job(Protocol):
    """A checked request of either kind."""

    @property
    def is_stream(self) -> bool: ...
    async def whole(self) -> dict[str, Any]: ...
    def chunks(self) -> AsyncGenerator[list[str], None]: ...


def make_http_app(service: GenerationService, *, echo_request_id: bool = True) -> FastAPI:
    """The HTTP API of a service.

    Args:
        echo_request_id: off under Serve, whose proxy does it.
    """
    app = FastAPI(
        title="minivllm",
        version=minivllm.__version__,
        description="OpenAI-compatible API of minivllm.",
        docs_url="/docs",
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_model_routes(app, service)
    _add_service_routes(app, service)
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    # The last one added is the first that a request meets.
    if service.args.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=service.args.api_keys)
    if service.args.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.args.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if echo_request_id:
        app.add_middleware(RequestIdMiddleware)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return error_answer(error)


# ----------------------------------------------------------------------------------------------------------------
# Routes
# ----------------------------------------------------------------------------------------------------------------


def _add_generation_routes(app: FastAPI, service: GenerationService) -> None:
    @app.post("/v1/completions", **openapi.completions())
    async def create_completion(request: Request) -> Response:
        return await _generate(service, request, Completion.prepare)

    @app.post("/v1/chat/completions", **openapi.chat_completions())
    async def create_chat_completion(request: Request) -> Response:
        return await _generate(service, request, Chat.prepare)


async def _generate(
    service: GenerationService, request: Request, prepare: Callable[[GenerationService, object], Awaitable[Job]]
) -> Response:
    try:
        job = await prepare(service, await read_json(request, service.args.max_request_bytes))
    except Exception as error:
        return error_answer(error)
    return StreamAnswer(job.chunks()) if job.is_stream else WholeAnswer(job.whole)


def _add_token_routes(app: FastAPI, service: GenerationService) -> None:
    limit = service.args.max_request_bytes

    @app.post("/tokenize", **openapi.tokenize())
    async def create_tokens(request: Request) -> Response:
        return await _answer(lambda fields: tokenize(service, fields), read_json(request, limit))

    @app.post("/detokenize", **openapi.detokenize())
    async def create_text(request: Request) -> Response:
        return await _answer(lambda fields: detokenize(service, fields), read_json(request, limit))

    @app.get("/tokenizer_info", **openapi.tokenizer_info())
    async def describe_tokenizer() -> Response:
        try:
            return JsonAnswer(tokenizer_info(service))
        except MinivllmError as error:
            return error_answer(error)


async def _answer(make: Callable[[object], Awaitable[dict[str, Any]]], fields: Awaitable[object]) -> Response:
    try:
        return JsonAnswer(await make(await fields))
    except Exception as error:
        return error_answer(error)


def _add_model_routes(app: FastAPI, service: GenerationService) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_at,
            "owned_by": "minivllm",
            "max_model_len": service.info.max_model_len,
        }

    @app.get("/v1/models", **openapi.models())
    async def list_models() -> Response:
        try:
            return JsonAnswer({"object": "list", "data": [card()]})
        except MinivllmError as error:
            return error_answer(error)

    @app.get("/v1/models/{model:path}", **openapi.model())
    async def retrieve_model(model: str) -> Response:
        try:
            service.check_model(model)
            return JsonAnswer(card())
        except MinivllmError as error:
            return error_answer(error)


def _add_service_routes(app: FastAPI, service: GenerationService) -> None:
    @app.get("/health", **openapi.health())
    async def health() -> Response:
        try:
            await service.healthy_snapshot()
        except Exception as error:
            return error_answer(error)
        return JsonAnswer({"status": "ok"})

    @app.get("/version", **openapi.version())
    async def version() -> Response:
        return JsonAnswer({"version": minivllm.__version__})

    @app.get("/metrics", **openapi.metrics())
    async def metrics() -> Response:
        return PlainTextResponse(render_prometheus(await service.last_snapshot()), media_type=CONTENT_TYPE)


# ----------------------------------------------------------------------------------------------------------------
# Bodies
# ----------------------------------------------------------------------------------------------------------------


async def read_json(request: Request, max_bytes: int) -> object:
    """The body as JSON.

    Raises UnsupportedMediaTypeError, RequestTooLargeError (before parsing) or InvalidRequestError.
    """
    body = await _read_body(request, max_bytes)
    declared = request.headers.get("content-type", "")
    if not _is_json(declared):
        raise UnsupportedMediaTypeError(
            f"the body must be JSON, declared by 'Content-Type: application/json', not {shorten(declared)}"
        )
    try:
        return from_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None


def _is_json(content_type: str) -> bool:
    """Anything else browsers send across origins unasked: a web page could use a server on its visitor's machine."""
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


async def _read_body(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    too_large = announced.isdecimal() and int(announced) > max_bytes
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S if too_large else None) as limit:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes and not too_large:
                    too_large = True
                    limit.reschedule(asyncio.get_running_loop().time() + DRAIN_TIMEOUT_S)
                if too_large:
                    parts.clear()
                    if size > DRAIN_BYTES:
                        break
                else:
                    parts.append(part)
    except TimeoutError:
        pass
    except ClientDisconnect:
        raise InvalidRequestError("the client left while it was sending its request") from None
    if too_large:
        raise RequestTooLargeError(f"the request is larger than the limit of {max_bytes} bytes")
    return b"".join(parts)
