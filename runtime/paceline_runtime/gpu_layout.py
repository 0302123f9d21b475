"""From the sequences of a step to the arrays that the GPU's kernels read; pure and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline_kernels.triton_ops.attention_plan import (
    ITEM_FIELDS,
    HostTiles,
    SplitPolicy,
    decode_capacity,
    decode_rows,
    pad_tiles,
    plan_tiles,
)
from paceline_runtime.gpu_inputs import StepArrays
from paceline_runtime.gpu_tables import SlotTables

__all__ = ["LayoutShape", "Span", "lay_out", "pad_decodes", "padding_step"]

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence from position `start` on. `ids` are as in `StepArrays`; `blocks` covers them and all before."""

    seq_id: int
    start: int
    ids: Sequence[int]
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class LayoutShape:
    """What of a model and its cache the layout depends on; `group` query heads share a KV head."""

    block_size: int
    group: int
    policy: SplitPolicy


def lay_out(spans: Sequence[Span], tables: SlotTables, shape: LayoutShape) -> StepArrays:
    """Lay out a step, in the order of `spans`, and give its sequences rows in `tables`."""
    starts = np.array([span.start for span in spans], dtype=np.int64)
    lens = np.array([len(span.ids) for span in spans], dtype=np.int64)
    ends = starts + lens
    counts = -(-ends // shape.block_size)
    rows = np.array([tables.row(s.seq_id, s.blocks, int(n)) for s, n in zip(spans, counts, strict=True)], dtype=np.int32)
    firsts = np.concatenate([[0], lens.cumsum()])
    positions = np.arange(firsts[-1]) + np.repeat(starts - firsts[:-1], lens)
    blocks = tables.host[np.repeat(rows, lens), positions // shape.block_size].astype(np.int64)
    changes = tables.take_changes()
    return StepArrays(
        ids=np.concatenate([np.asarray(span.ids, dtype=np.int32) for span in spans]),
        positions=positions.astype(np.int32),
        slots=(blocks * shape.block_size + positions % shape.block_size).astype(np.int32),
        query_starts=firsts.astype(np.int32),
        contexts=ends.astype(np.int32),
        table_rows=rows,
        tiles=plan_tiles(lens, ends, group=shape.group, policy=shape.policy),
        extra={"changed_rows": changes.rows, "changed_columns": changes.columns, "changed_blocks": changes.blocks},
    )


def pad_decodes(arrays: StepArrays, size: int, shape: LayoutShape) -> StepArrays:
    """Pad a step of decodes to `size` sequences: the rows that are added attend to nothing, and nothing of them is kept.

    Their attention is computed all the same, to zeros: what memory holds otherwise might be numbers that overflow.
    """
    (tiles,) = arrays.tiles
    idle = np.zeros((size - len(arrays.contexts), ITEM_FIELDS), dtype=np.int32)
    idle[:, 0] = np.arange(len(arrays.contexts), size)
    idle[:, 4] = -1
    tiles = replace(tiles, items=np.concatenate([tiles.items, idle]))
    return replace(
        arrays,
        ids=_padded(arrays.ids, size, 0),
        positions=_padded(arrays.positions, size, 0),
        slots=_padded(arrays.slots, size, -1),
        query_starts=np.arange(size + 1, dtype=np.int32),
        contexts=_padded(arrays.contexts, size, 1),
        table_rows=_padded(arrays.table_rows, size, 0),
        tiles=(pad_tiles(tiles, *decode_capacity(size, shape.policy)),),
    )


def padding_step(size: int, shape: LayoutShape) -> StepArrays:
    """Return a step of `size` decodes that is nothing but padding, for recording a graph."""
    none = np.zeros(0, dtype=np.int32)
    tiles = HostTiles(decode_rows(shape.group), np.zeros((0, 5), np.int32), np.zeros((0, 4), np.int32), 0)
    return pad_decodes(StepArrays(none, none, none, none, none, none, (tiles,)), size, shape)


def _padded(values: Ints, size: int, filler: int) -> Ints:
    out = np.full(size, filler, dtype=np.int32)
    out[: len(values)] = values
    return out
