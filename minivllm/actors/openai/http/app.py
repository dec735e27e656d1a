"""make_http_app: the routes of the HTTP API, the reading of bodies, and the response that runs a generation."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

import minivllm
from minivllm.actors.metrics.prometheus import CONTENT_TYPE, render_prometheus
from minivllm.actors.openai.http.middleware import (
    ApiKeyMiddleware,
    ClientVariantsMiddleware,
    RequestIdMiddleware,
)
from minivllm.actors.openai.protocol import responses
from minivllm.actors.openai.protocol.errors import error_response, shorten, to_api_error
from minivllm.actors.openai.protocol.requests import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestBody,
    TokenizeRequest,
    parse,
)
from minivllm.actors.openai.protocol.sse import DONE, event
from minivllm.actors.openai.serving.chat import chat_completion
from minivllm.actors.openai.serving.completions import completion
from minivllm.actors.openai.serving.generation import Generation
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.openai.serving.tokenize import detokenize, tokenize_to_json, tokenizer_info
from minivllm.core.errors import InvalidRequestError

INLINE_BYTES = 32 * 1024
"""A body up to this size is parsed in less time than a thread switch costs."""
DRAIN_TIMEOUT_S = 10.0
DRAIN_BYTES = 256 * 1024**2

_ERRORS: dict[int | str, str] = {
    400: "The request is wrong; `param` names the field",
    401: "No valid API key, where the server asks for one",
    404: "No such model",
    413: "The body is larger than `max_request_bytes`",
    415: "The body is not declared as JSON",
    429: "Too many requests wait; `Retry-After` says when to ask again",
    500: "The server failed at this request",
    503: "The model is loading, or the engine has failed",
    # FastAPI adds its own 422, which this API never sends, unless a default is described.
    "default": "Any other error",
}
_SCHEMAS = "#/components/schemas/{model}"


def make_http_app(service: GenerationService, *, echo_request_id: bool = True) -> FastAPI:
    """Builds the HTTP API of a service. `echo_request_id` is False under Serve, whose proxy does it."""
    app = FastAPI(
        title="minivllm",
        version=minivllm.__version__,
        description="OpenAI-compatible API of minivllm.",
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,  # `_read` checks it
        responses=_errors(401, 500, 503, "default"),
        exception_handlers={HTTPException: _on_error, Exception: _on_error},
    )
    app.router.route_class = ApiRoute
    app.state.max_request_bytes = service.args.max_request_bytes
    _add_text_routes(app, service)
    _add_service_routes(app, service)
    _complete_openapi(app)
    # The middleware added last runs first.
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
    app.add_middleware(ClientVariantsMiddleware)
    return app


# ---- routes


def _errors(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": responses.ErrorResponse, "description": _ERRORS[status]} for status in statuses}


def _route(summary: str, response: Any, *statuses: int, **success: Any) -> dict[str, Any]:
    """Returns the arguments that describe a route in openapi.json: `response` models a 200, `statuses` are errors."""
    return {
        "summary": summary,
        "response_model": response,
        "responses": {200: {"description": "The response", **success}, **_errors(*statuses)},
        "openapi_extra": {"security": [{}, {"bearer": []}]},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS.format(model=model.__name__)}


def _stream_of(chunk: type[responses.ResponseModel]) -> dict[str, Any]:
    """Describes the server-sent events that replace the JSON response when `stream` is true."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _reference(chunk)}
    schema = {
        "type": "object",
        "description": f"server-sent events with a {chunk.__name__} each, then [DONE]; an error is an ErrorResponse",
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }
    return {"text/event-stream": {"schema": schema}}


def _complete_openapi(app: FastAPI) -> None:
    """Adds to openapi.json what FastAPI does not know: the chunks of streams and the optional API key."""
    chunks = (responses.CompletionChunk, responses.ChatCompletionChunk)
    _, models = models_json_schema([(chunk, "validation") for chunk in chunks], ref_template=_SCHEMAS)
    components = app.openapi()["components"]  # FastAPI keeps the document
    components["schemas"].update(jsonable_encoder(models["$defs"], exclude_none=True))
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}


_BODY_ERRORS = (400, 404, 413, 415)


def _add_text_routes(app: FastAPI, service: GenerationService) -> None:
    text = _stream_of(responses.CompletionChunk)
    chat = _stream_of(responses.ChatCompletionChunk)

    @app.post(
        "/v1/completions",
        **_route("Complete a text", responses.CompletionResponse, 429, *_BODY_ERRORS, content=text),
    )
    async def create_completion(body: CompletionRequest) -> Response:
        return GenerationResponse(await completion(service, body))

    @app.post(
        "/v1/chat/completions",
        **_route("Answer in a chat", responses.ChatCompletionResponse, 429, *_BODY_ERRORS, content=chat),
    )
    async def create_chat_completion(body: ChatCompletionRequest) -> Response:
        return GenerationResponse(await chat_completion(service, body))

    @app.post("/tokenize", **_route("Token ids of a text or a chat", responses.TokenizeResponse, *_BODY_ERRORS))
    async def create_tokens(body: TokenizeRequest) -> Response:
        content = await tokenize_to_json(service, body)
        return Response(content, media_type="application/json")

    @app.post("/detokenize", **_route("Text of token ids", responses.DetokenizeResponse, *_BODY_ERRORS))
    async def create_text(body: DetokenizeRequest) -> Response:
        return JSONResponse(await detokenize(service, body))

    @app.get("/tokenizer_info", **_route("Special tokens and chat template", responses.TokenizerInfoResponse))
    async def describe_tokenizer() -> Response:
        return JSONResponse(tokenizer_info(service))


def _add_service_routes(app: FastAPI, service: GenerationService) -> None:
    def card() -> dict[str, Any]:
        model = {"id": service.model_name, "object": "model", "created": service.started_at}
        return {**model, "owned_by": "minivllm", "max_model_len": service.info.max_model_len}

    @app.get("/v1/models", **_route("The served model", responses.ModelList))
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}", **_route("One model", responses.ModelCard, 404))
    async def retrieve_model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(card())

    @app.get("/health", **_route("200 while the engine works", responses.HealthResponse))
    async def health() -> Response:
        await service.healthy_snapshot()
        return JSONResponse({"status": "ok"})

    @app.get("/version", **_route("Version of the server", responses.VersionResponse))
    async def version() -> Response:
        return JSONResponse({"version": minivllm.__version__})

    text = {"text/plain": {"schema": {"type": "string"}}}
    description = _route("Figures of the engine in Prometheus' text format", None, content=text)

    @app.get("/metrics", response_class=Response, **description)
    async def metrics() -> Response:
        return PlainTextResponse(render_prometheus(await service.last_snapshot()), media_type=CONTENT_TYPE)


# ---- bodies and errors


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


class ApiRoute(APIRoute):
    """A route that reads its body by `_read`, and whose errors pass through the middleware.

    FastAPI's own reader has no size limit, and hides errors in a bare 400.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle_with_errors(request: Request) -> Response:
            try:
                return await handle(request if kind is None else _CheckedRequest(request, await _read(request, kind)))
            except Exception as error:
                return error_response(error)

        return handle_with_errors


class _CheckedRequest(Request):
    """A request whose body is checked already: FastAPI accepts an instance of the route's model as it is."""

    def __init__(self, request: Request, checked: RequestBody) -> None:
        super().__init__({**request.scope, "headers": ()}, request.receive)
        self._checked = checked

    async def body(self) -> bytes:
        return b"{}"  # not empty: FastAPI then calls `json`

    async def json(self) -> Any:
        return self._checked


async def _read(request: Request, kind: type[Body]) -> Body:
    """Returns a checked body. Raises HTTPException for its size or media type, and InvalidRequestError."""
    body = await _read_bytes(request, request.app.state.max_request_bytes)
    codings = ",".join(request.headers.getlist("content-encoding") + request.headers.getlist("transfer-encoding"))
    for coding in map(str.strip, codings.lower().split(",")):
        if coding not in ("", "identity", "chunked"):
            raise HTTPException(415, f"the encoding {shorten(coding)} is not supported; send plain JSON")
    content_type = request.headers.get("content-type", "")
    # Browsers send other types across origins unasked: a web page could use a server on its visitor's machine.
    media_type = content_type.partition(";")[0].strip().lower()
    if not media_type.startswith("application/") or not media_type.endswith(("/json", "+json")):
        reason = f"declared by 'Content-Type: application/json', not {shorten(content_type)}"
        raise HTTPException(415, f"the body must be JSON, {reason}")
    if len(body) <= INLINE_BYTES:
        return _parse(kind, body)
    checked = await asyncio.to_thread(_parse, kind, body)  # other requests do not wait for a large body
    checked.mark_large()
    return checked


def _parse(kind: type[Body], body: bytearray) -> Body:
    try:
        fields = from_json(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    return parse(kind, fields)


async def _read_bytes(request: Request, max_bytes: int) -> bytearray:
    declared = request.headers.get("content-length", "")
    body = bytearray()
    parts = request.stream()
    try:
        if not declared.isdecimal() or int(declared) <= max_bytes:
            async for part in parts:
                body += part
                if len(body) > max_bytes:
                    break
            else:
                return body
        # Clients read the response only after they have sent all of a too large body.
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for part in parts:
                    size += len(part)
                    if size > DRAIN_BYTES:
                        break
    except ClientDisconnect:
        raise InvalidRequestError("the client disconnected while it was sending its request") from None
    raise HTTPException(413, f"the request is larger than the limit of {max_bytes} bytes")


# ---- responses of generations

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """Runs a generation while it sends the result; a client that disconnects aborts it, streamed or not.

    The status of a stream is sent with its first chunk, so that an error before it has a status of its own. A later
    error is an event, followed by `[DONE]`.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = self._run_stream if self._generation.is_stream else self._run
        await _run_until_disconnect(receive, run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = JSONResponse(await self._generation.response())
        except Exception as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _run_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        last = DONE
        async with contextlib.aclosing(self._generation.stream()) as stream:
            try:
                async for chunks in stream:
                    if not is_started:
                        is_started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
                    body = "".join(map(event, chunks)).encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except Exception as error:
                if not is_started:
                    await error_response(error)(scope, receive, send)
                    return
                last = event(json.dumps(to_api_error(error).body())).encode() + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, or cancels it when the client disconnects. Serve also cancels the call; other servers do not."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((task,))  # also when `receive` fails
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()
