"""Fakes for the tests in this folder: a paced runner without a model, and Serve handles without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

from minivllm.actors.config import LiveSettings
from minivllm.actors.engine.deployment import Engine
from minivllm.actors.engine.loop import EngineLoop
from minivllm.actors.transport.messages import EngineSnapshot
from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import MinivllmError
from minivllm.core.outputs import SampleResult
from minivllm.core.sampling_params import SamplingParams
from tests.core.fakes import FakeRunner

BLOCK_SIZE = 4


class PacedRunner(FakeRunner):
    """Takes `step_s` per step; steps block while `gate` is cleared."""

    generation_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, num_blocks: int = 64, *, step_s: float = 0.001) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()

    def precompile(self, sampling_params: SamplingParams) -> None: ...

    def execute(self, step: Any) -> list[SampleResult]:
        self.gate.wait()
        time.sleep(self.step_s)
        return super().execute(step)


def paced_engine(runner: PacedRunner, **config: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(block_size=BLOCK_SIZE, validate_blocks=True, **config), model_runner=runner)


async def started_loop(runner: PacedRunner, *, settings: LiveSettings | None = None, **config: Any) -> EngineLoop:
    loop = EngineLoop(lambda: paced_engine(runner, **config), settings or LiveSettings())
    await loop.start()
    return loop


async def started_engine(build: Callable[[], LLMEngine], settings: LiveSettings | None = None) -> Engine:
    """Returns the Engine deployment in this process, without Serve around it."""
    engine = Engine.__new__(Engine)
    metrics = LocalHandle(NoMetrics())
    await engine.__init__(EngineConfig(), settings or LiveSettings(), metrics, lambda _: build())  # type: ignore[misc]
    return engine


class NoMetrics:
    """Fakes the Metrics deployment: drops every snapshot."""

    async def record(self, snapshot: EngineSnapshot) -> None: ...


PARENT: ContextVar[str | None] = ContextVar("PARENT", default=None)


class LocalHandle:
    """Fakes a Serve handle: each call runs as a task, delayed by `delays_s`, and fails before or after the
    call when its name is in `lost` or `lost_replies`.

    Tests replace `target` as Serve replaces a replica; None is a replica that does not answer.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.delays_s: dict[str, float] = {}
        self.lost: set[str] = set()
        self.lost_replies: set[str] = set()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.parents: set[str | None] = set()
        """The values of `PARENT`, which fakes Serve's request context, at each call."""

    def options(self, *, stream: bool = False, _by_reference: bool = True) -> LocalHandle:
        return self

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._remote, name))

    def _remote(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, arguments))
        self.parents.add(PARENT.get())
        if name == "connect":
            return LocalStream(self, arguments)
        return asyncio.get_running_loop().create_task(self._answer(name, arguments))

    async def _answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        await asyncio.sleep(self.delays_s.get(name, 0))
        if name in self.lost:
            raise ConnectionError("lost")
        reply = await getattr(self.target, name)(*arguments)
        if name in self.lost_replies:
            raise ConnectionError("lost")
        return reply


class LocalStream:
    """Fakes a DeploymentResponseGenerator: reads ahead of its consumer, as gRPC does, and ends only by `cancel`."""

    def __init__(self, handle: LocalHandle, arguments: tuple[Any, ...]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._pump(handle, arguments))

    async def _pump(self, handle: LocalHandle, arguments: tuple[Any, ...]) -> None:
        try:
            await asyncio.sleep(handle.delays_s.get("connect", 0))
            if handle.target is None:
                await asyncio.Event().wait()
            async with contextlib.aclosing(handle.target.connect(*arguments)) as stream:
                async for message in stream:
                    self._queue.put_nowait(pickle.loads(pickle.dumps(message)))
            self._queue.put_nowait(StopAsyncIteration())
        except asyncio.CancelledError as error:
            self._queue.put_nowait(error)

    def break_off(self) -> None:
        """Breaks the connection, as when the other process dies."""
        self._queue.put_nowait(ConnectionError("reset by peer"))

    async def __anext__(self) -> Any:
        message = await self._queue.get()
        if isinstance(message, BaseException) and not isinstance(message, MinivllmError):
            raise message
        return message

    def cancel(self) -> None:
        self._task.cancel()
