"""What a pod's own traffic makes of its scores, whatever its knobs: told by the twin, and left out of the comparison. Pure.

Two equal pods differ for minutes: one got the long prompts, or the burst while its queue was short. The twin replays what
each pod got under the *same* knobs; the difference of these scores is luck, and is subtracted from the measured one.
Requests reach pods by chance, so its expectation is 0 however wrong the twin is: the comparison stays fair, and the better
the twin, the less noise is left (control variates; A. Deng et al., "Improving the sensitivity of online controlled
experiments by utilizing pre-experiment data", WSDM 2013).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline_core.knobs import knobs_from_wire
from paceline_operator.tuning.guard import Score, Sides
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.sampling import sample_of
from paceline_operator.tuning.twin import Twin
from paceline_sim.calibrated import CalibratedModel
from paceline_sim.result import Outcome

__all__ = ["Luck"]

_MOST_PODS = 4  # of more the luck is evened out among the others, and the replays would take too long
_PLACES = 6  # decimals by which an arrival is known again


class Luck:
    """The twin of some pods that are compared. `knobs` (wire form) are those that all of them had before."""

    def __init__(self, knobs: Mapping[str, Any], objective: Objective, model: CalibratedModel, num_blocks: int) -> None:
        self._knobs, self._objective, self._model, self._blocks = knobs, objective, model, num_blocks

    def of(
        self, changed: Sequence[Score], others: Sequence[Score], pods: Sequence[PodLedger], since: float, now: float
    ) -> Sides:
        """Return what the twin expects of the requests that were scored, and of those that it can't tell the mean of all.

        Nothing with more `pods` than are worth it.
        """
        if len(pods) > _MOST_PODS:
            return (), ()
        expected: dict[float, float] = {}
        for pod in pods:
            expected |= self._expected(pod, since, now)
        mean = fmean(expected.values()) if expected else 0.0
        left, right = ([(at, expected.get(round(at, _PLACES), mean)) for at, _ in side] for side in (changed, others))
        return left, right

    def _expected(self, pod: PodLedger, since: float, now: float) -> dict[float, float]:
        """Return the score of each request by its arrival."""
        begin, sample = sample_of(pod, self._objective, since=since, now=now, block_size=int(self._knobs["blockSize"]))
        question = Question(
            now, pod.name, self._knobs, {}, self._objective, self._model, self._blocks, (sample,) if sample else ()
        )
        return {
            round(begin + rows[outcome.index].arrival, _PLACES): self._score(outcome)
            for rows, result in Twin(question).outcomes(knobs_from_wire(self._knobs))
            for outcome in result.outcomes
            if rows[outcome.index].counted
        }

    def _score(self, outcome: Outcome) -> float:
        pairs = ((self._objective.ttft, outcome.ttft), (self._objective.tpot, outcome.tpot))
        parts = [1.0 - time / bound for bound, time in pairs if bound is not None and time is not None]
        worst = -1.0 if outcome.ttft is None else 1.0
        return self._objective.score(max(-1.0, min(parts, default=worst)))
