"""The work list of a step's attention: which program attends with which query rows to which stretch of KV.

It is laid out once per step on the host and serves all layers. A tile is up to `block_m` rows: consecutive tokens of one
sequence times the query heads that share a KV head. Its KV may be split at multiples of `chunk` into items that run in
parallel; a reduction then joins the parts in their order (Dao et al. 2023, "Flash-Decoding"). Needs no Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = [
    "ITEM_FIELDS",
    "REDUCTION_FIELDS",
    "HostTiles",
    "PagedBatch",
    "SplitPolicy",
    "TileSet",
    "decode_capacity",
    "decode_rows",
    "pad_tiles",
    "plan_paged",
    "plan_tiles",
]

# Rows of a decode tile: the smallest M of a matrix instruction. Every other tile has 64 rows, the M of one warp group.
DECODE_ROWS = 16
PREFILL_ROWS = 64
# Less than 256 positions per item would leave an item shorter than the pipeline that feeds it (3 stages of 64).
MIN_CHUNK = 256
# Fixed chunks of the batch-invariant mode: at 8 KV heads a 16 k context still gives 256 programs, two per SM of an H200.
INVARIANT_CHUNK = 512
ITEM_FIELDS = 5
REDUCTION_FIELDS = 4
# First query token of what only pads a list: no sequence reaches it in a step, so nothing of it is read or written.
_NOWHERE = 2**30


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
        even = _ceil_div(positions * self.num_kv_heads, self.programs)
        return _ceil_div(max(even, 1), MIN_CHUNK) * MIN_CHUNK


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
    """A step for the device: `block_tables` [R, m], `table_rows` [N], `query_starts` [N + 1] and `contexts` [N], all int32.

    Sequence n has query rows `[query_starts[n], query_starts[n + 1])`, the last of `contexts[n]` positions, and its blocks
    in row `table_rows[n]` of the tables: tables may stay on the device while batches come and go.
    """

    block_tables: torch.Tensor
    table_rows: torch.Tensor
    query_starts: torch.Tensor
    contexts: torch.Tensor
    tile_sets: tuple[TileSet, ...]


@dataclass(frozen=True, slots=True)
class HostTiles:
    """A `TileSet` that is still on the host: `items` [W, 5] and `reductions` [R, 4] int32."""

    block_m: int
    items: np.ndarray
    reductions: np.ndarray
    num_parts: int

    def to(self, device: torch.device | str) -> TileSet:
        """Return it on the device."""
        return TileSet(self.block_m, _int32(self.items, device), _int32(self.reductions, device), self.num_parts)


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
    """Lay out a step with tables of its own. See `plan_tiles`."""
    lens, ends = np.asarray(query_lens, dtype=np.int64), np.asarray(contexts, dtype=np.int64)
    tiles = plan_tiles(lens, ends, group=group, policy=policy, window=window)
    starts = np.concatenate([[0], lens.cumsum()])
    return PagedBatch(
        block_tables=_tables(blocks, device),
        table_rows=_int32(np.arange(len(lens)), device),
        query_starts=_int32(starts, device),
        contexts=_int32(ends, device),
        tile_sets=tuple(each.to(device) for each in tiles),
    )


def plan_tiles(
    lens: np.ndarray, ends: np.ndarray, *, group: int, policy: SplitPolicy, window: int | None = None
) -> tuple[HostTiles, ...]:
    """Return the work of sequences with `lens` [N] query rows that end at positions `ends` [N].

    `group` query heads share a KV head; `window` bounds how far back all layers look (None: some see everything).
    """
    assert (lens <= ends).all(), "a query token's position lies within its sequence's context"
    farthest = window or int(ends.max(initial=0))
    heights = _heights(lens, group, policy.invariant)
    sets = [_tile_set(block_m, chosen, lens, ends, group, policy, farthest) for block_m, chosen in heights]
    return tuple(each for each in sets if len(each.items))


def decode_rows(group: int) -> int:
    """Return the height of the tiles of decodes, unless the policy is invariant."""
    return max(DECODE_ROWS, _power_of_two(group))


def decode_capacity(sequences: int, policy: SplitPolicy) -> tuple[int, int]:
    """Return how many items and how many reductions, at most, decodes of so many sequences become, whatever their contexts.

    A chunk is at least the `programs / num_kv_heads`-th part of all KV: so many whole chunks there are, each of them gives
    one item beyond the one that every sequence has, and no more sequences than that are longer than a chunk.
    """
    chunks = _ceil_div(policy.programs, policy.num_kv_heads)
    return sequences + chunks, min(sequences, chunks)


def pad_tiles(tiles: HostTiles, items: int, reductions: int) -> HostTiles:
    """Return `tiles` with exactly so many items, parts and reductions: sizes that a CUDA graph can keep."""
    return HostTiles(tiles.block_m, _padded(tiles.items, items), _padded(tiles.reductions, reductions), items)


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Append rows of work for nobody: items without KV, reductions without parts."""
    assert len(rows) <= count, f"{len(rows)} rows don't fit {count}"
    padded = np.zeros((count, rows.shape[1]), dtype=np.int32)
    padded[: len(rows)] = rows
    padded[len(rows) :, 1] = _NOWHERE
    if rows.shape[1] == ITEM_FIELDS:
        padded[len(rows) :, 4] = -1
    return padded


def _heights(lens: np.ndarray, group: int, invariant: bool) -> list[tuple[int, np.ndarray]]:
    """Return tile heights with the sequences that use them; rows of one token never part."""
    tall, short = max(PREFILL_ROWS, _power_of_two(group)), decode_rows(group)
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
) -> HostTiles:
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
    return HostTiles(block_m, items[order].astype(np.int32), reductions.astype(np.int32), int(offsets[-1]))


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


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
