"""Sampling and token masks on a GPU: how rows are laid out for the Triton kernels, and their registration with the ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline_kernels.logit_edits import mask_tokens
from paceline_kernels.sampling import RowSampling, sample

if TYPE_CHECKING:
    from paceline_kernels.triton_ops.sampling import SamplingBatch

__all__ = ["SamplingColumns", "sampling_columns"]

# The noise of a row is drawn for a whole number; a row's uniform number has 53 random bits.
_SEEDS = 2**53


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """How n rows are sampled, column by column; None where no row needs the column. See `triton_ops.sampling`."""

    temperatures: np.ndarray  # [n] float32
    seeds: np.ndarray | None = None  # [n] int64
    top_ks: np.ndarray | None = None  # [n] int32
    top_ps: np.ndarray | None = None  # [n] float32
    min_ps: np.ndarray | None = None  # [n] float32


def sampling_columns(rows: Sequence[RowSampling]) -> SamplingColumns:
    """Lay `rows` out for the device. A row's noise depends on its uniform number alone, so it never depends on its batch."""

    def column(name: str, off: float, dtype: type[np.generic]) -> np.ndarray | None:
        values = [getattr(row, name) for row in rows]
        return None if all(value == off for value in values) else np.array(values, dtype=dtype)

    temperatures = np.array([row.temperature for row in rows], dtype=np.float32)
    if not temperatures.any():
        return SamplingColumns(temperatures)
    return SamplingColumns(
        temperatures,
        np.array([int(row.uniform * _SEEDS) for row in rows], dtype=np.int64),
        column("top_k", 0, np.int32),
        column("top_p", 1, np.float32),
        column("min_p", 0, np.float32),
    )


@sample.register("cuda")
def _sample_cuda(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    from paceline_kernels.triton_ops import sampling

    columns = sampling_columns(rows)
    return sampling.sample(logits, _to_device(columns, logits.device))


def _to_device(columns: SamplingColumns, device: torch.device) -> SamplingBatch:
    from paceline_kernels.triton_ops.sampling import SamplingBatch

    def there(column: np.ndarray | None) -> torch.Tensor | None:
        return None if column is None else torch.from_numpy(column).to(device)

    temperatures = torch.from_numpy(columns.temperatures).to(device)
    return SamplingBatch(
        temperatures, there(columns.seeds), there(columns.top_ks), there(columns.top_ps), there(columns.min_ps)
    )


@mask_tokens.register("cuda")
def _mask_tokens_cuda(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    from paceline_kernels.triton_ops import bitmask

    bitmask.apply_bitmask(logits, masks, rows)
