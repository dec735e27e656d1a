"""Engine deployment: one replica, which owns the model, the scheduler and the KV pool."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import minivllm
from minivllm.actors.config import LiveSettings
from minivllm.actors.engine.channels import ChannelMessage, Channels
from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.metrics.publisher import SnapshotPublisher
from minivllm.actors.process import freeze_gc, log_to_stderr
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot, GenerateRequest
from minivllm.core.config import EngineConfig
from minivllm.core.errors import MinivllmError
from minivllm.core.outputs import RequestOutput

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from minivllm.core.engine import LLMEngine
    from minivllm.core.kv_cache.block_manager import BlockOwner

logger = logging.getLogger("minivllm.engine")

GIL_SWITCH_INTERVAL_S = 0.0005
"""The loop's thread may hold the interpreter this long while the step thread waits for it. Python's 5 ms would be a
good part of a step."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The parts of AppArgs that the deployment needs beside the EngineConfig."""

    consumer_timeout_s: float
    stall_timeout_s: float
    snapshot_interval_s: float = 0.25


def load_engine(config: EngineConfig) -> LLMEngine:
    """Loads the model and warms it up."""
    from minivllm.core.engine import LLMEngine
    from minivllm.core.worker.model_runner import build_model_runner
    from minivllm.core.worker.warm_up import warm_up

    runner = build_model_runner(config)
    engine = LLMEngine(config, runner)
    warm_up(runner, engine.scheduler.token_budget)
    freeze_gc()
    return engine


class Engine:
    """Token ids in, token ids out. See `EngineLoop` for who does what in which thread.

    Args:
        config: what to load and how to run it.
        settings: timeouts.
        metrics: the Metrics deployment, or None.
        build_engine: makes the engine from its config. It runs in the step thread.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it: its loop stays responsive while the model loads
        self,
        config: EngineConfig,
        settings: EngineSettings,
        metrics: DeploymentHandle[Any] | None = None,
        build_engine: Callable[[EngineConfig], LLMEngine] = load_engine,
    ) -> None:
        log_to_stderr()
        sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
        self._config = config
        self._settings = settings
        self._metrics = metrics
        started = time.monotonic()
        self._loop = EngineLoop(
            partial(build_engine, config),
            consumer_timeout_s=settings.consumer_timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
            snapshot_interval_s=settings.snapshot_interval_s,
            on_snapshot=self._publish,
        )
        self._publisher = SnapshotPublisher(self._send_snapshot, self._loop.last_snapshot)
        await self._loop.start()
        self._info = await self._loop.call(self._describe)
        self._channels = Channels(self._loop, self._info)
        if metrics is not None:
            self._publisher.start()
        logger.info(
            "engine %s ready in %.1f s: %s, %d blocks of %d tokens, context of %d tokens",
            self._loop.engine_id,
            time.monotonic() - started,
            self._info.model,
            self._info.num_blocks,
            self._info.block_size,
            self._info.max_model_len,
        )

    # ---- requests ----

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[RequestOutput], None]:
        """Streams the outputs of one request; see `EngineLoop.generate`. The request ends with the stream."""
        outputs = self._loop.generate(request)
        try:
            async for merged in outputs:
                yield merged
        finally:
            await outputs.aclose()

    def connect(self, channel_id: str) -> AsyncGenerator[ChannelMessage, None]:
        """Opens a channel, over which all outputs of one client come; see `Channels`. EngineClient uses it."""
        return self._channels.connect(channel_id)

    async def submit(self, channel_id: str, request: GenerateRequest) -> MinivllmError | None:
        """Takes a request for a channel, or says why not."""
        return await self._channels.submit(channel_id, request)

    async def keep(self, channel_id: str, request_ids: list[str]) -> float:
        """Aborts the requests of a channel that its client has twice not named; see `Channels.keep`."""
        return self._channels.keep(channel_id, request_ids)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its samples; its terminal output still comes. An unknown id is no error."""
        self._loop.abort(request_id, index)

    async def count_never_fits(self) -> None:
        """Counts a prompt that was refused on its way here, since it could never fit."""
        await self._loop.call(lambda engine: engine.scheduler.count_never_fits())

    # ---- questions ----

    async def info(self) -> EngineInfo:
        return self._info

    async def stats(self) -> EngineSnapshot:
        """As of now: taken between two steps."""
        snapshot = await self._loop.snapshot()
        snapshot.model = self._info.model
        return snapshot

    async def owners(self) -> list[BlockOwner]:
        """Of each block: whether it is free, owned or cached, and by which requests."""
        return await self._loop.call(lambda engine: engine.block_manager.owners())

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, and nothing changed, while a sequence holds a cached block."""
        return await self._loop.call(lambda engine: engine.reset_prefix_cache())

    # ---- Serve's hooks ----

    async def check_health(self) -> None:
        self._loop.check_health()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Applies LiveSettings; what is not among them is as `args` say. Serve calls it when `user_config` changes.

        A mistake is logged and changes nothing. If it were raised, Serve would stop this engine, and each that follows.
        """
        try:
            live = LiveSettings.model_validate(user_config)
        except ValidationError as error:
            logger.error("user_config is not applied, the settings stay as they were: %s", error)
            return
        self._loop.consumer_timeout_s = live.consumer_timeout_s or self._settings.consumer_timeout_s
        self._loop.stall_timeout_s = live.stall_timeout_s or self._settings.stall_timeout_s
        limits = {
            name: getattr(live if name in live.model_fields_set else self._config, name)
            for name in ("max_waiting_requests", "max_waiting_tokens")
        }
        await self._loop.call(partial(_set_queue_limits, limits))
        timeouts = {name: getattr(self._loop, name) for name in ("consumer_timeout_s", "stall_timeout_s")}
        logger.info("settings now: %s", timeouts | limits)

    def __del__(self) -> None:
        if hasattr(self, "_publisher"):
            self._publisher.stop()
            self._loop.stop()

    # ---- inside ----

    def _describe(self, engine: LLMEngine) -> EngineInfo:
        config, runner = engine.config, engine.model_runner
        return EngineInfo(
            model=config.model,
            max_model_len=config.max_model_len or runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=tuple(sorted(runner.eos_token_ids)),
            block_size=config.block_size,
            num_blocks=engine.block_manager.num_blocks,
            config=config,
            version=minivllm.__version__,
            engine_id=self._loop.engine_id,
            started_at=self._loop.started_at,
            generation_defaults=dict(getattr(runner, "generation_defaults", {})),
        )

    def _publish(self, snapshot: EngineSnapshot) -> None:
        self._publisher.publish(snapshot)

    async def _send_snapshot(self, snapshot: EngineSnapshot) -> None:
        if self._metrics is None:
            return
        snapshot.model = self._info.model
        response = self._metrics.options(_by_reference=False).record.remote(snapshot)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise


def _set_queue_limits(limits: dict[str, int | None], engine: LLMEngine) -> None:
    engine.scheduler.config = engine.scheduler.config.model_copy(update=limits)
