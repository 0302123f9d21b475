"""Is the changed pod no worse than the others? An anytime-valid test, so that it may be looked at after every request. Pure.

Requests are scored from 0 to 1 by their margin to the objective (`Objective.score`). Time is cut into batches; each gives
one difference D = mean score of the changed pods − mean score of the others, in [−1, 1]: requests of one moment share their
luck, so a batch is one observation, not many. Two bets are made against the hypotheses

    harm:  "E[D] ≥ −0.02"   whose refutation says that the change does harm
    pass:  "E[D] ≤ −0.10"   whose refutation says that it is no worse than by a tenth of the score

The capital of a bettor who stakes λ of it on each batch, K = Π (1 + λ (D − m)), is a test supermartingale if the
hypothesis holds, for any λ chosen before the batch is seen; by Ville's inequality it ever reaches 1/α with probability at
most α. So each verdict is wrong with probability at most α = 0.05, however often one looks and whenever one stops:
I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024), section 4. λ is
theirs, too (aGRAPA, appendix B.3): the stake that would have grown capital fastest on the batches so far.
Where nobody was served in time before the trial (`Lately.starved`), all scores are 0 until a queue is gone. There a batch in
which no side's mean score reaches `STARVED` gives the difference of service rates instead, (changed − others) / (changed +
others) of output tokens per second; a batch in which somebody is served in time counts by scores as ever. That, too, is one
bounded figure per batch, so the same bets hold for it: harm is refuted at 4 % fewer tokens per second, pass at 18 %.
Else such a batch counts only where queues are the reason, on both sides: that both fail is no sign that one does no harm.
What a pod's own traffic makes of its scores is subtracted (`luck`); sides that differ by more than all there is count as
that.
What isn't covered: with one pod, "before" and "after" differ by the traffic as well as by the change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.service_rate import QUEUED, STARVED, ServiceRates

__all__ = [
    "ALPHA",
    "HARM_MARGIN",
    "Evidence",
    "Score",
    "Sides",
    "Verdict",
    "batch_seconds",
    "batches_had",
    "batches_needed",
    "judge",
    "margins",
    "weigh",
]

Score = tuple[float, float]  # arrival in seconds, score from 0 to 1
Sides = tuple[Sequence[Score], Sequence[Score]]  # of the changed pods, of the others
ALPHA = 0.05
HARM_MARGIN = 0.02
PASS_MARGIN = 0.10
_STAKE = 0.95  # of the most that can't be lost in one batch
_BATCHES = 20  # per interval
_PRIOR = (4.0, 0.02)  # weight and variance of the batches imagined before the first, at no difference


class Verdict(StrEnum):
    """What the evidence says so far."""

    OPEN = "Open"
    HARM = "Harm"
    PASS = "Pass"  # noqa: S105  a verdict, not a password


@dataclass(frozen=True, slots=True)
class Evidence:
    """The state of the test: batches and requests so far, the mean difference of scores, and the capital of both bets."""

    verdict: Verdict
    batches: int
    requests: int
    difference: float
    harm: float
    passed: float

    @property
    def harmful(self) -> bool:
        """Whether harm was ever evident, also after it had passed: the bet goes on while anybody looks."""
        return self.harm >= 1 / ALPHA

    @property
    def text(self) -> str:
        """Say it in words."""
        figures = f"{self.batches} batches, {self.requests} requests, mean difference {self.difference:+.3f}"
        return f"{figures}; evidence of harm {self.harm:.2g}, of no harm {self.passed:.2g} (20 decides)"


def judge(differences: Sequence[float], requests: int = 0) -> Evidence:
    """Return the evidence of batch differences in [−1, 1], in the order of time; harm, once evident, is the verdict."""
    harm = passed = 1.0
    most_harm = most_passed = 1.0
    weight, prior_variance = _PRIOR
    total, squares = 0.0, weight * prior_variance
    for count, difference in enumerate(differences):
        mean = total / (weight + count)
        variance = squares / (weight + count)
        harm *= 1.0 + _bet(-HARM_MARGIN - mean, variance, 1.0 - HARM_MARGIN) * (-HARM_MARGIN - difference)
        passed *= 1.0 + _bet(mean + PASS_MARGIN, variance, 1.0 - PASS_MARGIN) * (difference + PASS_MARGIN)
        most_harm, most_passed = max(most_harm, harm), max(most_passed, passed)
        total += difference
        squares += (difference - mean) ** 2
    mean = fmean(differences) if differences else 0.0
    verdict = Verdict.HARM if most_harm >= 1 / ALPHA else Verdict.PASS if most_passed >= 1 / ALPHA else Verdict.OPEN
    return Evidence(verdict, len(differences), requests, mean, most_harm, most_passed)


def _bet(lead: float, variance: float, most_loss: float) -> float:
    """Return the share of capital to stake: Kelly's for a gain of `lead` per batch, never so much that one batch ruins."""
    if lead <= 0:
        return 0.0
    return min(lead / (variance + lead * lead), _STAKE / most_loss)


def batch_seconds(interval: float) -> float:
    """Return the length of a time batch: equal pods pass after thirty, so there are twenty an interval."""
    return min(10.0, max(1.0, interval / _BATCHES))


def batches_had(rate: float, pods: int, seconds: float, batch: float) -> tuple[float, float]:
    """Return how many batches to expect in `seconds` at `rate` requests per second of each pod, and the requests of a pod in
    one: a batch lasts until both sides have a request (two exponential times, the longer of them).
    """
    if rate <= 0:
        return 0.0, 0.0
    span = max(batch, (1.0 + 1.0 / (pods - 1) - 1.0 / pods) / rate)
    return seconds / span, rate * span


def batches_needed(gain: float, share: float, requests: float, pods: int) -> float:
    """Return about how many batches of so many `requests` per pod the bet on "no worse" takes to reach 1/α.

    `share` of them are within the objective, `gain` more on the changed pod. Scores vary about half as much as zeros and
    ones do.
    """
    lead = PASS_MARGIN + gain
    variance = 0.5 * share * (1.0 - share) * (1.0 + 1.0 / (pods - 1)) / requests if requests > 0 else math.inf
    stake = _bet(lead, variance, 1.0 - PASS_MARGIN)
    growth = math.log1p(stake * lead) - variance / 2 * (stake / (1.0 + stake * lead)) ** 2
    return math.log(1 / ALPHA) / growth if growth > 0 else math.inf


def weigh(
    changed: Sequence[Score], others: Sequence[Score], *, start: float, end: float, batch: float,
    rates: ServiceRates | None = None, luck: Sides = ((), ()), queued: Sides | None = None,
) -> Evidence:  # fmt: skip
    """Return the evidence of (arrival, score) pairs from `start` to `end`, in batches of `batch` seconds.

    A batch without a request on either side is joined with the next one: nothing is made up. One in which nobody is served
    in time tells nothing of who serves better, except by `rates` (which has as many batches): if `queued` is given, only
    where that says of nearly all requests of both sides that they waited too long. `luck` is what each side's own traffic
    makes of its scores, and is left out.
    """
    sides = [_by_batch(pairs, start, batch) for pairs in (changed, others, *luck, *(queued or ()))]
    differences: list[float] = []
    pending: list[list[float]] = [[] for _ in sides]
    joined: list[int] = []
    requests = 0
    for number in range(max(0, int((end - start) // batch))):
        joined.append(number)
        pending = [[*waiting, *side.get(number, [])] for waiting, side in zip(pending, sides, strict=True)]
        if pending[0] and pending[1]:
            new, old, new_luck, old_luck, *queues = (fmean(values) if values else 0.0 for values in pending)
            served = rates.difference(joined) if rates is not None else None
            if max(new, old) >= STARVED:
                differences.append(max(-1.0, min(1.0, new - old - (new_luck - old_luck))))
            elif served is not None and min(queues, default=1.0) >= QUEUED:
                differences.append(served)
            requests += len(pending[0])
            pending, joined = [[] for _ in sides], []
    return judge(differences, requests)


def margins(records: Iterable[RequestRecord], objective: Objective, now: float, unknown: float) -> list[Score]:
    """Return (arrival, score) of each request that can be judged; one that can't by its time counts as `unknown`.

    Only requests that came more than `Objective.settle` ago are looked at, so that the quick ones don't come alone.
    """
    found = []
    for record in records:
        if record.arrival > now - objective.settle or record.outcome == "aborted":
            continue
        margin = objective.margin(record, now)
        found.append((record.arrival, objective.score(unknown if margin is None else margin)))
    return found


def _by_batch(scored: Iterable[Score], start: float, batch: float) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for arrival, score in scored:
        if arrival >= start:
            found.setdefault(int((arrival - start) // batch), []).append(score)
    return found
