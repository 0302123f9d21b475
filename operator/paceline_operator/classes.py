"""The InferenceClasses that are known, and which of them a service is under."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline_operator.class_spec import InferenceClass, parse_class
from paceline_operator.errors import Problem, SpecError
from paceline_operator.names import CLASS_KIND, DEFAULT_CLASS

__all__ = ["ClassBook"]


class ClassBook:
    """Classes by name, as watches tell of them. A class that can't be used is known too: its services wait for it."""

    def __init__(self, bodies: Iterable[Mapping[str, Any]] = ()) -> None:
        self._classes: dict[str, InferenceClass | SpecError] = {}
        self._versions: dict[str, str] = {}
        self._defaults: dict[str, str] = {}  # creation time by name of those that are marked as the default
        for body in bodies:
            self.put(body)

    def put(self, body: Mapping[str, Any]) -> bool:
        """Keep a class; return whether something about it is new."""
        meta = body["metadata"]
        name, version = meta["name"], str(meta.get("resourceVersion", ""))
        if version and self._versions.get(name) == version:
            return False
        known = self._classes.get(name), self._defaults.get(name)
        self._versions[name] = version
        if (meta.get("annotations") or {}).get(DEFAULT_CLASS) == "true":
            self._defaults[name] = str(meta.get("creationTimestamp") or "")
        else:
            self._defaults.pop(name, None)
        try:
            self._classes[name] = parse_class(body)
        except SpecError as error:
            self._classes[name] = error
        return not _equal(known[0], self._classes[name]) or known[1] != self._defaults.get(name)

    def remove(self, name: str) -> bool:
        """Forget a class; return whether it was known."""
        self._versions.pop(name, None)
        self._defaults.pop(name, None)
        return self._classes.pop(name, None) is not None

    def replace(self, bodies: Iterable[Mapping[str, Any]]) -> bool:
        """Make the classes those of a fresh list; return whether that changed something."""
        listed = {body["metadata"]["name"]: body for body in bodies}
        gone = [self.remove(name) for name in list(self._classes) if name not in listed]
        return any([*gone, *map(self.put, listed.values())])

    def error(self, name: str) -> SpecError | None:
        """Return what is wrong with a class, None if it can be used or isn't known."""
        found = self._classes.get(name)
        return found if isinstance(found, SpecError) else None

    def of(self, body: Mapping[str, Any]) -> InferenceClass | None:
        """Return the class of a service: the one that it names, else the default class, else None.

        Raises `SpecError` with the reason `ClassNotFound` or `ClassInvalid`.
        """
        spec = body.get("spec")
        name = spec.get("className") if isinstance(spec, Mapping) else None
        name = name if isinstance(name, str) else self._default()
        if name is None:
            return None
        found = self._classes.get(name)
        if found is None:
            remedy = f"create it, or name another {CLASS_KIND}; pods that run stay as they are"
            raise SpecError((Problem("spec.className", name, f"no such {CLASS_KIND}", remedy),), reason="ClassNotFound")
        if isinstance(found, SpecError):
            remedy = f"mend the {CLASS_KIND} ({found}); pods that run stay as they are"
            raise SpecError((Problem("spec.className", name, "a class that can be used", remedy),), reason="ClassInvalid")
        return found

    def _default(self) -> str | None:
        """Return the class that is annotated as the default; of several the newest, as with StorageClasses."""
        return max(self._defaults, key=lambda name: (self._defaults[name], name), default=None)


def _equal(known: InferenceClass | SpecError | None, new: InferenceClass | SpecError) -> bool:
    if isinstance(known, SpecError) and isinstance(new, SpecError):
        return str(known) == str(new)
    return known == new
