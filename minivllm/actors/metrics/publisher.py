"""publish_snapshots: sends the engine's snapshots to the Metrics actor. The engine never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from minivllm.actors.transport.messages import EngineSnapshot

logger = logging.getLogger("minivllm.engine")


async def publish_snapshots(
    latest: Callable[[], EngineSnapshot],
    changed: asyncio.Event,
    send: Callable[[EngineSnapshot], Awaitable[None]],
    *,
    heartbeat_s: float = 1.0,
    timeout_s: float = 5.0,
) -> NoReturn:
    """Sends the latest snapshot when `changed` is set, and at least once per `heartbeat_s`, one at a time.

    A slow or dead receiver costs nothing: a delivery that takes longer than `timeout_s` is cancelled. One that comes
    back has complete totals after the next heartbeat, because counters are cumulative.
    """
    is_failing = False
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(heartbeat_s):
                await changed.wait()
        changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await send(latest())
            is_failing = False
        except Exception as error:
            if not is_failing:
                logger.warning("the Metrics actor does not take snapshots (will retry): %r", error)
            is_failing = True
            await asyncio.sleep(heartbeat_s / 2)
