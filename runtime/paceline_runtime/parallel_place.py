"""A process's place in a tensor-parallel group, as a loader needs it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_runtime.model_config import ModelConfig
from paceline_runtime.parallel_group import SOLO, Link, TensorGroup, process_group
from paceline_runtime.parallel_weights import Shard, ShardedWeights, shard_config
from paceline_runtime.weights import WeightSource

__all__ = ["ALONE", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of `size`; `link` leads from the first rank to the others."""

    rank: int = 0
    size: int = 1
    link: Link | None = None

    def cut(self, config: ModelConfig, weights: WeightSource) -> tuple[ModelConfig, WeightSource, TensorGroup]:
        """Return this rank's part of a model, and its group. Raises `UnsupportedModel` if the model can't be cut so."""
        if self.size == 1:
            return config, weights, SOLO
        part = shard_config(config, self.size)
        group = process_group(self.rank, self.size, config.vocab_size, self.link)
        return part, ShardedWeights(weights, config, Shard(self.rank, self.size)), group


ALONE = Place()
