"""Finds the setting with the most goodput, one knob after the other, from where it is outwards. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline_core.knobs import KNOBS, Knobs, knobs_to_wire
from paceline_operator.tuning.candidates import TUNED, allowed, between, ladder, merge_changes
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.twin import Forecast, Twin

__all__ = ["Found", "better", "changes_between", "search"]

_TIE = 0.01  # relative: goodputs closer than this are equal, and latency decides
_LATENCY_TIE = 0.10
_FAILED = 0.02  # of requests: less goodput is none to rank by
_PATIENCE = 2  # settings in a row that are worse than the best: further away from it there is nothing to find


@dataclass(frozen=True, slots=True)
class Found:
    """The best setting and its forecast beside the current one's; `changes` (wire form) is empty if that is the best."""

    knobs: Knobs
    changes: Mapping[str, Any]
    current: Forecast
    best: Forecast
    tried: tuple[tuple[Mapping[str, Any], Forecast], ...]


@dataclass(slots=True)
class _Search:
    question: Question
    twin: Twin
    base: Knobs
    known: dict[Knobs, Forecast] = field(default_factory=dict)

    def forecast(self, knobs: Knobs) -> Forecast:
        if knobs not in self.known:
            self.known[knobs] = self.twin.forecast(knobs, load=self.question.load)
        return self.known[knobs]

    def sweep(self, best: Knobs, changes: Sequence[Mapping[str, Any]], *, rising: bool = False) -> Knobs:
        """Return the best of `best` and its changes, tried in their order while that leads anywhere.

        `rising`: each is more of a knob than the one before, so that there is an end where it doesn't bind.
        """
        start, last, worse = best, None, 0
        for change in changes:
            knobs = merge_changes(start, change)
            if knobs is None or knobs == start or self._is_excluded(knobs):
                continue
            before, last = last, self.forecast(knobs)
            if rising and last == before and last == self.forecast(start):
                break  # the knob doesn't bind: more of it changes nothing
            if better(self.question, last, self.forecast(best)):
                best, worse = knobs, 0
            elif better(self.question, self.forecast(best), last):
                worse += 1
            if worse == _PATIENCE:
                break
        return best

    def around(self, best: Knobs, changes: Sequence[Mapping[str, Any]], name: str) -> Knobs:
        """Return the best of `best` and its changes in knob `name`: first those above its value, then those below."""
        here = knobs_to_wire(best)[name]
        if not isinstance(here, int):
            return self.sweep(best, changes)
        above = self.sweep(best, [change for change in changes if change[name] > here], rising=True)
        below = self.sweep(best, [change for change in reversed(changes) if change[name] < here])
        return above if better(self.question, self.forecast(above), self.forecast(below)) else below

    def _is_excluded(self, knobs: Knobs) -> bool:
        """Return whether it did harm before, or a knob that follows another leaves its bounds."""
        changes = changes_between(self.base, knobs)
        if self.question.only is None and not allowed(changes, self.question.bounds):
            return True
        return any(changes == blocked for blocked in self.question.blocked)

    def best_known(self, excluded: set[Knobs]) -> Knobs:
        """Return the best of what was tried and isn't excluded."""
        best = self.base
        for knobs, forecast in self.known.items():
            if knobs not in excluded and better(self.question, forecast, self.known[best]):
                best = knobs
        return best


def search(twin: Twin, knobs: Knobs, question: Question, current: Forecast) -> Found:
    """Return the best setting found; with `question.only` the best of those and the current one, forecast as `current`."""
    state = _Search(question, twin, knobs, {knobs: current})
    if question.only is not None:
        best = state.sweep(knobs, question.only)
    else:
        best = _known_to_the_model(state, _sweeps(state, knobs))
    tried = ((changes_between(knobs, k), f) for k, f in state.known.items())
    return Found(best, changes_between(knobs, best), current, state.forecast(best), tuple(tried))


def _sweeps(state: _Search, best: Knobs) -> Knobs:
    bounds, model = state.question.bounds, state.question.model.base
    for name in TUNED:
        best = state.around(best, ladder(name, best, bounds, model), name)
    for name in TUNED[:2]:
        best = state.around(best, between(name, best, bounds, model), name)
    return best


def _known_to_the_model(state: _Search, best: Knobs) -> Knobs:
    """Return the best setting whose steps are all of sizes that the model may speak of."""
    excluded: set[Knobs] = set()
    while best != state.base:
        if not state.twin.forecast(best, load=state.question.load, watch=True).unknown:
            return best
        excluded.add(best)
        best = state.best_known(excluded)
    return best


def better(question: Question, a: Forecast, b: Forecast) -> bool:
    """Return whether `a` is preferred to `b`: goodput, then latency, then fewer preemptions."""
    first, second = _worth(question, a), _worth(question, b)
    if max(first, second) < _FAILED:  # nobody is served in time: what drains the queue fastest
        return a.token_rate > (1 + _TIE) * b.token_rate
    scale = max(first, second, _FAILED)
    if abs(first - second) > _TIE * scale:
        return first > second
    slow, fast = _slowness(question, a), _slowness(question, b)
    if abs(slow - fast) > _LATENCY_TIE * max(slow, fast):
        return slow < fast
    return a.preemptions < b.preemptions


def _worth(question: Question, forecast: Forecast) -> float:
    """Return what is to be maximised: the share within the objective, half of it with room for error; or tokens/s."""
    if question.objective.stated:
        return (forecast.attainment + forecast.soft) / 2
    return forecast.token_rate * forecast.attainment


def _slowness(question: Question, forecast: Forecast) -> float:
    """Return the tails as multiples of the objectives (of a second and a tenth where there are none)."""
    objective = question.objective
    return forecast.ttft_p95 / (objective.ttft or 1.0) + forecast.tpot_p95 / (objective.tpot or 0.1)


def changes_between(old: Knobs, new: Knobs) -> dict[str, Any]:
    """Return what differs in `new`, in wire form."""
    before, after = knobs_to_wire(old), knobs_to_wire(new)
    return {spec.name: after[spec.name] for spec in KNOBS if before[spec.name] != after[spec.name]}
