"""Whether a manifest can be used, and what it comes to: the one source of `SpecValid` and of the admission webhook. Pure
but for the memory of an `Acceptor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_operator.class_spec import InferenceClass
from paceline_operator.classes import ClassBook
from paceline_operator.errors import SpecError
from paceline_operator.inherit import resolve
from paceline_operator.limits import limit_problems
from paceline_operator.policy import policy_problems, rules_of
from paceline_operator.settings import Settings
from paceline_operator.spec import InferenceService
from paceline_operator.store import Key

__all__ = ["Acceptor", "accept"]


def accept(body: Mapping[str, Any], classes: ClassBook, settings: Settings) -> InferenceService:
    """Return the service of a manifest, under its class. Raises `SpecError` with every problem of the first depth that has
    any: the class, then the fields, then what class and operator allow."""
    return _judge(body, classes.of(body), settings)


class Acceptor:
    """`accept` for the manifests that the operator looks at again and again: it judges one anew only when its spec or its
    class has changed. Judging takes a millisecond, the tuner looks every few seconds, and a pass follows every event."""

    def __init__(self, classes: ClassBook, settings: Settings) -> None:
        self._classes, self._settings = classes, settings
        self._known: dict[Key, tuple[_About, InferenceService]] = {}

    def accept(self, key: Key, body: Mapping[str, Any]) -> InferenceService:
        """Return the service of a manifest, under its class. Raises `SpecError` as `accept` does."""
        meta, cls = body["metadata"], self._classes.of(body)
        about = (meta["uid"], int(meta.get("generation", 0)), cls)
        known = self._known.get(key)
        if known is not None and known[0] == about:
            return known[1]
        service = _judge(body, cls, self._settings)
        self._known[key] = (about, service)
        return service

    def forget(self, key: Key) -> None:
        """Forget a service that is gone."""
        self._known.pop(key, None)


_About = tuple[str, int, InferenceClass | None]  # uid, generation, class: what a judgement is about


def _judge(body: Mapping[str, Any], cls: InferenceClass | None, settings: Settings) -> InferenceService:
    service = resolve(body, cls)
    problems = [*policy_problems(service, rules_of(settings, cls)), *(limit_problems(service, cls) if cls else ())]
    if problems:
        raise SpecError(tuple(problems))
    return service
