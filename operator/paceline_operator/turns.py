"""A change of a class rolls its services in turns: a bounded number at a time, so that a bad one stops at the first few.

What a service's own spec asks for is rolled at once. A change that only its class caused waits while as many services of the
class as may are rolling because of it; each keeps its turn until all its pods are ready. The turn stands in an annotation of
the Deployment, so a new operator knows who has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline_operator.children import Manifest
from paceline_operator.names import INPUTS, OWN, TURN
from paceline_operator.store import Key
from paceline_operator.upgrade import held_back, recorded

__all__ = ["Turns", "has_turn", "in_turn", "with_notes"]


class Turns:
    """Who rolls and who waits, by class. `wake` is called with a service whose turn may have come."""

    def __init__(self, most: int, wake: Callable[[Key], None]) -> None:
        self._most, self._wake = most, wake
        self._rolling: dict[Key, str] = {}
        self._waiting: dict[Key, str] = {}  # in the order of arrival

    def take(self, key: Key, cls: str) -> bool:
        """Return whether the service may roll now; one that may not is woken later."""
        self._waiting.pop(key, None)
        if key not in self._rolling and self.count(cls) >= self._most:
            self._waiting[key] = cls
            return False
        self._rolling[key] = cls
        self._wake_next(cls)  # several places may have come free before the first who was woken got here
        return True

    def keep(self, key: Key, cls: str) -> None:
        """Note that the service still rolls in a turn that it had, perhaps under an earlier operator."""
        self._waiting.pop(key, None)
        self._rolling[key] = cls

    def end(self, key: Key) -> None:
        """Note that the service has no turn (any more) and needs none; wake the next of its class."""
        waited, rolled = self._waiting.pop(key, None), self._rolling.pop(key, None)
        cls = waited if rolled is None else rolled
        if cls is not None:  # who waited may have been woken for a place that it leaves to others
            self._wake_next(cls)

    def pause(self, key: Key, *, rolling: bool) -> None:
        """Note that nothing can be applied to the service for now: it keeps a turn only while its pods are `rolling`."""
        if not (rolling and key in self._rolling):
            self.end(key)

    def _wake_next(self, cls: str) -> None:
        following = next((other for other, of in self._waiting.items() if of == cls), None)
        if following is not None and self.count(cls) < self._most:
            self._wake(following)

    def count(self, cls: str) -> int:
        """Return how many services of a class roll."""
        return sum(of == cls for of in self._rolling.values())


def has_turn(live: Mapping[str, Any]) -> bool:
    """Return whether the template that a live Deployment has came in a turn."""
    have = live["metadata"].get("annotations") or {}
    return TURN in have and have[TURN] == have.get(INPUTS)


def in_turn(
    turns: Turns, key: Key, cls: str, deployment: Manifest, live: Mapping[str, Any] | None, *, rolling: bool
) -> tuple[Manifest, bool]:
    """Return the Deployment to apply now, and whether a change of the class has to wait for its turn.

    `rolling` says that pods of the live Deployment are still being replaced or aren't ready.
    """
    wanted, have = deployment["metadata"]["annotations"], ((live or {}).get("metadata") or {}).get("annotations") or {}
    if have.get(INPUTS) == wanted[INPUTS]:  # nothing new
        if have.get(TURN) != wanted[INPUTS]:
            turns.end(key)
            return deployment, False
        turns.keep(key, cls) if rolling else turns.end(key)
        return _marked(deployment), False
    kept = recorded(have)
    if kept is None or have.get(OWN) != wanted[OWN] or kept == deployment["spec"]["template"]:
        turns.end(key)
        return deployment, False
    if turns.take(key, cls):
        return _marked(deployment), False
    return held_back(deployment, kept, {name: have[name] for name in (INPUTS, TURN) if name in have}), True


def with_notes(deployment: Manifest, notes: Mapping[str, str]) -> Manifest:
    """Return the Deployment with further annotations."""
    meta = deployment["metadata"]
    return deployment | {"metadata": meta | {"annotations": {**meta["annotations"], **notes}}}


def _marked(deployment: Manifest) -> Manifest:
    return with_notes(deployment, {TURN: deployment["metadata"]["annotations"][INPUTS]})
