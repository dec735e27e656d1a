"""SnapshotPublisher: keeps the Metrics actor informed and never waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from minivllm.actors.transport.messages import EngineSnapshot

logger = logging.getLogger("minivllm.engine")


class SnapshotPublisher:
    """Sends snapshots one at a time. While one is under way only the newest is kept, so a slow or dead receiver costs
    nothing; one that comes back is told everything at the next heartbeat, since counters are cumulative.

    Args:
        send: delivers one snapshot; may fail, may hang.
        latest: makes a snapshot for the heartbeat.
        heartbeat_s: longest time without a snapshot.
        timeout_s: a delivery that takes longer is given up.
    """

    def __init__(
        self,
        send: Callable[[EngineSnapshot], Awaitable[None]],
        latest: Callable[[], EngineSnapshot],
        *,
        heartbeat_s: float = 1.0,
        timeout_s: float = 5.0,
    ) -> None:
        self._send = send
        self._latest = latest
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._news = asyncio.Event()
        self._waiting: EngineSnapshot | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send_forever())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def publish(self, snapshot: EngineSnapshot) -> None:
        self._waiting = snapshot
        self._news.set()

    async def _send_forever(self) -> None:
        is_failing = False
        while True:
            try:
                await asyncio.wait_for(self._news.wait(), self._heartbeat_s)
            except TimeoutError:
                self._waiting = self._latest()
            self._news.clear()
            snapshot, self._waiting = self._waiting, None
            if snapshot is None:
                continue
            try:
                await asyncio.wait_for(self._send(snapshot), self._timeout_s)
                is_failing = False
            except Exception as error:
                if not is_failing:
                    logger.warning("the Metrics actor does not take snapshots (will retry): %r", error)
                is_failing = True
                await asyncio.sleep(self._heartbeat_s / 2)
