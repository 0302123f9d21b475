"""The pods' linear step-time model, corrected where their own steps say that it is off. Pure.

A linear model can't follow tiles, caches and clocks: near saturation 5 % of step time is the difference between a queue
that drains and one that grows. A knee in context is fitted if there is one (`bent`). For each class of steps (powers of two
of decodes and prefill tokens, powers of the root of two of context) that was measured, the prediction is multiplied by the
median of measured over predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_sim.bent import bend

__all__ = ["CalibratedModel", "StepClass", "calibrate", "class_of"]

StepClass = tuple[int, int, int]
_FITTED = 4  # measured steps of a class that tell whether there is a knee: each size counts alike
_FEWEST = 4  # measured steps of a class: fewer are no median
_REACH = 2  # classes further away than this tell nothing
_MOST = 3.0  # a correction beyond this is a wrong model, which the check of the twin tells


@dataclass(frozen=True, slots=True)
class CalibratedModel:
    """A `StepPredictor`: `base` times a factor per class of steps; an unmeasured class has its neighbour's."""

    base: StepModel
    factors: Mapping[StepClass, float] = field(default_factory=dict)
    _near: dict[StepClass, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def constant(self) -> float:
        """Seconds that any step takes."""
        return self.base.constant

    @property
    def residual(self) -> float:
        """The base model's own error."""
        return self.base.residual

    def predict(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        return self.base.predict(shape) * self._factor(class_of(shape))

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return, to the last bit, what `predict` says of a step of this many decodes."""
        key = (sequences.bit_length(), 0, (context_tokens * context_tokens).bit_length())
        return self.base.predict_decode(sequences, context_tokens) * self._factor(key)

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        """Return the features in which the base model would be guessing."""
        return self.base.outside(shape)

    def scaled(self, share: float) -> CalibratedModel:
        """Return the model of a device whose steps take `share` of the time."""
        return CalibratedModel(
            self.base, {key: share * factor for key, factor in (self.factors or {(0, 0, 0): 1.0}).items()}
        )

    def _factor(self, key: StepClass) -> float:
        if (known := self._near.get(key)) is None:
            known = self._near[key] = self._nearest(key)
        return known

    def _nearest(self, key: StepClass) -> float:
        ranked = sorted((_distance(key, other), other) for other in self.factors)
        if not ranked:
            return 1.0
        # where nothing is near, all that was measured counts together
        return self.factors[ranked[0][1]] if ranked[0][0] <= _REACH else median(self.factors.values())

    def to_json(self) -> list[list[Any]]:
        """Return the factors as JSON-ready rows."""
        return [[*key, factor] for key, factor in sorted(self.factors.items())]


def class_of(shape: StepShape) -> StepClass:
    """Return the class of a step."""
    context = shape.context_tokens
    return shape.decode_tokens.bit_length(), shape.prefill_tokens.bit_length(), (context * context).bit_length()


def calibrate(model: StepModel, steps: Iterable[tuple[StepShape, float]]) -> CalibratedModel:
    """Return `model`, with a knee if measured `steps` (shape, seconds) show one, and with the factors that they ask for."""
    classes: dict[StepClass, list[tuple[StepShape, float]]] = {}
    for shape, seconds in steps:
        if seconds > 0:
            classes.setdefault(class_of(shape), []).append((shape, seconds))
    base = bend(model, [step for key in sorted(classes) for step in classes[key][-_FITTED:]])
    found: dict[StepClass, float] = {}
    for key, measured in classes.items():
        ratios = [seconds / predicted for shape, seconds in measured if (predicted := base.predict(shape)) > 0]
        if len(ratios) >= _FEWEST:
            found[key] = round(min(_MOST, max(1 / _MOST, median(ratios))), 4)
    return CalibratedModel(base, found)


def _distance(a: StepClass, b: StepClass) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1]) + abs(a[2] - b[2])
