"""Client and AsyncClient: the application from another Ray program.

    client = Client()
    client.chat([{"role": "user", "content": "Hello!"}], max_tokens=20)["choices"][0]["message"]["content"]
    for chunk in client.generate_stream("Once upon a time", max_tokens=100):
        print(chunk["choices"][0]["text"], end="")

Arguments and response bodies are those of `/v1/completions` and `/v1/chat/completions`. An invalid request raises the
typed errors of `minivllm.core.errors`, as in the engine's own process.

A stream sends its request with the first `next` and cancels it when the iteration ends early. Serve's own response
generators do not: after a `break`, an exception or a timeout the engine would continue.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ray import serve
from ray.exceptions import RayTaskError

from minivllm.core.errors import MinivllmError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

Messages = list[dict[str, Any]]
Prompt = str | list[str] | list[int] | list[list[int]]
Body = dict[str, Any]
Response = TypeVar("Response")
Chunks = TypeVar("Chunks")


class _Client(ABC, Generic[Response, Chunks]):
    def __init__(self, app_name: str = "minivllm", *, handle: DeploymentHandle[Any] | None = None) -> None:
        self._handle = serve.get_app_handle(app_name) if handle is None else handle

    def generate(self, prompt: Prompt, **fields: Any) -> Response:
        """Completes a prompt, or each of several (then `choices` has prompts x n entries)."""
        return cast(Response, self.call("generate", prompt=prompt, **fields))

    def generate_stream(self, prompt: Prompt, **fields: Any) -> Chunks:
        """Yields the chunks of `generate`."""
        return self._stream("generate_stream", prompt=prompt, **fields)

    def chat(self, messages: Messages, **fields: Any) -> Response:
        """Answers a conversation."""
        return cast(Response, self.call("chat", messages=messages, **fields))

    def chat_stream(self, messages: Messages, **fields: Any) -> Chunks:
        """Yields the chunks of `chat`."""
        return self._stream("chat_stream", messages=messages, **fields)

    @abstractmethod
    def call(self, method: str, **fields: Any) -> Any:
        """Calls any method of the ingress: `tokenize`, `detokenize`, `info`, `stats`, `metrics_history`."""

    @abstractmethod
    def _stream(self, method: str, **fields: Any) -> Chunks: ...


class Client(_Client[Body, Generator[Body, None, None]]):
    """For programs without an asyncio loop.

    Args:
        app_name: of the application in serve_config.yaml.
        timeout_s: longest wait for a complete response, which is then cancelled with TimeoutError. None: no limit.
        handle: use this handle instead of looking the application up.
    """

    def __init__(
        self, app_name: str = "minivllm", *, timeout_s: float | None = None, handle: DeploymentHandle[Any] | None = None
    ) -> None:
        super().__init__(app_name, handle=handle)
        self._timeout_s = timeout_s

    def call(self, method: str, **fields: Any) -> Any:
        response = getattr(self._handle, method).remote(**fields)
        with _cancel_unless_done(response):
            return response.result(timeout_s=self._timeout_s)

    def _stream(self, method: str, **fields: Any) -> Generator[Body, None, None]:
        response = getattr(self._handle.options(stream=True), method).remote(**fields)
        with _cancel_unless_done(response):
            yield from response


class AsyncClient(_Client[Coroutine[Any, Any, Body], AsyncGenerator[Body, None]]):
    """For programs with an asyncio loop, other deployments among them. A cancelled caller cancels its request.

    A stream that is left early is cancelled at once by `aclose` (`contextlib.aclosing`) or cancellation, and after a
    bare `break` when Python collects it. The methods are those of `Client`.
    """

    async def call(self, method: str, **fields: Any) -> Any:
        response = getattr(self._handle, method).remote(**fields)
        with _cancel_unless_done(response):
            return await response

    async def _stream(self, method: str, **fields: Any) -> AsyncGenerator[Body, None]:
        response = getattr(self._handle.options(stream=True), method).remote(**fields)
        with _cancel_unless_done(response):
            async for chunk in response:
                yield chunk


@contextlib.contextmanager
def _cancel_unless_done(response: Any) -> Iterator[None]:
    """Cancels a request that is left early. Raises the error of this package that Ray has wrapped."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, MinivllmError):
            raise error.cause from None
        raise
    except BaseException:
        response.cancel()
        raise
