"""Which settings are worth a replay of all the traffic: many on a short piece, few on more, two on everything. Pure.

Successive halving (K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016): replays of all candidates on all traffic would take minutes, and most of them are out of the question after a
few dozen requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline_core.knobs import Knobs
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.preference import better
from paceline_operator.tuning.question import Sample
from paceline_operator.tuning.twin import Forecast

__all__ = ["FINE", "ROUGH", "Forecaster", "Rung", "piece_of", "shortlist"]

ROUGH, FINE = 96, 192  # requests of the two pieces
_WORTH_IT = 1.5  # times as many requests as in a piece there must be, else it is (nearly) all there is
_STEP = 4  # windows that are looked at per length of a window


class Forecaster(Protocol):
    """The twin, as far as a search needs it."""

    def forecast(
        self, knobs: Knobs, *, load: float = 1.0, watch: bool = False, piece: Sequence[Sample] | None = None
    ) -> Forecast:
        """Return what to expect under `knobs`."""


@dataclass(slots=True)
class Rung:
    """Forecasts of settings on one piece of the traffic, each made once; on all of it (None) they are of the load to come
    and of the load of now, half and half, and say whether the model knows such steps.
    """

    twin: Forecaster
    objective: Objective
    load: float
    piece: tuple[Sample, ...] | None = None
    known: dict[Knobs, Forecast] = field(default_factory=dict)
    now: dict[Knobs, Forecast] = field(default_factory=dict)  # at the load of now alone

    def forecast(self, knobs: Knobs, ahead: Forecast | None = None) -> Forecast:
        """Return the forecast of a setting; `ahead` is that of the load to come if it is known."""
        if knobs not in self.known:
            whole = self.piece is None
            found = ahead or self.twin.forecast(knobs, load=self.load, piece=self.piece, watch=whole)
            if whole:
                self.now[knobs] = found if self.load == 1.0 else self.twin.forecast(knobs)
                found = found.mean(self.now[knobs])
            self.known[knobs] = found
        return self.known[knobs]

    def best(self, settings: Iterable[Knobs], count: int) -> list[Knobs]:
        """Return the `count` best of some settings, the best first; of equals the first one."""
        left = list(settings)
        found: list[Knobs] = []
        while left and len(found) < count:
            best = left[0]
            for knobs in left[1:]:
                if better(self.objective, self.forecast(knobs), self.forecast(best)):
                    best = knobs
            found.append(best)
            left.remove(best)
        return found


def piece_of(traffic: Sequence[Sample], count: int) -> tuple[Sample, ...] | None:
    """Return about `count` requests of the traffic that stand for all of it; None if that is (nearly) all there is.

    Half of them are a stretch as busy as traffic usually is, which tells how settings do beside others' prompts; half the
    busiest one, which tells what they make of a queue. On the usual one alone, a setting that never gets over a burst looks
    as good as any.
    """
    if sum(map(len, traffic)) < _WORTH_IT * count:
        return None
    pieces: list[Sample] = []
    for sample in sorted(traffic, key=len, reverse=True):
        if (left := (count - sum(map(len, pieces))) // 2) <= 0:
            break
        pieces += [sample] if len(sample) <= 2 * left else _usual_and_busiest(sample, left)
    return tuple(pieces)


def _usual_and_busiest(sample: Sample, count: int) -> list[Sample]:
    """Return the `count` requests in a row that bring as much work per second as all do, and those that bring most."""
    usual = _work(sample)
    starts = range(0, len(sample) - count + 1, max(1, count // _STEP))
    windows = [sample[start : start + count] for start in starts]
    return [min(windows, key=lambda window: abs(_work(window) - usual)), max(windows, key=_work)]


def _work(sample: Sample) -> float:
    """Return tokens per second."""
    return sum(r.prompt + r.output for r in sample) / max(sample[-1].arrival - sample[0].arrival, 1e-9)


def shortlist(rough: Rung, finer: Sequence[Rung], keep: Sequence[int]) -> list[Knobs]:
    """Return the settings that are left after each of `finer` has told the `keep` best of those before it."""
    left = list(rough.known)
    for before, rung, count in zip((rough, *finer), finer, keep, strict=False):
        left = before.best(left, count)
        for knobs in left:
            rung.forecast(knobs)
    return left
