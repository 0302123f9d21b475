"""The gate of SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline_kernels.dispatch import Op

__all__ = ["silu_mul"]


@Op
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) × up` [T, I] of a fused projection [T, 2·I] whose first half is the gate. Any float dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@silu_mul.register("cuda")
def _silu_mul_cuda(gate_up: torch.Tensor) -> torch.Tensor:
    from paceline_kernels.triton_ops import gate

    return gate.silu_mul(gate_up)
