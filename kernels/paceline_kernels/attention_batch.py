"""The ragged batch of a step, laid out once for all layers: which rows attend to which blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = [
    "MASK_ROWS",
    "MAX_GROUP_SLOTS",
    "AttentionBatch",
    "AttentionPlanner",
    "DecodeGroup",
    "Gather",
    "PrefillSegment",
    "SequenceSpan",
]

# A group of decodes is padded to its longest member. Padding costs 0.27 µs per slot and layer, another group 40 µs (one
# AVX-512 core, 3 × 64 KV, float32), so a group may hold about 16 blocks of padding before a new one is cheaper.
_MAX_PADDING_BLOCKS = 16
# Bounds the gather buffer: 32 k slots of 3 × 64 KV in float32 are 50 MB.
MAX_GROUP_SLOTS = 32768
# Rows of the causal mask that chunks share: 512 rows of 8192 positions in float32 are 16 MB.
MASK_ROWS = 512


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


class AttentionPlanner:
    """Lays out steps for attention with blocks of `block_size` slots, masks in `dtype` on `device`."""

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._causal = torch.empty(0, 0, dtype=dtype)

    def plan(self, spans: Sequence[SequenceSpan]) -> AttentionBatch:
        """Lay out `spans`; those of one token come first, best by falling context (less padding)."""
        ones = sum(span.num_tokens == 1 for span in spans)
        assert all(span.num_tokens == 1 for span in spans[:ones]), "spans of one token come first"
        positions = np.concatenate([np.arange(span.start, span.context) for span in spans])
        slots = np.concatenate([_slots(span, self._block_size) for span in spans])
        decodes = [self._decode_group(first, spans[first:last]) for first, last in _groups(spans[:ones], self._block_size)]
        prefills, row = [], ones
        for span in spans[ones:]:
            prefills.extend(self._prefill_segments(row, span))
            row += span.num_tokens
        return AttentionBatch(self._ids(positions), self._ids(slots), tuple(decodes), tuple(prefills))

    def _decode_group(self, first: int, spans: Sequence[SequenceSpan]) -> DecodeGroup:
        width = max(_num_blocks(span.context, self._block_size) for span in spans)
        blocks = np.zeros((len(spans), width), dtype=np.int64)  # padding reads block 0, and the mask drops it
        for row, span in zip(blocks, spans, strict=True):
            count = _num_blocks(span.context, self._block_size)
            row[:count] = span.blocks[:count]
        contexts = np.array([span.context for span in spans])
        mask = None
        if (contexts < width * self._block_size).any():
            hidden = np.arange(width * self._block_size)[None] >= contexts[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = mask[:, None, None].to(self._device)
        return DecodeGroup(first, first + len(spans), self._ids(blocks.reshape(-1)), mask)

    def _prefill_segments(self, first: int, span: SequenceSpan) -> Iterator[PrefillSegment]:
        """A chunk that starts its sequence is one plain causal piece; a later one is cut so that its masks stay small."""
        blocks = self._ids(np.asarray(span.blocks[: _num_blocks(span.context, self._block_size)]))
        if span.start == 0:
            yield PrefillSegment(first, first + span.num_tokens, span.context, blocks, None)
            return
        for begin in range(0, span.num_tokens, MASK_ROWS):
            rows = min(MASK_ROWS, span.num_tokens - begin)
            context = span.start + begin + rows
            mask = self._causal_tail(rows, context)
            part = blocks[: _num_blocks(context, self._block_size)]
            yield PrefillSegment(first + begin, first + begin + rows, context, part, mask)

    def _causal_tail(self, rows: int, context: int) -> torch.Tensor:
        """Return the mask [rows, context] of the last `rows` of `context` positions: a corner of one mask that grows."""
        width = self._causal.shape[1]
        if context > width:
            width = 1 << (context - 1).bit_length()
            mask = torch.full((MASK_ROWS, width), float("-inf"), dtype=self._dtype)
            self._causal = mask.triu_(width - MASK_ROWS + 1).to(self._device)
        return self._causal[MASK_ROWS - rows :, width - context :]

    def _ids(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


def _num_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


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
        blocks = _num_blocks(span.context, block_size)
        members = index - cuts[-1] + 1
        padded = max(widest, blocks) * members
        if members > 1 and (padded - real - blocks > _MAX_PADDING_BLOCKS or padded * block_size > MAX_GROUP_SLOTS):
            cuts.append(index)
            widest, real = 0, 0
        widest, real = max(widest, blocks), real + blocks
    return [pair for pair in zip(cuts, [*cuts[1:], len(spans)], strict=True) if pair[0] < pair[1]]
