"""Finds the setting with the most goodput, one knob after the other, from where it is outwards. Pure.

All that is tried is tried on a short piece of the traffic; what looks best there on more of it, the last four on all, and
of those the one with the most room is chosen (`finals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.step_time import StepModel
from paceline_operator.tuning.candidates import (
    TUNED,
    between,
    changes_between,
    in_tiles,
    ladder,
    merge_changes,
    trusted_most,
)  # fmt: skip
from paceline_operator.tuning.finals import STRESS, Finals, is_excluded
from paceline_operator.tuning.preference import better
from paceline_operator.tuning.question import Question, Sample
from paceline_operator.tuning.screen import FINE, ROUGH, Forecaster, Rung, piece_of, shortlist
from paceline_operator.tuning.twin import Forecast

__all__ = ["Found", "search"]

_PATIENCE = 2  # settings in a row that are worse than the best: further away from it there is nothing to find
_SMALL_BUDGETS, _MORE_SLOTS = (128, 256), (1.4, 2.0, 2.8)  # tokens; times the best number of slots under the budget in force
_TO_FINE, _TO_ALL = 6, 4  # settings that are tried on more of the traffic, and on all of it


@dataclass(frozen=True, slots=True)
class Found:
    """The best setting and its forecast beside the current one's; `changes` (wire form) is empty if that is the best.

    Both are of the load of now and of the load to come, half and half; `now` says the same of the load of now alone.
    `tried` has the forecast on most requests of every setting that was tried.
    """

    knobs: Knobs
    changes: Mapping[str, Any]
    current: Forecast
    best: Forecast
    now: tuple[Forecast, Forecast]
    tried: tuple[tuple[Mapping[str, Any], Forecast], ...]


@dataclass(slots=True)
class _Search:
    question: Question
    rung: Rung
    base: Knobs

    def sweep(self, best: Knobs, changes: Sequence[Mapping[str, Any]], *, rising: bool = False) -> Knobs:
        """Return the best of `best` and its changes, tried in their order while that leads anywhere.

        `rising`: each is more of a knob than the one before, so that there is an end where it doesn't bind.
        """
        objective, start, last, worse = self.question.objective, best, None, 0
        for change in changes:
            knobs = merge_changes(start, change)
            if knobs is None or knobs == start or is_excluded(self.question, self.base, knobs):
                continue
            before, last = last, self.rung.forecast(knobs)
            if rising and last == before and last == self.rung.forecast(start):
                break  # the knob doesn't bind: more of it changes nothing
            if better(objective, last, self.rung.forecast(best)):
                best, worse = knobs, 0
            elif better(objective, self.rung.forecast(best), last):
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
        return self.rung.best([below, above], 1)[0]


def search(twin: Forecaster, traffic: Sequence[Sample], knobs: Knobs, question: Question, ahead: Forecast) -> Found:
    """Return the best setting found; with `question.only` the best of those and the current one.

    `ahead` is the forecast for the current one at the load to come.
    """
    both = Rung(twin, question.objective, question.load, both=True)
    if question.only is not None:
        return _found([both], knobs, _Search(question, both, knobs).sweep(knobs, question.only))
    rungs = _rungs(twin, traffic, question)
    _sweeps(_Search(question, rungs[0], knobs), knobs)
    left = shortlist(knobs, rungs[0], rungs[1:], (_TO_FINE, _TO_ALL)[-len(rungs[1:]) :])
    if not left:
        return _found(rungs, knobs, knobs)
    both.forecast(knobs, ahead)
    hard = Rung(twin, question.objective, STRESS * question.load)
    winner = Finals(question, knobs, rungs[-1], hard, both).winner(left)
    best = both.best([knobs, winner], 1)[0] if winner is not None else knobs
    return _found([*rungs, both], knobs, best)


def _found(rungs: Sequence[Rung], knobs: Knobs, best: Knobs) -> Found:
    """Return what was found on the last of some rungs."""
    last = rungs[-1]
    tried = {k: f for rung in rungs for k, f in rung.known.items()}
    return Found(
        knobs=best,
        changes=changes_between(knobs, best),
        current=last.forecast(knobs),
        best=last.forecast(best),
        now=(last.now.get(knobs, last.forecast(knobs)), last.now.get(best, last.forecast(best))),
        tried=tuple((changes_between(knobs, k), f) for k, f in tried.items()),
    )


def _sweeps(state: _Search, best: Knobs) -> None:
    bounds, model = state.question.bounds, state.question.model.base
    slots, budget, *others = TUNED
    # the other knobs make up for a wrong number of slots, and then look as if they mattered: so that is refined first
    for steps in (ladder, between):
        best = state.around(best, steps(slots, best, bounds, model), slots)
    most = min(trusted_most(slots, model), best.max_num_seqs_limit)
    pairs = [[pair for pair in _beside(best, small, model) if pair[slots] <= min(small, most)] for small in _SMALL_BUDGETS]
    best = state.around(best, ladder(budget, best, bounds, model), budget)
    for changes in pairs:
        best = state.sweep(best, changes)
    for name in others:
        best = state.around(best, ladder(name, best, bounds, model), name)
    for name in (slots, budget):
        best = state.around(best, between(name, best, bounds, model), name)


def _beside(knobs: Knobs, budget: int, model: StepModel) -> list[dict[str, Any]]:
    """Return settings with a smaller budget and more slots at once.

    Chunks keep a long prompt from holding up everybody's tokens, but then it takes longer, in a slot of its own: where one
    comes now and then among short ones both together are best, and neither alone is a step that way.
    """
    if budget >= knobs.max_num_batched_tokens:
        return []
    return [{TUNED[0]: in_tiles(TUNED[0], f * knobs.max_num_seqs, model), TUNED[1]: budget} for f in _MORE_SLOTS]


def _rungs(twin: Forecaster, traffic: Sequence[Sample], question: Question) -> list[Rung]:
    """Return what settings are screened on, the least traffic first."""
    pieces = [piece_of(traffic, ROUGH) or tuple(traffic)]
    pieces += [finer] if (finer := piece_of(traffic, FINE)) is not None else []
    between_both = (1.0 + question.load) / 2  # one replay has to tell of both loads
    return [Rung(twin, question.objective, between_both, piece) for piece in (*pieces, None)]
