"""The work list of a step's attention: which program attends with which query rows to which stretch of KV.

It is laid out once per step on the host and serves all layers. A tile is up to `block_m` rows: consecutive tokens of one
sequence times the query heads that share a KV head. Its KV may be split at multiples of `chunk` into items that run in
parallel; a reduction then joins the parts in their order (Dao et al. 2023, "Flash-Decoding").
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline_kernels.triton_ops.launch import ceil_div

__all__ = ["PagedBatch", "SplitPolicy", "TileSet", "plan_paged"]

# Rows of a decode tile: the smallest M of a matrix instruction. Every other tile has 64 rows, the M of one warp group.
DECODE_ROWS = 16
PREFILL_ROWS = 64
# Less than 256 positions per item would leave an item shorter than the pipeline that feeds it (3 stages of 64).
MIN_CHUNK = 256
# Fixed chunks of the batch-invariant mode: at 8 KV heads a 16 k context still gives 256 programs, two per SM of an H200.
INVARIANT_CHUNK = 512
ITEM_FIELDS = 5
REDUCTION_FIELDS = 4


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How KV is split. `programs` is the number wanted in flight (two per SM); `num_kv_heads` of them share an item.

    `invariant` fixes tiles and splits by position alone, so that a row's result has the same bits alone, in any batch and
    under any chunking of its prompt. It costs short decodes parallelism and all decodes a taller tile.
    """

    programs: int
    num_kv_heads: int
    invariant: bool = False

    def chunk(self, positions: int) -> int:
        """Return the chunk for tiles that attend to `positions` in all, a multiple of every tile's width."""
        if self.invariant:
            return INVARIANT_CHUNK
        even = ceil_div(positions * self.num_kv_heads, self.programs)
        return ceil_div(max(even, 1), MIN_CHUNK) * MIN_CHUNK


@dataclass(frozen=True, slots=True)
class TileSet:
    """Tiles of one height. `items` [W, 5] int32: sequence, first query token, KV begin, KV end, part (-1: the only one).

    `reductions` [R, 4] int32: sequence, first query token, first part, number of parts.
    """

    block_m: int
    items: torch.Tensor
    reductions: torch.Tensor
    num_parts: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step for the device: `block_tables` [N, m], `query_starts` [N + 1] and `contexts` [N], all int32.

    Sequence n has query rows `[query_starts[n], query_starts[n + 1])`, the last of `contexts[n]` positions.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    contexts: torch.Tensor
    tile_sets: tuple[TileSet, ...]


def plan_paged(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    blocks: Sequence[Sequence[int]],
    *,
    group: int,
    policy: SplitPolicy,
    window: int | None = None,
    device: torch.device | str,
) -> PagedBatch:
    """Lay out a step. `group` query heads share a KV head; `window` bounds how far back the layers look (None: all)."""
    lens, ends = np.asarray(query_lens, dtype=np.int64), np.asarray(contexts, dtype=np.int64)
    assert (lens <= ends).all(), "a query token's position lies within its sequence's context"
    starts = np.concatenate([[0], lens.cumsum()])
    sets = []
    for block_m, chosen in _heights(lens, group, policy.invariant):
        sets.append(_tile_set(block_m, chosen, lens, ends, group, policy, window or int(ends.max()), device))
    return PagedBatch(
        _tables(blocks, device), _int32(starts, device), _int32(ends, device), tuple(s for s in sets if len(s.items))
    )


def _heights(lens: np.ndarray, group: int, invariant: bool) -> list[tuple[int, np.ndarray]]:
    """Return tile heights with the sequences that use them; rows of one token never part."""
    tall, short = max(PREFILL_ROWS, _power_of_two(group)), max(DECODE_ROWS, _power_of_two(group))
    used = np.flatnonzero(lens)
    if invariant:
        return [(tall, used)] if len(used) else []
    fits = lens[used] * group <= short
    return [(rows, chosen) for rows, chosen in ((short, used[fits]), (tall, used[~fits])) if len(chosen)]


def _tile_set(
    block_m: int,
    chosen: np.ndarray,
    lens: np.ndarray,
    ends: np.ndarray,
    group: int,
    policy: SplitPolicy,
    window: int,
    device: torch.device | str,
) -> TileSet:
    tokens = block_m // group
    sequence, nth = _expand(chosen, -(-lens[chosen] // tokens))
    first = nth * tokens
    before = ends[sequence] - lens[sequence]
    end = before + np.minimum(first + tokens, lens[sequence])
    begin = np.maximum(before + first - window + 1, 0)
    chunk = policy.chunk(int((end - begin).sum()))
    parts = -(-end // chunk) - begin // chunk
    tile, part = _expand(np.arange(len(sequence)), parts)
    part_begin = (begin[tile] // chunk + part) * chunk
    part_end = np.minimum(part_begin + chunk, end[tile])
    split = parts[tile] > 1
    number = np.where(split, split.cumsum() - 1, -1)
    items = np.stack([sequence[tile], first[tile], part_begin, part_end, number], axis=1)
    # the longest first: what starts last should be what ends soonest
    order = np.argsort(part_begin - part_end, kind="stable")
    several = np.flatnonzero(parts > 1)
    offsets = np.concatenate([[0], parts[several].cumsum()])
    reductions = np.stack([sequence[several], first[several], offsets[:-1], parts[several]], axis=1)
    return TileSet(block_m, _int32(items[order], device), _int32(reductions, device), int(offsets[-1]))


def _expand(values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat each value `counts` times; also return which repetition each one is."""
    starts = np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(values, counts), np.arange(int(counts.sum())) - starts


def _tables(blocks: Sequence[Sequence[int]], device: torch.device | str) -> torch.Tensor:
    table = np.zeros((len(blocks), max((len(row) for row in blocks), default=0)), dtype=np.int64)
    for target, row in zip(table, blocks, strict=True):
        target[: len(row)] = row
    return _int32(table, device)


def _int32(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device, non_blocking=True)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
