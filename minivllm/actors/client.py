"""Client and AsyncClient: the application from another Ray program, with iterators that take their request along.

Leaving a stream of Serve early (`break`, an exception, a timeout around it) cancels nothing by itself: the engine would
go on computing for nobody. The iterators here cancel in `finally`.

    client = Client()
    client.chat([{"role": "user", "content": "Hello!"}], max_tokens=20)["choices"][0]["message"]["content"]
    for chunk in client.generate_stream("Once upon a time", max_tokens=100):
        print(chunk["choices"][0]["text"], end="")

Arguments and answers are those of `/v1/completions` and `/v1/chat/completions`. What is wrong with a request raises the
typed errors of `minivllm.core.errors`, as in the engine's own process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayTaskError

from minivllm.core.errors import MinivllmError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

Messages = list[dict[str, Any]]
Prompt = str | list[str] | list[int] | list[list[int]]
Answer = dict[str, Any]


class Client:
    """For programs without an asyncio loop.

    Args:
        app_name: of the application in serve_config.yaml.
        timeout_s: longest wait for a whole answer; it is cancelled then and TimeoutError raised. None: no limit.
        handle: use this one instead of looking the application up.
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

    def generate(self, prompt: Prompt, **fields: Any) -> Answer:
        """Completes a prompt, or each of several (then `choices` has prompts x n entries)."""
        answer: Answer = self._whole("generate", prompt=prompt, **fields)
        return answer

    def generate_stream(self, prompt: Prompt, **fields: Any) -> Generator[Answer, None, None]:
        """The same as chunks. The request is sent by the first `next`, and cancelled when the iteration ends early."""
        return self._stream("generate_stream", prompt=prompt, **fields)

    def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Answers a conversation."""
        answer: Answer = self._whole("chat", messages=messages, **fields)
        return answer

    def chat_stream(self, messages: Messages, **fields: Any) -> Generator[Answer, None, None]:
        """The same as chunks; see `generate_stream`."""
        return self._stream("chat_stream", messages=messages, **fields)

    def call(self, method: str, **fields: Any) -> Any:
        """Any other method of the ingress: `tokenize`, `detokenize`, `info`, `stats`, `metrics_history`."""
        return self._whole(method, **fields)

    def _whole(self, method: str, **fields: Any) -> Any:
        response = getattr(self._handle, method).remote(**fields)
        with _own_errors():
            try:
                return response.result(timeout_s=self._timeout_s)
            except BaseException:
                response.cancel()
                raise

    def _stream(self, method: str, **fields: Any) -> Generator[Answer, None, None]:
        response = getattr(self._handle.options(stream=True), method).remote(**fields)
        try:
            with _own_errors():
                yield from response
        finally:
            response.cancel()


class AsyncClient:
    """For programs with an asyncio loop, other deployments among them. A cancelled caller cancels its request."""

    def __init__(self, app_name: str = "minivllm", *, handle: DeploymentHandle[Any] | None = None) -> None:
        self._handle = serve.get_app_handle(app_name) if handle is None else handle

    async def generate(self, prompt: Prompt, **fields: Any) -> Answer:
        """Completes a prompt, or each of several (then `choices` has prompts x n entries)."""
        answer: Answer = await self._whole("generate", prompt=prompt, **fields)
        return answer

    def generate_stream(self, prompt: Prompt, **fields: Any) -> AsyncGenerator[Answer, None]:
        """The same as chunks. The request is sent with the first `anext`, and cancelled when the iteration ends early:
        at once by `aclose` (`contextlib.aclosing`) or cancellation, after a bare `break` when Python collects it."""
        return self._stream("generate_stream", prompt=prompt, **fields)

    async def chat(self, messages: Messages, **fields: Any) -> Answer:
        """Answers a conversation."""
        answer: Answer = await self._whole("chat", messages=messages, **fields)
        return answer

    def chat_stream(self, messages: Messages, **fields: Any) -> AsyncGenerator[Answer, None]:
        """The same as chunks; see `generate_stream`."""
        return self._stream("chat_stream", messages=messages, **fields)

    async def call(self, method: str, **fields: Any) -> Any:
        """Any other method of the ingress: `tokenize`, `detokenize`, `info`, `stats`, `metrics_history`."""
        return await self._whole(method, **fields)

    async def _whole(self, method: str, **fields: Any) -> Any:
        response = getattr(self._handle, method).remote(**fields)
        with _own_errors():
            try:
                return await response
            except BaseException:
                response.cancel()
                raise

    async def _stream(self, method: str, **fields: Any) -> AsyncGenerator[Answer, None]:
        response = getattr(self._handle.options(stream=True), method).remote(**fields)
        try:
            with _own_errors():
                async for chunk in response:
                    yield chunk
        finally:
            response.cancel()


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Ray wraps what a replica raised; callers want to catch what we raised."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, MinivllmError):
            raise error.cause from None
        raise
