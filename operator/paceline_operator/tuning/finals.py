"""Which of the last few settings is chosen: not the best of the last minute by a hair, but one with room to be wrong. Pure.

Traffic and model are known from some hundred requests, and the best of twenty settings is in part the luckiest. So of those
that are left the one counts that does well up to the load to come and beyond it, too; its neighbours in slots are looked at,
since little traffic had taken them for equal; and a change of one more knob stays only if it earns its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline_core.knobs import Knobs, knob, knobs_to_wire
from paceline_operator.tuning.candidates import FEATURES, TUNED, allowed, changes_between, merge_changes, trusted_most
from paceline_operator.tuning.preference import clearly_better, worth
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.screen import Rung

__all__ = ["STRESS", "Finals", "is_excluded"]

# Times the load to come. Settings that are equal up to there differ in what happens beyond it, and there the one at the edge
# falls over; much further away all do, and nothing is told apart any more
STRESS = 1.25
_NEARBY = (1.2, 0.85)  # times the slots of the best


@dataclass(frozen=True, slots=True)
class Finals:
    """What the last settings are told apart by, all of the traffic at some loads: `last` between that of now and that to
    come, `hard` at `STRESS` times that to come, `both` as forecasts are told. `base` are the knobs in force.
    """

    question: Question
    base: Knobs
    last: Rung
    hard: Rung
    both: Rung

    def winner(self, settings: Sequence[Knobs]) -> Knobs | None:
        """Return the setting with the most room, None if the model may speak of none of them.

        `settings` are in their order by `last`. That counts where a queue is worked off: its load is beyond any already.
        """
        draining = self.question.objective.draining
        for setting in settings if draining else sorted(settings, key=self._room, reverse=True):
            near = setting if draining else self._roomiest_near(setting)
            for choice in (self._plainest(near), setting):
                if (known := self._known(choice)) is not None:
                    return known
        return None

    def _room(self, knobs: Knobs) -> float:
        """Return what a setting is worth at all loads."""
        return 2 * worth(self.question.objective, self.last.forecast(knobs)) + self._worth_beyond(knobs)

    def _worth_beyond(self, knobs: Knobs) -> float:
        return worth(self.question.objective, self.hard.forecast(knobs))

    def _roomiest_near(self, best: Knobs) -> Knobs:
        """Return `best`, or one with more room that has a few slots more or less, with or without its other changes.

        One knob is searched after the other: what is right for sixteen slots needn't be for fourteen.
        """
        own = knobs_to_wire(self.base)
        others = {name: own[name] for name in TUNED[1:]}
        near = [
            merge_changes(best, {TUNED[0]: round(f * best.max_num_seqs)}, also) for f in _NEARBY for also in ({}, others)
        ]
        return max((best, *self._allowed(*dict.fromkeys(near))), key=self._room)

    def _plainest(self, best: Knobs) -> Knobs:
        """Return `best` without the changes that don't earn their place: each is one more thing to be wrong about.

        Fewer slots are none: they hold where the model is wrong about large batches.
        """
        objective = self.question.objective
        names = TUNED[1:] if best.max_num_seqs < self.base.max_num_seqs else TUNED
        for name in reversed(names):
            plainer = merge_changes(best, {name: knobs_to_wire(self.base)[name]})
            if plainer is None or plainer in (best, self.base) or is_excluded(self.question, self.base, plainer):
                continue
            rungs = (self.last,) if objective.draining else (self.last, self.hard)
            if not any(clearly_better(objective, rung.forecast(best), rung.forecast(plainer)) for rung in rungs):
                best = plainer
        return best

    def _known(self, knobs: Knobs) -> Knobs | None:
        """Return a setting whose steps are of sizes that the model may speak of: this one, or it with a smaller budget."""
        most = trusted_most("maxNumBatchedTokens", self.question.model.base)
        for setting in self._allowed(knobs, merge_changes(knobs, {"maxNumBatchedTokens": most})):
            unknown = set(self.both.forecast(setting).unknown)
            if unknown <= set(self.both.forecast(self.base).unknown) and unknown.isdisjoint(self._raised(setting)):
                return setting
        return None

    def _allowed(self, *settings: Knobs | None) -> Iterator[Knobs]:
        return (s for s in settings if s is not None and s != self.base and not is_excluded(self.question, self.base, s))

    def _raised(self, knobs: Knobs) -> set[str]:
        """Return the features of steps that a setting lets grow beyond what the knobs in force allow.

        What those may bring any minute is no reason against a change that leaves it alone.
        """
        return {feature for name, feature in FEATURES.items() if _value(knobs, name) > _value(self.base, name)}


def is_excluded(question: Question, base: Knobs, knobs: Knobs) -> bool:
    """Return whether a setting did harm before, or a knob that follows another leaves its bounds."""
    changes = changes_between(base, knobs)
    if question.only is None and not allowed(changes, question.bounds):
        return True
    return any(changes == blocked for blocked in question.blocked)


def _value(knobs: Knobs, name: str) -> int:
    return int(getattr(knobs, knob(name).attribute))
