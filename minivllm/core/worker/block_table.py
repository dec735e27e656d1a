"""BlockTable: the block tables of running sequences as rows of an array, kept from step to step.

Copying every table anew costs more in a large batch than all other tensor building together, and from one step to the
next a table only changes at its end: it grows, and a block that was filled in the last step may have been swapped for a
cached copy. Blocks that were full before that step stay what they are until the sequence is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from minivllm.core.scheduler.scheduler import ScheduledSequence
    from minivllm.core.sequence import Sequence


@dataclass(slots=True)
class _Row:
    """`settled` leading blocks cannot have changed, provided that the next step starts at token `end`."""

    place: int
    sequence: Sequence
    num_preemptions: int
    end: int
    settled: int


class BlockTable:
    """A row for each sequence that was in a step and has not been released.

    Args:
        padding_block_id: what fills a row up.
    """

    def __init__(self, block_size: int, padding_block_id: int) -> None:
        self._block_size = block_size
        self._padding = padding_block_id
        self._tables = np.full((8, 8), padding_block_id, dtype=np.int32)
        self._rows: dict[str, _Row] = {}
        self._free_places = list(range(8))

    def tables(self, scheduled: SequenceOf[ScheduledSequence]) -> npt.NDArray[np.int32]:
        """(S, max_blocks): of each table what covers the tokens of this step, then padding."""
        places = []
        longest = 0
        for one in scheduled:
            num_blocks = -(-one.end // self._block_size)
            longest = max(longest, num_blocks)
            row = self._row_of(one, num_blocks)
            self._tables[row.place, row.settled : num_blocks] = one.sequence.block_table[row.settled : num_blocks]
            row.end = one.end
            # Blocks that this step fills may be swapped when it is done; those before it are out of reach.
            row.settled = one.start // self._block_size
            places.append(row.place)
        return self._tables[places, :longest]

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence. One that is not known is a no-op."""
        row = self._rows.get(sequence.seq_id)
        if row is not None and row.sequence is sequence:
            del self._rows[sequence.seq_id]
            self._free_places.append(row.place)

    def _row_of(self, one: ScheduledSequence, num_blocks: int) -> _Row:
        if num_blocks > self._tables.shape[1]:
            self._enlarge(self._tables.shape[0], 2 * num_blocks)
        sequence = one.sequence
        row = self._rows.get(sequence.seq_id)
        if row is None:
            if not self._free_places:
                self._enlarge(2 * self._tables.shape[0], self._tables.shape[1])
            row = _Row(self._free_places.pop(), sequence, -1, 0, 0)
            self._rows[sequence.seq_id] = row
        unbroken = row.sequence is sequence and row.num_preemptions == sequence.num_preemptions and row.end == one.start
        if not unbroken:
            self._tables[row.place] = self._padding
            row.sequence, row.num_preemptions, row.settled = sequence, sequence.num_preemptions, 0
        return row

    def _enlarge(self, num_rows: int, width: int) -> None:
        before = self._tables
        self._tables = np.full((num_rows, width), self._padding, dtype=np.int32)
        self._tables[: before.shape[0], : before.shape[1]] = before
        self._free_places += range(before.shape[0], num_rows)
