"""The gates of SwiGLU and GeGLU on a fused projection (Shazeer 2020, arXiv:2002.05202)."""

import torch
import triton
import triton.language as tl

from paceline_kernels.triton_ops.launch import ceil_div, launch
from paceline_kernels.triton_ops.primitives import tanh

__all__ = ["gelu_mul", "gelu_tanh_mul", "silu_mul"]

# 4 warps with 8 numbers a lane: one 16-byte load each of gate and up in 16 bit.
_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) × up` [T, I] of a fused projection [T, 2·I] whose first half is the gate.

    float16, bfloat16 or float32; computed in float32 and rounded once.
    """
    return _launch(gate_up, "silu")


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) × up`, as `silu_mul` does, with the exact GELU (by the error function)."""
    return _launch(gate_up, "gelu")


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `gelu(gate) × up`, as `silu_mul` does, with GELU's tanh approximation (Gemma)."""
    return _launch(gate_up, "gelu_tanh")


def _launch(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    assert gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    arguments = {"out": out, "gate_up": gate_up, "width": width, "ACTIVATION": activation, "BLOCK": _BLOCK}
    launch(_gate, (rows, ceil_div(width, _BLOCK)), arguments)
    return out


@triton.jit
def _gate(
    out,  # [T, I]
    gate_up,  # [T, 2 · I]
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, p): columns [p · BLOCK, (p + 1) · BLOCK) of row t."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        # x · sigmoid(x), with sigmoid(x) = (1 + tanh(x / 2)) / 2: no exponential that overflows
        gate = gate * (0.5 + 0.5 * tanh(0.5 * gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (1.0 + tanh(inner))
    tl.store(out + row * width + column, (gate * up).to(out.dtype.element_ty), mask=mask)
