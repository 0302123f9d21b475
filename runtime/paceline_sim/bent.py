"""A step-time model that is linear up to a knee in context, and dearer beyond it. Pure.

Reading keys and values costs more per token where they no longer fit a cache. A linear model that has seen both sides of
such a knee spreads what is beyond it over all features: steps of many sequences with short contexts, and of small chunks,
are then said to take half as long again as they do, and settings that would bring them look bad before they were ever tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from paceline_core.nnls import fit_to_ones
from paceline_core.plan import StepShape
from paceline_core.step_time import FEATURES, StepModel

__all__ = ["BentModel", "bend"]

_FEWEST = 64  # measured steps
_KNEES = tuple(2.0 ** (-i / 4) for i in range(1, 21))  # of the longest context: where a knee is looked for
_CLEARLY = 0.7  # of the linear fit's squared errors: a bend that leaves more of them is none
_RIGHT = 1e-3  # relative error of a linear fit that has nothing to explain


@dataclass(frozen=True, slots=True)
class BentModel(StepModel):
    """A `StepModel` of which each context token beyond `knee` costs `beyond` seconds more."""

    knee: float = math.inf
    beyond: float = 0.0

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step."""
        return StepModel.predict(self, shape) + self._dearer(shape.context_tokens)

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return, to the last bit, what `predict` says of a step of this many decodes."""
        return StepModel.predict_decode(self, sequences, context_tokens) + self._dearer(context_tokens)

    def _dearer(self, context_tokens: int) -> float:
        return self.beyond * (context_tokens - self.knee) if context_tokens > self.knee else 0.0


def bend(model: StepModel, steps: Sequence[tuple[StepShape, float]]) -> StepModel:
    """Return a model with a knee fitted to `steps` (shape, seconds), `model` as it is if that doesn't explain them better.

    A hinge of J. H. Friedman's regression splines ("Multivariate adaptive regression splines", Annals of Statistics 1991),
    its place by search, the coefficients by non-negative least squares on relative errors. What `model` has seen stays said.
    """
    longest = max((shape.context_tokens for shape, _ in steps), default=0)
    if len(steps) < _FEWEST or not longest:
        return model
    columns = [[1.0 / seconds for _, seconds in steps]]
    columns += [[getattr(shape, name) / seconds for shape, seconds in steps] for name in FEATURES]
    straight, _ = _fit(columns)
    if straight <= len(steps) * _RIGHT**2:
        return model
    found = []
    for knee in (share * longest for share in _KNEES):
        hinge = [max(0.0, shape.context_tokens - knee) / seconds for shape, seconds in steps]
        found.append((*_fit([*columns, hinge]), knee))
    loss, (constant, *slopes, beyond), knee = min(found)
    if loss > _CLEARLY * straight:
        return model
    own = dict(zip(FEATURES, slopes, strict=True))
    return BentModel(constant, **own, residual=model.residual, steps=model.steps, seen=model.seen, knee=knee, beyond=beyond)


def _fit(columns: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
    """Return the squared relative errors of the best fit, and its coefficients."""
    found = fit_to_ones(columns)
    return sum((sum(map(mul, found, row)) - 1.0) ** 2 for row in zip(*columns, strict=True)), found
