"""Products with weights packed for the native kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from paceline_kernels.triton_ops.quantised_weights import RowScaledWeight

__all__ = ["PackedLinear"]

# Outputs of a panel and the multiple of inputs, as csrc/kernels.h has them.
_FLOAT_PANEL = 32
_INT_PANEL = 16
_DEPTH = 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear:
    """`x @ weight.T + bias` in float32 sums, by the native kernels; only the packed weight [out, in] is kept.

    A float32, bfloat16 or float16 weight is used as it is. One in 8 bits meets activations of 16 bits, quantised by row.
    """

    def __init__(self, weight: torch.Tensor | RowScaledWeight, bias: torch.Tensor | None = None) -> None:
        values = weight.values if isinstance(weight, RowScaledWeight) else weight
        self.out_features, self.in_features = values.shape
        tensors = _int_panels(weight) if isinstance(weight, RowScaledWeight) else (_float_panels(weight), None, None)
        wide = None if bias is None else bias.float().contiguous()
        self.nbytes = sum(tensor.nbytes for tensor in (*tensors, wide) if tensor is not None)
        data, scales, sums = tensors
        make: Any = torch.classes.paceline_cpu.Weight
        self.weight = make(data, self.out_features, self.in_features, scales, sums, wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [T, out], for `x` [T, in], in the dtype of `x`."""
        out: torch.Tensor = torch.ops.paceline_cpu.linear(x.float().contiguous(), self.weight)
        return out.to(x.dtype)


def _float_panels(weight: torch.Tensor) -> torch.Tensor:
    """Return [out / 32, in, 32]."""
    rows, columns = weight.shape
    panels = pad(weight, (0, 0, 0, -rows % _FLOAT_PANEL)).view(-1, _FLOAT_PANEL, columns)
    return panels.transpose(1, 2).contiguous()


def _int_panels(weight: RowScaledWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [out / 16, in / 4, 16, 4], and the scales and sums of the outputs, padded."""
    rows, columns = weight.values.shape
    more = -rows % _INT_PANEL
    padded = pad(weight.values, (0, -columns % _DEPTH, 0, more))
    panels = padded.view(-1, _INT_PANEL, padded.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous()
    return panels, pad(weight.scales.float(), (0, more)), padded.sum(1, dtype=torch.int32)
