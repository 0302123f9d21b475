"""Lists of ints as tensors: made several times in every step, and `torch.tensor` reads an int in 160 ns, this in 8."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import torch

__all__ = ["int32s", "int64s"]


def int32s(values: Sequence[int]) -> torch.Tensor:
    """Return `values` [n] as int32, on the CPU; an array of C ints is shared. Raises `struct.error` for one too large."""
    if isinstance(values, array) and values:
        return torch.frombuffer(values, dtype=torch.int32)
    return _packed(values, "i", torch.int32)


def int64s(values: Sequence[int]) -> torch.Tensor:
    """Return `values` [n] as int64, on the CPU."""
    return _packed(values, "q", torch.int64)


def _packed(values: Sequence[int], code: str, dtype: torch.dtype) -> torch.Tensor:
    if not values:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(struct.pack(f"{len(values)}{code}", *values)), dtype=dtype)
