"""The table of embeddings, which a tied head multiplies with too: in the model's dtype, or in 8 bits."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline_kernels.cpu.packed import PackedLinear
from paceline_kernels.triton_ops.quantised_weights import quantise_rows
from paceline_runtime.decoder_weights import Projection
from paceline_runtime.parallel_group import TensorGroup
from paceline_runtime.quantised_linear import plain, row_scaled

__all__ = ["EmbeddingTable", "make_table"]


class EmbeddingTable(Protocol):
    """Rows of embeddings. `nbytes` is what it keeps."""

    nbytes: int

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        """Return the rows of `token_ids` [T] as [T, hidden], which the caller may change."""

    def tied_head(self) -> tuple[Projection, int]:
        """Return the product with the table, and the bytes that it keeps beside the table."""


def make_table(weight: torch.Tensor, quantization: str | None) -> EmbeddingTable:
    """Return the table of `weight` [vocab, hidden]. int8 and int4 keep it in 8 bits: 4 would cost more than they save."""
    return _ScaledTable(weight) if quantization in ("int8", "int4") else _PlainTable(weight)


class _PlainTable:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.embed(token_ids, self._weight)

    def tied_head(self) -> tuple[Projection, int]:
        """A head that is packed is a copy, one that isn't is the table itself."""
        head = plain(self._weight)
        return head, head.nbytes if isinstance(head, PackedLinear) or head.packed else 0


class _ScaledTable:
    def __init__(self, weight: torch.Tensor) -> None:
        self._dtype = weight.dtype
        self._weight = quantise_rows(weight, torch.int8)
        self.nbytes = self._weight.values.nbytes + self._weight.scales.nbytes

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        rows = group.embed(token_ids, self._weight.values).to(self._dtype)
        return rows.mul_(group.embed(token_ids, self._weight.scales[:, None]).to(self._dtype))

    def tied_head(self) -> tuple[Projection, int]:
        head = row_scaled(self._weight)
        return head, head.nbytes if isinstance(head, PackedLinear) else 0
