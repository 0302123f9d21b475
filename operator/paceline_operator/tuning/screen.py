"""Which settings are worth replays of all the traffic: many on a short piece, few on more, one at more than one load. Pure.

Successive halving (K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016): replays of all candidates on all traffic would take minutes, and most of them are out of the question after a
few dozen requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline_core.knobs import Knobs
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.preference import better, certain_gain
from paceline_operator.tuning.question import Sample
from paceline_operator.tuning.twin import Forecast

__all__ = ["FINE", "ROUGH", "Forecaster", "Rung", "piece_of", "shortlist"]

ROUGH, FINE = 96, 192  # requests of the two pieces
_WORTH_IT = 1.5  # times as many requests as in a piece there must be, else it is (nearly) all there is
_STEP = 4  # places that are looked at per length of what is looked for


class Forecaster(Protocol):
    """The twin, as far as a search needs it."""

    def forecast(
        self, knobs: Knobs, *, load: float = 1.0, watch: bool = False, piece: Sequence[Sample] | None = None
    ) -> Forecast:
        """Return what to expect under `knobs`."""


@dataclass(slots=True)
class Rung:
    """Forecasts of settings on a piece of the traffic (None: all of it), each made once.

    `both`: they are of `load` and of the load of now, half and half, and say whether the model knows such steps.
    """

    twin: Forecaster
    objective: Objective
    load: float
    piece: tuple[Sample, ...] | None = None
    both: bool = False
    known: dict[Knobs, Forecast] = field(default_factory=dict)
    now: dict[Knobs, Forecast] = field(default_factory=dict)  # at the load of now alone

    def forecast(self, knobs: Knobs, ahead: Forecast | None = None) -> Forecast:
        """Return the forecast of a setting; `ahead` is that of the load to come if it is known."""
        if knobs not in self.known:
            found = ahead or self.twin.forecast(knobs, load=self.load, piece=self.piece, watch=self.both)
            if self.both:
                self.now[knobs] = found if self.load == 1.0 else self.twin.forecast(knobs)
                found = found.mean(self.now[knobs])
            self.known[knobs] = found
        return self.known[knobs]

    def best(self, settings: Iterable[Knobs], count: int, *, apart: bool = False) -> list[Knobs]:
        """Return the `count` best of some settings, the best first; of equals the first one.

        With `apart` no two have about the same number of slots (the same power of the root of two is nearest).
        """
        left = list(settings)
        found: list[Knobs] = []
        while left and len(found) < count:
            best = left[0]
            for knobs in left[1:]:
                if better(self.objective, self.forecast(knobs), self.forecast(best)):
                    best = knobs
            left.remove(best)
            if not apart or _place(best) not in map(_place, found):
                found.append(best)
        return found


def piece_of(traffic: Sequence[Sample], count: int) -> tuple[Sample, ...] | None:
    """Return about `count` requests of the traffic to tell settings apart by; None if that is (nearly) all there is.

    They are around the busiest moment: on calm traffic a setting that never gets over a burst looks as good as any. The last
    quarter of them doesn't count: nobody comes after them, and a queue that isn't added to is soon at its end.
    """
    if sum(map(len, traffic)) < _WORTH_IT * count:
        return None
    pieces: list[Sample] = []
    for sample in sorted(traffic, key=len, reverse=True):
        if (left := count - sum(map(len, pieces))) <= 0:
            break
        pieces.append(_around_the_busiest(sample, left))
    return tuple(pieces)


def _around_the_busiest(sample: Sample, count: int) -> Sample:
    """Return `count` requests in a row: the half of them in the middle bring as much work per second as any do."""
    busy = max(1, count // 2)
    starts = range(0, max(1, len(sample) - busy + 1), max(1, busy // _STEP))
    busiest = max(starts, key=lambda start: _work(sample[start : start + busy]))
    start = max(0, min(busiest - busy // 2, len(sample) - count))
    piece = sample[start : start + count]
    counted = max(1, len(piece) - len(piece) // _STEP)
    return (*piece[:counted], *(replace(request, counted=False) for request in piece[counted:]))


def _work(sample: Sample) -> float:
    """Return tokens per second."""
    return sum(r.prompt + r.output for r in sample) / max(sample[-1].arrival - sample[0].arrival, 1e-9)


def shortlist(base: Knobs, rough: Rung, finer: Sequence[Rung], keep: Sequence[int]) -> list[Knobs]:
    """Return the settings that are left after each of `finer` has told the `keep` best of those before it, the best first.

    They differ in the number of slots: five variants of one setting would be one chance, not five, and little traffic
    flatters few slots, whose queue takes its time to grow. What does the same as `base`, is surely worse, or in the end no
    better, is out.
    """
    left = [knobs for knobs in rough.known if knobs == base or rough.forecast(knobs) != rough.forecast(base)]
    for before, rung, count in zip((rough, *finer), finer, keep, strict=False):
        left = [knobs for knobs in left if knobs != base and not _is_surely_worse(before, knobs, base)]
        left = before.best(left, count, apart=True)
        for knobs in left:
            rung.forecast(knobs)
    last = (finer or (rough,))[-1]
    promising = [knobs for knobs in left if better(last.objective, last.forecast(knobs), last.forecast(base))]
    return last.best(promising, len(promising))


def _place(knobs: Knobs) -> int:
    return round(2 * math.log2(knobs.max_num_seqs))


def _is_surely_worse(rung: Rung, knobs: Knobs, base: Knobs) -> bool:
    return rung.objective.stated and certain_gain(rung.forecast(knobs), rung.forecast(base)) > 0
