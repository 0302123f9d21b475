"""When to look for better knobs: if the traffic has moved, if the objective isn't kept, and now and then anyway. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline_operator.tuning.decide import MIN_REQUESTS
from paceline_operator.tuning.state import State
from paceline_operator.tuning.view import ServiceView

__all__ = ["is_due", "load_ahead", "looked", "moved", "signature_of"]

_MOVED = 1.33  # a figure that is by this factor up or down is other traffic
_SAFETY = 1.25  # margin on the rate: 40 arrivals, a pod's in an interval, vary by a sixth; 1.25 is one and a half of that
_TREND_FROM, _TREND_MOST = 1.15, 1.5


def signature_of(view: ServiceView) -> tuple[float, ...]:
    """Return what makes traffic what it is: its rate and its lengths."""
    return (view.arrival_rate, view.prompt_p50, view.prompt_p95, view.output_p50)


def moved(old: Sequence[float], new: Sequence[float]) -> bool:
    """Return whether traffic has become another."""
    if len(old) != len(new):
        return True
    return any(max(a, b) > _MOVED * max(min(a, b), 1e-9) for a, b in zip(old, new, strict=True) if max(a, b) > 0)


def is_due(state: State, view: ServiceView, now: float, percentile: float) -> bool:
    """Return whether it is time to ask the twin."""
    if view.requests < MIN_REQUESTS:
        return False
    lost = state.kept and 100 * view.attainment < percentile
    return now >= state.next_search or moved(state.signature, signature_of(view)) or lost


def looked(state: State, view: ServiceView, now: float, percentile: float) -> State:
    """Return the state after the twin was asked about this traffic."""
    fresh = moved(state.signature, signature_of(view))
    searches = 0 if fresh else state.idle_searches
    kept = 100 * view.attainment >= percentile
    return replace(state, signature=signature_of(view), idle_searches=searches, kept=kept, next_search=now)


def load_ahead(view: ServiceView) -> float:
    """Return the rate to prepare for, as a multiple of the last one: what rises is taken to go on rising for a while."""
    return _SAFETY * (min(view.trend, _TREND_MOST) if view.trend > _TREND_FROM else 1.0)
