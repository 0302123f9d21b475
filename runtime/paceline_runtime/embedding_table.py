"""The table of embeddings, which a tied head multiplies with too: in the model's dtype, as stored, or in 8 bits."""

from __future__ import annotations

from typing import Protocol

import torch

from paceline_kernels import Linear
from paceline_kernels.cpu.packed import AnyWeight, PackedLinear
from paceline_kernels.triton_ops.quantised_weights import quantise_rows
from paceline_runtime.decoder_weights import Projection
from paceline_runtime.parallel_group import TensorGroup
from paceline_runtime.quantised_linear import QuantisedLinear

__all__ = ["EmbeddingTable", "make_table"]


class EmbeddingTable(Protocol):
    """Rows of embeddings. `nbytes` is what it keeps."""

    nbytes: int

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        """Return the rows of `token_ids` [T] as [T, hidden], which the caller may change."""

    def tied_head(self) -> tuple[Projection, int]:
        """Return the product with the table, and the bytes that it keeps beside the table."""


def make_table(weight: AnyWeight, quantization: str | None, *, packed: bool = False) -> EmbeddingTable:
    """Return the table of `weight` [vocab, hidden]. int8 and int4 keep it in 8 bits: 4 would cost more than they save.

    With `packed` it is packed for the native CPU kernels, which multiply with it and read rows from it.
    """
    narrow = quantization in ("int8", "int4")
    if packed:
        return _PackedTable(quantise_rows(weight, torch.int8) if narrow and isinstance(weight, torch.Tensor) else weight)
    assert isinstance(weight, torch.Tensor), "only packed tables are kept as they are stored"
    return _ScaledTable(weight) if narrow else _PlainTable(weight)


class _PlainTable:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.embed(token_ids, self._weight)

    def tied_head(self) -> tuple[Projection, int]:
        """A head that is packed is a copy, one that isn't is the table itself."""
        head = Linear(self._weight)
        return head, head.nbytes if head.packed else 0


class _ScaledTable:
    def __init__(self, weight: torch.Tensor) -> None:
        self._dtype = weight.dtype
        self._weight = quantise_rows(weight, torch.int8)
        self.nbytes = self._weight.values.nbytes + self._weight.scales.nbytes

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        rows = group.embed(token_ids, self._weight.values).to(self._dtype)
        return rows.mul_(group.embed(token_ids, self._weight.scales[:, None]).to(self._dtype))

    def tied_head(self) -> tuple[Projection, int]:
        return QuantisedLinear(self._weight), 0


class _PackedTable:
    """One packed weight for both; for a process alone."""

    def __init__(self, weight: AnyWeight) -> None:
        self._head = PackedLinear(weight)
        self.nbytes = self._head.nbytes

    def embed(self, token_ids: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        assert group.size == 1, "a packed table isn't cut"
        return self._head.rows(token_ids)

    def tied_head(self) -> tuple[Projection, int]:
        return self._head, 0
