"""SnapshotPublisher: sends the engine's snapshots to the Metrics actor. The engine never waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from minivllm.actors.transport.messages import EngineSnapshot

logger = logging.getLogger("minivllm.engine")


class SnapshotPublisher:
    """Sends snapshots one at a time. While one is being sent, only the newest is kept.

    A slow or dead receiver costs nothing. One that comes back has complete totals after the next heartbeat, because
    counters are cumulative.

    Args:
        send: delivers one snapshot; may fail or hang.
        heartbeat_s: longest time without a snapshot.
        timeout_s: a delivery that takes longer is cancelled.
    """

    def __init__(
        self,
        send: Callable[[EngineSnapshot], Awaitable[None]],
        *,
        heartbeat_s: float = 1.0,
        timeout_s: float = 5.0,
    ) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._has_new = asyncio.Event()
        self._newest: EngineSnapshot | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, latest: Callable[[], EngineSnapshot]) -> None:
        """`latest` makes a snapshot for the heartbeat."""
        self._task = asyncio.get_running_loop().create_task(self._send_forever(latest))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def publish(self, snapshot: EngineSnapshot) -> None:
        self._newest = snapshot
        self._has_new.set()

    async def _send_forever(self, latest: Callable[[], EngineSnapshot]) -> None:
        is_failing = False
        while True:
            try:
                await asyncio.wait_for(self._has_new.wait(), self._heartbeat_s)
            except TimeoutError:
                self._newest = latest()
            self._has_new.clear()
            snapshot, self._newest = self._newest, None
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
