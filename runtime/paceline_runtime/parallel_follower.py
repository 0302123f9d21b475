"""What a rank that isn't the first does with the messages of the first one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from paceline_kernels import AttentionPlanner, SequenceSpan
from paceline_runtime.decoder import Decoder
from paceline_runtime.gpu_executor import PagedExecutor
from paceline_runtime.kv_pool import KvPool
from paceline_runtime.parallel_messages import Head, Message, Resize, Spans, Step

__all__ = ["CpuFollower", "Follower", "GpuFollower"]


class Follower(Protocol):
    """Computes with the first rank."""

    def run(self, message: Message) -> None:
        """Do what one message says."""


class CpuFollower:
    """Follows a `ModelRunner`."""

    def __init__(self, decoder: Decoder, kv: KvPool) -> None:
        self._decoder = decoder
        self._kv = kv
        self._planner = AttentionPlanner(kv.block_size, decoder.dtype, decoder.device, window=decoder.config.window)

    @torch.inference_mode()
    def run(self, message: Message) -> None:
        """Compute what the first rank computes; nothing is sampled here."""
        if isinstance(message, Spans):
            self._compute(message)
        elif isinstance(message, Resize):
            self._kv.resize(message.num_blocks)
        elif isinstance(message, Head):
            compute_head(self._decoder, message.rows)

    def _compute(self, message: Spans) -> None:
        batch = self._planner.plan([SequenceSpan(*span) for span in message.spans])
        hidden = self._decoder.hidden(torch.tensor(message.ids), batch, self._kv.layers)
        if message.rows:
            self._decoder.logits(hidden[message.rows])


class GpuFollower:
    """Follows a `PagedRunner`: the same steps, the same graphs, and the tokens that the first rank sampled."""

    def __init__(self, decoder: Decoder, executor: PagedExecutor) -> None:
        self._decoder = decoder
        self._executor = executor

    @torch.inference_mode()
    def run(self, message: Message) -> None:
        """Queue what the first rank queues."""
        executor = self._executor
        if isinstance(message, Step):
            executor.run(executor.stage_received(message.packed, message.data, message.size, message.sampled))
            if message.sampled:
                dist.broadcast(executor.sampled[: message.sampled], 0)
        elif isinstance(message, Resize):
            executor.resize(message.num_blocks)
        elif isinstance(message, Head):
            compute_head(self._decoder, message.rows)


def compute_head(decoder: Decoder, rows: int) -> None:
    """Compute logits of hidden states that the first rank has."""
    hidden = torch.empty(rows, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device)
    dist.broadcast(hidden, 0)
    decoder.logits(hidden)
