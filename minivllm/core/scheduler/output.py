"""SchedulerOutput: what one step computes, fixed the moment it is decided; and StepPlan, a step in the making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minivllm.core.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Tokens `start .. end` of a sequence are computed in this step; with `samples`, one is sampled after them."""

    sequence: Sequence
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes. Block tables cover every `end` and do not change until `update_from_output`."""

    sequences: tuple[ScheduledSequence, ...]
    num_tokens: int


class StepPlan:
    """Who is in the step so far, and how many tokens of the budget are left."""

    __slots__ = ("budget", "scheduled", "token_budget")

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.budget = token_budget
        self.scheduled: dict[str, ScheduledSequence] = {}

    def put(self, sequence: Sequence, end: int) -> None:
        """Schedules the tokens from `num_computed_tokens` to `end`, for which the table has blocks."""
        start = sequence.num_computed_tokens
        samples = end == sequence.num_tokens and sequence.max_output_tokens != 0
        self.scheduled[sequence.request_id] = ScheduledSequence(sequence, start, end, samples)
        self.budget -= end - start

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out again that was preempted after it had been scheduled."""
        scheduled = self.scheduled.pop(sequence.request_id, None)
        if scheduled is not None:
            self.budget += scheduled.end - scheduled.start

    def drop_ended(self) -> None:
        """Takes out who has ended since: damage found at one sequence can end another that was scheduled before it."""
        for scheduled in list(self.scheduled.values()):
            if scheduled.sequence.is_finished:
                self.drop(scheduled.sequence)

    def freeze(self) -> SchedulerOutput:
        return SchedulerOutput(tuple(self.scheduled.values()), self.token_budget - self.budget)
