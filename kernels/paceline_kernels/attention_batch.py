"""The ragged batch of a step, laid out once for all layers: which rows attend to which blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["AttentionBatch", "DecodeGroup", "Gather", "PrefillSegment", "SequenceSpan", "plan_attention"]

# A group of decodes is padded to its longest member. Padding costs 0.27 µs per slot and layer, another group 40 µs (one
# AVX-512 core, 3 × 64 KV, float32), so a group may hold about 16 blocks of padding before a new one is cheaper.
_MAX_PADDING_BLOCKS = 16
# Bounds the gather buffer: 32 k slots of 3 × 64 KV in float32 are 50 MB.
MAX_GROUP_SLOTS = 32768


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's part of a step: positions `[start, start + num_tokens)`, with the ids of the blocks that cover them."""

    start: int
    num_tokens: int
    blocks: Sequence[int]

    @property
    def context(self) -> int:
        """Positions that the last token attends to."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `[first, last)`, one token each. `blocks` [n·m] int64 are their tables padded to m blocks; `mask` [n, 1, 1, m·S]
    is 0 where a row attends and -inf where it doesn't (padding and unwritten slots); None if every slot counts.
    """

    first: int
    last: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """Rows `[first, last)` of one sequence at consecutive positions, attending causally to `context` slots of `blocks` [m].

    `mask` [n, context] is 0 or -inf; None where the segment starts the sequence (plain causal).
    """

    first: int
    last: int
    context: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's rows: `positions` and `slots` [T] int64, and how the rows attend. Rows follow the order of the spans."""

    positions: torch.Tensor
    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSegment, ...]


class Gather:
    """A buffer for gathered KV that grows to the largest need and is reused by every layer and step.

    Without it each gather gets fresh pages from the system, which costs three times the copy itself.
    """

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def blocks(self, kv_cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return blocks `ids` [n] of `kv_cache` [B, S, 2, K, D] as [n, S, 2, K, D], valid until the next call."""
        shape = (len(ids), *kv_cache.shape[1:])
        need = int(np.prod(shape))
        if self._flat.numel() < need or self._flat.dtype != kv_cache.dtype or self._flat.device != kv_cache.device:
            self._flat = torch.empty(need, dtype=kv_cache.dtype, device=kv_cache.device)
        out = self._flat[:need].view(shape)
        torch.index_select(kv_cache, 0, ids, out=out)
        return out


def plan_attention(
    spans: Sequence[SequenceSpan], block_size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> AttentionBatch:
    """Lay out `spans` for attention in `dtype`. Spans of one token come first, best by falling context (less padding)."""
    ones = sum(span.num_tokens == 1 for span in spans)
    assert all(span.num_tokens == 1 for span in spans[:ones]), "spans of one token come first"
    positions = np.concatenate([np.arange(s.start, s.context) for s in spans])
    slots = np.concatenate([_slots(s, block_size) for s in spans])
    decodes = [
        _decode_group(first, spans[first:last], block_size, dtype, device)
        for first, last in _groups(spans[:ones], block_size)
    ]
    prefills, row = [], ones
    for span in spans[ones:]:
        prefills.append(_prefill_segment(row, span, block_size, dtype, device))
        row += span.num_tokens
    return AttentionBatch(_ids(positions, device), _ids(slots, device), tuple(decodes), tuple(prefills))


def _ids(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device)


def _num_blocks(span: SequenceSpan, block_size: int) -> int:
    return -(-span.context // block_size)


def _slots(span: SequenceSpan, block_size: int) -> np.ndarray:
    """Return block × block_size + offset of each of the span's positions."""
    if span.num_tokens == 1:
        block, offset = divmod(span.start, block_size)
        return np.array([span.blocks[block] * block_size + offset])
    positions = np.arange(span.start, span.context)
    return np.asarray(span.blocks)[positions // block_size] * block_size + positions % block_size


def _groups(spans: Sequence[SequenceSpan], block_size: int) -> list[tuple[int, int]]:
    """Cut the decodes into runs whose padding is bounded."""
    cuts, widest, real = [0], 0, 0
    for index, span in enumerate(spans):
        blocks = _num_blocks(span, block_size)
        members = index - cuts[-1] + 1
        padded = max(widest, blocks) * members
        if members > 1 and (padded - real - blocks > _MAX_PADDING_BLOCKS or padded * block_size > MAX_GROUP_SLOTS):
            cuts.append(index)
            widest, real = 0, 0
        widest, real = max(widest, blocks), real + blocks
    return [pair for pair in zip(cuts, [*cuts[1:], len(spans)], strict=True) if pair[0] < pair[1]]


def _decode_group(
    first: int, spans: Sequence[SequenceSpan], block_size: int, dtype: torch.dtype, device: torch.device | str
) -> DecodeGroup:
    width = max(_num_blocks(span, block_size) for span in spans)
    blocks = np.zeros((len(spans), width), dtype=np.int64)  # padding reads block 0, and the mask drops it
    for row, span in zip(blocks, spans, strict=True):
        count = _num_blocks(span, block_size)
        row[:count] = span.blocks[:count]
    contexts = np.array([span.context for span in spans])
    mask = None
    if (contexts < width * block_size).any():
        hidden = np.arange(width * block_size)[None] >= contexts[:, None]
        mask = _mask(hidden, dtype, device)[:, None, None]
    return DecodeGroup(first, first + len(spans), _ids(blocks.reshape(-1), device), mask)


def _prefill_segment(
    first: int, span: SequenceSpan, block_size: int, dtype: torch.dtype, device: torch.device | str
) -> PrefillSegment:
    blocks = np.asarray(span.blocks[: _num_blocks(span, block_size)])
    mask = None
    if span.start:
        hidden = np.arange(span.context)[None] > np.arange(span.start, span.context)[:, None]
        mask = _mask(hidden, dtype, device)
    return PrefillSegment(first, first + span.num_tokens, span.context, _ids(blocks, device), mask)


def _mask(hidden: np.ndarray, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(device)
