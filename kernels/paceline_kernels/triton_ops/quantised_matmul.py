"""Matrix products with 8- and 4-bit weights for decode: few rows, so a weight's bytes are what takes the time.

Weights are widened in registers, right before the tensor cores (as in Marlin, arXiv:2408.11743); few output tiles are split
along K so that every SM reads, and the parts are added in their order, so that a result never depends on scheduling.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import INTERPRETED, Target, ceil_div, current_target, launch
from paceline_kernels.triton_ops.primitives import dot, quantise, to_float
from paceline_kernels.triton_ops.quantised_weights import Int4Weight, RowScaledWeight

__all__ = ["int4_matmul", "quantise_activations", "row_scaled_matmul"]

FP8 = torch.float8_e4m3fn
# Output columns of a program and columns of K of a step: 64 × 128 bytes are 8 KiB, four stages of two programs per SM keep
# 64 KiB in flight, more than the 36 KiB that an H200's bandwidth × latency asks of an SM.
_BLOCK_N = 64
_BLOCK_K = 128
_STAGES = 4
# Two programs for each of an H200's 132 SMs; a part of less than 4 steps would be shorter than the pipeline.
_PROGRAMS = 264
_MIN_STEPS = 4
_SUM_BLOCK = 1024


def row_scaled_matmul(
    x: torch.Tensor, weight: RowScaledWeight, bias: torch.Tensor | None = None, x_scales: torch.Tensor | None = None,
    *, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return `x @ weight.T + bias` [T, N] in the dtype of `x`, or in `dtype`.

    `x` [T, K], contiguous rows: float16, bfloat16 or float32 with int8 or float8_e4m3fn weights (widened to its dtype), or
    float8_e4m3fn with `x_scales` [T] float32 and float8_e4m3fn weights (multiplied as they are; `dtype` is needed).
    `bias` [N]. Sums are float32. Any T; made for up to 64.
    """
    assert x.stride(1) == 1 and weight.values.is_contiguous() and (x.dtype == FP8) == (x_scales is not None)
    assert x.dtype != FP8 or weight.values.dtype == FP8, "both operands of a float8 product are float8"
    arguments = {
        "weight": weight.values, "scales": weight.scales, "x_scales": x_scales,
        "NARROW": x.dtype == FP8, "NOTHING": 0 if weight.values.dtype == torch.int8 else 0.0,
    }  # fmt: skip
    size = weight.values.shape[0]
    return _run(_multiply_rows, x, size, bias, dtype or x.dtype, arguments, x_scales=x_scales, scales=weight.scales)


def int4_matmul(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` [T, N] in the dtype of `x` [T, K]: float16, bfloat16 or float32, contiguous rows.

    Groups are 32, 64 or 128 columns. `bias` [N]. Sums are float32. Any T; made for up to 64.
    """
    assert x.stride(1) == 1 and weight.values.is_contiguous() and weight.group in (32, 64, 128)
    arguments = {
        "weight": weight.values, "scales": weight.scales, "minimums": weight.minimums, "GROUP": weight.group,
    }  # fmt: skip
    return _run(_multiply_int4, x, weight.values.shape[0], bias, x.dtype, arguments)


@dataclass(frozen=True, slots=True)
class _Tiles:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int


def _tiles(target: Target, rows: int, size: int, depth: int, dtype: torch.dtype, stored: torch.dtype) -> _Tiles:
    """Return tiles for `rows` × `size` outputs over `depth`. Splits depend on the weight alone, never on the batch."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wanted = ceil_div(_PROGRAMS, ceil_div(size, _BLOCK_N))
    possible = max(ceil_div(depth, _BLOCK_K) // _MIN_STEPS, 1)
    # float32, for checking numbers, takes twice the shared memory
    num_stages = 2 if target.is_hip or dtype == torch.float32 else _STAGES
    # what the builds show to spill otherwise: bytes widened by 4 warps on sm_90, and 64 × 64 of 4 bits on sm_80
    num_warps = 8 if dtype != FP8 and stored != torch.uint8 else 4
    block_n = 32 if block_m == 64 and stored == torch.uint8 and target == Target("cuda", 80) else _BLOCK_N
    return _Tiles(block_m, block_n, num_warps, num_stages, min(wanted, possible))


def _run(
    kernel: Any, x: torch.Tensor, size: int, bias: torch.Tensor | None, dtype: torch.dtype, arguments: dict[str, Any],
    *, x_scales: torch.Tensor | None = None, scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch a product and, where it is split, the sum of its parts; scales that factor out are applied at the end."""
    rows, depth = x.shape
    tiles = _tiles(current_target(), rows, size, depth, x.dtype, arguments["weight"].dtype)
    out = torch.empty((rows, size), dtype=dtype, device=x.device)
    split = tiles.splits > 1
    parts = torch.empty((tiles.splits, rows, size), dtype=torch.float32, device=x.device) if split else None
    shape = {"rows": rows, "size": size}
    common = {
        "x": x, "out": out, "parts": parts, "bias": bias, "depth": depth, "x_stride": x.stride(0),
        "part_depth": ceil_div(ceil_div(depth, _BLOCK_K), tiles.splits) * _BLOCK_K,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": _BLOCK_K,
        "PRECISION": current_target().precision, "WIDE": INTERPRETED,
    }  # fmt: skip
    grid = (ceil_div(rows, tiles.block_m), ceil_div(size, tiles.block_n), tiles.splits)
    launch(kernel, grid, arguments | shape | common, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    if split:
        summed = {"parts": parts, "out": out, "x_scales": x_scales, "scales": scales, "bias": bias,
                  "SPLITS": tiles.splits, "BLOCK": _SUM_BLOCK}  # fmt: skip
        launch(_sum_parts, (rows, ceil_div(size, _SUM_BLOCK)), summed | shape)
    return out


@triton.jit
def _store(acc, out, parts, x_scales, scales, bias, rows, size, row, column):
    """Store a tile: raw into its part, or scaled, with the bias, into the output."""
    mask = (row < rows)[:, None] & (column < size)[None, :]
    at = row.to(tl.int64)[:, None] * size + column[None, :]
    if parts is not None:
        tl.store(parts + tl.program_id(2).to(tl.int64) * rows * size + at, acc, mask=mask)
    else:
        if scales is not None:
            acc *= tl.load(scales + column, mask=column < size, other=0.0)[None, :]
        if x_scales is not None:
            acc *= tl.load(x_scales + row, mask=row < rows, other=0.0)[:, None]
        if bias is not None:
            acc += tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])  # it changes from step to step: no build for each 1 or multiple of 16
def _multiply_rows(
    x,  # [T, K]
    weight,  # [N, K] int8 or float8
    out,  # [T, N]
    parts,  # [splits, T, N] float32, or None
    x_scales,  # [T] float32, or None
    scales,  # [N] float32
    bias,  # [N], or None
    rows,
    size,
    depth,
    x_stride,
    part_depth,
    NARROW: tl.constexpr,
    NOTHING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (i, j, s): rows of tile i, columns of tile j, columns [s · part_depth, (s + 1) · part_depth) of K."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * part_depth
    end = tl.minimum(begin + part_depth, depth)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = weight + column.to(tl.int64)[:, None] * depth
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_row + k[None, :], mask=(row < rows)[:, None] & (k < end)[None, :], other=0.0)
        w = tl.load(w_row + k[None, :], mask=(column < size)[:, None] & (k < end)[None, :], other=NOTHING)
        if NARROW:
            # sm_90 adds float8 products with 14 bits; after each step they go to a float32 sum
            acc = tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = dot(a, tl.trans(to_float(w, a.dtype, WIDE)), acc, PRECISION, WIDE)
    _store(acc, out, parts, x_scales, scales, bias, rows, size, row, column)


@triton.jit(do_not_specialize=["rows"])  # it changes from step to step: no build for each 1 or multiple of 16
def _multiply_int4(
    x,  # [T, K]
    weight,  # [N, K / 2] uint8
    out,  # [T, N]
    parts,  # [splits, T, N] float32, or None
    scales,  # [N, K / GROUP]
    minimums,  # [N, K / GROUP]
    bias,  # [N], or None
    rows,
    size,
    depth,
    x_stride,
    part_depth,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (i, j, s), as in `_multiply_rows`. A byte's halves are columns of K that lie GROUP / 2 apart: two products."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * part_depth
    end = tl.minimum(begin + part_depth, depth)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = weight + column.to(tl.int64)[:, None] * (depth // 2)
    group_row = column.to(tl.int64)[:, None] * (depth // GROUP)
    byte = tl.arange(0, BLOCK_K // 2)
    low_column = byte // (GROUP // 2) * GROUP + byte % (GROUP // 2)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = (column < size)[:, None] & (start // 2 + byte < end // 2)[None, :]
        packed = tl.load(w_row + start // 2 + byte[None, :], mask=inside, other=0)
        group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        known = (column < size)[:, None] & (group < depth // GROUP)[None, :]
        scale = tl.load(scales + group_row + group[None, :], mask=known, other=0.0).to(tl.float32)
        minimum = tl.load(minimums + group_row + group[None, :], mask=known, other=0.0).to(tl.float32)
        low = _widen(packed & 15, scale, minimum, BLOCK_N, BLOCK_K, GROUP).to(x.dtype.element_ty)
        high = _widen(packed >> 4, scale, minimum, BLOCK_N, BLOCK_K, GROUP).to(x.dtype.element_ty)
        k = start + low_column
        live = (row < rows)[:, None] & (k < end)[None, :]
        acc = dot(tl.load(x_row + k[None, :], mask=live, other=0.0), tl.trans(low), acc, PRECISION, WIDE)
        acc = dot(tl.load(x_row + (k + GROUP // 2)[None, :], mask=live, other=0.0), tl.trans(high), acc, PRECISION, WIDE)
    _store(acc, out, parts, None, None, bias, rows, size, row, column)


@triton.jit
def _widen(numbers, scale, minimum, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Return numbers [BLOCK_N, BLOCK_K / 2] of 4 bits as float32, by the scale and the minimum of each GROUP / 2 of them."""
    wide = tl.reshape(numbers.to(tl.float32), [BLOCK_N, BLOCK_K // GROUP, GROUP // 2])
    return tl.reshape(wide * scale[:, :, None] + minimum[:, :, None], [BLOCK_N, BLOCK_K // 2])


@triton.jit(do_not_specialize=["rows"])  # it changes from step to step: no build for each 1 or multiple of 16
def _sum_parts(
    parts,  # [SPLITS, T, N] float32
    out,  # [T, N]
    x_scales,  # [T] float32, or None
    scales,  # [N] float32, or None
    bias,  # [N], or None
    rows,
    size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, p): columns [p · BLOCK, (p + 1) · BLOCK) of row t, part after part."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(SPLITS):
        total += tl.load(parts + (part * rows + row) * size + column, mask=inside, other=0.0)
    if scales is not None:
        total *= tl.load(scales + column, mask=inside, other=0.0)
    if x_scales is not None:
        total *= tl.load(x_scales + row)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, total.to(out.dtype.element_ty), mask=inside)


def quantise_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of `x` [T, K], any float dtype, to float8_e4m3fn; return it with its scales [T] float32."""
    assert x.stride(1) == 1
    values = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    arguments = {"x": x, "values": values, "scales": scales, "depth": x.shape[1], "x_stride": x.stride(0),
                 "BLOCK": triton.next_power_of_2(x.shape[1]), "INTERPRETED": INTERPRETED}  # fmt: skip
    launch(_quantise_row, (len(x),), arguments, num_warps=8)
    return values, scales


@triton.jit
def _quantise_row(
    x,  # [T, K]
    values,  # [T, K] float8
    scales,  # [T] float32
    depth,
    x_stride,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_stride + column, mask=column < depth, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    scale = tl.where(largest == 0, 1.0, largest / 448.0)
    tl.store(scales + row, scale)
    narrow = quantise(wide / scale, values.dtype.element_ty, INTERPRETED)
    tl.store(values + row * depth + column, narrow, mask=column < depth)
