"""OutputRouter: the registry of live requests in a process. The engine has one, and so has each client of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm.actors.transport.messages import INTER_TOKEN_LATENCY, REQUEST_LATENCY, TIME_TO_FIRST_TOKEN, Histogram
from minivllm.core.errors import InvalidRequestError, MinivllmError
from minivllm.core.outputs import RequestOutput
from minivllm.core.sequence import FinishReason

logger = logging.getLogger("minivllm.engine")


@dataclass(slots=True, eq=False)
class RequestOutputCollector:
    """A queue with at most one output per sample: an output is merged into the one that already waits.

    The first token leaves at once and later ones as the consumer takes them. A slow consumer costs only the memory of
    its tokens. Belongs to one asyncio loop and has one consumer.
    """

    is_closed: bool = False
    _outputs: dict[tuple[str, int], RequestOutput] = field(default_factory=dict)
    _waiter: asyncio.Future[None] | None = None
    _last_taken: float = field(default_factory=time.monotonic)

    def push(self, output: RequestOutput) -> None:
        key = (output.request_id, output.index)
        if key in self._outputs:
            merge(self._outputs[key], output)
        else:
            self._outputs[key] = output
        self.wake()

    def wake(self) -> None:
        """Makes a waiting `take` return, even without outputs."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Makes `take` return what is left, and then nothing without waiting."""
        self.is_closed = True
        self.wake()

    async def take(self) -> list[RequestOutput]:
        """Waits for outputs; returns all since the last call, one per sample."""
        if not self._outputs and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._last_taken = time.monotonic()
        outputs, self._outputs = list(self._outputs.values()), {}
        return outputs

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def seconds_unread(self, now: float) -> float:
        """Seconds since the consumer last asked for outputs; 0 while it waits for some. `now`: time.monotonic()."""
        return 0.0 if self._waiter is not None else now - self._last_taken


def merge(first: RequestOutput, second: RequestOutput) -> None:
    """Appends `second` to `first`, an earlier output of the same sample."""
    first.new_token_ids += second.new_token_ids
    if second.logprobs is not None:
        first.logprobs = (first.logprobs or []) + second.logprobs
    if second.prompt_logprobs is not None:
        first.prompt_logprobs = (first.prompt_logprobs or []) + second.prompt_logprobs
    first.finished = second.finished
    first.finish_reason = second.finish_reason
    first.num_cached_tokens = second.num_cached_tokens
    first.error = second.error
    first.stop_token_id = second.stop_token_id


@dataclass(slots=True)
class Latencies:
    """Observes the token times of one request in the engine's histograms. Times are seconds of `time.monotonic()`."""

    _histograms: dict[str, Histogram]
    _arrival: float
    _last: dict[int, float] = field(default_factory=dict)

    def tokens_arrived(self, index: int, count: int, now: float) -> None:
        """`count` tokens of sample `index` came together: they share the time since the one before."""
        last = self._last.get(index)
        if last is None:
            self._histograms[TIME_TO_FIRST_TOKEN].observe(now - self._arrival)
        else:
            self._histograms[INTER_TOKEN_LATENCY].observe((now - last) / count, count)
        self._last[index] = now

    def request_ended(self, now: float) -> None:
        self._histograms[REQUEST_LATENCY].observe(now - self._arrival)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request until its last terminal output has been delivered."""

    request_id: str
    open_samples: set[int]
    """Samples that have not ended."""
    collector: RequestOutputCollector = field(default_factory=RequestOutputCollector)
    latencies: Latencies | None = None
    is_submitted: bool = True
    """False in a client until the engine has accepted the request."""
    is_aborted: bool = False


class OutputRouter:
    """Delivers outputs to the collectors of their requests, and aborts requests. Belongs to one asyncio loop.

    An aborted request stays until its terminal outputs have come, so that its id is not used again before. `send_abort`
    is called once per request or sample to abort, with `request_id` and `index` (None: all samples).
    """

    def __init__(self, send_abort: Callable[[str, int | None], None]) -> None:
        self._send_abort = send_abort
        self._live: dict[str, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, live: LiveRequest) -> None:
        """Registers a request. Raises InvalidRequestError if its id is in use."""
        if live.request_id in self._live:
            raise InvalidRequestError(f"request id {live.request_id!r} is in use", param="request_id")
        self._live[live.request_id] = live

    def submitted(self, live: LiveRequest) -> None:
        """The engine has accepted the request. Sends an abort that was asked for before."""
        live.is_submitted = True
        if live.is_aborted and live.open_samples:
            self._send_abort(live.request_id, None)

    def refused(self, live: LiveRequest) -> None:
        """The engine has refused the request: no output will come."""
        live.open_samples.clear()
        self._live.pop(live.request_id, None)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or sample `index` of it. Its terminal outputs still come. Unknown ids: a no-op."""
        live = self._live.get(request_id)
        if live is None or live.is_aborted:
            return
        live.is_aborted = index is None
        if live.is_submitted:
            self._send_abort(request_id, index)

    def abort_all(self, collector: RequestOutputCollector) -> None:
        """Aborts the requests of one collector."""
        for live in list(self._live.values()):
            if live.collector is collector:
                self.abort(live.request_id)

    def abort_unread(self, timeout_s: float) -> None:
        """Aborts the requests whose consumer has not asked for outputs for `timeout_s`."""
        now = time.monotonic()
        for live in list(self._live.values()):
            if live.is_submitted and not live.is_aborted and live.collector.seconds_unread(now) > timeout_s:
                logger.warning("request %s: its output was not read for %g s; aborted", live.request_id, timeout_s)
                self.abort(live.request_id)

    def deliver(self, outputs: list[RequestOutput], now: float) -> None:
        """Delivers the outputs of a step. `now`: time.monotonic() at its end."""
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            if output.new_token_ids and live.latencies is not None:
                live.latencies.tokens_arrived(output.index, len(output.new_token_ids), now)
            if output.finished:
                live.open_samples.discard(output.index)
                if not live.open_samples:
                    del self._live[output.request_id]
                    if live.latencies is not None:
                        live.latencies.request_ended(now)
            live.collector.push(output)

    def fail_all(self, error: MinivllmError) -> None:
        """Ends every open sample with `error`: no more outputs will come."""
        failed, self._live = self._live, {}
        for request_id, live in failed.items():
            for index in sorted(live.open_samples):
                live.collector.push(
                    RequestOutput(request_id, finished=True, finish_reason=FinishReason.ERROR, index=index, error=error)
                )
            live.open_samples.clear()


@dataclass(frozen=True, slots=True)
class RequestStream:
    """The outputs of one submitted request, for one consumer on the router's asyncio loop."""

    _router: OutputRouter
    _live: LiveRequest

    async def take(self) -> list[RequestOutput]:
        """Waits for outputs; returns all since the last call, one per sample. Empty once every sample has ended."""
        if self._live.collector.is_empty and not self._live.open_samples:
            return []
        return await self._live.collector.take()

    def close(self) -> None:
        """Aborts the request if it still runs. May be called again."""
        if self._live.open_samples:
            self._router.abort(self._live.request_id)
