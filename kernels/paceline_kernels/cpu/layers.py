"""A decoder's layers in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline_kernels.attention_batch import AttentionBatch
from paceline_kernels.cpu.packed import PackedLinear

__all__ = ["LayerParts", "LayerShape", "NativeLayers"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all layers share. `soft_cap` None: scores aren't capped."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gelu: bool
    eps: float
    scale: float
    soft_cap: float | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer. `norms`: input, query, key, after attention, before and after the feed-forward part; None where absent.

    `weights`: queries with keys and values, output, gate with up, down. `rope` is the rotation's index; `window` None: all.
    """

    norms: tuple[torch.Tensor | None, ...]
    weights: tuple[PackedLinear, ...]
    rope: int
    window: int | None


class NativeLayers:
    """Runs all layers of a step; whatever their weights' type, what flows between them is float32.

    `ropes` are the rotations that layers name: frequencies [head_dim / 2], and what cosines and sines are multiplied by.
    """

    def __init__(
        self, shape: LayerShape, layers: Sequence[LayerParts], ropes: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> None:
        numbers = [shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, int(shape.gelu)]
        make: Any = torch.classes.paceline_cpu.Layers
        self._layers = make(numbers, [shape.eps, shape.scale, shape.soft_cap or 0.0])
        for part in layers:
            norms = [None if norm is None else norm.float().contiguous() for norm in part.norms]
            self._layers.add(norms, [weight.weight for weight in part.weights], part.rope, part.window or 0)
        for frequencies, factors in ropes:
            self._layers.add_rope(
                frequencies.float().contiguous(), None if factors is None else factors.float().contiguous()
            )

    def run(self, residual: torch.Tensor, batch: AttentionBatch, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Change `residual` [T, hidden] float32 into what the last layer leaves, and write the step's keys and values."""
        assert batch.spans is not None and batch.tables is not None, "the step was laid out for a GPU"
        self._layers.run(residual, batch.spans, batch.tables, list(kv))
        return residual
