"""Decides per step which sequences run and how many tokens each computes. No torch."""

from minivllm.core.scheduler.output import ScheduledSequence, SchedulerOutput
from minivllm.core.scheduler.scheduler import Scheduler

__all__ = ["ScheduledSequence", "Scheduler", "SchedulerOutput"]
