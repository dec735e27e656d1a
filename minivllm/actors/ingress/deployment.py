"""Ingress deployment: HTTP and handle calls in, token ids to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray import serve
from starlette.types import ASGIApp

from minivllm.actors.config import AppArgs
from minivllm.actors.ingress.engine_client import EngineClient
from minivllm.actors.ingress.http_server import HttpServer
from minivllm.actors.openai.http.app import make_http_app
from minivllm.actors.openai.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeRequest,
    parse,
)
from minivllm.actors.openai.serving.chat import chat_completion
from minivllm.actors.openai.serving.completions import completion
from minivllm.actors.openai.serving.generation import Generation
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.openai.serving.tokenize import detokenize, tokenize
from minivllm.actors.process import freeze_gc, log_to_stderr, use_batch_cpu_policy
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot
from minivllm.core.errors import InvalidRequestError
from minivllm.core.text.tokenizer import Tokenizer, import_transformers_without_torch, load_tokenizer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from minivllm.actors.metrics.deployment import HistoryPoint

Prompt = str | list[str] | list[int] | list[list[int]]
Body = dict[str, Any]
Answer = Body | AsyncGenerator[Body, None]
Request = TypeVar("Request", bound=GenerationBody)
Start = Callable[[GenerationService, Request], Awaitable[Generation]]


@serve.deployment(name="Ingress")
@serve.ingress()
class Ingress:
    """The HTTP routes (see `actors/openai/http/app.py`) and the methods below for handles.

    `generate` and `chat` take the fields of `/v1/completions` and `/v1/chat/completions` as keyword arguments and
    return the response body as a plain dict; with `stream=True`, or in their `_stream` forms, they yield its chunks.
    Call these through `handle.options(stream=True)`. A wrong request raises the typed errors of `minivllm.core.errors`,
    before the first chunk if it can be known by then.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: AppArgs, engine: DeploymentHandle[Any], metrics: DeploymentHandle[Any]
    ) -> None:
        log_to_stderr()
        use_batch_cpu_policy()
        with ThreadPoolExecutor(1) as executor:  # a new thread, since its priority stays low
            tokenizer = await asyncio.get_running_loop().run_in_executor(executor, _load_tokenizer, args)
        freeze_gc()
        self._client = EngineClient(engine)
        self._metrics = metrics.options(_by_reference=False)
        self._service = GenerationService(self._client, tokenizer, args, self._metrics.current.remote)
        # In the background: /health answers while the engine is still loading.
        self._service.start()
        if args.http_port is not None:
            self._server = HttpServer(make_http_app(self._service), args.http_host, args.http_port)
            await self._server.open()

    async def __del__(self) -> None:  # Serve awaits it
        if (server := getattr(self, "_server", None)) is not None:
            await server.close(self._client.close)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_http_app(self._service, echo_request_id=False)

    # ---- text

    async def generate(self, prompt: Prompt, *, stream: bool = False, **fields: Any) -> Answer:
        """Completes a prompt, or each of several."""
        return await self._answer(completion, CompletionRequest, {**fields, "prompt": prompt}, stream)

    async def generate_stream(self, prompt: Prompt, **fields: Any) -> Answer:
        return await self.generate(prompt, **{**fields, "stream": True})

    async def chat(self, messages: list[Body], *, stream: bool = False, **fields: Any) -> Answer:
        """Answers a conversation."""
        return await self._answer(chat_completion, ChatCompletionRequest, {**fields, "messages": messages}, stream)

    async def chat_stream(self, messages: list[Body], **fields: Any) -> Answer:
        return await self.chat(messages, **{**fields, "stream": True})

    async def _answer(self, start: Start[Request], model: type[Request], fields: Body, stream: bool) -> Answer:
        if stream:
            return self._chunks(start, model, {**fields, "stream": True})
        if fields.get("stream_options") is not None:
            raise InvalidRequestError("stream_options: only for streams", param="stream_options")
        await self._service.ready()
        return await (await start(self._service, parse(model, fields))).response()

    async def _chunks(self, start: Start[Request], model: type[Request], fields: Body) -> AsyncGenerator[Body, None]:
        await self._service.ready()
        generation = await start(self._service, parse(model, fields))
        async with contextlib.aclosing(generation.stream()) as batches:
            async for chunks in batches:
                for chunk in chunks:
                    yield json.loads(chunk)

    # ---- tokens

    async def tokenize(self, **fields: Any) -> Body:
        """Returns the token ids of `prompt` or `messages`; see POST /tokenize."""
        await self._service.ready()
        return await tokenize(self._service, parse(TokenizeRequest, fields))

    async def detokenize(self, tokens: list[int], **fields: Any) -> Body:
        """Returns the text of token ids; see POST /detokenize."""
        await self._service.ready()
        return await detokenize(self._service, parse(DetokenizeRequest, {"tokens": tokens, **fields}))

    # ---- questions

    async def info(self) -> EngineInfo:
        """Returns what never changes while one engine lives; waits for an engine that is loading."""
        return await self._service.ready()

    async def stats(self) -> EngineSnapshot:
        """Returns the engine's statistics and settings, taken now."""
        return await self._client.stats()

    async def metrics_history(self, last: int | None = None) -> list[HistoryPoint]:
        """Returns block counts and rejections over time from the Metrics deployment, oldest first."""
        return cast("list[HistoryPoint]", await self._metrics.history.remote(last))


def _load_tokenizer(args: AppArgs) -> Tokenizer:
    """Loads the tokenizer at low thread priority: the engine, which takes longer, loads at the same time."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
    import_transformers_without_torch(args)
    return load_tokenizer(args)
