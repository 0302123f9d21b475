"""The choice of the next token, by inversion: one uniform number per row decides, so a row never depends on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline_kernels.cpu import native
from paceline_kernels.dispatch import Op

__all__ = ["RowSampling", "sample"]

# top_p needs the tokens in order of probability. The best 1024 nearly always hold that mass, and finding them is much
# cheaper than sorting a vocabulary; where they don't, the row is sorted whole.
_NUCLEUS_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row is sampled. `temperature` 0 is greedy, else it is at least 1e-5 (the logits divided by it are float32);
    `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off.

    `uniform` in [0, 1) is the row's random number. Filters apply in this order: temperature, top_k, top_p, min_p.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


@Op
def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Return one token id per row, [n] int64, for `logits` [n, V] (float32) and as many `rows`."""
    tokens = logits.argmax(-1)
    for index, row in enumerate(rows):
        if row.temperature > 0:
            tokens[index] = _draw(logits[index], row)
    return tokens


@sample.register("cpu")
def _sample_cpu(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    if any(row.temperature > 0 for row in rows) or not native.in_use() or logits.dtype != torch.float32:
        return sample.reference(logits, rows)
    best: torch.Tensor = torch.ops.paceline_cpu.argmax(logits.contiguous())  # torch's takes five times as long
    return best


def _draw(logits: torch.Tensor, row: RowSampling) -> torch.Tensor:
    """Return the id, a 0-d tensor, at which the row's cumulated probability passes its uniform number."""
    probabilities = (logits / row.temperature).softmax(-1)
    ids = None
    if row.top_k or row.top_p < 1:
        probabilities, ids = _most_likely(probabilities, row)
    if row.min_p > 0:
        probabilities = probabilities.where(probabilities >= row.min_p * probabilities.max(), 0)
    # float64: a float32 sum over a vocabulary is off by more than its rarest tokens weigh
    mass = probabilities.cumsum(-1, dtype=torch.float64)
    # the product may round to the whole mass; clamping to the last likely token keeps an impossible one out
    index = torch.searchsorted(mass, mass[-1] * row.uniform, right=True)
    index = index.clamp_max(torch.searchsorted(mass, mass[-1]))
    index = index.clamp_max(len(mass) - 1)  # nan (a model that overflowed) passes nothing: any token, but not a crash
    return index if ids is None else ids[index]


def _most_likely(probabilities: torch.Tensor, row: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities that top_k and top_p leave, falling, and their ids."""
    vocabulary = len(probabilities)
    window = min(row.top_k or _NUCLEUS_WINDOW, vocabulary)
    values, ids = probabilities.topk(window)
    if row.top_p >= 1:
        return values, ids
    # the nucleus is a share of what top_k left over
    whole = values.sum(dtype=torch.float64) if row.top_k else torch.ones((), dtype=torch.float64, device=values.device)
    before = values.cumsum(-1, dtype=torch.float64) - values
    if not row.top_k and window < vocabulary and before[-1] + values[-1] < row.top_p:
        values, ids = probabilities.sort(descending=True, stable=True)
        before = values.cumsum(-1, dtype=torch.float64) - values
    kept = int((before < row.top_p * whole).sum().clamp_min(1))
    return values[:kept], ids[:kept]
