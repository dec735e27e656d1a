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
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.exceptions import RayTaskError

from minivllm.core.errors import MinivllmError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

Messages = list[dict[str, Any]]
Prompt = str | list[str] | list[int] | list[list[int]]
Body = dict[str, Any]


class Client:
    """For programs without an asyncio loop.

    Args:
        app_name: of the application in serve_config.yaml.
        timeout_s: longest wait for a complete response, which is then cancelled with TimeoutError. None: no limit.
        handle: use this handle instead of looking the application up.
    """

    def __init__(
        self,
        app_name: str = "minivllm",
        *,
        timeout_s: float | None = None,
        handle: DeploymentHandle[Any] | None = None,
    ) -> None:
        self._handle = serve.get_app_handle(app_name) if handle is None else handle
        self._timeout_s = timeout_s

    def generate(self, prompt: Prompt, **fields: Any) -> Body:
        """Completes a prompt, or each of several (then `choices` has prompts x n entries)."""
        return cast(Body, self.call("generate", prompt=prompt, **fields))

    def generate_stream(self, prompt: Prompt, **fields: Any) -> Generator[Body, None, None]:
        """Yields the chunks of `generate`."""
        return self._stream("generate_stream", prompt=prompt, **fields)

    def chat(self, messages: Messages, **fields: Any) -> Body:
        """Answers a conversation."""
        return cast(Body, self.call("chat", messages=messages, **fields))

    def chat_stream(self, messages: Messages, **fields: Any) -> Generator[Body, None, None]:
        """Yields the chunks of `chat`."""
        return self._stream("chat_stream", messages=messages, **fields)

    def call(self, method: str, **fields: Any) -> Any:
        """Calls any method of the ingress: `tokenize`, `detokenize`, `info`, `stats`, `metrics_history`."""
        response = getattr(self._handle, method).remote(**fields)
        with _typed_errors():
            try:
                return response.result(timeout_s=self._timeout_s)
            except BaseException:
                response.cancel()
                raise

    def _stream(self, method: str, **fields: Any) -> Generator[Body, None, None]:
        response = getattr(self._handle.options(stream=True), method).remote(**fields)
        try:
            with _typed_errors():
                yield from response
        finally:
            response.cancel()


class AsyncClient:
    """For programs with an asyncio loop, other deployments among them. A cancelled caller cancels its request.

    A stream that is left early is cancelled at once by `aclose` (`contextlib.aclosing`) or cancellation, and after a
    bare `break` when Python collects it. The methods are those of `Client`.
    """

    def __init__(self, app_name: str = "minivllm", *, handle: DeploymentHandle[Any] | None = None) -> None:
        self._handle = serve.get_app_handle(app_name) if handle is None else handle

    async def generate(self, prompt: Prompt, **fields: Any) -> Body:
        return cast(Body, await self.call("generate", prompt=prompt, **fields))

    def generate_stream(self, prompt: Prompt, **fields: Any) -> AsyncGenerator[Body, None]:
        return self._stream("generate_stream", prompt=prompt, **fields)

    async def chat(self, messages: Messages, **fields: Any) -> Body:
        return cast(Body, await self.call("chat", messages=messages, **fields))

    def chat_stream(self, messages: Messages, **fields: Any) -> AsyncGenerator[Body, None]:
        return self._stream("chat_stream", messages=messages, **fields)

    async def call(self, method: str, **fields: Any) -> Any:
        response = getattr(self._handle, method).remote(**fields)
        with _typed_errors():
            try:
                return await response
            except BaseException:
                response.cancel()
                raise

    async def _stream(self, method: str, **fields: Any) -> AsyncGenerator[Body, None]:
        response = getattr(self._handle.options(stream=True), method).remote(**fields)
        try:
            with _typed_errors():
                async for chunk in response:
                    yield chunk
        finally:
            response.cancel()


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Raises the error of this package that Ray has wrapped."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, MinivllmError):
            raise error.cause from None
        raise
