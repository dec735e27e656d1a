"""Decides per step which sequences run and how many tokens each computes. No torch."""

from minivllm.core.scheduler.output import ScheduledSequence, ScheduledStep
from minivllm.core.scheduler.scheduler import Scheduler

__all__ = ["ScheduledSequence", "ScheduledStep", "Scheduler"]
