"""For how long traffic has been what it is now, and what it is: what came before a shift is no guide. Pure.

A burst is part of the traffic it comes in: knobs that are chosen on a burst alone, or on the calm after it, are wrong a
minute later. So decisions look as far back as requests are of one kind: to the last place after which their prompts or
outputs differ in length from those before, by the rank test of Mann and Whitney ("On a test of whether one of two random
variables is stochastically larger than the other", 1947), which holds for lengths of whatever distribution. The place is
that of the largest difference; what comes after it is looked at again (binary segmentation: A. J. Scott and M. Knott, "A
cluster analysis method for grouping means in the analysis of variance", Biometrics 1974).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.lengths import read
from paceline_operator.tuning.view import percentile

__all__ = ["LATELY", "Stretch", "stretch_of"]

_FEWEST = 16  # requests on either side of a shift
# Standard errors: chance alone gives as much once in 40,000 places. Of the places of a stretch only some are apart from each
# other, and those that have more than sixty requests on both sides must differ by more than this anyway (`_EFFECT`)
_ERRORS = 4.2
_EFFECT = 0.15  # beyond a half, of the pairs in which one is the longer: smaller differences ask for no other knobs
_BLOCK, _ENDED = 40, 0.9  # of so many requests in a row: before that the short ones have ended, and they look shorter
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

    `share` makes up for pods that told nothing: how many there are over how many told. Requests that were refused before
    they were read count for the rate, not for what tells kinds of traffic apart.
    """
    rows = sorted((r for r in records if r.arrival >= now - most), key=lambda r: r.arrival)
    lengths = read(rows)
    if first := _first(lengths):
        rows, lengths = rows[rows.index(lengths[first]) :], lengths[first:]
    began = rows[0].arrival if rows else now
    span = max(min(now - began, LATELY * interval), 1e-9)
    prompts = [r.prompt_tokens for r in lengths]
    return Stretch(
        began=began,
        requests=len(rows),
        rate=share * sum(r.arrival > now - span for r in rows) / span if rows else 0.0,
        trend=_trend([r.arrival for r in rows], began, now) if now - began >= LATELY * interval else 1.0,
        prompt_p50=float(percentile(prompts, 50)),
        prompt_p95=float(percentile(prompts, 95)),
        output_p50=float(percentile([r.output_tokens for r in lengths if r.outcome == "finished"], 50)),
    )


def _first(rows: Sequence[RequestRecord]) -> int:
    """Return the place of the stretch's first request: after the last shift."""
    first = 0
    while (shift := _shift(rows[first:])) is not None:
        first += shift
    return first


def _shift(rows: Sequence[RequestRecord]) -> int | None:
    """Return where requests become of another kind, as clearly as anywhere; None if they don't by more than chance."""
    prompts = [r.prompt_tokens for r in rows]
    outputs = [(place, r.output_tokens) for place, r in enumerate(rows[: _mostly_ended(rows)]) if r.outcome == "finished"]
    found = [_break(prompts)]
    if (split := _break([length for _, length in outputs])) is not None:
        found.append((split[0], outputs[split[1]][0]))
    return max((shift for shift in found if shift is not None), default=(0.0, None))[1]


def _mostly_ended(rows: Sequence[RequestRecord]) -> int:
    """Return how many requests there are until too many still run: of those the short ones have ended."""
    running = [0, *itertools.accumulate(r.outcome != "finished" for r in rows)]
    ends = range(len(rows), _BLOCK - 1, -1)
    return next((end for end in ends if running[end] - running[end - _BLOCK] <= (1 - _ENDED) * _BLOCK), 0)


def _break(lengths: Sequence[int]) -> tuple[float, int] | None:
    """Return where lengths differ most from those before, and by how many standard errors; None where by chance at most."""
    count, ranks = len(lengths), _ranks(lengths)
    before = [0.0, *itertools.accumulate(ranks)]
    found: list[tuple[float, int]] = []
    for split in range(_FEWEST, count - _FEWEST + 1):
        new = count - split
        longer = (before[-1] - before[split] - new * (new + 1) / 2) / (new * split)  # of all pairs, the newer is so often
        error = math.sqrt((count + 1) / (12 * new * split))
        if abs(longer - 0.5) > max(_EFFECT, _ERRORS * error):
            found.append((abs(longer - 0.5) / error, split))
    return max(found, default=None)


def _ranks(lengths: Sequence[int]) -> list[float]:
    """Return the place of each length among all, from 1; equal ones share theirs."""
    ordered = sorted(lengths)
    place = {length: (bisect_left(ordered, length) + bisect_right(ordered, length) + 1) / 2 for length in set(lengths)}
    return [place[length] for length in lengths]


def _trend(arrivals: Sequence[float], began: float, now: float) -> float:
    """Return how much faster requests come in the last third, 1 unless by more than twice what parts differ by chance."""
    counts = [0.0] * _PARTS
    for arrival in arrivals:
        counts[min(_PARTS - 1, int(_PARTS * (arrival - began) / (now - began)))] += 1
    before, last = counts[: -(_PARTS // 3)], counts[-(_PARTS // 3) :]
    old, new = fmean(before), fmean(last)
    error = math.sqrt(pvariance(before) / len(before) + pvariance(last) / len(last))
    return new / old if old > 0 and abs(new - old) > _TREND_T * error else 1.0
