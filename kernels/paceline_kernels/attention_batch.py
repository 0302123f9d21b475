"""The ragged batch of a step, laid out once for all layers: which rows attend to which blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from paceline_kernels.causal_masks import MASK_ROWS, CausalMasks
from paceline_kernels.ints import int32s

if TYPE_CHECKING:
    from paceline_kernels.triton_ops.attention_plan import PagedBatch

__all__ = [
    "MAX_GROUP_SLOTS",
    "AttentionBatch",
    "AttentionLayout",
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
_NOTHING = torch.empty(0, dtype=torch.int64)


class SequenceSpan(NamedTuple):
    """One sequence's part of a step: positions `[start, start + num_tokens)`, with the ids of the blocks that cover them.

    A tuple, because every step makes one of each sequence. Blocks in an array are copied as a piece, others one by one.
    """

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
class AttentionLayout:
    """How a step's rows attend, without the positions."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSegment, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's rows: `positions` and `slots` [T] int64, and how the rows attend. Rows follow the order of the spans.

    `windowed` is how they attend in layers that see only the last `window` positions; None if no context is longer. On a GPU
    `paged` is how they attend instead, under any window; there negative slots belong to padding and aren't written. For
    the native CPU kernels `spans` [n, 3] int32 are each sequence's first position, rows, and where its blocks begin in
    `tables` int32; they need nothing else, and a batch for them alone has neither positions nor slots.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...] = ()
    prefills: tuple[PrefillSegment, ...] = ()
    window: int | None = None
    windowed: AttentionLayout | None = None
    paged: PagedBatch | None = None
    spans: torch.Tensor | None = None
    tables: torch.Tensor | None = None

    def layout(self, window: int | None) -> AttentionLayout:
        """Return how the rows attend under a sliding window, which must be the one that was planned for, or without one."""
        assert window in (None, self.window), f"the step was planned for the window {self.window}, not {window}"
        if window is None or self.windowed is None:
            return AttentionLayout(self.decodes, self.prefills)
        return self.windowed


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
    """Lays out steps for attention with blocks of `block_size` slots, masks in `dtype` on `device`.

    `window` is the sliding window of the model's windowed layers, if it has some. With `native` only what the native CPU
    kernels need is laid out, neither groups nor masks.
    """

    def __init__(
        self,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        window: int | None = None,
        native: bool = False,
    ) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._window = window
        self._native = native
        self._masks = CausalMasks(dtype, device)

    def plan(self, spans: Sequence[SequenceSpan]) -> AttentionBatch:
        """Lay out `spans`; those of one token come first, best by falling context (less padding). Native kernels
        don't mind.
        """
        starts, tables = _tables(spans, self._block_size)
        if self._native:
            return AttentionBatch(_NOTHING, _NOTHING, spans=starts, tables=tables)
        ones = sum(span.num_tokens == 1 for span in spans)
        assert all(span.num_tokens == 1 for span in spans[:ones]), "spans of one token come first"
        positions = _joined([span.start for span in spans[:ones]], [np.arange(s.start, s.context) for s in spans[ones:]])
        slots = _joined(_last_slots(spans[:ones], self._block_size), [_slots(s, self._block_size) for s in spans[ones:]])
        full = self._layout(spans, ones, None)
        windowed = None
        if self._window is not None and any(span.context > self._window for span in spans):
            windowed = self._layout(spans, ones, self._window)
        return AttentionBatch(
            self._ids(positions),
            self._ids(slots),
            full.decodes,
            full.prefills,
            self._window,
            windowed,
            spans=starts,
            tables=tables,
        )

    def _layout(self, spans: Sequence[SequenceSpan], ones: int, window: int | None) -> AttentionLayout:
        views = [_visible(span, self._block_size, window) for span in spans[:ones]]
        decodes = [self._decode_group(first, views[first:last]) for first, last in _groups(views, self._block_size)]
        prefills, row = [], ones
        for span in spans[ones:]:
            prefills.extend(self._prefill_segments(row, span, window))
            row += span.num_tokens
        return AttentionLayout(tuple(decodes), tuple(prefills))

    def _decode_group(self, first: int, views: Sequence[_Visible]) -> DecodeGroup:
        width = max(len(view.blocks) for view in views)
        blocks = np.zeros((len(views), width), dtype=np.int64)  # padding reads block 0, and the mask drops it
        for row, view in zip(blocks, views, strict=True):
            row[: len(view.blocks)] = view.blocks
        begins, ends = np.array([view.first for view in views]), np.array([view.last for view in views])
        mask = None
        if begins.any() or (ends < width * self._block_size).any():
            slots = np.arange(width * self._block_size)[None]
            hidden = (slots >= ends[:, None]) | (slots < begins[:, None])
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = mask[:, None, None].to(self._device)
        return DecodeGroup(first, first + len(views), self._ids(blocks.reshape(-1)), mask)

    def _prefill_segments(self, first: int, span: SequenceSpan, window: int | None) -> Iterator[PrefillSegment]:
        """A chunk that starts its sequence is one plain causal piece; a later one is cut so that its masks stay small."""
        if span.start == 0 and (window is None or span.context <= window):
            blocks = self._ids(np.asarray(span.blocks[: _num_blocks(span.context, self._block_size)]))
            yield PrefillSegment(first, first + span.num_tokens, span.context, blocks, None)
            return
        for begin in range(0, span.num_tokens, MASK_ROWS):
            rows = min(MASK_ROWS, span.num_tokens - begin)
            end = span.start + begin + rows
            # from the block of the first position that the piece's first row sees
            skipped = 0 if window is None else max(0, end - rows - window + 1) // self._block_size
            context = end - skipped * self._block_size
            blocks = self._ids(np.asarray(span.blocks[skipped : _num_blocks(end, self._block_size)]))
            mask = self._masks.tail(rows, context, window)
            yield PrefillSegment(first + begin, first + begin + rows, context, blocks, mask)

    def _ids(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


@dataclass(frozen=True, slots=True)
class _Visible:
    """What one decode sees: slots `[first, last)` of `blocks`."""

    blocks: Sequence[int]
    first: int
    last: int


def _visible(span: SequenceSpan, block_size: int, window: int | None) -> _Visible:
    last = _num_blocks(span.context, block_size)
    if window is None or span.context <= window:
        return _Visible(span.blocks[:last], 0, span.context)
    begin = span.context - window
    skipped = begin // block_size
    return _Visible(span.blocks[skipped:last], begin - skipped * block_size, span.context - skipped * block_size)


def _num_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _tables(spans: Sequence[SequenceSpan], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `AttentionBatch.spans` and `.tables`: copies, since the scheduler goes on changing its tables."""
    rows: list[int] = []
    blocks = array("i")
    for span in spans:
        rows += (span.start, span.num_tokens, len(blocks))
        blocks.extend(span.blocks[: _num_blocks(span.context, block_size)])
    return int32s(rows).view(-1, 3), int32s(blocks)


def _joined(ones: list[int], chunks: list[np.ndarray]) -> np.ndarray:
    """Return one number of each decode, then those of the chunks: an array for each decode would cost a microsecond."""
    return np.concatenate([np.array(ones, dtype=np.int64), *chunks]) if chunks else np.array(ones, dtype=np.int64)


def _last_slots(spans: Sequence[SequenceSpan], size: int) -> list[int]:
    """Return block × size + offset of the only position of each span."""
    return [span.blocks[span.start // size] * size + span.start % size for span in spans]


def _slots(span: SequenceSpan, block_size: int) -> np.ndarray:
    """Return block × block_size + offset of each of the span's positions."""
    positions = np.arange(span.start, span.context)
    return np.asarray(span.blocks)[positions // block_size] * block_size + positions % block_size


def _groups(views: Sequence[_Visible], block_size: int) -> list[tuple[int, int]]:
    """Cut the decodes into runs whose padding is bounded."""
    cuts, widest, real = [0], 0, 0
    for index, view in enumerate(views):
        blocks = len(view.blocks)
        members = index - cuts[-1] + 1
        padded = max(widest, blocks) * members
        if members > 1 and (padded - real - blocks > _MAX_PADDING_BLOCKS or padded * block_size > MAX_GROUP_SLOTS):
            cuts.append(index)
            widest, real = 0, 0
        widest, real = max(widest, blocks), real + blocks
    return [pair for pair in zip(cuts, [*cuts[1:], len(views)], strict=True) if pair[0] < pair[1]]
