"""Rotary positions (Su et al. 2021, arXiv:2104.09864), fused with the write of keys and values into their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline_kernels.dispatch import Op

__all__ = ["RopeTable", "rope_and_cache", "rope_table"]


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and signed sines [P, 1, D] of each position; `sin` carries a minus in its first half."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> RopeTable:
        """Return the rows of `positions` [T], as `rope_and_cache` wants them."""
        return RopeTable(self.cos.index_select(0, positions), self.sin.index_select(0, positions))


def rope_table(inverse_frequencies: torch.Tensor, max_positions: int, dtype: torch.dtype) -> RopeTable:
    """Return the table for `inverse_frequencies` [D/2], computed in their dtype (float32, as models are trained)."""
    positions = torch.arange(max_positions, dtype=inverse_frequencies.dtype, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return RopeTable(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))


@Op
def rope_and_cache(
    qkv: torch.Tensor, table: RopeTable, kv_cache: torch.Tensor, slots: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Rotate queries and keys of `qkv` **in place**, write keys and values to `kv_cache`, return the queries.

    `qkv` [T, H + 2·K, D] holds queries, keys, values; `table` the T rows of the step's positions; `kv_cache` is
    [B, S, 2, K, D]; `slots` [T] int64 is block × S + offset of each token. The halves of a head are rotated against each
    other (the Hugging Face order).
    Returns a view [T, H, D].
    """
    heads, size = qkv.shape[1:]
    num_kv_heads = (heads - num_heads) // 2
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.unflatten(-1, (2, size // 2)).flip(2).flatten(2)
    rotated.mul_(table.cos).addcmul_(swapped, table.sin)
    kv_cache.view(-1, 2 * num_kv_heads, size).index_copy_(0, slots, qkv[:, num_heads:])
    return qkv[:, :num_heads]
