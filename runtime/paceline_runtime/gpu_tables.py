"""Which row of the device's block tables a sequence has, and what a step changes in them: only what was appended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SlotTables", "TableChanges"]

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Entries to write: `tables[rows[i], columns[i]] = blocks[i]`."""

    rows: Ints
    columns: Ints
    blocks: Ints


class SlotTables:
    """The host's copy of the block tables [rows, width] and who has which row.

    A sequence gets a row with its first step and keeps it until it is preempted or ends. The device runs steps in order, so
    a row may be given away while earlier steps that read it are still to run.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.host: Ints = np.zeros((rows, width), dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._rows: dict[int, int] = {}
        self._filled = [0] * rows
        self._changes: list[tuple[int, int, int]] = []  # row, columns [first, last)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Take the rows of these sequences back, of those that have one."""
        for seq_id in seq_ids:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._filled[row] = 0
                self._free.append(row)

    def release_all(self) -> None:
        """Take every row back: the blocks that they name are gone."""
        self.release(tuple(self._rows))

    def row(self, seq_id: int, blocks: Sequence[int], count: int) -> int:
        """Return the sequence's row, filled with its first `count` blocks at least; `blocks` only ever grew since."""
        row = self._rows.get(seq_id)
        if row is None:
            assert self._free, f"more than {len(self._filled)} sequences run at once"
            row = self._rows[seq_id] = self._free.pop()
        have = self._filled[row]
        if count > have:
            self.host[row, have:count] = blocks[have:count]
            self._filled[row] = count
            self._changes.append((row, have, count))
        return row

    def take_changes(self) -> TableChanges:
        """Return what was filled since the last call."""
        changes, self._changes = self._changes, []
        if not changes:
            empty = np.zeros(0, dtype=np.int32)
            return TableChanges(empty, empty, empty)
        rows = np.concatenate([np.full(last - first, row, dtype=np.int32) for row, first, last in changes])
        columns = np.concatenate([np.arange(first, last, dtype=np.int32) for _, first, last in changes])
        return TableChanges(rows, columns, self.host[rows, columns])
