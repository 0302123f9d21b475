"""The gates of SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline_kernels.dispatch import Op

__all__ = ["gelu_tanh_mul", "silu_mul"]


@Op
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) × up` [T, I] of a fused projection [T, 2·I] whose first half is the gate. Any float dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@Op
def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) × up` [T, I], as `silu_mul` does, with GELU's tanh approximation (Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@silu_mul.register("cuda")
def _silu_mul_cuda(gate_up: torch.Tensor) -> torch.Tensor:
    from paceline_kernels.triton_ops import gate

    return gate.silu_mul(gate_up)


@gelu_tanh_mul.register("cuda")
def _gelu_tanh_mul_cuda(gate_up: torch.Tensor) -> torch.Tensor:
    from paceline_kernels.triton_ops import gate

    return gate.gelu_tanh_mul(gate_up)
