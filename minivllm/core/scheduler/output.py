"""SchedulerOutput: what one step computes; StepPlan: the step while it is being scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from minivllm.core.kv_cache.block_manager import Slot
from minivllm.core.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Tokens `start .. end` of a sequence are computed in this step; with `samples`, one is sampled after them."""

    sequence: Sequence
    start: int
    end: int
    samples: bool
    slot: Slot | None = None  # of the one token of a decode, if the block manager validates


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes. Block tables cover every `end` and do not change until `update_from_output`."""

    sequences: tuple[ScheduledSequence, ...]
    num_tokens: int
    slot_mapping: list[int] | None = None  # of all tokens, if the block manager validates: the runner compares its own


class StepPlan:
    """The sequences scheduled so far, and the tokens left of the budget."""

    __slots__ = ("budget", "scheduled", "token_budget")

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.budget = token_budget
        self.scheduled: list[ScheduledSequence] = []

    def add(self, sequence: Sequence, end: int, slot: Slot | None = None) -> None:
        """Schedules the tokens from `num_computed_tokens` to `end`, which the block table covers."""
        start = sequence.num_computed_tokens
        samples = end == sequence.num_tokens and sequence.max_output_tokens != 0
        self.scheduled.append(ScheduledSequence(sequence, start, end, samples, slot))
        self.budget -= end - start

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that is preempted after it was scheduled; a no-op for others."""
        for scheduled in [one for one in self.scheduled if one.sequence is sequence]:
            self.scheduled.remove(scheduled)
            self.budget += scheduled.end - scheduled.start

    def freeze(self, slot_mapping: list[int] | None) -> SchedulerOutput:
        return SchedulerOutput(tuple(self.scheduled), self.token_budget - self.budget, slot_mapping)
