"""BlockTable: the block tables of running sequences as rows of one array, kept between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from minivllm.core.scheduler.output import ScheduledSequence
    from minivllm.core.sequence import Sequence


@dataclass(slots=True)
class _Row:
    """State at `sequence.block_table_row`: the row's first `num_blocks` entries are those of the sequence's table."""

    index: int
    num_preemptions: int
    num_blocks: int = 0


class BlockTable:
    """One row per sequence that was in a step and has not been released.

    A step copies only the blocks that its sequences gained since their last step: between two preemptions a
    sequence's block table is append-only. Copying all tables would cost more than all other input building.

    Args:
        padding_block_id: fills rows beyond their blocks.
    """

    def __init__(self, block_size: int, padding_block_id: int) -> None:
        self._block_size = block_size
        self._padding = padding_block_id
        self._tables = np.full((8, 8), padding_block_id, dtype=np.int32)
        self._free_rows = list(range(8))

    def tables(self, scheduled: SequenceOf[ScheduledSequence]) -> npt.NDArray[np.int32]:
        """Returns (S, max_blocks): the blocks that cover the tokens of each sequence up to this step's end."""
        rows = []
        longest = 0
        for sequence, _, end, *_ in scheduled:
            num_blocks = -(-end // self._block_size)
            row = self._row_of(sequence)
            if num_blocks > row.num_blocks:
                if num_blocks > self._tables.shape[1]:
                    self._resize(self._tables.shape[0], 2 * num_blocks)
                self._tables[row.index, row.num_blocks : num_blocks] = sequence.block_table[row.num_blocks : num_blocks]
                row.num_blocks = num_blocks
            rows.append(row.index)
            longest = max(longest, num_blocks)
        return self._tables[rows, :longest]

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a sequence. A no-op on a sequence without one."""
        row: _Row | None = sequence.block_table_row
        if row is not None:
            self._free_rows.append(row.index)
            sequence.block_table_row = None

    def _row_of(self, sequence: Sequence) -> _Row:
        row: _Row | None = sequence.block_table_row
        if row is None or row.num_preemptions != sequence.num_preemptions:
            self.release(sequence)
            if not self._free_rows:
                self._resize(2 * self._tables.shape[0], self._tables.shape[1])
            row = sequence.block_table_row = _Row(self._free_rows.pop(), sequence.num_preemptions)
            self._tables[row.index] = self._padding
        return row

    def _resize(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self._tables.shape
        self._tables = np.pad(
            self._tables, ((0, num_rows - rows), (0, num_columns - columns)), constant_values=self._padding
        )
        self._free_rows += range(rows, num_rows)
