"""The ranks that share one model's matrices: what each holds, and the sums that make it whole (tensor parallelism).

Projections into heads and into the feed-forward width are cut by output, those back to the hidden size by input, so that a
layer needs two sums (Shoeybi et al. 2019, arXiv:1909.08053). The vocabulary is cut too, in the embedding and in the head.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

__all__ = ["SOLO", "TensorGroup"]


class TensorGroup:
    """One rank alone: nothing is cut, nothing is exchanged. `ProcessGroup` is the one of several processes."""

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


SOLO = TensorGroup()
