"""Products with weights packed for the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from paceline_kernels.triton_ops.quantised_weights import Int4Weight, Int8GroupWeight, RowScaledWeight

__all__ = ["FLOATS", "AnyWeight", "PackedLinear", "packs"]

AnyWeight = torch.Tensor | RowScaledWeight | Int4Weight | Int8GroupWeight

# Outputs of a panel, the multiple of inputs, and the inputs of a group, as csrc/kernels.h has them.
_FLOAT_PANEL = 32
_INT_PANEL = 16
_DEPTH = 64
GROUP = 32
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# csrc/kernels.h's enum Kind
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_Q4, _Q8 = 4, 5


@dataclass(frozen=True, slots=True)
class _Panels:
    """What csrc/kernels.h's `Matrix` points to."""

    kind: int
    data: torch.Tensor
    scales: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    groups: torch.Tensor | None = None


class PackedLinear:
    """`x @ weight.T + bias` in float32 sums, by the native kernels; only the packed weight [out, in] is kept.

    A weight in float32, bfloat16, float16 or groups of 32 inputs counts as exactly what it is. Few rows of activations meet
    groups in 15 bits with a scale per group, many rows as two bfloat16 numbers each (AMX) or whole; an int8 weight with a
    scale per output meets 13 to 15 bits with a scale per row.
    """

    def __init__(self, weight: AnyWeight, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = _shape(weight)
        panels = _panels(weight)
        wide = None if bias is None else bias.float().contiguous()
        parts = (panels.data, panels.scales, panels.sums, panels.groups, wide)
        self.nbytes = sum(part.nbytes for part in parts if part is not None)
        make: Any = torch.classes.paceline_cpu.Weight
        sizes = (self.out_features, self.in_features)
        self.weight = make(panels.kind, panels.data, *sizes, panels.scales, panels.sums, panels.groups, wide)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [T, out], for `x` [T, in], in the dtype of `x`."""
        out: torch.Tensor = torch.ops.paceline_cpu.linear(x.float().contiguous(), self.weight)
        return out.to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of the outputs `ids` [T] int64 as [T, in] float32: the packed weight as a table."""
        out: torch.Tensor = torch.ops.paceline_cpu.embed(ids, self.weight)
        return out

    def head(self, hidden: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the product with the RMSNorm (`norm` [in]) of `rows` [n] int64 of `hidden` [T, in], [n, out]; float32."""
        out: torch.Tensor = torch.ops.paceline_cpu.head(hidden, rows, norm, eps, self.weight)
        return out

    def greedy(self, hidden: torch.Tensor, rows: torch.Tensor, norm: torch.Tensor, eps: float) -> list[int]:
        """Return the first of the largest of each row of what `head` returns, [n]."""
        out: list[int] = torch.ops.paceline_cpu.greedy(hidden, rows, norm, eps, self.weight)
        return out


def packs(weight: AnyWeight) -> bool:
    """Tell whether there are native kernels for a weight of this type."""
    if isinstance(weight, Int4Weight):
        return weight.group == GROUP
    if isinstance(weight, RowScaledWeight):
        return weight.values.dtype == torch.int8
    return isinstance(weight, Int8GroupWeight) or weight.dtype in FLOATS


def _shape(weight: AnyWeight) -> tuple[int, int]:
    values = weight if isinstance(weight, torch.Tensor) else weight.values
    return values.shape[0], values.shape[1] * (2 if isinstance(weight, Int4Weight) else 1)


def _panels(weight: AnyWeight) -> _Panels:
    if isinstance(weight, Int4Weight):
        return _q4_panels(weight)
    if isinstance(weight, Int8GroupWeight):
        return _q8_panels(weight)
    return _int_panels(weight) if isinstance(weight, RowScaledWeight) else _float_panels(weight)


def _float_panels(weight: torch.Tensor) -> _Panels:
    """[out / 32, in, 32]"""
    rows, columns = weight.shape
    panels = pad(weight, (0, 0, 0, -rows % _FLOAT_PANEL)).view(-1, _FLOAT_PANEL, columns)
    return _Panels(_KINDS[weight.dtype], panels.transpose(1, 2).contiguous())


def _int_panels(weight: RowScaledWeight) -> _Panels:
    """[out / 16, in / 4, 16, 4], and the scales and sums of the outputs."""
    rows, columns = weight.values.shape
    more = -rows % _INT_PANEL
    padded = pad(weight.values, (0, -columns % _DEPTH, 0, more))
    panels = padded.view(-1, _INT_PANEL, padded.shape[1] // 4, 4).permute(0, 2, 1, 3).contiguous()
    scales = pad(weight.scales.float(), (0, more))
    return _Panels(_KINDS[torch.int8], panels, scales, padded.sum(1, dtype=torch.int32))


def _q4_panels(weight: Int4Weight) -> _Panels:
    """[out / 16, in / 32, 4, 16, 4]; the groups' scales and minimums [out / 16, in / 32, 2, 16]."""
    more = -len(weight.values) % _FLOAT_PANEL
    values = pad(weight.values, (0, 0, 0, more)).view(-1, _INT_PANEL, weight.scales.shape[1], 4, 4)
    parts = [pad(part.half(), (0, 0, 0, more)) for part in (weight.scales, weight.minimums)]
    numbers = [part.view(-1, _INT_PANEL, part.shape[1]) for part in parts]
    groups = torch.stack(numbers, 1).permute(0, 3, 1, 2).contiguous()
    return _Panels(_Q4, values.permute(0, 2, 3, 1, 4).contiguous(), groups=groups)


def _q8_panels(weight: Int8GroupWeight) -> _Panels:
    """[out / 16, in / 32, 8, 16, 4], values + 128; the groups' scales [out / 16, in / 32, 16]."""
    more = -len(weight.values) % _FLOAT_PANEL
    unsigned = pad(weight.values, (0, 0, 0, more)).view(torch.uint8) ^ 128
    values = unsigned.view(-1, _INT_PANEL, weight.scales.shape[1], 8, 4)
    scales = pad(weight.scales.half(), (0, 0, 0, more)).view(-1, _INT_PANEL, weight.scales.shape[1])
    return _Panels(_Q8, values.permute(0, 2, 3, 1, 4).contiguous(), groups=scales.transpose(1, 2).contiguous())
