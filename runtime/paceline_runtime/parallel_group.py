"""The ranks that share one model's matrices: what each holds, and the sums that make it whole (tensor parallelism).

Projections into heads and into the feed-forward width are cut by output, those back to the hidden size by input, so that a
layer needs two sums (Shoeybi et al. 2019, arXiv:1909.08053). The vocabulary is cut too, in the embedding and in the head.
The first rank is the engine's own process: it plans and samples, and tells the others what to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import embedding

from paceline_runtime.model_errors import ModelError

if TYPE_CHECKING:
    from paceline_kernels import SequenceSpan
    from paceline_runtime.gpu_device import Mark
    from paceline_runtime.gpu_executor import StagedStep

__all__ = ["SOLO", "Head", "Link", "RankDied", "TensorGroup", "group_head", "process_group"]


_LOOK_SECONDS = 2e-5  # the next step is queued already, so the GPU doesn't wait for this look


class RankDied(ModelError):
    """A rank of a tensor-parallel group has ended, so the model can't go on."""


class TensorGroup:
    """One rank alone: nothing is cut, nothing is exchanged. `process_group` gives that of several processes."""

    rank = 0
    size = 1

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks; `x` may be overwritten."""
        return x

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the rows of `token_ids` [T] in the whole table, of which `table` is this rank's part."""
        return embedding(token_ids, table)

    def gather_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Return whole rows of logits [n, V] from this rank's columns."""
        return logits

    def share(self, values: torch.Tensor) -> None:
        """Give the first rank's `values` to all, in place."""

    def least(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        return value

    def send_spans(self, spans: Sequence[SequenceSpan], ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Have the other ranks compute `spans` with token ids `ids` [T], and logits of `rows` [n], on a CPU."""

    def send_step(self, step: StagedStep) -> None:
        """Have the other ranks run a step with this one, on a GPU."""

    def send_resize(self, num_blocks: int) -> None:
        """Have the other ranks rebuild their KV pools."""

    def send_head(self, hidden: torch.Tensor) -> None:
        """Have the other ranks compute the logits of these `hidden` states [n, hidden] with this one."""

    def wait(self, mark: Mark) -> None:
        """Return when the device has passed `mark`. Raises `RankDied` if a rank that it depends on has ended."""
        mark.wait()

    def close(self) -> None:
        """End the other ranks."""


SOLO = TensorGroup()


class Head(Protocol):
    """A decoder's last norm and its projection to the vocabulary."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, hidden] after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden states [n, hidden]."""


def group_head(decoder: Head, group: TensorGroup) -> Head:
    """Return the decoder's head for use outside a step, when the other ranks don't expect it."""
    return decoder if group.size == 1 else _GroupHead(decoder, group)


class _GroupHead:
    def __init__(self, decoder: Head, group: TensorGroup) -> None:
        self._decoder = decoder
        self._group = group

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.normed(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._group.send_head(hidden)
        return self._decoder.logits(hidden)


class Link(Protocol):
    """The first rank's line to the others."""

    def send(self, kind: str, **parts: object) -> None:
        """Send a message to every other rank."""

    def check(self) -> None:
        """Raise `RankDied` if one has ended."""

    def check_broken(self) -> None:
        """An exchange broke off: raise `RankDied` once the one that ended is known."""

    def close(self) -> None:
        """End them."""


class _ProcessGroup(TensorGroup):
    """This process's place among those of `torch.distributed`'s default group; `link` is there on the first rank."""

    def __init__(self, rank: int, size: int, vocab_size: int, link: Link | None = None) -> None:
        self.rank = rank
        self.size = size
        self._vocab_size = vocab_size
        self._link = link

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._together(lambda: dist.all_reduce(x))
        return x

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Each rank adds the rows that it has, and zeros for the rest."""
        place = token_ids - self.rank * len(table)
        mine = (place >= 0) & (place < len(table))
        rows = embedding(torch.where(mine, place, 0), table)
        return self.reduce(rows * mine.unsqueeze(1))

    def gather_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        rows, columns = logits.shape
        parts = torch.empty((self.size, rows, columns), dtype=logits.dtype, device=logits.device)
        self._together(lambda: dist.all_gather(list(parts.unbind()), logits.contiguous()))
        whole = parts.transpose(0, 1).reshape(rows, -1)
        return whole[:, : self._vocab_size].contiguous()

    def share(self, values: torch.Tensor) -> None:
        self._together(lambda: dist.broadcast(values, 0))

    def least(self, value: int) -> int:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        smallest = torch.tensor(value, dtype=torch.int64, device=device)
        self._together(lambda: dist.all_reduce(smallest, dist.ReduceOp.MIN))
        return int(smallest)

    def send_spans(self, spans: Sequence[SequenceSpan], ids: torch.Tensor, rows: torch.Tensor) -> None:
        parts = [(span.start, span.num_tokens, list(span.blocks)) for span in spans]
        self._first.send("spans", spans=parts, ids=ids.tolist(), rows=rows.tolist())

    def send_step(self, step: StagedStep) -> None:
        data = step.buffer[: step.packed.words].numpy().tobytes()
        self._first.send("step", packed=step.packed, data=data, size=step.size, sampled=step.sampled)

    def send_resize(self, num_blocks: int) -> None:
        self._first.send("resize", num_blocks=num_blocks)

    def send_head(self, hidden: torch.Tensor) -> None:
        self._first.send("head", rows=len(hidden))
        self.share(hidden.contiguous())

    def wait(self, mark: Mark) -> None:
        """Look after the other ranks while waiting: NCCL waits for a dead one for ever."""
        while not mark.passed():
            self._first.check()
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        dist.destroy_process_group()

    @property
    def _first(self) -> Link:
        assert self._link is not None, "only the first rank tells the others what to do"
        return self._link

    def _together(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except RuntimeError as error:
            if self._link is not None:
                self._link.check_broken()
            raise RankDied(f"rank {self.rank} lost the others: {str(error).splitlines()[0]}") from error


def process_group(rank: int, size: int, vocab_size: int, link: Link | None = None) -> TensorGroup:
    """Return this process's group, which it has joined (see `parallel_start`); `link` is there on the first rank."""
    return _ProcessGroup(rank, size, vocab_size, link)
