"""Attention over paged KV for a ragged batch of prefill chunks and decodes: one kernel, and one that joins split KV.

Sources: paged KV, Kwon et al. 2023 (arXiv:2309.06180); online softmax in tiles, Dao 2023 (arXiv:2307.08691); split KV,
"Flash-Decoding" (Dao et al. 2023); packing the heads of a group into a tile's rows, as FlashInfer does (arXiv:2501.01005).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.attention_plan import ITEM_FIELDS, REDUCTION_FIELDS, PagedBatch, TileSet
from paceline_kernels.triton_ops.launch import INTERPRETED, Target, current_target, launch
from paceline_kernels.triton_ops.primitives import dot, tanh, to_float

__all__ = ["paged_attention"]

_LOG2_E = math.log2(math.e)
# Rows that one program of the reduction joins: a tile of 16 × 256 float32 takes 32 registers of 128 threads.
_REDUCED_ROWS = 16


def paged_attention(
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(cap(scale · q kᵀ) + causal mask) v for every row, [T, H·D], in the dtype of `queries`.

    `queries` [T, H, D] float16, bfloat16 or float32; `kv_cache` [B, S, 2, K, D] in the same dtype, or float8_e4m3fn or int8
    with `kv_scales` [B, S, 2, K] float32 that the stored numbers are multiplied by (a scale for all is an expanded view).
    Query head h reads KV head h // (H / K). A row sees its last `window` positions; `soft_cap` c maps scores s to
    c · tanh(s / c). Softmax and sums are float32. Rows that no tile covers are not written.
    """
    assert queries.stride(2) == 1 and kv_cache.stride(4) == 1, "head dimensions are contiguous"
    assert (kv_scales is not None) == (kv_cache.dtype != queries.dtype), "KV of another dtype needs scales"
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for tiles in batch.tile_sets:
        _launch_tiles(out, queries, kv_cache, batch, tiles, scale, window or 0, soft_cap, kv_scales)
    return out.flatten(1)


def _launch_tiles(
    out: torch.Tensor,
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedBatch,
    tiles: TileSet,
    scale: float,
    window: int,
    soft_cap: float | None,
    kv_scales: torch.Tensor | None,
) -> None:
    heads, size = queries.shape[1:]
    block_size, _, kv_heads = kv_cache.shape[1:4]
    shape = _tile_shape(current_target(), tiles.block_m, size, queries.dtype, kv_cache.dtype)
    padded = triton.next_power_of_2(size)
    parts = torch.empty((tiles.num_parts, kv_heads, tiles.block_m, padded), dtype=torch.float32, device=out.device)
    sums = torch.empty((tiles.num_parts, kv_heads, 2, tiles.block_m), dtype=torch.float32, device=out.device)
    shared = {
        "out": out, "query_starts": batch.query_starts, "parts": parts, "sums": sums,
        "GROUP": heads // kv_heads, "D": size, "D_PAD": padded, "BLOCK_M": tiles.block_m,
    }  # fmt: skip
    arguments = {
        "queries": queries, "kv": kv_cache, "scales": kv_scales, "tables": batch.block_tables,
        "table_rows": batch.table_rows, "contexts": batch.contexts, "items": tiles.items,
        "scale": scale if soft_cap else scale * _LOG2_E, "soft_cap": soft_cap or 0.0,
        "q_token": queries.stride(0), "q_head": queries.stride(1),
        **dict(zip(("kv_block", "kv_slot", "kv_side", "kv_head"), kv_cache.stride()[:4], strict=True)),
        **dict(zip(("s_block", "s_slot", "s_side", "s_head"), (0,) * 4 if kv_scales is None else kv_scales.stride(),
                   strict=True)),
        "table_row": batch.block_tables.stride(0),
        "S": block_size, "WINDOW": window, "CAPPED": soft_cap is not None, "SCALED": kv_scales is not None,
        "BLOCK_N": shape.block_n, "ITEM": ITEM_FIELDS,
        "NOTHING": 0.0 if kv_cache.is_floating_point() else 0, "PRECISION": current_target().precision, "WIDE": INTERPRETED,
    }  # fmt: skip
    grid = (kv_heads, len(tiles.items))
    launch(_attend, grid, shared | arguments, num_warps=shape.num_warps, num_stages=shape.num_stages)
    if len(tiles.reductions):
        reduced = {"reductions": tiles.reductions, "ROWS": _REDUCED_ROWS, "FIELDS": REDUCTION_FIELDS}
        launch(_join, (kv_heads, len(tiles.reductions), tiles.block_m // _REDUCED_ROWS), shared | reduced)


@dataclass(frozen=True, slots=True)
class _TileShape:
    block_n: int
    num_warps: int
    num_stages: int


def _tile_shape(target: Target, block_m: int, size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> _TileShape:
    """Return the KV tile: keys and values of a stage are 64 × 128 × 2 × 16 bit = 32 KiB, three stages 96 KiB.

    That is two programs per SM of sm_80 and sm_90 with more in flight than latency × bandwidth needs (36 KiB per SM on an
    H200). Wider heads halve the tile, and so does AMD for tall tiles, where whole ones take up to 452 registers, one
    wave per SIMD; its 64 KiB of shared memory have no room for stages. float32 is for checking numbers: its tiles are as
    large as registers allow. The rest keeps tall tiles from spilling: 8 warps on sm_80, half a tile of int8 on sm_100.
    """
    wide, tall = size > 128, block_m > 32
    if dtype == torch.float32:
        return _TileShape(16 if wide or tall else 32, 8 if wide else 4, 1)
    block_n = 32 if wide else 64
    if target.is_hip:
        return _TileShape(block_n // 2 if tall else block_n, 4, 1)
    if tall and not wide and target.arch >= 100 and kv_dtype == torch.int8:
        return _TileShape(block_n // 2, 4, 3)
    return _TileShape(block_n, 8 if tall and (wide or target.arch < 90) else 4, 3)


@triton.jit(do_not_specialize=["table_row"])  # it changes from step to step: no build for each 1 or multiple of 16
def _attend(
    out,  # [T, H, D]
    queries,  # [T, H, D]
    kv,  # [B, S, 2, K, D]
    scales,  # [B, S, 2, K] float32, or None
    tables,  # [R, m] int32
    table_rows,  # [N] int32
    query_starts,  # [N + 1] int32
    contexts,  # [N] int32
    items,  # [W, 5] int32
    parts,  # [P, K, BLOCK_M, D_PAD] float32: unnormalised sums of split tiles
    sums,  # [P, K, 2, BLOCK_M] float32: their maxima and their sums of weights
    scale,
    soft_cap,
    q_token,
    q_head,
    kv_block,
    kv_slot,
    kv_side,
    kv_head,
    s_block,
    s_slot,
    s_side,
    s_head,
    table_row,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ITEM: tl.constexpr,
    NOTHING: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (k, w): item w for KV head k. Scores are kept in units of log 2, so that one exp2 gives a weight."""
    head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM
    sequence = tl.load(item)
    first = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    part = tl.load(item + 4)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, D_PAD)
    start = tl.load(query_starts + sequence)
    length = tl.load(query_starts + sequence + 1) - start
    token = first + row // GROUP
    live = (row < BLOCK_M // GROUP * GROUP) & (token < length)
    offset = (start + token).to(tl.int64)[:, None] * q_token + (head * GROUP + row % GROUP)[:, None] * q_head
    q = tl.load(queries + offset + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0.0)
    position = tl.load(contexts + sequence) - length + token
    if WINDOW > 0:
        # the first row looks furthest back; tiles stay at multiples of their width, whatever the window
        begin = tl.maximum(begin, (tl.load(contexts + sequence) - length + first - WINDOW + 1) // BLOCK_N * BLOCK_N)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    kv += head * kv_head
    table = tables + tl.load(table_rows + sequence).to(tl.int64) * table_row
    for tile in range(begin, end, BLOCK_N):
        slot = tile + tl.arange(0, BLOCK_N)
        within = slot < end
        block = tl.load(table + slot // S, mask=within, other=0).to(tl.int64)
        source = block * kv_block + (slot % S) * kv_slot
        inside = within[:, None] & (column < D)[None, :]
        k = to_float(tl.load(kv + source[:, None] + column[None, :], mask=inside, other=NOTHING), q.dtype, WIDE)
        score = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, WIDE) * scale
        if SCALED:
            scale_at = scales + block * s_block + (slot % S) * s_slot + head * s_head
            score *= tl.load(scale_at, mask=within, other=0.0)[None, :]
        if CAPPED:
            score = soft_cap * 1.4426950408889634 * tanh(score / soft_cap)
        seen = within[None, :] & (slot[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= slot[None, :] > position[:, None] - WINDOW
        score = tl.where(seen, score, float("-inf"))
        updated = tl.maximum(largest, tl.max(score, 1))
        # a row that has seen nothing yet has no maximum; 0 keeps its weights exp2(-inf - 0) = 0 out of NaN
        base = tl.where(updated == float("-inf"), 0.0, updated)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(largest - base)
        weights = weights * shrink + tl.sum(weight, 1)
        if SCALED:
            weight *= tl.load(scale_at + s_side, mask=within, other=0.0)[None, :]
        v = to_float(tl.load(kv + kv_side + source[:, None] + column[None, :], mask=inside, other=NOTHING), q.dtype, WIDE)
        acc = dot(weight.to(q.dtype), v, acc * shrink[:, None], PRECISION, WIDE)
        largest = updated
    if part < 0:
        result = acc / tl.where(weights == 0, 1.0, weights)[:, None]
        target = (start + token).to(tl.int64)[:, None] * (tl.num_programs(0) * GROUP) + (head * GROUP + row % GROUP)[:, None]
        mask = live[:, None] & (column < D)[None, :]
        tl.store(out + target * D + column[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        tile_at = part.to(tl.int64) * tl.num_programs(0) + head
        tl.store(parts + (tile_at * BLOCK_M + row)[:, None] * D_PAD + column[None, :], acc)
        tl.store(sums + tile_at * 2 * BLOCK_M + row, largest)
        tl.store(sums + (tile_at * 2 + 1) * BLOCK_M + row, weights)


@triton.jit
def _join(
    out,  # [T, H, D]
    query_starts,  # [N + 1] int32
    parts,  # [P, K, BLOCK_M, D_PAD] float32
    sums,  # [P, K, 2, BLOCK_M] float32
    reductions,  # [R, 4] int32
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Program (k, r, i): rows [i · ROWS, (i + 1) · ROWS) of reduction r for KV head k, part after part in KV order."""
    head = tl.program_id(0)
    reduction = reductions + tl.program_id(1) * FIELDS
    sequence = tl.load(reduction)
    first = tl.load(reduction + 1)
    part = tl.load(reduction + 2).to(tl.int64)
    count = tl.load(reduction + 3)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_PAD)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for number in range(count):
        tile_at = (part + number) * tl.num_programs(0) + head
        part_largest = tl.load(sums + tile_at * 2 * BLOCK_M + row)
        updated = tl.maximum(largest, part_largest)
        base = tl.where(updated == float("-inf"), 0.0, updated)
        old, new = tl.exp2(largest - base), tl.exp2(part_largest - base)
        weights = weights * old + tl.load(sums + (tile_at * 2 + 1) * BLOCK_M + row) * new
        values = tl.load(parts + (tile_at * BLOCK_M + row)[:, None] * D_PAD + column[None, :])
        acc = acc * old[:, None] + values * new[:, None]
        largest = updated
    start = tl.load(query_starts + sequence)
    token = first + row // GROUP
    live = (row < BLOCK_M // GROUP * GROUP) & (token < tl.load(query_starts + sequence + 1) - start)
    target = (start + token).to(tl.int64)[:, None] * (tl.num_programs(0) * GROUP) + (head * GROUP + row % GROUP)[:, None]
    result = acc / tl.where(weights == 0, 1.0, weights)[:, None]
    mask = live[:, None] & (column < D)[None, :]
    tl.store(out + target * D + column[None, :], result.to(out.dtype.element_ty), mask=mask)
