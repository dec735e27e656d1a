"""EngineLoop: one thread that owns the LLMEngine, and the asyncio side that passes messages to it and back.

    asyncio loop                                       step thread
    submit, abort, stats, owners ...  -- inbox -->     between two steps: runs the calls in the inbox
    collectors, futures               <-- _deliver --  once per step: outputs, results of calls, snapshots

Only the thread touches the engine; everything else here belongs to the asyncio loop, so there is no lock. Has no Ray:
the deployment around it is in `deployment.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.actors.config import LiveSettings
from minivllm.actors.process import use_default_cpu_policy
from minivllm.actors.transport.messages import EngineSnapshot, GenerateRequest, empty_histograms
from minivllm.actors.transport.output_router import Latencies, LiveRequest, OutputRouter, RequestOutputCollector
from minivllm.core.errors import EngineDeadError
from minivllm.core.outputs import RequestOutput
from minivllm.core.stats import EngineStats

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine

logger = logging.getLogger("minivllm.engine")

SNAPSHOT_WAIT_S = 0.08
"""Health checks and scrapes are answered within 0.1 s, whatever a step takes."""

T = TypeVar("T")
Call = tuple[Callable[["LLMEngine"], Any], asyncio.Future[Any]]
"""What runs in the thread, and the future of its result."""
Result = tuple[asyncio.Future[Any], Any, BaseException | None]


class EngineLoop:
    """Runs an engine in a thread of its own. Create it, `start` it and use it on one asyncio loop.

    Args:
        build_engine: called in the thread. `start` raises its exceptions.
        on_change: called at most once per `snapshot_interval_s`, and once when the engine becomes idle.
        on_death: called once, when the engine has failed or was stopped.
    """

    def __init__(
        self,
        build_engine: Callable[[], LLMEngine],
        settings: LiveSettings,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
        snapshot_interval_s: float = 0.25,
    ) -> None:
        engine_id = uuid.uuid4().hex[:12]
        self.state = EngineSnapshot(EngineStats(), engine_id, histograms=empty_histograms(), settings=settings)
        self.router = OutputRouter(self._send_abort)
        self._build_engine = build_engine
        self._on_change = on_change
        self._on_death = on_death
        self._snapshot_interval_s = snapshot_interval_s
        self._death: EngineDeadError | None = None
        # Shared with the thread.
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._is_stopping = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    # ---- asyncio side ----

    async def start(self) -> None:
        """Builds the engine in its thread; returns when it is ready."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._ready

    def stop(self) -> None:
        """Ends the thread after the step it is in. Live requests end with EngineDeadError."""
        self._is_stopping = True
        self._put(lambda _: None)  # wakes the thread

    async def submit(self, request: GenerateRequest, collector: RequestOutputCollector) -> LiveRequest:
        """Submits a request to the engine; its outputs go to `collector`.

        Raises InvalidRequestError (also for the id of a live request), NeverFitsError, EngineOverloadedError or
        EngineDeadError when the engine refuses it.
        """
        if request.sampling_params.structured_output is not None:
            await asyncio.to_thread(self._precompile, request.sampling_params)  # streams do not wait for a slow grammar
        self._raise_if_dead()
        now = time.monotonic()
        samples = set(range(request.sampling_params.n))
        live = LiveRequest(request.request_id, samples, collector, Latencies(self.state.histograms, now))
        arguments = {one.name: getattr(request, one.name) for one in fields(request)}
        self.router.add(live)
        added = self._put(lambda engine: engine.add_request(**arguments, arrival_time=now))
        added.add_done_callback(lambda _: self.router.refused(live) if added.exception() else None)
        if collector.is_closed:
            self.router.abort(live.request_id)
        await asyncio.shield(added)  # if the caller is cancelled, a refusal still ends the request
        return live

    async def call(self, work: Callable[[LLMEngine], T]) -> T:
        """Runs `work(engine)` in the thread, between two steps. Raises its exceptions."""
        self._raise_if_dead()
        return await self._put(work)

    async def apply(self, settings: LiveSettings) -> None:
        """Puts new settings in force between two steps."""
        limits = settings.model_dump(include={"max_waiting_requests", "max_waiting_tokens"})
        await self.call(lambda engine: engine.apply_settings(**limits))
        self.state.settings = settings

    async def snapshot(self) -> EngineSnapshot:
        """Returns a snapshot taken between two steps; of a dead engine, and during a long step, the last one."""
        with contextlib.suppress(EngineDeadError, TimeoutError):
            self.state.stats = await asyncio.wait_for(self.call(lambda engine: engine.stats()), SNAPSHOT_WAIT_S)
        return self.last_snapshot()

    def last_snapshot(self) -> EngineSnapshot:
        """Returns a snapshot with the statistics known so far."""
        self.state.number += 1
        self.state.time = time.time()
        return copy.deepcopy(self.state)

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine failed, its thread ended, or a step takes longer than stall_timeout_s.

        Looks at progress only: a long queue or a slow model is not a fault. A stuck engine is abandoned: its requests
        end with the error, even if the step returns later.
        """
        busy_since, timeout_s = self._busy_since, self.state.settings.stall_timeout_s
        if busy_since is not None and time.monotonic() - busy_since > timeout_s:
            self._is_stopping = True
            self._die(EngineDeadError(f"the engine has been in one step for over {timeout_s:g} s"))
        self._raise_if_dead()

    def _send_abort(self, request_id: str, index: int | None) -> None:
        self._put(lambda engine: engine.abort_request(request_id, index))

    def _put(self, work: Callable[[LLMEngine], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put((work, future))
        return future

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            # A new exception each time: one that is raised repeatedly collects tracebacks.
            raise EngineDeadError(self._death.message)

    def _deliver(
        self, now: float, outputs: list[RequestOutput], results: list[Result], stats: EngineStats | None, is_dead: bool
    ) -> None:
        """Handles the message of a step: `outputs`, then the results of the calls that followed it.

        `now`: time.monotonic() at the end of the step. `is_dead`: the step failed, so no consumer of its outputs may
        find an engine that still accepts requests.
        """
        self.router.deliver(outputs, now)
        for result in results:
            _settle(*result)
        if stats is not None:
            self.state.stats = stats
            self._on_change()
        if is_dead:
            self._die(EngineDeadError("the engine is dead: a step failed"))

    def _die(self, error: EngineDeadError) -> None:
        """Ends every request and pending call with `error`: the thread has ended or is abandoned."""
        if self._death is not None:
            return
        self._death, self.state.is_dead = error, True
        while not self._inbox.empty():
            _, future = self._inbox.get_nowait()
            _settle(future, None, error)
        self.router.fail_all(error)
        self._on_death()
        self._on_change()

    # ---- step thread ----

    def _run(self) -> None:
        use_default_cpu_policy()
        try:
            engine = self._build_engine()
        except BaseException as error:
            self._post(_settle, self._ready, None, error)
            return
        self._precompile = engine.model_runner.precompile
        self.state.model, self.state.started_at = engine.config.model, time.time()
        self._post(_settle, self._ready, None, None)
        try:
            self._step_forever(engine)
            death = EngineDeadError("the engine was stopped")
        except BaseException as error:
            logger.exception("the engine failed")
            death = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
        self._busy_since = None
        self._post(self._die, death)

    def _step_forever(self, engine: LLMEngine) -> None:
        outputs: list[RequestOutput] = []
        idle_is_reported = False
        next_snapshot = 0.0
        while not self._is_stopping:
            is_idle = not engine.has_unfinished_requests()
            results = self._read_inbox(engine, block=is_idle and idle_is_reported)
            now = time.monotonic()
            is_idle = not engine.has_unfinished_requests()
            stats = None
            if now >= next_snapshot or (is_idle and not idle_is_reported) or engine.is_dead:
                stats = engine.stats()
                next_snapshot = now + self._snapshot_interval_s
            if outputs or results or stats is not None:
                self._post(self._deliver, now, outputs, results, stats, engine.is_dead)
            if engine.is_dead:
                return
            idle_is_reported = is_idle
            outputs = [] if is_idle else engine.step()

    def _read_inbox(self, engine: LLMEngine, *, block: bool) -> list[Result]:
        """Runs all calls in the inbox. With `block`, waits for the first one."""
        results: list[Result] = []
        with contextlib.suppress(queue.Empty):
            while True:
                if block:
                    self._busy_since = None
                work, future = self._inbox.get(block)
                block = False
                self._busy_since = time.monotonic()
                try:
                    results.append((future, work(engine), None))
                except Exception as error:
                    results.append((future, None, error))
        self._busy_since = time.monotonic()
        return results

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop may be closed: its process is then shutting down.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        if isinstance(error, EngineDeadError):
            future.exception()  # marks it as retrieved: an abort is not awaited
