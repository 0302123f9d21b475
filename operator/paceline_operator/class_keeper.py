"""Keeps the InferenceClasses that the API server has, tells whose services are concerned, and writes their status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from paceline_operator.classes import ClassBook
from paceline_operator.cluster import Cluster
from paceline_operator.conditions import Condition
from paceline_operator.status import dated, merge_patch

__all__ = ["ClassKeeper"]

Body = Mapping[str, Any]


class ClassKeeper:
    """Feeds a book of classes from events and lists. Each change yields the names that services would have to look at."""

    def __init__(self, cluster: Cluster) -> None:
        self.book = ClassBook()
        self._cluster = cluster
        self._bodies: dict[str, Body] = {}
        self._told: set[str] = set()  # names that a watch has told of since the last list was asked for

    def observe(self, event: Mapping[str, Any]) -> bool:
        """Take one watch event; return whether services have to be looked at."""
        body = event["object"]
        name = body["metadata"]["name"]
        self._told.add(name)
        if event["type"] == "DELETED":
            self._bodies.pop(name, None)
            return self.book.remove(name)
        self._bodies[name] = body
        return self.book.put(body)

    async def relist(self) -> bool:
        """Make the classes those that the API server has, but for what a watch tells meanwhile, which is newer than the
        list; return whether services have to be looked at. Raises `ApiUnavailable`, `ApiRefused`."""
        self._told.clear()
        listed = {body["metadata"]["name"]: body for body in await self._cluster.classes()}
        told = {name: body for name, body in self._bodies.items() if name in self._told}
        self._bodies = {name: body for name, body in listed.items() if name not in self._told} | told
        return self.book.replace(self._bodies.values())

    def names(self) -> list[str]:
        """Return the names of all classes."""
        return list(self._bodies)

    async def report(self, name: str) -> None:
        """Write the status of a class if it isn't what it should be. Raises `ApiUnavailable`, `ApiRefused`."""
        body = self._bodies.get(name)
        if body is None:
            return
        meta, old = body["metadata"], body.get("status") or {}
        patch = merge_patch(old, _status(body, self.book.error(name)))
        if patch:
            await self._cluster.patch_class_status(name, meta["resourceVersion"], patch)


def concerned(services: Iterable[tuple[Any, Body]], name: str) -> Iterator[Any]:
    """Yield the keys of services that a change of the class `name` may concern: those that name it, or none."""
    for key, body in services:
        spec = body.get("spec")
        stated = spec.get("className") if isinstance(spec, Mapping) else None
        if stated in (None, name):
            yield key


def _status(body: Body, error: Exception | None) -> dict[str, Any]:
    generation = int(body["metadata"].get("generation", 0))
    valid = Condition("Valid", "True", "Valid", "services can use it")
    if error is not None:
        valid = Condition("Valid", "False", "Invalid", str(error))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"observedGeneration": generation, "conditions": [dated(valid, body.get("status") or {}, generation, now)]}
