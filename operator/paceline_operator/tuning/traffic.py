"""When to look for better knobs: if the traffic has moved, if the objective isn't kept, and now and then anyway. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline_operator.tuning.decide import MIN_REQUESTS
from paceline_operator.tuning.service_rate import Lately
from paceline_operator.tuning.state import Phase, State
from paceline_operator.tuning.stretch import Stretch

__all__ = ["MOST_CHANGES", "budget_left", "follow", "is_due", "is_lost", "load_ahead", "looked", "moved"]

MOST_CHANGES = 3  # per shift of the traffic
_FORGOTTEN = 2880  # intervals after which a change doesn't count any more: a day of them at 30 s
# Factors on rate, prompt p50 and p95, output p50, of stretches of one kind. 60 requests tell a median to within a fifth and
# a p95 to within a third: what is beyond the first is worth asking the twin about. The second are what one of them alone
# must change by to renew the budget of changes; half of the way in each of them is as far (see `_distance`).
_MOVED = (1.4, 1.4, 2.0, 1.4)
_SHIFTED = (2.0, 1.6, 2.5, 1.6)
_NONE = 1e-9  # a figure of nothing
_FALL = 0.15  # of requests fewer within the objective than at the last search: a queue has come that doesn't end
_MISSES = 3  # of an interval's requests
_LASTS, _APART = 3, 20  # intervals that it must last, and that must lie between two
# Margin on the rate. What has to be got over is the worst moment: a burst of twenty arrivals at a pod varies by 22 % by
# chance, and 1.5 is two of that. At 1.25 settings were chosen that were right for the minute they were chosen by.
_SAFETY = 1.5
_TREND_FROM, _TREND_MOST = 1.15, 1.5


def moved(old: Sequence[float], new: Sequence[float]) -> bool:
    """Return whether traffic has become another."""
    return len(old) != len(new) or any(way > 1.0 for way in _ways(old, new, _MOVED))


def follow(state: State, stretch: Stretch, now: float, interval: float) -> State:
    """Return the state after a look at the traffic: a shift that lasts renews the budget of changes and the trust.

    The first looks at new traffic see little of it: what it is said to be is put right until there may be another shift.
    """
    found = stretch.signature
    if not state.shift:
        return replace(state, shift=found, shifted=now) if stretch.requests >= MIN_REQUESTS else state
    if stretch.requests < MIN_REQUESTS:
        return replace(state, shifting=0.0)
    early = now - state.shifted < _APART * interval
    if _distance(state.shift, found) <= 1.0 or (early and stretch.began <= state.shifted):
        return replace(state, shifting=0.0, shift=found if early else state.shift)
    since = state.shifting or now
    if now - since < _LASTS * interval or early:
        return replace(state, shifting=since)
    # what was begun since the new traffic came is about that: it counts among its changes, and isn't gone back on
    new = min(since, max(stretch.began, since - _APART * interval))
    begun = tuple(at for at in state.begun if at >= new)
    left = state.left[-len(begun) :] if begun else ()
    return replace(state, shift=found, shifted=now, shifting=0.0, begun=begun, left=left, doubt=0.0)


def budget_left(state: State, now: float, interval: float) -> bool:
    """Return whether another change may be begun."""
    return sum(now - begun < _FORGOTTEN * interval for begun in state.begun) < MOST_CHANGES


def _distance(old: Sequence[float], new: Sequence[float]) -> float:
    """Return how far apart two kinds of traffic are, as a multiple of what makes one of the figures alone a shift."""
    return math.hypot(*_ways(old, new, _SHIFTED))


def _ways(old: Sequence[float], new: Sequence[float], factors: Sequence[float]) -> list[float]:
    """Return how far each figure has gone of the way that is its factor, on a scale of ratios."""
    pairs = zip(old, new, factors, strict=True)
    return [abs(math.log(max(b, _NONE) / max(a, _NONE))) / math.log(factor) for a, b, factor in pairs]


def is_due(state: State, stretch: Stretch, now: float, percentile: float) -> bool:
    """Return whether it is time to ask the twin."""
    if stretch.requests < MIN_REQUESTS:
        return False
    lost = state.kept and 100 * stretch.attainment < percentile
    fell = stretch.attainment < state.share - _FALL
    return now >= state.next_search or moved(state.signature, stretch.signature) or lost or fell


def is_lost(state: State, lately: Lately, percentile: float) -> bool:
    """Return whether an objective that a change has brought back is lost again, by more than a stray request or two.

    The calm after a change is for what it does to be seen. That was seen; this is something else, and won't wait.
    """
    misses = lately.requests * (1.0 - lately.share)
    return state.phase is Phase.SETTLED and state.kept and misses >= _MISSES and 100 * lately.share < percentile


def looked(state: State, stretch: Stretch, now: float, percentile: float) -> State:
    """Return the state after the twin was asked about this traffic."""
    fresh = moved(state.signature, stretch.signature)
    searches = 0 if fresh else state.idle_searches
    kept = 100 * stretch.attainment >= percentile
    return replace(
        state, signature=stretch.signature, idle_searches=searches, kept=kept, share=stretch.attainment, next_search=now
    )


def load_ahead(stretch: Stretch) -> float:
    """Return the rate to prepare for, as a multiple of the last one: what rises is taken to go on rising for a while."""
    return _SAFETY * (min(stretch.trend, _TREND_MOST) if stretch.trend > _TREND_FROM else 1.0)
