"""EngineClient: how the ingress talks to the engine. Hides Ray's transport, its errors and its ways of cancelling."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from minivllm.actors.config import LiveSettings
from minivllm.actors.transport.messages import ChannelClosedError, EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.actors.transport.output_router import LiveRequest, OutputRouter, RequestStream
from minivllm.core.errors import EngineDeadError, MinivllmError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("minivllm.client")

Result = TypeVar("Result")

CONSUMER_CHECK_INTERVAL_S = 1.0
ABORT_RETRY_INTERVAL_S = 0.5

_running_tasks: set[asyncio.Task[Any]] = set()
"""asyncio keeps only weak references to tasks."""


class EngineClient:
    """The engine's client in one process; used from one asyncio loop.

    Every method raises typed errors (minivllm.core.errors): InvalidRequestError, NeverFitsError and
    EngineOverloadedError for a request that was refused, EngineDeadError when the engine died or cannot be reached.
    A request waits up to `connect_timeout_s` for an engine that is starting.
    """

    def __init__(self, engine: DeploymentHandle[Any], *, connect_timeout_s: float = 5.0) -> None:
        # Not by reference: plain gRPC between the two processes, without Ray's object store.
        self._call = engine.options(_by_reference=False)
        self._stream = engine.options(_by_reference=False, stream=True)
        self._connect_timeout_s = connect_timeout_s
        self._opening: asyncio.Task[_Channel] | None = None

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Returns the stream of a request that the engine has accepted. Raises the refusal.

        The caller closes the stream. If the caller is cancelled here, the request is aborted.
        """
        channel = await self._connect()
        try:
            return await channel.submit(request)
        except ChannelClosedError:
            channel.close(EngineDeadError("the engine was replaced"))
        return await (await self._connect()).submit(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its `n` samples. Its terminal output still arrives. Unknown ids: a no-op."""
        if (channel := self._open_channel()) is not None:
            channel.router.abort(request_id, index)

    async def info(self) -> EngineInfo:
        """What never changes while one engine lives; waits for an engine that is still loading."""
        return cast(EngineInfo, await _typed(self._call.info.remote()))

    async def stats(self) -> EngineSnapshot:
        """Returns a snapshot taken now, between two steps."""
        return cast(EngineSnapshot, await _typed(self._call.stats.remote()))

    def count_never_fits(self) -> None:
        """Makes the engine count a prompt that can never fit and was not sent to it. Does not wait."""
        in_own_context(_typed(self._call.count_never_fits.remote())).add_done_callback(_log_exception)

    def close(self) -> None:
        """Closes the channel; live requests end with EngineDeadError."""
        if (channel := self._open_channel()) is not None:
            channel.close(EngineDeadError("the ingress is shutting down"))

    async def _connect(self) -> _Channel:
        if self._opening is None or (self._opening.done() and self._open_channel() is None):
            self._opening = in_own_context(_Channel.open(self._stream, self._call, self._connect_timeout_s))
            self._opening.add_done_callback(_log_exception)
        # Several requests may wait for one channel: a request that is cancelled does not cancel its opening.
        return await asyncio.shield(self._opening)

    def _open_channel(self) -> _Channel | None:
        task = self._opening
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result() if task.result().is_open else None


class _Channel:
    """The client's side of one channel to one engine; `actors/engine/deployment.py` has the protocol.

    A request whose consumer stops reading is aborted here after `consumer_timeout_s`, and an abort is repeated until
    the engine acknowledges it. If this process dies, the engine sees the channel end.
    """

    def __init__(self, channel_id: str, response: Any, call: DeploymentHandle[Any], settings: LiveSettings) -> None:
        self.router = OutputRouter(self._send_abort)
        self.is_open = True
        self._id = channel_id
        self._response = response
        self._call = call
        self._settings = settings
        in_own_context(self._read())
        in_own_context(self._abort_unread())

    @classmethod
    async def open(cls, stream: DeploymentHandle[Any], call: DeploymentHandle[Any], timeout_s: float) -> _Channel:
        """Raises EngineDeadError when no engine answers in time."""
        channel_id = uuid.uuid4().hex
        response: Any = stream.connect.remote(channel_id)
        try:
            first = await asyncio.wait_for(_typed(anext(response)), timeout_s)
        except BaseException as error:
            response.cancel()
            if isinstance(error, TimeoutError):
                raise EngineDeadError(f"no engine is ready ({timeout_s:g} s waited)") from None
            raise
        return cls(channel_id, response, call, first)

    def close(self, error: MinivllmError) -> None:
        """Ends the channel and, with `error`, its live requests."""
        if self.is_open:
            self.is_open = False
            self._response.cancel()
            self.router.fail_all(error)

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Sends a request. Raises the refusal."""
        live = LiveRequest(request.request_id, set(range(request.sampling_params.n)), is_submitted=False)
        self.router.add(live)
        stream = RequestStream(self.router, live)
        try:
            # If the caller is cancelled, the message is still sent; the abort follows once it has arrived.
            refusal = await asyncio.shield(in_own_context(self._submit(request, live)))
        except BaseException:
            stream.close()
            raise
        if refusal is not None:
            raise refusal
        return stream

    async def _submit(self, request: GenerateRequest, live: LiveRequest) -> MinivllmError | None:
        try:
            refusal: MinivllmError | None = await _typed(self._call.submit.remote(self._id, request))
        except MinivllmError as error:
            refusal = error
            self._send_abort(request.request_id, None)  # the message may have arrived all the same
        if refusal is None:
            self.router.submitted(live)
        else:
            self.router.refused(live)
        return refusal

    def _send_abort(self, request_id: str, index: int | None) -> None:
        in_own_context(self._abort(request_id, index))

    async def _abort(self, request_id: str, index: int | None) -> None:
        while self.is_open:
            try:
                await _typed(self._call.abort.remote(request_id, index))
                return
            except MinivllmError as error:
                logger.info("an abort did not reach the engine (will retry): %s", error)
            await asyncio.sleep(ABORT_RETRY_INTERVAL_S)

    async def _read(self) -> None:
        error: MinivllmError = EngineDeadError("the connection to the engine was closed")
        try:
            while True:
                message = await _typed(anext(self._response))
                if isinstance(message, LiveSettings):
                    self._settings = message
                else:
                    self.router.deliver(message, time.monotonic())
        except MinivllmError as reason:
            error = reason
        finally:
            self.close(error)

    async def _abort_unread(self) -> None:
        while self.is_open:
            timeout_s = self._settings.consumer_timeout_s
            await asyncio.sleep(min(CONSUMER_CHECK_INTERVAL_S, timeout_s / 4))
            self.router.abort_unread(self._settings.consumer_timeout_s)


def _log_exception(task: asyncio.Task[Any]) -> None:
    """Retrieves the exception of a task that may have no other consumer."""
    if not task.cancelled() and task.exception() is not None:
        logger.info("no connection to the engine: %s", task.exception())


def in_own_context(coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Starts a task outside the context of the current request.

    Serve keeps the current request in a context variable, takes every call made under it for its child, and cancels
    the children with their parent. The shared channel, and the abort that a cancelled request sends, must survive.
    """
    task = asyncio.get_running_loop().create_task(coroutine, context=contextvars.Context())
    _running_tasks.add(task)
    task.add_done_callback(_running_tasks.discard)
    return task


async def _typed(response: Any) -> Any:
    """Awaits a response of the engine. Raises EngineDeadError for the end of a stream, for any error of Ray's, and for
    a cancellation that does not come from the caller."""
    try:
        return await response
    except MinivllmError:
        raise
    except StopAsyncIteration:
        raise EngineDeadError("the engine has ended and is being replaced") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineDeadError("the engine is shutting down") from None
    except Exception as error:
        raise EngineDeadError(f"the engine cannot be reached: {type(error).__name__}") from error
