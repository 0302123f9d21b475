"""Rotary positions (Su et al. 2021, arXiv:2104.09864), fused with the write of keys and values into their blocks."""

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import INTERPRETED, ceil_div, launch
from paceline_kernels.triton_ops.primitives import quantise

__all__ = ["rope_and_cache"]

# Heads of a program: 8 × 128 numbers are 8 a lane of 4 warps.
_HEADS = 8
_STORED_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    *,
    positions: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys of `qkv` **in place**, write keys and values to `kv_cache`, return the queries [T, H, D].

    `qkv` [T, H + 2·K, D] float16, bfloat16 or float32, contiguous; the halves of a head rotate against each other. `cos` and
    signed `sin` [P, D] hold a row per position, read at `positions` [T] (None: row t is token t's). `kv_cache` is
    [B, S, 2, K, D]; `slots` [T] are block × S + offset, negative where a token is padding and isn't written. Into an int8
    or float8_e4m3fn cache each head of a token goes with its own scale, largest magnitude / largest number, which is
    written to `kv_scales` [B, S, 2, K] float32.
    """
    count, heads, size = qkv.shape
    assert qkv.is_contiguous() and kv_cache.is_contiguous() and size % 2 == 0
    assert (kv_scales is not None) == (kv_cache.dtype in _STORED_MAX), "a quantised cache has scales"
    half = triton.next_power_of_2(size // 2)
    arguments = {
        "qkv": qkv, "cos": cos, "sin": sin, "kv": kv_cache, "scales": kv_scales, "slots": slots, "positions": positions,
        "QUERIES": num_heads, "KEYS": (heads - num_heads) // 2, "D": size, "HALF": half, "HEADS": _HEADS,
        "LARGEST": _STORED_MAX.get(kv_cache.dtype, 0.0), "INTERPRETED": INTERPRETED,
    }  # fmt: skip
    launch(_rotate, (count, ceil_div(heads, _HEADS)), arguments)
    return qkv[:, :num_heads]


@triton.jit
def _rotate(
    qkv,  # [T, QUERIES + 2 · KEYS, D]
    cos,  # [P, D]
    sin,  # [P, D]
    kv,  # [B · S, 2 · KEYS, D]
    scales,  # [B · S, 2 · KEYS] float32, or None
    slots,  # [T]
    positions,  # [T], or None
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (t, p): heads [p · HEADS, (p + 1) · HEADS) of token t, queries, keys and values alike, in two halves."""
    token = tl.program_id(0).to(tl.int64)
    position = token if positions is None else tl.load(positions + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    mask = (head < QUERIES + 2 * KEYS)[:, None] & (column < D // 2)[None, :]
    turned = (head < QUERIES + KEYS)[:, None]
    at = qkv + (token * (QUERIES + 2 * KEYS) + head)[:, None] * D + column[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + D // 2, mask=mask, other=0.0).to(tl.float32)
    angle = position * D + column
    inside = column < D // 2
    # both halves of a row hold the same cosines, and sines that differ only in sign
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle + D // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    low, high = tl.where(turned, low * c - high * s, low), tl.where(turned, high * c + low * s, high)
    tl.store(at, low.to(qkv.dtype.element_ty), mask=mask & turned)
    tl.store(at + D // 2, high.to(qkv.dtype.element_ty), mask=mask & turned)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        stored = mask & (head >= QUERIES)[:, None]
        row = slot * (2 * KEYS) + head - QUERIES
        target = kv + row[:, None] * D + column[None, :]
        if scales is None:
            tl.store(target, low.to(kv.dtype.element_ty), mask=stored)
            tl.store(target + D // 2, high.to(kv.dtype.element_ty), mask=stored)
        else:
            largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
            scale = tl.where(largest == 0, 1.0, largest / LARGEST)
            tl.store(scales + row, scale, mask=(head >= QUERIES) & (head < QUERIES + 2 * KEYS))
            tl.store(target, quantise(low / scale[:, None], kv.dtype.element_ty, INTERPRETED), mask=stored)
            tl.store(target + D // 2, quantise(high / scale[:, None], kv.dtype.element_ty, INTERPRETED), mask=stored)
