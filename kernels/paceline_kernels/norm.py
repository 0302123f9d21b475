"""RMSNorm, alone and fused with the residual sum (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline_kernels.dispatch import Op

__all__ = ["add_rms_norm", "rms_norm"]


@Op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x²) + eps) × weight` over the last dimension, in the dtype of `x`.

    `x` [T, N] or [T, H, N] (a view of a fused projection will do), `weight` [N], any float dtype. The mean is taken in
    float32 at least, as the models were trained.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(x.dtype) * weight).to(x.dtype)


@rms_norm.register("cpu")
def _rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # one fused pass in float32 (and float64); the 16-bit types keep the reference's float32 mean
    if x.dtype in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return rms_norm.reference(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


@Op
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` [T, N] to `residual` [T, N] **in place** and return the RMSNorm of the sum, [T, N]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


@rms_norm.register("cuda")
def _rms_norm_cuda(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from paceline_kernels.triton_ops import norm

    return norm.rms_norm(x, weight, eps)


@add_rms_norm.register("cuda")
def _add_rms_norm_cuda(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from paceline_kernels.triton_ops import norm

    return norm.add_rms_norm(x, residual, weight, eps)
