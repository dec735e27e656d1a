"""EngineLoop: one thread that owns the LLMEngine, and the asyncio side that passes messages to it and back.

    asyncio loop                                       step thread
    submit, abort, stats, owners ...  -- inbox -->     between two steps: do what the inbox says
    collectors, futures               <-- _deliver --  once per step: outputs, answers, now and then a snapshot

The thread alone touches the engine; everything else here belongs to the loop, so there is not one lock. No Ray: the
deployment around it is in `deployment.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.actors.process import use_default_cpu_policy
from minivllm.actors.transport.collector import RequestOutputCollector
from minivllm.actors.transport.latencies import Latencies
from minivllm.actors.transport.messages import EngineSnapshot, GenerateRequest
from minivllm.actors.transport.output_router import OutputRouter
from minivllm.core.errors import EngineDeadError
from minivllm.core.outputs import RequestOutput
from minivllm.core.stats import EngineStats

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine
    from minivllm.core.sampling_params import SamplingParams

logger = logging.getLogger("minivllm.engine")

T = TypeVar("T")
Work = Callable[["LLMEngine"], Any]
Answer = Callable[[Any, BaseException | None], None]


class EngineLoop:
    """Runs an engine in a thread of its own. Create it, `start` it and use it on one asyncio loop.

    Args:
        build_engine: called in the thread; loads the model. What it raises, `start` raises.
        consumer_timeout_s: a request whose outputs nobody asks for so long is aborted.
        stall_timeout_s: `check_health` fails when one step takes longer.
        on_snapshot: called on the loop at most once per `snapshot_interval_s`, and once when the engine becomes idle.
    """

    def __init__(
        self,
        build_engine: Callable[[], LLMEngine],
        *,
        consumer_timeout_s: float = 60.0,
        stall_timeout_s: float = 300.0,
        on_snapshot: Callable[[EngineSnapshot], None] | None = None,
        snapshot_interval_s: float = 0.25,
    ) -> None:
        self.consumer_timeout_s = consumer_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.engine_id = uuid.uuid4().hex[:12]
        self.started_at = 0.0
        self.last_stats = EngineStats()
        self.on_death: Callable[[], None] | None = None
        self._build_engine = build_engine
        self._precompile: Callable[[SamplingParams], None] | None = None
        self._on_snapshot = on_snapshot
        self._snapshot_interval_s = snapshot_interval_s
        self._snapshot_number = 0
        self._router = OutputRouter(self._send_abort)
        self._latencies = Latencies.histograms()
        self._death: EngineDeadError | None = None
        self._lease_timer: asyncio.TimerHandle | None = None
        # Shared with the thread.
        self._inbox: queue.SimpleQueue[tuple[Work, Answer | None]] = queue.SimpleQueue()
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
        self._inbox.put((_nothing, None))

    async def submit(self, request: GenerateRequest, collector: RequestOutputCollector) -> None:
        """Hands a request to the engine; its outputs go to `collector`.

        A refusal is raised: InvalidRequestError (also for the id of a live request), NeverFitsError,
        EngineOverloadedError, EngineDeadError. A caller that is cancelled here has to `discard` the request in the
        router: the engine may still accept it.
        """
        self._raise_if_dead()
        if self._precompile is not None and request.sampling_params.structured_output is not None:
            await asyncio.to_thread(self._precompile, request.sampling_params)  # no stream waits for a slow grammar
        now = time.monotonic()
        self._router.add(request, collector, Latencies(self._latencies, now))
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._inbox.put((partial(_add, request, now), partial(self._on_added, request.request_id, accepted)))
        self._watch_leases()
        await accepted

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or sample `index` of it, between two steps. Its terminal outputs still come."""
        self._router.abort(request_id, index)

    def has_died(self) -> bool:
        return self._death is not None

    @property
    def router(self) -> OutputRouter:
        return self._router

    async def call(self, work: Callable[[LLMEngine], T]) -> T:
        """Runs `work(engine)` in the thread, between two steps. Raises what it raises."""
        self._raise_if_dead()
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put((work, partial(_settle, future)))
        return await future

    async def snapshot(self) -> EngineSnapshot:
        """Fresh, taken between two steps; of a dead engine, the last."""
        with contextlib.suppress(EngineDeadError):
            self.last_stats = await self.call(_stats)
        return self._make_snapshot()

    def last_snapshot(self) -> EngineSnapshot:
        return self._make_snapshot()

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine failed, its thread ended, or a step takes longer than stall_timeout_s.

        Looks at progress only: a long queue or a slow model is not a fault. An engine found stuck is given up: its
        requests end with the error, even if the step should come back.
        """
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > self.stall_timeout_s:
            self._is_stopping = True
            self._on_death(EngineDeadError(f"the engine has been in one step for over {self.stall_timeout_s:g} s"))
        self._raise_if_dead()

    def _send_abort(self, request_id: str, index: int | None) -> None:
        self._inbox.put((partial(_abort, request_id, index), None))

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            # A new one each time: an exception that is raised again and again drags all its tracebacks along.
            raise EngineDeadError(self._death.message)

    def _make_snapshot(self) -> EngineSnapshot:
        self._snapshot_number += 1
        return EngineSnapshot(
            stats=self.last_stats,
            engine_id=self.engine_id,
            number=self._snapshot_number,
            time=time.time(),
            started_at=self.started_at,
            is_dead=self._death is not None,
            histograms={name: histogram.copy() for name, histogram in self._latencies.items()},
        )

    def _on_added(self, request_id: str, accepted: asyncio.Future[None], _: Any, error: BaseException | None) -> None:
        if error is not None:
            self._router.forget(request_id)
        _settle(accepted, None, error)

    def _deliver(
        self,
        now: float,
        outputs: list[RequestOutput],
        answers: list[tuple[Answer, Any, BaseException | None]],
        stats: EngineStats | None,
        death: EngineDeadError | None,
    ) -> None:
        """The one message a step: all it brought. `now`: time.monotonic() when the step was over."""
        for answer, result, error in answers:
            answer(result, error)
        self._router.deliver(outputs, now)
        if stats is not None:
            self.last_stats = stats
            if self._on_snapshot is not None:
                self._on_snapshot(self._make_snapshot())
        if death is not None:
            self._on_death(death)

    def _on_death(self, error: EngineDeadError) -> None:
        """The thread has ended, or is given up. Whatever still waits for it is told so."""
        if self._death is not None:
            return
        self._death = error
        while not self._inbox.empty():
            _, answer = self._inbox.get_nowait()
            if answer is not None:
                answer(None, error)
        self._router.fail_all(error)
        if self.on_death is not None:
            self.on_death()
        if self._on_snapshot is not None:
            self._on_snapshot(self._make_snapshot())

    def _watch_leases(self) -> None:
        if self._lease_timer is None:
            self._lease_timer = self._loop.call_later(min(1.0, self.consumer_timeout_s / 4), self._check_leases)

    def _check_leases(self) -> None:
        self._lease_timer = None
        self._router.abort_unpolled(self.consumer_timeout_s)
        if len(self._router):
            self._watch_leases()

    # ---- step thread ----

    def _run(self) -> None:
        use_default_cpu_policy()
        try:
            engine = self._build_engine()
            self._precompile = getattr(engine.model_runner, "precompile", None)
        except BaseException as error:
            self._post(_settle, self._ready, None, error)
            return
        self.started_at = time.time()
        self._post(_settle, self._ready, None, None)
        try:
            self._step_forever(engine)
            death = EngineDeadError("the engine was stopped")
        except BaseException as error:
            logger.exception("the engine failed")
            death = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
        self._busy_since = None
        self._post(self._on_death, death)

    def _step_forever(self, engine: LLMEngine) -> None:
        outputs: list[RequestOutput] = []
        idle_is_reported = False
        next_snapshot = 0.0
        while not self._is_stopping:
            is_idle = not engine.has_unfinished_requests()
            answers = self._read_inbox(engine, block=is_idle and idle_is_reported)
            now = time.monotonic()
            is_idle = not engine.has_unfinished_requests()
            stats = None
            if now >= next_snapshot or (is_idle and not idle_is_reported):
                stats = engine.stats()
                next_snapshot = now + self._snapshot_interval_s
            death = EngineDeadError("the engine is dead: a forward pass failed") if engine.is_dead else None
            if outputs or answers or stats is not None or death is not None:
                self._post(self._deliver, now, outputs, answers, stats, death)
            if death is not None:
                return
            idle_is_reported = is_idle
            outputs = [] if is_idle else engine.step()

    def _read_inbox(self, engine: LLMEngine, *, block: bool) -> list[tuple[Answer, Any, BaseException | None]]:
        """Does all that the inbox says. With `block`, sleeps until it says something."""
        answers: list[tuple[Answer, Any, BaseException | None]] = []
        while True:
            try:
                if block:
                    self._busy_since = None
                work, answer = self._inbox.get(block)
                block = False
                self._busy_since = time.monotonic()
            except queue.Empty:
                self._busy_since = time.monotonic()
                return answers
            result, error = None, None
            try:
                result = work(engine)
            except Exception as raised:
                error = raised
            if answer is not None:
                answers.append((answer, result, error))
            elif error is not None:
                logger.error("a message to the engine failed", exc_info=error)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        # A loop that is closed belongs to a process that is going down.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _nothing(engine: LLMEngine) -> None:
    """Wakes the thread."""


def _add(request: GenerateRequest, arrival_time: float, engine: LLMEngine) -> None:
    engine.add_request(
        request.request_id,
        request.prompt_token_ids,
        request.sampling_params,
        priority=request.priority,
        cache_salt=request.cache_salt,
        arrival_time=arrival_time,
    )


def _abort(request_id: str, index: int | None, engine: LLMEngine) -> None:
    engine.abort_request(request_id, index)


def _stats(engine: LLMEngine) -> EngineStats:
    return engine.stats()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
