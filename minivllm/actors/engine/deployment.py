"""Engine deployment: one replica, which owns the model, the scheduler and the KV pool.

A client opens a channel: one stream that carries the outputs of all its requests, one message per step. Outputs that
the client has not read yet are merged.

    client                                       engine
    connect(channel_id)          ------------->  the settings in force
                                 <-------------  outputs, and settings when they change, until either side ends it
    submit(channel_id, request)  ------------->  None, or the error that refuses the request
    abort(request_id, index)     ------------->  acknowledges; the terminal outputs come over the channel

A client that ends its channel, or dies, has its requests aborted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import minivllm
from minivllm.actors.config import LiveSettings
from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.metrics.publisher import publish_snapshots
from minivllm.actors.process import freeze_gc, log_to_stderr
from minivllm.actors.transport.messages import ChannelClosedError, EngineInfo
from minivllm.actors.transport.output_router import RequestOutputCollector
from minivllm.core.config import EngineConfig
from minivllm.core.errors import MinivllmError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from minivllm.actors.transport.messages import ChannelMessage, EngineSnapshot, GenerateRequest
    from minivllm.core.engine import LLMEngine
    from minivllm.core.kv_cache.block_manager import BlockOwner

logger = logging.getLogger("minivllm.engine")

GIL_SWITCH_INTERVAL_S = 0.0005
"""How long the asyncio thread may keep the GIL while the step thread waits for it. Python's 5 ms is a large part of a
step."""


def load_engine(config: EngineConfig) -> LLMEngine:
    """Loads the model and warms it up."""
    from minivllm.core.engine import LLMEngine
    from minivllm.core.worker.model_runner import build_model_runner
    from minivllm.core.worker.warm_up import warm_up

    runner = build_model_runner(config)
    engine = LLMEngine(config, runner)
    warm_up(runner, engine.scheduler.config.max_num_batched_tokens)
    freeze_gc()
    return engine


class Engine:
    """Token ids in, token ids out. `EngineLoop` describes its two threads; `build_engine` runs in the step thread.

    `settings` are the live settings while there is no `user_config`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it: its loop stays responsive while the model loads
        self,
        config: EngineConfig,
        settings: LiveSettings,
        metrics: DeploymentHandle[Any],
        build_engine: Callable[[EngineConfig], LLMEngine],
    ) -> None:
        log_to_stderr()
        sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
        started = time.monotonic()
        self._metrics = metrics.options(_by_reference=False)
        self._default_settings = settings
        self._channels: dict[str, RequestOutputCollector] = {}
        changed = asyncio.Event()
        self.loop = EngineLoop(
            partial(build_engine, config), settings, on_change=changed.set, on_death=self._close_channels
        )
        await self.loop.start()
        self._info = await self.loop.call(self._describe)
        publishing = publish_snapshots(self.loop.last_snapshot, changed, self._send_snapshot)
        self._publishing = asyncio.create_task(publishing)
        info, seconds = self._info, time.monotonic() - started
        sizes = f"{info.num_blocks} blocks of {info.block_size} tokens, context of {info.max_model_len} tokens"
        logger.info("engine %s ready in %.1f s: %s, %s", info.engine_id, seconds, info.model, sizes)

    # ---- requests ----

    async def connect(self, channel_id: str) -> AsyncGenerator[ChannelMessage, None]:
        """Opens a channel. It ends with the engine; when the client ends it, the client's requests are aborted."""
        collector = self._channels[channel_id] = RequestOutputCollector(is_closed=self.loop.state.is_dead)
        sent = None
        try:
            while not (collector.is_closed and collector.is_empty):
                if sent is not self.loop.state.settings:
                    sent = self.loop.state.settings
                    yield sent
                if outputs := await collector.take():
                    yield outputs
        finally:
            del self._channels[channel_id]
            collector.close()
            self.loop.router.abort_all(collector)

    async def submit(self, channel_id: str, request: GenerateRequest) -> MinivllmError | None:
        """Accepts a request whose outputs go to the channel, or returns the error that refuses it.

        Serve logs every exception that a method raises with its traceback, so a client's mistake is returned.
        """
        collector = self._channels.get(channel_id)
        if collector is None:
            return ChannelClosedError("the engine does not know this channel: connect again")
        try:
            await self.loop.submit(request, collector)
        except MinivllmError as refusal:
            return refusal
        return None

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its samples; its terminal output still comes. Unknown ids: a no-op."""
        self.loop.router.abort(request_id, index)

    async def count_never_fits(self) -> None:
        """Counts a prompt that the ingress refused because it can never fit."""
        await self.loop.call(lambda engine: engine.scheduler.count_never_fits())

    # ---- questions ----

    async def info(self) -> EngineInfo:
        return self._info

    async def stats(self) -> EngineSnapshot:
        """Returns a snapshot taken now, between two steps."""
        return await self.loop.snapshot()

    async def owners(self) -> list[BlockOwner]:
        """Returns for each block whether it is free, owned or cached, and by which requests."""
        return await self.loop.call(lambda engine: engine.block_manager.owners())

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns False and changes nothing while a sequence uses a cached block."""
        return await self.loop.call(lambda engine: engine.reset_prefix_cache())

    # ---- Serve's hooks ----

    async def check_health(self) -> None:
        self.loop.check_health()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Applies a `user_config`. Serve calls it when `user_config` changes.

        A mistake is logged and changes nothing. If it were raised, Serve would stop this engine and each replacement.
        """
        try:
            settings = LiveSettings.model_validate(self._default_settings.model_dump() | user_config)
        except ValidationError as error:
            logger.error("user_config is not applied, the settings stay as they were: %s", error)
            return
        await self.loop.apply(settings)
        for collector in self._channels.values():
            collector.wake()
        logger.info("settings now: %s", settings)

    def __del__(self) -> None:
        if hasattr(self, "_publishing"):
            self._publishing.cancel()
        if hasattr(self, "loop"):
            self.loop.stop()

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
            engine_id=self.loop.state.engine_id,
            started_at=self.loop.state.started_at,
            generation_defaults=dict(runner.generation_defaults),
        )

    def _close_channels(self) -> None:
        for collector in self._channels.values():
            collector.close()

    async def _send_snapshot(self, snapshot: EngineSnapshot) -> None:
        response = self._metrics.record.remote(snapshot)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
