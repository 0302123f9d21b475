"""One rank's part of a model: its configuration, and its cut of each tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from paceline_runtime.model_config import ModelConfig
from paceline_runtime.model_errors import UnsupportedModel
from paceline_runtime.weights import WeightSource

__all__ = ["Shard", "ShardedWeights", "shard_config"]

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")
_BY_TOKEN = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int
    size: int


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return what one of `size` ranks computes of `config`. Raises `UnsupportedModel` if it can't be cut evenly."""
    cuts = {"heads": config.num_heads, "key/value heads": config.num_kv_heads, "feed-forward": config.intermediate_size}
    for what, count in cuts.items():
        if count % size:
            possible = [n for n in range(1, size) if all(value % n == 0 for value in cuts.values())]
            fitting = " or ".join(map(str, possible))
            raise UnsupportedModel(f"--tensor-parallel-size {size} doesn't divide the model's {count} {what}: use {fitting}")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        vocab_size=-(-config.vocab_size // size),
    )


class ShardedWeights:
    """A `WeightSource` that gives a rank its cut. `config` is that of the whole model."""

    def __init__(self, weights: WeightSource, config: ModelConfig, shard: Shard) -> None:
        self._weights = weights
        self._vocab_size = config.vocab_size
        self._shard = shard

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's part, of `shape`, of the tensor."""
        module, kind = name.split(".")[-2:]
        size = self._shard.size
        if module in _BY_OUTPUT:
            return self._cut(self._weights.tensor(name, (shape[0] * size, *shape[1:])), 0)
        if module in _BY_INPUT and kind == "weight":
            return self._cut(self._weights.tensor(name, (shape[0], shape[1] * size)), 1)
        if module in _BY_TOKEN:
            return self._vocabulary(self._weights.tensor(name, (self._vocab_size, *shape[1:])), shape[0])
        whole = self._weights.tensor(name, shape)
        # a bias behind a product that is cut by input must be added once, and the ranks' results are summed
        return whole if module not in _BY_INPUT or self._shard.rank == 0 else torch.zeros_like(whole)

    def _cut(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        # a copy: the view would keep the whole tensor
        return whole.chunk(self._shard.size, dimension)[self._shard.rank].clone(memory_format=torch.contiguous_format)

    def _vocabulary(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        """Cut a table by tokens; the last rank's part is filled up with zeros."""
        part = whole[self._shard.rank * rows :][:rows]
        out = torch.zeros((rows, *whole.shape[1:]), dtype=whole.dtype)
        out[: len(part)] = part
        return out
