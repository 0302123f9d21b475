"""How long a step takes: a model fitted online from the engine's own steps.

Seconds = constant + Σ coefficient × feature over the features of `plan.StepShape`, with no coefficient below zero (more
work never takes less time), fitted by non-negative least squares on *relative* errors, so that a 2 ms decode step counts as
much as a 200 ms prefill. The steps it is fitted on are a stratified reservoir: every power-of-two size class of decode
and prefill keeps its own sample, so that regimes that are rare now (a long prompt at night) aren't forgotten.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import mul
from typing import Protocol

from paceline_core.errors import FormatError
from paceline_core.nnls import fit_to_ones
from paceline_core.plan import StepShape
from paceline_core.wire import StepModelDocument

__all__ = ["FEATURES", "StepModel", "StepPredictor", "StepTimeFitter"]

FEATURES = ("decode_tokens", "prefill_tokens", "context_tokens", "prefill_attention")
TRUSTED = 2.0  # nobody may extrapolate beyond this multiple of what was seen


class StepPredictor(Protocol):
    """What the scheduler and the twin ask of a step-time model. More work never takes less time."""

    @property
    def constant(self) -> float:
        """Seconds that any step takes."""

    @property
    def residual(self) -> float:
        """The model's own relative error, at the 90th percentile of steps."""

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step."""

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return, to the last bit, what `predict` says of a step of this many decodes: the twin's inner loop."""

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        """Return the features of `shape` in which the model would be guessing."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """A fitted model: seconds per unit of each feature, the error it makes and the ranges it was fitted on.

    `residual` is the relative error at the 90th percentile of the steps it was fitted on, `seen` gives (low, high) per
    feature; a feature without a range (a model that was written, not fitted) is trusted everywhere.
    """

    constant: float
    decode_tokens: float = 0.0
    prefill_tokens: float = 0.0
    context_tokens: float = 0.0
    prefill_attention: float = 0.0
    residual: float = 0.0
    steps: int = 0
    seen: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step; whether the model knows steps of this size is `outside`'s to say."""
        return (
            self.constant
            + self.decode_tokens * shape.decode_tokens
            + self.prefill_tokens * shape.prefill_tokens
            + self.context_tokens * shape.context_tokens
            + self.prefill_attention * shape.prefill_attention
        )

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        """Return, to the last bit, what `predict` says of a step of this many decodes: the twin's inner loop."""
        return self.constant + self.decode_tokens * sequences + self.context_tokens * context_tokens

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        """Return the features of `shape` that lie beyond twice what was seen: the prediction is a guess there."""
        return tuple(name for name, (_, high) in self.seen.items() if getattr(shape, name) > TRUSTED * high)

    def to_document(self) -> StepModelDocument:
        """Return the wire form."""
        return StepModelDocument(
            constant=self.constant,
            decode_tokens=self.decode_tokens,
            prefill_tokens=self.prefill_tokens,
            context_tokens=self.context_tokens,
            prefill_attention=self.prefill_attention,
            residual=self.residual,
            steps=self.steps,
            seen=dict(self.seen),
        )

    @classmethod
    def from_document(cls, document: StepModelDocument) -> StepModel:
        """Read the wire form. Raises `FormatError` for a negative coefficient or an unknown feature."""
        coefficients = {name: getattr(document, name) for name in ("constant", *FEATURES)}
        for name, value in coefficients.items():
            if not 0 <= value < float("inf"):
                raise FormatError(f"step model: {name} is {value!r}, expected a finite number of seconds ≥ 0")
        unknown = set(document.seen) - set(FEATURES)
        if unknown:
            raise FormatError(f"step model: seen names {sorted(unknown)}, the features are {', '.join(FEATURES)}")
        return cls(**coefficients, residual=document.residual, steps=document.steps, seen=dict(document.seen))


class StepTimeFitter:
    """Collects steps and fits a `StepModel`. Deterministic for a given `seed` and sequence of steps."""

    PER_STRATUM = 32  # some hundred classes at most: a fit takes about 10 ms

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)  # noqa: S311  # sampling, not secrets
        self._strata: dict[tuple[int, int], list[tuple[StepShape, float]]] = {}
        self._steps = 0

    @property
    def steps(self) -> int:
        """How many steps were observed."""
        return self._steps

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take one measured step. A step of no tokens or of no time says nothing and is left out."""
        if seconds <= 0 or not shape.decode_tokens + shape.prefill_tokens:
            return
        self._steps += 1
        stratum = self._strata.setdefault((shape.decode_tokens.bit_length(), shape.prefill_tokens.bit_length()), [])
        if len(stratum) < self.PER_STRATUM:
            stratum.append((shape, seconds))
        else:
            # a random victim: old steps fade out geometrically, so the sample follows the machine as it warms or throttles
            stratum[self._random.randrange(self.PER_STRATUM)] = (shape, seconds)

    def model(self) -> StepModel:
        """Fit and return the model. Raises `ValueError` before the first step was observed."""
        sample = [pair for stratum in self._strata.values() for pair in stratum]
        if not sample:
            raise ValueError("no step was observed yet")
        # one column per coefficient, each divided by the seconds: the fit then minimises relative errors
        columns = [[1.0 / seconds for _, seconds in sample]]
        columns += [[getattr(shape, name) / seconds for shape, seconds in sample] for name in FEATURES]
        coefficients = fit_to_ones(columns)
        errors = sorted(abs(sum(map(mul, coefficients, row)) - 1.0) for row in zip(*columns, strict=True))
        constant, *slopes = coefficients
        return StepModel(
            constant=constant,
            **dict(zip(FEATURES, slopes, strict=True)),
            residual=errors[min(len(errors) - 1, int(0.9 * len(errors)))],
            steps=self._steps,
            seen={name: _range([getattr(shape, name) for shape, _ in sample]) for name in FEATURES},
        )


def _range(values: list[int]) -> tuple[float, float]:
    return float(min(values)), float(max(values))
