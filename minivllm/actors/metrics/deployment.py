"""Metrics deployment: the engine's newest snapshot and the history of its block counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

from minivllm.actors.metrics.prometheus import render_prometheus
from minivllm.actors.process import use_batch_cpu_policy
from minivllm.actors.transport.messages import EngineSnapshot


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Block counts and cumulative block-admission rejections at one moment (seconds since the epoch)."""

    time: float = field(compare=False)
    engine_id: str
    num_free_blocks: int
    num_used_blocks: int
    num_total_blocks: int
    num_running: int
    num_waiting: int
    rejections: dict[str, int]

    @classmethod
    def of(cls, snapshot: EngineSnapshot) -> HistoryPoint:
        names = [one.name for one in fields(cls) if hasattr(snapshot.stats, one.name)]
        return cls(snapshot.time, snapshot.engine_id, **{name: getattr(snapshot.stats, name) for name in names})


class Metrics:
    """The newest snapshot and a history of `history_size` points. A stretch without changes takes two points.

    Every snapshot has the engine's cumulative counters, so that a new actor is complete after the first one.
    """

    def __init__(self, history_size: int) -> None:
        use_batch_cpu_policy()
        self._current: EngineSnapshot | None = None
        self._history: deque[HistoryPoint] = deque(maxlen=history_size)

    async def record(self, snapshot: EngineSnapshot) -> None:
        """Stores a snapshot, unless a newer one of this engine, or one of a newer engine, is known."""
        current = self._current
        if current is not None:
            if snapshot.engine_id == current.engine_id and snapshot.number <= current.number:
                return
            if snapshot.engine_id != current.engine_id and snapshot.started_at < current.started_at:
                return
        self._current = snapshot
        point, history = HistoryPoint.of(snapshot), self._history
        if len(history) >= 2 and history[-2] == history[-1] == point:
            history.pop()
        history.append(point)

    async def current(self) -> EngineSnapshot | None:
        """Returns the newest snapshot; None before the engine has sent one."""
        return self._current

    async def history(self, last: int | None = None) -> list[HistoryPoint]:
        """Returns block counts and cumulative rejections by reason, oldest first; only the `last` points if given."""
        points = list(self._history)
        return points if last is None else points[max(0, len(points) - last) :]

    async def prometheus(self) -> str:
        """Returns the newest snapshot as Prometheus text."""
        return render_prometheus(self._current)
