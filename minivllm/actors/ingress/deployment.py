"""Ingress deployment: speaks HTTP with clients and Python with other Ray programs, token ids with the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ray import serve
from starlette.types import ASGIApp

from minivllm.actors.config import AppArgs
from minivllm.actors.ingress.engine_client import EngineClient
from minivllm.actors.ingress.http_server import HttpServer
from minivllm.actors.openai.http.app import make_http_app
from minivllm.actors.openai.serving.chat import Chat
from minivllm.actors.openai.serving.completions import Completion
from minivllm.actors.openai.serving.service import GenerationService
from minivllm.actors.openai.serving.tokenize import detokenize, tokenize
from minivllm.actors.process import freeze_gc, log_to_stderr, use_batch_cpu_policy
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot
from minivllm.core.errors import InvalidRequestError
from minivllm.core.text.tokenizer import Tokenizer, import_transformers_without_torch, load_tokenizer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from minivllm.actors.metrics.deployment import HistoryPoint


@serve.deployment(name="Ingress")
@serve.ingress()
class Ingress:
    """The application's front: HTTP routes (see `actors/openai/http/app.py`) and the methods below for handles.

    `generate` and `chat` take the fields of `/v1/completions` and `/v1/chat/completions` as keyword arguments and
    return the body of the answer as a plain dict; their `_stream` forms yield its chunks. What is wrong with a request
    raises the typed errors of `minivllm.core.errors`, before the first chunk if it can be known by then.

    Args:
        args: of the application.
        engine: handle of the Engine deployment.
        metrics: handle of the Metrics deployment.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: AppArgs, engine: DeploymentHandle[Any], metrics: DeploymentHandle[Any]
    ) -> None:
        log_to_stderr()
        use_batch_cpu_policy()
        tokenizer = await _in_background(_load_tokenizer, args)
        freeze_gc()
        self._client = EngineClient(engine)
        self._metrics = metrics.options(_by_reference=False)
        self._service = GenerationService(self._client, tokenizer, args, self._last_known)
        # In the background: /health answers while the engine is still loading.
        self._service.start()
        self._server = None
        if args.http_port is not None:
            self._server = HttpServer(make_http_app(self._service), args.http_host, args.http_port)
            await self._server.open()

    async def __del__(self) -> None:  # Serve awaits it
        if (server := getattr(self, "_server", None)) is not None:
            await server.close(self._client.close)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_http_app(self._service, echo_request_id=False)

    # ---------------------------------------------------------------- text

    async def generate(
        self, prompt: str | list[str] | list[int] | list[list[int]], *, stream: bool = False, **fields: Any
    ) -> dict[str, Any] | AsyncGenerator[dict[str, Any], None]:
        """Completes a prompt, or each of several. With `stream=True` it is `generate_stream`."""
        request = {"prompt": prompt, **fields}
        if stream:
            return self._stream(Completion, request)
        return await self._whole(Completion, request)

    async def generate_stream(
        self, prompt: str | list[str] | list[int] | list[list[int]], **fields: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The same as chunks. Call it through `handle.options(stream=True)`."""
        async with contextlib.aclosing(self._stream(Completion, {"prompt": prompt, **fields})) as chunks:
            async for chunk in chunks:
                yield chunk

    async def chat(
        self, messages: list[dict[str, Any]], *, stream: bool = False, **fields: Any
    ) -> dict[str, Any] | AsyncGenerator[dict[str, Any], None]:
        """Answers a conversation. With `stream=True` it is `chat_stream`."""
        request = {"messages": messages, **fields}
        if stream:
            return self._stream(Chat, request)
        return await self._whole(Chat, request)

    async def chat_stream(self, messages: list[dict[str, Any]], **fields: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The same as chunks. Call it through `handle.options(stream=True)`."""
        async with contextlib.aclosing(self._stream(Chat, {"messages": messages, **fields})) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _whole(self, kind: type[Completion] | type[Chat], request: Mapping[str, Any]) -> dict[str, Any]:
        await self._service.ready()
        if request.get("stream_options") is not None:
            raise InvalidRequestError("stream_options: only for streams", param="stream_options")
        job = await kind.prepare(self._service, {**request, "stream": False})
        return await job.whole()

    async def _stream(
        self, kind: type[Completion] | type[Chat], request: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        await self._service.ready()
        job = await kind.prepare(self._service, {**request, "stream": True})
        async with contextlib.aclosing(job.chunks()) as chunks:
            async for together in chunks:
                for chunk in together:
                    yield json.loads(chunk)

    # ---------------------------------------------------------------- tokens

    async def tokenize(self, **fields: Any) -> dict[str, Any]:
        """Token ids of `prompt` or `messages`; see POST /tokenize."""
        await self._service.ready()
        return await tokenize(self._service, fields)

    async def detokenize(self, tokens: list[int], **fields: Any) -> dict[str, Any]:
        """Text of token ids; see POST /detokenize."""
        await self._service.ready()
        return await detokenize(self._service, {"tokens": tokens, **fields})

    # ---------------------------------------------------------------- questions

    async def info(self) -> EngineInfo:
        """What never changes while one engine lives; waits for one that is loading."""
        return await self._service.ready()

    async def stats(self) -> EngineSnapshot:
        """The engine as it is now."""
        return await self._service.engine.stats()

    async def _last_known(self) -> EngineSnapshot | None:
        snapshot: EngineSnapshot | None = await self._metrics.current.remote()
        return snapshot

    async def metrics_history(self, last: int | None = None) -> list[HistoryPoint]:
        """Block counts and rejections over time, from the Metrics deployment, oldest first."""
        points: list[HistoryPoint] = await self._metrics.history.remote(last)
        return points


def _load_tokenizer(args: AppArgs) -> Tokenizer:
    import_transformers_without_torch(args)
    return load_tokenizer(args)


async def _in_background(function: Callable[[AppArgs], Tokenizer], args: AppArgs) -> Tokenizer:
    """Runs it in a thread that stands back: the engine, which everybody waits for, loads at the same time."""

    def stand_back() -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)

    with ThreadPoolExecutor(1, initializer=stand_back) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, function, args)
