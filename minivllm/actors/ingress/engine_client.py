"""EngineClient: how the ingress talks to the engine. Hides Ray's transport, its errors and its ways of cancelling."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.actors.transport.messages import ChannelClosedError, EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.actors.transport.output_router import OutputRouter, RequestStream
from minivllm.core.errors import EngineDeadError, MinivllmError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("minivllm.client")

Result = TypeVar("Result")


class EngineClient:
    """One per process that sends requests to the engine; used from one asyncio loop.

    Every method raises our own typed errors (minivllm.core.errors): InvalidRequestError, NeverFitsError and
    EngineOverloadedError for a request that was refused, EngineDeadError when the engine died or cannot be reached.

    Args:
        engine: handle of the deployment `Engine`.
        consumer_timeout_s: a request whose outputs nobody asks for so long is aborted. The engine may set another one.
        keep_interval_s: how often the engine is told which requests are still wanted.
        connect_timeout_s: how long a request waits for an engine that is starting.
    """

    def __init__(
        self,
        engine: DeploymentHandle[Any],
        *,
        consumer_timeout_s: float = 60.0,
        keep_interval_s: float = 10.0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        # Not by reference: plain gRPC between the two processes, without Ray's object store.
        self._call = engine.options(_by_reference=False)
        self._stream = engine.options(_by_reference=False, stream=True)
        self._consumer_timeout_s = consumer_timeout_s
        self._keep_interval_s = keep_interval_s
        self._connect_timeout_s = connect_timeout_s
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._counting: set[asyncio.Task[Any]] = set()

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Returns the stream of a request that the engine has accepted. Raises the refusal.

        The caller closes the stream; a caller that is cancelled here leaves nothing behind.
        """
        connection = await self._connected()
        try:
            return await connection.submit(request)
        except ChannelClosedError:
            connection.close()
        return await (await self._connected()).submit(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its `n` samples. Its terminal output still arrives. An unknown id is no error."""
        if self._connection is not None:
            self._connection.router.abort(request_id, index)

    async def info(self) -> EngineInfo:
        """What never changes while one engine lives; waits for an engine that is still loading."""
        info: EngineInfo = await _typed(self._call.info.remote())
        return info

    async def stats(self) -> EngineSnapshot:
        """A fresh snapshot, taken between two steps."""
        snapshot: EngineSnapshot = await _typed(self._call.stats.remote())
        return snapshot

    def count_never_fits(self) -> None:
        """Tells the engine, in passing, of a prompt that could never fit and was not sent to it."""
        counting = in_own_context(_typed(self._call.count_never_fits.remote()))
        self._counting.add(counting)
        counting.add_done_callback(self._counting.discard)
        counting.add_done_callback(_take_note)

    def close(self) -> None:
        """Ends the connection; live requests end with EngineDeadError."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> _Connection:
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._connecting is None:
            self._connecting = in_own_context(self._connect())
            self._connecting.add_done_callback(_take_note)
        # Others may wait for the same connection: who is cancelled leaves it to them.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Connection:
        try:
            connection = _Connection(self._stream, self._call)
            await connection.open(self._connect_timeout_s)
            connection.keep_up(self._keep_interval_s, self._consumer_timeout_s)
            self._connection = connection
            return connection
        finally:
            self._connecting = None


class _Connection:
    """One channel to one incarnation of the engine. Once closed it stays so."""

    def __init__(self, stream: DeploymentHandle[Any], call: DeploymentHandle[Any]) -> None:
        self.router = OutputRouter(self._send_abort)
        self.is_open = False
        self._channel_id = uuid.uuid4().hex
        self._stream = stream
        self._call = call
        self._response: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submissions: dict[str, asyncio.Task[MinivllmError | None]] = {}

    async def open(self, timeout_s: float) -> None:
        """Raises EngineDeadError when no engine answers in time."""
        self._response = self._stream.connect.remote(self._channel_id)
        try:
            greeting = await asyncio.wait_for(_typed(anext(self._response)), timeout_s)
        except TimeoutError:
            self._response.cancel()
            raise EngineDeadError(f"no engine is ready ({timeout_s:g} s waited)") from None
        except StopAsyncIteration:
            raise EngineDeadError("the engine has ended") from None
        except BaseException:
            self._response.cancel()
            raise
        if isinstance(greeting, MinivllmError):
            raise greeting
        self.is_open = True
        self._spawn(self._read())

    def keep_up(self, interval_s: float, consumer_timeout_s: float) -> None:
        """Starts telling the engine what is still wanted, and looking for what is not."""
        self._spawn(self._keep(interval_s, consumer_timeout_s))

    def close(self, error: MinivllmError | None = None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._response.cancel()
        self.router.fail_all(error or EngineDeadError("the connection to the engine was closed"))

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Sends a request. Raises the refusal if it is refused."""
        stream = self.router.open(request)
        submission = self._spawn(self._submit(request))
        self._submissions[request.request_id] = submission
        try:
            # A caller that is cancelled leaves the message under way; the abort follows when it has arrived.
            refusal = await asyncio.shield(submission)
        except BaseException:
            stream.close()
            raise
        if refusal is not None:
            raise refusal
        return stream

    async def _submit(self, request: GenerateRequest) -> MinivllmError | None:
        try:
            refusal: MinivllmError | None = await _typed(self._call.submit.remote(self._channel_id, request))
        except MinivllmError as error:
            refusal = error
        finally:
            self._submissions.pop(request.request_id, None)
        if refusal is not None:
            self.router.forget(request.request_id)
        return refusal

    def _send_abort(self, request_id: str, index: int | None) -> None:
        if self.is_open:
            self._spawn(self._abort(request_id, index, self._submissions.get(request_id)))

    async def _abort(
        self, request_id: str, index: int | None, submission: asyncio.Task[MinivllmError | None] | None
    ) -> None:
        if submission is not None and await submission is not None:
            return
        try:
            await _typed(self._call.abort.remote(request_id, index))
        except MinivllmError as error:
            logger.info("an abort did not reach the engine (the next keep will): %s", error)

    async def _read(self) -> None:
        error = EngineDeadError("the engine has ended")
        try:
            while True:
                outputs = await _typed(anext(self._response))
                self.router.deliver(outputs, time.monotonic())
        except StopAsyncIteration:
            pass
        except MinivllmError as reason:
            error = EngineDeadError(f"the connection to the engine broke: {reason}")
        finally:
            self.close(error)

    async def _keep(self, interval_s: float, consumer_timeout_s: float) -> None:
        timeout_s = consumer_timeout_s
        while self.is_open:
            await asyncio.sleep(min(interval_s, timeout_s / 4))
            self.router.abort_unpolled(timeout_s)
            if self.is_open:
                try:
                    timeout_s = await _typed(self._call.keep.remote(self._channel_id, self.router.request_ids()))
                except MinivllmError as error:
                    logger.info("the engine does not answer: %s", error)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = in_own_context(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _take_note(task: asyncio.Task[Any]) -> None:
    """Nobody else may ask for its exception."""
    if not task.cancelled() and task.exception() is not None:
        logger.info("no connection to the engine: %s", task.exception())


def in_own_context(coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task without the context of the request on whose behalf it happens to start.

    Serve keeps the current request in a context variable, takes every call made under it for its child, and cancels
    the children with their parent. The shared connection, and the abort that a cancelled request sends, must survive.
    """
    return asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())


async def _typed(response: Any) -> Any:
    """Awaits an answer of the engine. Whatever Ray says of an engine that cannot be reached becomes EngineDeadError;
    so does a cancellation that comes from there and not from our own caller."""
    try:
        return await response
    except (MinivllmError, StopAsyncIteration):
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineDeadError("the engine is shutting down") from None
    except Exception as error:
        raise EngineDeadError(f"the engine cannot be reached: {type(error).__name__}") from error
