"""OutputRouter: who gets the outputs of which request. The engine has one, and so has each of its clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from minivllm.actors.transport.collector import RequestOutputCollector
from minivllm.actors.transport.latencies import Latencies
from minivllm.actors.transport.messages import GenerateRequest
from minivllm.core.errors import InvalidRequestError, MinivllmError
from minivllm.core.outputs import RequestOutput
from minivllm.core.sequence import FinishReason

logger = logging.getLogger("minivllm.engine")


@dataclass(slots=True)
class _LiveRequest:
    collector: RequestOutputCollector
    open_samples: set[int]
    latencies: Latencies | None
    is_aborted: bool = False


class OutputRouter:
    """The requests under way, from before they are submitted until the last terminal output has been handed on.

    An aborted request stays until its terminal outputs have come: its id is in use until then, and nobody who takes
    the same id again can receive them. Belongs to one asyncio loop.

    Args:
        send_abort: tells the engine, once for each request or sample that is to end early.
    """

    def __init__(self, send_abort: Callable[[str, int | None], None]) -> None:
        self._send_abort = send_abort
        self._live: dict[str, _LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: GenerateRequest) -> RequestStream:
        """Returns the stream of a request that is about to be submitted. Raises what `add` raises."""
        collector = RequestOutputCollector()
        self.add(request, collector)
        return RequestStream(self, request.request_id, collector)

    def add(
        self, request: GenerateRequest, collector: RequestOutputCollector, latencies: Latencies | None = None
    ) -> None:
        """Routes the outputs of this request to `collector`. Raises InvalidRequestError if the id is in use."""
        request_id = request.request_id
        if request_id in self._live:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        self._live[request_id] = _LiveRequest(collector, set(range(request.sampling_params.n)), latencies)

    def forget(self, request_id: str) -> None:
        """The request was refused: no output will come."""
        self._live.pop(request_id, None)

    def has_ended(self, request_id: str, collector: RequestOutputCollector) -> bool:
        """Whether all outputs of the request have reached its collector."""
        live = self._live.get(request_id)
        return live is None or live.collector is not collector

    def discard(self, request_id: str, collector: RequestOutputCollector) -> None:
        """The consumer is gone: aborts the request if it still runs."""
        if not self.has_ended(request_id, collector):
            self.abort(request_id)

    def discard_all(self, collector: RequestOutputCollector) -> None:
        for request_id in self.request_ids(collector):
            self.abort(request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or sample `index` of it, early. Its terminal outputs still come. Unknown ids: a no-op."""
        live = self._live.get(request_id)
        if live is None or live.is_aborted:
            return
        if index is None:
            live.is_aborted = True
        self._send_abort(request_id, index)

    def abort_unpolled(self, timeout_s: float) -> None:
        """The lease: ends the requests whose consumer has not asked for outputs for so long."""
        now = time.monotonic()
        for request_id, live in list(self._live.items()):
            if not live.is_aborted and live.collector.seconds_unpolled(now) > timeout_s:
                logger.warning("request %s: nobody has asked for its output for %g s; aborted", request_id, timeout_s)
                self.abort(request_id)

    def request_ids(self, collector: RequestOutputCollector | None = None) -> list[str]:
        """Of the requests that have a consumer; only those of one collector if given."""
        return [
            request_id
            for request_id, live in self._live.items()
            if not live.is_aborted and (collector is None or live.collector is collector)
        ]

    def deliver(self, outputs: list[RequestOutput], now: float) -> None:
        """Hands outputs on. `now`: time.monotonic() when they were made."""
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
        """No more outputs will come: every sample still open ends with `error`."""
        failed, self._live = self._live, {}
        for request_id, live in failed.items():
            for index in sorted(live.open_samples):
                live.collector.push(
                    RequestOutput(request_id, finished=True, finish_reason=FinishReason.ERROR, index=index, error=error)
                )


class RequestStream:
    """The outputs of one submitted request, and the way to end it. One consumer, on the router's asyncio loop."""

    __slots__ = ("_collector", "_request_id", "_router")

    def __init__(self, router: OutputRouter, request_id: str, collector: RequestOutputCollector) -> None:
        self._router = router
        self._request_id = request_id
        self._collector = collector

    async def take(self) -> list[RequestOutput]:
        """Waits for outputs; returns all since the last call, one per sample. Empty once every sample has ended."""
        if self._collector.is_empty and self._router.has_ended(self._request_id, self._collector):
            return []
        return await self._collector.take()

    def close(self) -> None:
        """Aborts the request if it still runs. May be called again."""
        self._router.discard(self._request_id, self._collector)
