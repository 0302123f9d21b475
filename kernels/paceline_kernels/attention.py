"""Causal attention over paged KV for a ragged batch of prefill chunks and decodes (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline_kernels.attention_batch import AttentionBatch, DecodeGroup, Gather, PrefillSegment
from paceline_kernels.dispatch import Op

__all__ = ["paged_attention"]

# 128 rows of 16 heads over 8192 positions in float32 are 64 MB.
_SCORE_ROWS = 128


@Op
def paged_attention(
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionBatch,
    gather: Gather,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Return softmax(cap(scale · q kᵀ) + causal mask) v for every row, [T, H·D].

    `queries` [T, H, D] are rotated; `kv_cache` [B, S, 2, K, D] already holds the step's own keys and values; query head h
    reads KV head h // (H / K). A row sees its last `window` positions (None: all); `soft_cap` c maps scores s to
    c · tanh(s / c). `gather` is scratch space of the caller. Any float dtype; softmax in float32 at least.
    """
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    layout = batch.layout(window)
    for group in layout.decodes:
        keys, values = _group_kv(kv_cache, group, gather)
        rows = queries[group.first : group.last].unsqueeze(2)
        out[group.first : group.last] = _attend(rows, keys, values, group.mask, scale, soft_cap).squeeze(2)
    for part in layout.prefills:
        keys, values = _segment_kv(kv_cache, part, gather)
        _attend_segment(queries, keys, values, part, scale, soft_cap, out)
    return out.flatten(1)


@paged_attention.register("cpu")
def _paged_attention_cpu(
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionBatch,
    gather: Gather,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    if soft_cap is not None:  # torch's fused attention has none
        return paged_attention.reference(queries, kv_cache, batch, gather, scale, window=window, soft_cap=soft_cap)
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    layout = batch.layout(window)
    for group in layout.decodes:
        _decode(queries, kv_cache, group, gather, scale, out)
    for part in layout.prefills:
        _prefill(queries, kv_cache, part, gather, scale, out)
    return out.flatten(1)


@paged_attention.register("cuda")
def _paged_attention_cuda(
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionBatch,
    _gather: Gather,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    from paceline_kernels.triton_ops import attention

    assert batch.paged is not None, "the step was laid out for torch's kernels"
    return attention.paged_attention(queries, kv_cache, batch.paged, scale, window=window, soft_cap=soft_cap)


def _decode(
    queries: torch.Tensor, kv_cache: torch.Tensor, group: DecodeGroup, gather: Gather, scale: float, out: torch.Tensor
) -> None:
    keys, values = _group_kv(kv_cache, group, gather)
    # one token each: the heads that share a KV head become the query positions of one attention, [n, K, H/K, D]
    shape = (group.last - group.first, keys.shape[1], -1, queries.shape[2])
    rows = queries[group.first : group.last].reshape(shape)
    attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=group.mask, scale=scale)
    out[group.first : group.last] = attended.flatten(1, 2)


def _prefill(
    queries: torch.Tensor, kv_cache: torch.Tensor, part: PrefillSegment, gather: Gather, scale: float, out: torch.Tensor
) -> None:
    keys, values = _segment_kv(kv_cache, part, gather)
    rows = queries[part.first : part.last].transpose(0, 1).unsqueeze(0)  # [1, H, n, D]
    attended = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=part.mask, is_causal=part.mask is None, scale=scale, enable_gqa=True
    )
    out[part.first : part.last] = attended.squeeze(0).transpose(0, 1)


def _group_kv(kv_cache: torch.Tensor, group: DecodeGroup, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [n, K, m·S, D] of a group as views of the gather buffer."""
    members = group.last - group.first
    rows = gather.blocks(kv_cache, group.blocks).view(members, -1, *kv_cache.shape[2:])
    return rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)


def _segment_kv(kv_cache: torch.Tensor, part: PrefillSegment, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [1, K, context, D] of a segment as views of the gather buffer."""
    rows = gather.blocks(kv_cache, part.blocks).flatten(0, 1)[: part.context]
    return rows[:, 0].transpose(0, 1).unsqueeze(0), rows[:, 1].transpose(0, 1).unsqueeze(0)


def _attend_segment(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: PrefillSegment,
    scale: float,
    soft_cap: float | None,
    out: torch.Tensor,
) -> None:
    """Attention of a segment written out, a few rows at a time: all scores of a long prompt would take gigabytes."""
    for begin in range(0, part.last - part.first, _SCORE_ROWS):
        count = min(_SCORE_ROWS, part.last - part.first - begin)
        first = part.first + begin
        if part.mask is not None:
            context, mask = part.context, part.mask[begin : begin + count]
        else:
            context = begin + count
            mask = torch.full((count, context), float("-inf"), dtype=queries.dtype, device=queries.device).triu_(begin + 1)
        rows = queries[first : first + count].transpose(0, 1).unsqueeze(0)  # [1, H, n, D]
        attended = _attend(rows, keys[:, :, :context], values[:, :, :context], mask, scale, soft_cap)
        out[first : first + count] = attended.squeeze(0).transpose(0, 1)


def _attend(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention written out: `rows` [n, H, t, D], `keys` and `values` [n, K, c, D], `mask` broadcast to [n, H, t, c]."""
    share = rows.shape[1] // keys.shape[1]
    wide = torch.promote_types(rows.dtype, torch.float32)
    scores = rows.to(wide) @ keys.repeat_interleave(share, 1).to(wide).transpose(2, 3) * scale
    if soft_cap is not None:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ values.repeat_interleave(share, 1).to(wide)).to(rows.dtype)
