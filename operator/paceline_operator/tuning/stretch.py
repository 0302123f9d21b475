"""For how long traffic has been what it is now, and what it is: what came before a shift is no guide. Pure.

A burst is part of the traffic it comes in: knobs that are chosen on a burst alone, or on the calm after it, are wrong a
minute later. So decisions look as far back as requests are of one kind. Going back from now, a block of them belongs to the
stretch unless its prompts or outputs differ in length from all that came since, by the rank test of Mann and Whitney ("On a
test of whether one of two random variables is stochastically larger than the other", 1947), which holds for lengths of
whatever distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.view import percentile

__all__ = ["LATELY", "Stretch", "stretch_of"]

_BLOCK = 40  # requests that are judged together
# Standard errors: chance alone gives as much once in 40,000 blocks; a day of looks at 16 blocks each has 46,000
_ERRORS = 4.2
_EFFECT = 0.15  # beyond a half, of the pairs in which one is the longer: smaller differences ask for no other knobs
_ENDED = 0.9  # of a block's requests: before that the short ones have ended, and the block looks shorter than it is
LATELY = 10  # intervals over which rate and attainment are taken: bursts are shorter
_PARTS = 12  # of a stretch, for its trend: the last third of them against the others
_TREND_T = 2.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Traffic of one kind since `began` (seconds): `requests` of it, and the last `rate` of arrivals per second.

    `trend` is the rate of its last third over that of the others, 1 while that may be chance. Lengths are tokens;
    `attainment` is the share within the objective of what came lately under the knobs that pods have now.
    """

    began: float
    requests: int
    rate: float
    trend: float
    prompt_p50: float
    prompt_p95: float
    output_p50: float
    attainment: float = 1.0

    @property
    def signature(self) -> tuple[float, ...]:
        """What makes traffic what it is: its rate and its lengths."""
        return (self.rate, self.prompt_p50, self.prompt_p95, self.output_p50)


def stretch_of(records: Iterable[RequestRecord], now: float, most: float, interval: float, share: float = 1.0) -> Stretch:
    """Return the traffic of one kind up to `now`, of `most` seconds at most.

    `share` makes up for pods that told nothing: how many there are over how many told.
    """
    rows = sorted((r for r in records if r.arrival >= now - most), key=lambda r: r.arrival)
    rows = rows[_first(rows) :]
    began = rows[0].arrival if rows else now
    span = max(min(now - began, LATELY * interval), 1e-9)
    prompts = [r.prompt_tokens for r in rows]
    return Stretch(
        began=began,
        requests=len(rows),
        rate=share * sum(r.arrival > now - span for r in rows) / span if rows else 0.0,
        trend=_trend([r.arrival for r in rows], began, now) if now - began >= LATELY * interval else 1.0,
        prompt_p50=float(percentile(prompts, 50)),
        prompt_p95=float(percentile(prompts, 95)),
        output_p50=float(percentile([r.output_tokens for r in rows if r.outcome == "finished"], 50)),
    )


def _first(rows: Sequence[RequestRecord]) -> int:
    """Return the place of the stretch's first request."""
    first = max(0, len(rows) - _BLOCK)
    since = _Lengths.of(rows[first:])
    while first >= _BLOCK:
        block = _Lengths.of(rows[first - _BLOCK : first])
        if block.differs(since):
            break
        since = since.joined(block)
        first -= _BLOCK
    return first if first >= _BLOCK else 0  # what is left is too few to tell


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The lengths of some requests, sorted; without outputs while many of them run."""

    prompts: Sequence[int]
    outputs: Sequence[int]

    @classmethod
    def of(cls, rows: Sequence[RequestRecord]) -> _Lengths:
        ended = sorted(r.output_tokens for r in rows if r.outcome == "finished")
        return cls(sorted(r.prompt_tokens for r in rows), ended if len(ended) >= _ENDED * len(rows) else ())

    def joined(self, other: _Lengths) -> _Lengths:
        return _Lengths(sorted([*self.prompts, *other.prompts]), sorted([*self.outputs, *other.outputs]))

    def differs(self, since: _Lengths) -> bool:
        """Return whether these are of another kind than what came after them."""
        return _differ(self.prompts, since.prompts) or _differ(self.outputs, since.outputs)


def _differ(some: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether one of two sorted samples is the longer, by more than chance; too few are never said to be."""
    count, most = len(some), len(others)
    if min(count, most) < _BLOCK // 2:
        return False
    below = sum(bisect_left(others, length) + bisect_right(others, length) for length in some) / (2 * count * most)
    error = math.sqrt((count + most + 1) / (12 * count * most))
    return abs(below - 0.5) > max(_EFFECT, _ERRORS * error)


def _trend(arrivals: Sequence[float], began: float, now: float) -> float:
    """Return how much faster requests come in the last third, 1 unless by more than twice what parts differ by chance."""
    counts = [0.0] * _PARTS
    for arrival in arrivals:
        counts[min(_PARTS - 1, int(_PARTS * (arrival - began) / (now - began)))] += 1
    before, last = counts[: -(_PARTS // 3)], counts[-(_PARTS // 3) :]
    old, new = fmean(before), fmean(last)
    error = math.sqrt(pvariance(before) / len(before) + pvariance(last) / len(last))
    return new / old if old > 0 and abs(new - old) > _TREND_T * error else 1.0
