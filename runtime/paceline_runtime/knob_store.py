"""The knobs of a running server: what is in force, what is on its way, and what waits for a restart.

Pure state: the admin API asks it for a change, the engine client carries the change out and reports back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from paceline_core.errors import KnobError, PacelineError, RevisionConflict
from paceline_core.knobs import KNOBS, CostClass, Knobs, KnobSpec
from paceline_core.wire import KnobsDocument, KnobsPatch

__all__ = ["KnobChange", "KnobStore", "NothingToRollBack"]

HISTORY = 32  # changes that can be rolled back


class NothingToRollBack(PacelineError):
    """No change was made since the start."""


@dataclass(frozen=True, slots=True)
class KnobChange:
    """What the engine must be told: the knobs to put in force, under this revision."""

    revision: int
    knobs: Knobs


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a revision stands for, and the changes that can be rolled back under it."""

    desired: Knobs
    target: Knobs
    history: tuple[Knobs, ...] = ()


class KnobStore:
    """Every change is validated whole, then gets a revision. A `KnobError` or `RevisionConflict` changes nothing."""

    def __init__(self, knobs: Knobs) -> None:
        self.revision = 1
        self.epoch = 0
        self.applied_revision = 0
        self._running = knobs  # the engine said so
        self._target = knobs  # the engine was told so
        self._desired = knobs  # somebody asked for it
        self._fencing = 0
        self._history: deque[Knobs] = deque(maxlen=HISTORY)
        self._sound = _Asked(knobs, knobs)  # the last revision that the engine took
        self._unanswered = {self.revision: self._sound}

    @property
    def target(self) -> Knobs:
        """The knobs that the engine has or is about to have; a new engine starts with them."""
        return self._target

    def patch(self, patch: KnobsPatch, if_match: int | None = None) -> KnobChange:
        """Ask for a change; nothing happens to the revision if the values are what they were."""
        self._check_race(patch.fencing, if_match)
        desired = self._desired.updated(patch.knobs)
        self._fencing = max(self._fencing, patch.fencing)
        if desired != self._desired:
            self._history.append(self._desired)
            self._aim(desired)
        return KnobChange(self.revision, self._target)

    def rollback(self, fencing: int = 0, if_match: int | None = None) -> KnobChange:
        """Take the last change back. Raises `NothingToRollBack` if there is none."""
        self._check_race(fencing, if_match)
        if not self._history:
            raise NothingToRollBack("there is no change to roll back")
        self._fencing = max(self._fencing, fencing)
        self._aim(self._history.pop())
        return KnobChange(self.revision, self._target)

    def applied(self, revision: int, epoch: int) -> None:
        """The engine runs under the knobs of `revision` from `epoch` on."""
        self.epoch, self.applied_revision = epoch, max(revision, self.applied_revision)
        self._sound = self._unanswered.get(revision, self._sound)
        self._running = self._sound.target
        self._unanswered = {number: asked for number, asked in self._unanswered.items() if number > revision}

    def refused(self, revision: int) -> None:
        """The engine can't run under the knobs of `revision`: what it runs under counts again, as a new revision."""
        if revision != self.revision:
            return  # a newer change is on its way: the answer to that one decides
        self._history = deque(self._sound.history, HISTORY)
        self._aim(self._sound.desired)
        self._unanswered.clear()
        self.applied_revision = self.revision

    def document(self, instance: str) -> KnobsDocument:
        """Return values in force and, per knob, how far a change has come."""
        status = {spec.name: self._status(spec) for spec in KNOBS}
        return KnobsDocument(
            revision=self.revision,
            epoch=self.epoch,
            knobs={spec.name: _wire(spec, self._running) for spec in KNOBS},
            status=status,
            desired={spec.name: _wire(spec, self._desired) for spec in KNOBS if status[spec.name] != "applied"},
            instance=instance,
        )

    def _check_race(self, fencing: int, if_match: int | None) -> None:
        if if_match is not None and if_match != self.revision:
            message = f"the knobs are at revision {self.revision}, not {if_match}: read them again"
            raise RevisionConflict(message, current_revision=self.revision)
        # 0 is a person or a tool without a Lease: it neither fences nor is fenced
        if 0 < fencing < self._fencing:
            message = f"a newer leader (fencing number {self._fencing}) changed the knobs; yours is {fencing}"
            raise RevisionConflict(message, current_revision=self.revision)

    def _aim(self, desired: Knobs) -> None:
        self.revision += 1
        self._desired = desired
        self._target = _reachable(desired, self._running)
        self._unanswered[self.revision] = _Asked(desired, self._target, tuple(self._history))

    def _status(self, spec: KnobSpec) -> str:
        running, target, desired = (getattr(k, spec.attribute) for k in (self._running, self._target, self._desired))
        if desired == running:
            return "applied"
        return "pending" if desired == target else "needs-restart"


def _reachable(desired: Knobs, running: Knobs) -> Knobs:
    """Return as much of `desired` as a running engine can take: no restart knob, and nothing that depends on one."""
    values: dict[str, Any] = {s.attribute: getattr(desired, s.attribute) for s in KNOBS if s.cost is not CostClass.RESTART}
    attributes = {spec.name: spec.attribute for spec in KNOBS}
    while values:
        try:
            return replace(running, **values)
        except KnobError as error:
            broken = {attributes[violation.field] for violation in error.violations}
        values = {attribute: value for attribute, value in values.items() if attribute not in broken}
    return running


def _wire(spec: KnobSpec, knobs: Knobs) -> Any:
    return spec.to_wire(getattr(knobs, spec.attribute))
