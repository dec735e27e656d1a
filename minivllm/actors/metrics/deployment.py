"""Metrics deployment: what the engine last said, and how the block counts got there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from minivllm.actors.metrics.prometheus import render_prometheus
from minivllm.actors.process import use_batch_cpu_policy
from minivllm.actors.transport.messages import EngineSnapshot


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Block counts and cumulative block-admission rejections at one moment (seconds since the epoch)."""

    time: float
    engine_id: str
    num_free_blocks: int
    num_used_blocks: int
    num_total_blocks: int
    num_running: int
    num_waiting: int
    rejections: dict[str, int] = field(default_factory=dict)


class MetricsStore:
    """The newest snapshot and a bounded history. It holds nothing that the engine does not tell it again: counters are
    the engine's, cumulative, and come with every snapshot, so a new store is complete after the first one.

    Args:
        history_size: points kept. A flat stretch takes two points, however long it lasts.
    """

    def __init__(self, history_size: int) -> None:
        self._current: EngineSnapshot | None = None
        self._history: deque[HistoryPoint] = deque(maxlen=history_size)

    def record(self, snapshot: EngineSnapshot) -> None:
        """Takes a snapshot, unless it is older than what is known, of this engine or of the one before."""
        current = self._current
        if current is not None:
            if snapshot.engine_id == current.engine_id and snapshot.number <= current.number:
                return
            if snapshot.engine_id != current.engine_id and snapshot.started_at < current.started_at:
                return
        self._current = snapshot
        self._add_point(snapshot)

    def current(self) -> EngineSnapshot | None:
        return self._current

    def history(self, last: int | None = None) -> list[HistoryPoint]:
        """The last points, oldest first."""
        points = list(self._history)
        return points if last is None else points[max(0, len(points) - last) :]

    def _add_point(self, snapshot: EngineSnapshot) -> None:
        stats = snapshot.stats
        point = HistoryPoint(
            time=snapshot.time,
            engine_id=snapshot.engine_id,
            num_free_blocks=stats.num_free_blocks,
            num_used_blocks=stats.num_used_blocks,
            num_total_blocks=stats.num_total_blocks,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            rejections=dict(stats.rejections),
        )
        history = self._history
        if len(history) >= 2 and _is_same(point, history[-1]) and _is_same(point, history[-2]):
            history[-1] = point
        else:
            history.append(point)


def _is_same(point: HistoryPoint, other: HistoryPoint) -> bool:
    return replace(other, time=point.time) == point


class Metrics:
    """The store as an actor. The engine tells it of every change; anybody may ask.

    Args:
        history_size: see MetricsStore.
    """

    def __init__(self, history_size: int) -> None:
        use_batch_cpu_policy()
        self._store = MetricsStore(history_size)

    async def record(self, snapshot: EngineSnapshot) -> None:
        self._store.record(snapshot)

    async def current(self) -> EngineSnapshot | None:
        """The newest snapshot; None before the engine has sent one."""
        return self._store.current()

    async def history(self, last: int | None = None) -> list[HistoryPoint]:
        """Timestamped block counts and cumulative rejections by reason, oldest first; only the `last` ones if given."""
        return self._store.history(last)

    async def prometheus(self) -> str:
        """The newest snapshot as Prometheus text."""
        return render_prometheus(self._store.current())
