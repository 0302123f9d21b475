"""The frequencies of rotary positions, as `transformers` computes them (models are trained so), in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline_runtime.model_config import RopeConfig

__all__ = ["Rotation", "rotated_first", "rotation_of"]

ReadTensor = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rotation:
    """`frequencies` [head_dim / 2] and what cosines and sines are multiplied by, [head_dim / 2] or None.

    Pair i of a head is its numbers i and i + head_dim / 2. A head that is rotated in part has its rotated pairs first
    (`rotated_first` reorders the weights) and frequencies of 0 after them, which rotate nothing.
    """

    frequencies: torch.Tensor
    factors: torch.Tensor | None

    def to(self, device: torch.device) -> Rotation:
        """Return it on another device."""
        return Rotation(self.frequencies.to(device), None if self.factors is None else self.factors.to(device))


def rotation_of(rope: RopeConfig, head_dim: int, read: ReadTensor) -> Rotation:
    """Return the rotation of heads of `head_dim` numbers; `read` (name, shape) gives tensors of the weights."""
    size = head_dim if rope.rotary_dim is None else rope.rotary_dim
    frequencies = torch.zeros(head_dim // 2)
    frequencies[: size // 2] = _frequencies(rope, size, read)
    if rope.attention_factor == 1.0:
        return Rotation(frequencies, None)
    factors = torch.ones(head_dim // 2)
    factors[: size // 2] = rope.attention_factor
    return Rotation(frequencies, factors)


def rotated_first(rows: torch.Tensor, heads: int, rotary_dim: int) -> torch.Tensor:
    """Reorder `rows` [heads · D, …] of queries or keys, of whose heads only the first `rotary_dim` numbers are rotated, so
    that the rotated numbers are the first of each half: a head then rotates like a whole one. Dot products don't change.
    """
    size, half = rows.shape[0] // heads, rotary_dim // 2
    order = torch.arange(size)
    rest = order[rotary_dim:]
    cut = size // 2 - half
    order = torch.cat((order[:half], rest[:cut], order[half:rotary_dim], rest[cut:]))
    return rows.view(heads, size, *rows.shape[1:])[:, order].flatten(0, 1)


def _frequencies(rope: RopeConfig, size: int, read: ReadTensor) -> torch.Tensor:
    """Return the frequencies [size / 2] of `size` rotated numbers."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rope.kind == "none":
        return torch.zeros_like(plain)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, size)
    if rope.kind == "longrope":
        return plain / _factors(rope.short_factors, size, read)
    if rope.kind == "factors":
        return plain / _factors(rope.factors_tensor, size, read)
    assert rope.kind == "default", rope.kind
    return plain


def _factors(given: tuple[float, ...] | str, size: int, read: ReadTensor) -> torch.Tensor:
    return read(given, (size // 2,)).float() if isinstance(given, str) else torch.tensor(given)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's ramp: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    ramp = ((rope.original_max_positions / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * plain / rope.factor + ramp * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor, size: int) -> torch.Tensor:
    """YaRN's ramp by parts (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        return size * math.log(rope.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
