"""RMSNorm, alone and fused with the residual sum (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import ceil_div, launch

__all__ = ["add_rms_norm", "rms_norm"]

# A program takes about 2048 numbers: one row of a hidden state, or many short rows where single heads are normalised.
_PROGRAM_NUMBERS = 2048
# Numbers per warp: 32 lanes with 16 each, four 16-byte loads of 16-bit numbers in flight per lane for a row of two loads.
_WARP_NUMBERS = 512
_MAX_WARPS = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) × weight` over the last dimension, contiguous, in the dtype of `x`.

    `x` [T, N] or [T, H, N] in float16, bfloat16 or float32, its last dimension contiguous (a view of a fused projection
    will do); `weight` [N]. The mean is float32, and the quotient is rounded before it meets the weight, as in the models.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, x, None, weight, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` [T, N] to the contiguous `residual` [T, N] **in place** and return the RMSNorm of the sum, [T, N]."""
    assert residual.is_contiguous(), "the residual is written with the layout of the result"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, x, residual, weight, eps)
    return out


def _launch(out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> None:
    assert x.stride(-1) == 1 and weight.is_contiguous()
    wide = x if x.dim() == 3 else x.unsqueeze(1)
    count, inner, size = wide.shape
    block = triton.next_power_of_2(size)
    rows = max(_PROGRAM_NUMBERS // block, 1)
    arguments = {
        "out": out, "x": x, "residual": residual, "weight": weight, "eps": eps, "count": count * inner,
        "outer_stride": wide.stride(0), "inner_stride": wide.stride(1),
        "INNER": inner, "N": size, "BLOCK": block, "ROWS": rows,
    }  # fmt: skip
    num_warps = min(max(rows * block // _WARP_NUMBERS, 1), _MAX_WARPS)
    launch(_normalise, (ceil_div(count * inner, rows),), arguments, num_warps=num_warps)


@triton.jit(do_not_specialize=["count"])  # it changes from step to step: no build for each 1 or multiple of 16
def _normalise(
    out,  # [T, INNER, N], contiguous
    x,  # [T, INNER, N]
    residual,  # [T, INNER, N], contiguous, or None
    weight,  # [N]
    eps,
    count,
    outer_stride,
    inner_stride,
    INNER: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program p: rows [p · ROWS, (p + 1) · ROWS), each read once and kept in registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (column < N)[None, :]
    source = (row // INNER * outer_stride + row % INNER * inner_stride)[:, None] + column[None, :]
    target = row[:, None] * N + column[None, :]
    values = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        # the sum is rounded first: what is normalised is what later layers will add to
        values = (values + tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
        tl.store(residual + target, values, mask=mask)
        values = values.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(values * values, 1) / N + eps)
    values = (values * shrink[:, None]).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + target, (values * factor[None, :]).to(out.dtype.element_ty), mask=mask)
