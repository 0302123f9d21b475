"""Weights in 8 and 4 bits: what is stored, and how it is made from a float weight. Plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

__all__ = [
    "Int4Weight",
    "Int8GroupWeight",
    "RowScaledWeight",
    "StoredMatrix",
    "join_rows",
    "map_rows",
    "quantise_int4",
    "quantise_rows",
]

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class RowScaledWeight:
    """A weight [N, K] is `values` [N, K], int8 or float8_e4m3fn, times `scales` [N] float32."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantise(self) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A weight [N, K] in groups of columns: number q of 0…15 stands for `scales` · q + `minimums`, both [N, K / group].

    Byte i of a group's `group` / 2 bytes holds column i in its low half and column i + group / 2 in its high half, as in
    GGUF's Q4_0 and Q4_1, so that `values` [N, K / 2] uint8 unpack without a shuffle. Scales and minimums are float16 or
    float32.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    def dequantise(self) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        packed = self.values.unflatten(1, (-1, self.group // 2))
        numbers = torch.cat((packed & 15, packed >> 4), -1).float()
        return (numbers * self.scales.float()[..., None] + self.minimums.float()[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class Int8GroupWeight:
    """A weight [N, K] is `values` [N, K] int8 times `scales` [N, K / group] float16, as in GGUF's Q8_0 with groups of 32."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantise(self) -> torch.Tensor:
        """Return the weight [N, K] in float32."""
        grouped = self.values.unflatten(1, (self.scales.shape[1], -1)).float()
        return (grouped * self.scales.float()[..., None]).flatten(1)


StoredMatrix = torch.Tensor | Int4Weight | Int8GroupWeight


def map_rows(weight: StoredMatrix, change: Callable[[torch.Tensor], torch.Tensor]) -> StoredMatrix:
    """Return `weight` with its rows changed by what reorders or picks rows of a tensor [N, …]."""
    if isinstance(weight, torch.Tensor):
        return change(weight)
    return type(weight)(*(change(getattr(weight, part.name)) for part in fields(weight)))


def join_rows(weights: Sequence[StoredMatrix]) -> StoredMatrix:
    """Return the rows of all `weights`, which are of one type, one after the other."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])
    return type(first)(*(torch.cat([getattr(weight, part.name) for weight in weights]) for part in fields(first)))


def quantise_rows(weight: torch.Tensor, dtype: torch.dtype) -> RowScaledWeight:
    """Round `weight` [N, K] to int8 or float8_e4m3fn with a scale per row: largest magnitude / largest number."""
    wide = weight.float()
    scales = (wide.abs().amax(-1) / _LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = wide / scales[:, None]
    return RowScaledWeight((scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales)


def quantise_int4(weight: torch.Tensor, group: int) -> Int4Weight:
    """Round `weight` [N, K] to 4 bits, asymmetric: each group's range is cut into 15 steps. K is a multiple of `group`."""
    grouped = weight.float().unflatten(1, (-1, group))
    minimums, largest = grouped.amin(-1), grouped.amax(-1)
    scales = ((largest - minimums) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = ((grouped - minimums[..., None]) / scales[..., None]).round().clamp(0, 15).to(torch.uint8)
    low, high = numbers.chunk(2, -1)
    return Int4Weight((low | high << 4).flatten(1), scales, minimums)
