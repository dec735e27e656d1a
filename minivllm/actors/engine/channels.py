"""Channels: the engine's side of its connections to clients. One stream for each carries the outputs of all it asked.

A step brings news for every running request. Sent request by request they would cost a message each; a channel sends
what a step brought for one client as one message, and what the client has not taken is merged.

    client                                         engine
    connect(channel)            ----------------->  greets with its EngineInfo
                                <-----------------  lists of outputs, as long as the client holds the stream
    submit(channel, request)    ----------------->  None, or why it is refused
    abort(request_id)           ----------------->
    keep(channel, request_ids)  ----------------->  aborts what the client does not know any more;
                                                    the consumer_timeout_s in force
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.transport.collector import RequestOutputCollector
from minivllm.actors.transport.messages import ChannelClosedError, EngineInfo, GenerateRequest
from minivllm.core.errors import EngineDeadError, MinivllmError
from minivllm.core.outputs import RequestOutput

ChannelMessage = EngineInfo | list[RequestOutput] | MinivllmError


@dataclass(slots=True)
class _Channel:
    collector: RequestOutputCollector = field(default_factory=RequestOutputCollector)
    missed: set[str] = field(default_factory=set)
    """Requests that the client's last `keep` did not name."""


class Channels:
    """All channels of one engine. Refusals are returned, not raised: Serve logs every exception with its traceback,
    and a client's mistake is not worth that."""

    def __init__(self, loop: EngineLoop, info: EngineInfo) -> None:
        self._loop = loop
        self._info = info
        self._channels: dict[str, _Channel] = {}
        loop.on_death = self._wake_all

    async def connect(self, channel_id: str) -> AsyncGenerator[ChannelMessage, None]:
        """The stream of one client. It ends with the engine; when the client ends it, its requests are aborted."""
        if self._loop.has_died():
            yield EngineDeadError("the engine has failed and is being replaced")
            return
        channel = _Channel()
        self._channels[channel_id] = channel
        try:
            yield self._info
            while not self._loop.has_died() or not channel.collector.is_empty:
                yield await channel.collector.take()
        finally:
            del self._channels[channel_id]
            self._loop.router.discard_all(channel.collector)

    async def submit(self, channel_id: str, request: GenerateRequest) -> MinivllmError | None:
        """Takes a request whose outputs go to the channel; or says why not."""
        channel = self._channels.get(channel_id)
        if channel is None:
            return ChannelClosedError("the engine does not know this channel: connect anew")
        try:
            await self._loop.submit(request, channel.collector)
        except MinivllmError as refusal:
            return refusal
        return None

    def keep(self, channel_id: str, request_ids: list[str]) -> float:
        """The client names the requests that it still waits for. Others of its channel are aborted, in case an abort
        was lost: the second time that they are missing, since the first list may be older than the request.

        Returns `consumer_timeout_s`, which the client has to watch over: it may change while the engine runs.
        """
        channel = self._channels.get(channel_id)
        if channel is not None:
            router = self._loop.router
            missing = set(router.request_ids(channel.collector)).difference(request_ids)
            for request_id in missing & channel.missed:
                router.abort(request_id)
            channel.missed = missing
        return self._loop.consumer_timeout_s

    def _wake_all(self) -> None:
        for channel in self._channels.values():
            channel.collector.wake()
