"""Runs laid-out steps on a device whose state stays there: block tables, the tokens sampled last, inputs, graphs.

Every rank of a tensor-parallel group has one and runs the same steps; only the first samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline_kernels import AttentionBatch, use_kernels
from paceline_kernels.triton_ops.attention_plan import PagedBatch, SplitPolicy, TileSet
from paceline_runtime.decoder import Decoder
from paceline_runtime.gpu_device import Device, Mark
from paceline_runtime.gpu_graphs import DecodeGraphs, bucket_sizes
from paceline_runtime.gpu_inputs import Packed, PackedViews, StepArrays, pack, words_of
from paceline_runtime.gpu_layout import LayoutShape, pad_decodes, padding_step
from paceline_runtime.kv_pool import KvPool

__all__ = ["Computed", "PagedExecutor", "StagedStep"]

# Room beside a graph's inputs: a block that is new is 3 words, in every 16th step of a sequence; sampling takes 7 a row.
_EXTRA_WORDS = 4096
_EXTRA_WORDS_PER_ROW = 16


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A packed step in host memory, `buffer` [words] int32. `size` is the graph that it takes, None if it takes none.

    `sampled` is how many rows the first rank samples from: the first so many of a graph, else those that `rows` names.
    """

    packed: Packed
    buffer: torch.Tensor
    size: int | None
    sampled: int


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step left on the device: `logits` [n, V] float32 of the rows to sample from, None without any; the last layer's
    `hidden` states [T, hidden] unless a graph ran; the step's arrays.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor | None
    views: PackedViews


class PagedExecutor:
    """One rank's device, decoder and KV pool. One thread calls everything here."""

    def __init__(
        self, decoder: Decoder, kv: KvPool, device: Device, *, max_seqs: int, max_len: int, invariant: bool = False
    ) -> None:
        config = decoder.config
        policy = SplitPolicy(device.programs, config.num_kv_heads, invariant=invariant)
        self.shape = LayoutShape(kv.block_size, config.num_heads // config.num_kv_heads, policy)
        self.device = device
        self.max_seqs = max_seqs
        self.table_width = -(-max_len // kv.block_size)
        self._decoder = decoder
        self._kv = kv
        self._tables = torch.zeros(max_seqs, self.table_width, dtype=torch.int32, device=device.where)
        self.sampled = torch.zeros(max_seqs, dtype=torch.int64, device=device.where)
        self._hosts = [_HostBuffer(device), _HostBuffer(device)]
        self._mixed = torch.empty(0, dtype=torch.int32, device=device.where)
        sizes = () if invariant else bucket_sizes(max_seqs)  # invariant splits have no bound that a recording could keep
        self.graphs = DecodeGraphs(device, sizes, self._decode)
        self._records_ahead = False
        words = words_of(padding_step(max_seqs, self.shape)) + _EXTRA_WORDS + _EXTRA_WORDS_PER_ROW * max_seqs
        self._fixed = torch.zeros(words, dtype=torch.int32, device=device.where)
        self._fixed_parts: dict[int, Packed] = {}

    def stage(
        self, arrays: StepArrays, rows: Sequence[int], extra: Mapping[str, np.ndarray], *, decodes: bool
    ) -> StagedStep:
        """Pack a step for the device. `rows` are those to sample from, `extra` what sampling reads.

        `decodes`: each sequence computes one token and samples, and nobody wants hidden states.
        """
        size = self.graphs.bucket(len(arrays.contexts)) if decodes else None
        if size is not None:
            padded = replace(pad_decodes(arrays, size, self.shape), extra={**arrays.extra, **extra})
            # a long table that is new, say of a prompt that is cached whole, may need more room than a graph's inputs have
            if words_of(padded) <= len(self._fixed):
                return self._pack(padded, size, len(rows))
        plain = {"rows": np.array(rows, dtype=np.int32), **arrays.extra, **extra}
        return self._pack(replace(arrays, extra=plain), None, len(rows))

    def _pack(self, arrays: StepArrays, size: int | None, sampled: int) -> StagedStep:
        buffer = self._next_host(words_of(arrays))
        return StagedStep(pack(arrays, buffer), buffer, size, sampled)

    def stage_received(self, packed: Packed, data: bytes, size: int | None, sampled: int) -> StagedStep:
        """Take over a step that the first rank has packed."""
        buffer = self._next_host(packed.words)
        buffer[: packed.words] = torch.frombuffer(bytearray(data), dtype=torch.int32)
        return StagedStep(packed, buffer, size, sampled)

    @torch.inference_mode()
    def run(self, step: StagedStep) -> Computed:
        """Queue the step; nothing here waits for the device."""
        words = step.packed.words
        target = self._fixed if step.size is not None else self._room(words)
        target[:words].copy_(step.buffer[:words], non_blocking=True)
        self._hosts[0].in_use(self.device.mark())
        views = PackedViews(step.packed, target)
        if len(views["changed_rows"]):
            self._tables[views["changed_rows"], views["changed_columns"]] = views["changed_blocks"]
        if step.size is not None:
            return Computed(self.graphs.replay(step.size)[: step.sampled], None, views)
        with use_kernels("triton"):
            hidden = self._decoder.hidden(self._ids(views), self._batch(views), self._kv.layers)
            logits = self._decoder.logits(hidden.index_select(0, views["rows"])) if step.sampled else None
        return Computed(logits, hidden, views)

    def resize(self, num_blocks: int) -> None:
        """Rebuild the KV pool, empty, and record the graphs that read it anew."""
        self.graphs.forget()
        self._kv.resize(num_blocks)
        if self._records_ahead:
            self.record_graphs()

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record a graph for every size of decode steps now, and again whenever the pool is rebuilt."""
        self._records_ahead = True
        self._fixed.zero_()  # sequences without tokens; what the last step left might name blocks that are gone
        self.graphs.record()

    def _decode(self, size: int) -> torch.Tensor:
        """Compute `size` decodes out of the fixed buffer."""
        packed = self._fixed_parts.get(size)
        if packed is None:
            arrays = padding_step(size, self.shape)
            packed = self._fixed_parts[size] = pack(arrays, torch.empty(words_of(arrays), dtype=torch.int32))
        views = PackedViews(packed, self._fixed)
        with use_kernels("triton"):
            return self._decoder.forward(self._ids(views), self._batch(views), self._kv.layers, None)

    def _ids(self, views: PackedViews) -> torch.Tensor:
        ids = views["ids"]
        last = self.sampled.index_select(0, (-1 - ids).clamp_min(0))
        return torch.where(ids < 0, last, ids)

    def _batch(self, views: PackedViews) -> AttentionBatch:
        tiles = tuple(
            TileSet(each.block_m, views.items(number), views.reductions(number), each.parts)
            for number, each in enumerate(views.tiles)
        )
        paged = PagedBatch(self._tables, views["table_rows"], views["query_starts"], views["contexts"], tiles)
        return AttentionBatch(views["positions"], views["slots"], paged=paged)

    def _next_host(self, words: int) -> torch.Tensor:
        """Return host memory for the next step; the one of the step before may still be on its way to the device."""
        self._hosts.reverse()
        return self._hosts[0].room(words)

    def _room(self, words: int) -> torch.Tensor:
        if len(self._mixed) < words:
            self._mixed = torch.empty(2 * words, dtype=torch.int32, device=self.device.where)
        return self._mixed


class _HostBuffer:
    """Pinned memory that is reused once the device has read it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.pinned(0, torch.int32)
        self._read: Mark | None = None

    def room(self, words: int) -> torch.Tensor:
        if self._read is not None:
            self._read.wait()
        if len(self._memory) < words:
            self._memory = self._device.pinned(2 * words, torch.int32)
        return self._memory

    def in_use(self, until: Mark) -> None:
        self._read = until
