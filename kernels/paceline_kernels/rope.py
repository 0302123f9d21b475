"""Rotary positions (Su et al. 2021, arXiv:2104.09864), fused with the write of keys and values into their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline_kernels.dispatch import Op

__all__ = ["RopeRows", "rope_and_cache", "rope_rows"]


@dataclass(frozen=True, slots=True)
class RopeRows:
    """Cosines and signed sines [T, 1, D] of a step's positions; `sin` carries a minus in its first half."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_rows(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype, factors: torch.Tensor | None = None
) -> RopeRows:
    """Return the rows of `positions` [T] for `inverse_frequencies` [D/2], computed in their dtype (float32, as in training).

    A frequency of 0 leaves its pair of numbers as it is. `factors` [D/2] multiply cosines and sines (YaRN's and LongRoPE's
    attention factor). Made once per step for all layers, in microseconds; a table of every position would take gigabytes of
    a model that claims a context of millions.
    """
    angles = torch.outer(positions.to(inverse_frequencies.dtype), inverse_frequencies)
    cos, sin = angles.cos(), angles.sin()
    if factors is not None:
        cos, sin = cos * factors, sin * factors
    cos, sin = cos.to(dtype), sin.to(dtype)
    return RopeRows(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))


@Op
def rope_and_cache(
    qkv: torch.Tensor, rows: RopeRows, kv_cache: torch.Tensor, slots: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Rotate queries and keys of `qkv` **in place**, write keys and values to `kv_cache`, return the queries.

    `qkv` [T, H + 2·K, D] holds queries, keys, values; `rows` the step's positions; `kv_cache` is
    [B, S, 2, K, D]; `slots` [T] int64 is block × S + offset of each token. The halves of a head are rotated against each
    other (the Hugging Face order).
    Returns a view [T, H, D].
    """
    heads, size = qkv.shape[1:]
    num_kv_heads = (heads - num_heads) // 2
    rotated = qkv[:, : num_heads + num_kv_heads]
    swapped = rotated.unflatten(-1, (2, size // 2)).flip(2).flatten(2)
    rotated.mul_(rows.cos).addcmul_(swapped, rows.sin)
    kv_cache.view(-1, 2 * num_kv_heads, size).index_copy_(0, slots, qkv[:, num_heads:])
    return qkv[:, :num_heads]


@rope_and_cache.register("cuda")
def _rope_and_cache_cuda(
    qkv: torch.Tensor, rows: RopeRows, kv_cache: torch.Tensor, slots: torch.Tensor, num_heads: int
) -> torch.Tensor:
    from paceline_kernels.triton_ops import rope

    return rope.rope_and_cache(qkv, rows.cos.squeeze(1), rows.sin.squeeze(1), kv_cache, slots, num_heads)
