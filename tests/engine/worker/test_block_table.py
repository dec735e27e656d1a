"""BlockTable: the rows kept between steps equal the block tables of the sequences."""

from __future__ import annotations

import random

import numpy as np

from minivllm.core.sampling_params import SamplingParams
from minivllm.core.scheduler.scheduler import ScheduledSequence
from minivllm.core.sequence import Sequence
from minivllm.core.worker.block_table import BlockTable

BLOCK_SIZE = 4
PADDING = 999


def plain(scheduled: list[ScheduledSequence]) -> np.ndarray:
    counts = [-(-one.end // BLOCK_SIZE) for one in scheduled]
    rows = [
        one.sequence.block_table[:count] + [PADDING] * (max(counts) - count)
        for one, count in zip(scheduled, counts, strict=True)
    ]
    return np.array(rows)


class Lifecycle:
    """A sequence whose block table grows, and is emptied by preemption."""

    def __init__(self, request_id: str, rng: random.Random) -> None:
        self.rng = rng
        self.sequence = Sequence(request_id, [1], SamplingParams())
        self.computed = 0

    def schedule(self) -> ScheduledSequence:
        end = self.computed + self.rng.choice([1, 1, 1, 3, 9])
        table = self.sequence.block_table
        while len(table) * BLOCK_SIZE < end:
            table.append(self.rng.randrange(900))
        return ScheduledSequence(self.sequence, self.computed, end, True)

    def complete(self, scheduled: ScheduledSequence) -> None:
        self.computed = scheduled.end

    def preempt(self) -> None:
        """Empties the table and admits again with a cached prefix, up to the last full block at most."""
        self.sequence.num_preemptions += 1
        self.sequence.block_table.clear()
        self.computed = self.rng.choice([0, self.computed // BLOCK_SIZE * BLOCK_SIZE])
        self.sequence.block_table.extend(self.rng.randrange(900) for _ in range(self.computed // BLOCK_SIZE))


def test_rows_follow_the_block_tables_of_a_random_workload() -> None:
    rng = random.Random(0)
    rows = BlockTable(BLOCK_SIZE, PADDING)
    lifecycles = {f"r{number}": Lifecycle(f"r{number}", rng) for number in range(20)}
    for _ in range(600):
        batch = rng.sample(list(lifecycles.values()), rng.randrange(1, len(lifecycles)))
        scheduled = [lifecycle.schedule() for lifecycle in batch]
        np.testing.assert_array_equal(rows.tables(scheduled), plain(scheduled))
        for lifecycle, one in zip(batch, scheduled, strict=True):
            lifecycle.complete(one)
            if rng.random() < 0.05:
                lifecycle.preempt()
            elif rng.random() < 0.05:
                rows.release(lifecycle.sequence)
                lifecycles[lifecycle.sequence.request_id] = Lifecycle(lifecycle.sequence.request_id, rng)


def test_a_step_reads_only_blocks_that_are_new_since_the_last_step() -> None:
    class Table(list):
        def __getitem__(self, key):
            read.append(list(range(len(self)))[key])
            return super().__getitem__(key)

    read: list[list[int]] = []
    rows = BlockTable(BLOCK_SIZE, PADDING)
    sequence = Sequence("r", [1], SamplingParams())
    sequence.block_table = Table(range(100, 110))
    for start, end in ((0, 9), (9, 10), (10, 12), (12, 13), (13, 30)):
        rows.tables([ScheduledSequence(sequence, start, end, True)])
    assert read == [[0, 1, 2], [3], [4, 5, 6, 7]]


def test_release_frees_the_row_of_a_sequence() -> None:
    rng = random.Random(0)
    rows = BlockTable(BLOCK_SIZE, PADDING)
    for number in range(500):
        lifecycle = Lifecycle(f"r{number}", rng)
        rows.tables([lifecycle.schedule()])
        rows.release(lifecycle.sequence)
        rows.release(lifecycle.sequence)
        assert lifecycle.sequence.block_table_row is None
    assert rows._tables.shape[0] == 8


def test_releasing_an_old_sequence_keeps_the_row_of_a_new_one_with_its_id() -> None:
    rng = random.Random(0)
    rows = BlockTable(BLOCK_SIZE, PADDING)
    old, new = Lifecycle("r", rng), Lifecycle("r", rng)
    rows.tables([old.schedule()])
    scheduled = [new.schedule()]
    rows.tables(scheduled)
    rows.release(old.sequence)
    np.testing.assert_array_equal(rows.tables(scheduled), plain(scheduled))
    assert len(rows._free_rows) == 7
