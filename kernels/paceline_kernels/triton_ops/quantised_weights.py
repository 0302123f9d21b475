"""Weights in 8 and 4 bits: what is stored, and how it is made from a float weight. Plain torch."""

from dataclasses import dataclass

import torch

__all__ = ["Int4Weight", "RowScaledWeight", "quantise_int4", "quantise_rows"]

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
