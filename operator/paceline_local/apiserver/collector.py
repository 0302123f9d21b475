"""What goes by itself: dependents without owners, the content of namespaces and CRDs, old events.

Level triggered: each sweep looks at everything. A local fleet has some hundred objects, so a sweep takes about a millisecond
and there is no graph to keep right.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from paceline_local.apiserver.journal import Key
from paceline_local.apiserver.lifecycle import FOREGROUND, ORPHAN
from paceline_local.apiserver.objects import Json, dig, metadata, replaced
from paceline_local.apiserver.operations import Operations
from paceline_local.apiserver.resources import CRD_STORAGE
from paceline_local.apiserver.store import Subscription
from paceline_local.apiserver.targets import DeleteOptions

__all__ = ["Collector"]

_log = logging.getLogger(__name__)
_EVENT_TTL_S = 3600
_PERIOD_S = 60.0
_RETRY_S = 1.0
_CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


@dataclass(frozen=True, slots=True)
class _Dependent:
    key: Key
    blocks: bool  # the owner's foreground deletion waits for it


class Collector:
    """The garbage collector; `run` it as a task."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._store = operations.store
        self.failures = 0

    async def run(self) -> None:
        """Sweep at start, after every change that may matter, and every minute."""
        while True:
            inbox = self._store.subscribe(None)
            try:
                if not self.sweep():
                    await _relevant(inbox)
                await asyncio.sleep(0)  # let requests in between two sweeps
            except Exception:  # noqa: BLE001  # collection goes on
                self.failures += 1
                _log.exception("garbage collection failed (%d times so far)", self.failures)
                await asyncio.sleep(_RETRY_S)
            finally:
                self._store.unsubscribe(inbox)

    def sweep(self) -> bool:
        """Do what can be done now; tell whether anything was done (then another sweep may find more)."""
        before = self._store.revision
        objects = dict(self._store.all())
        owners = {metadata(obj)["uid"]: key for key, obj in objects.items()}
        dependents = _dependents(objects)
        for key, obj in objects.items():
            if self._store.get(key) is obj:  # else changed by this sweep: the next one looks again
                self._look_at(key, obj, owners, dependents.get(metadata(obj)["uid"], []))
        return self._store.revision != before

    def _look_at(self, key: Key, obj: Json, owners: dict[str, Key], dependents: list[_Dependent]) -> None:
        try:
            if "deletionTimestamp" in metadata(obj):
                self._finish(key, obj, dependents)
            elif metadata(obj).get("ownerReferences"):
                self._check_owners(key, obj, owners)
            elif key[0] == "events" and self._expired(obj):
                self._operations.drop(key)
        except Exception:  # noqa: BLE001  # one bad object must not end collection for the others; the next sweep tries it again
            self.failures += 1
            _log.exception("collecting %s failed", "/".join(key))

    def _finish(self, key: Key, obj: Json, dependents: list[_Dependent]) -> None:
        """Take a dying object one step further."""
        finalizers = metadata(obj).get("finalizers") or []
        if FOREGROUND in finalizers:
            self._delete((dependent.key for dependent in dependents), policy="Foreground")
            if not any(d.blocks and self._store.get(d.key) for d in dependents):
                self._release(key, FOREGROUND)
        elif ORPHAN in finalizers:
            for dependent in dependents:
                self._disown(dependent.key, {metadata(obj)["uid"]})
            self._release(key, ORPHAN)
        elif key[0] == "namespaces":
            self._empty(key, (k for k, _ in self._store.all() if k[1] == key[2]))
        elif key[0] == CRD_STORAGE and _CRD_CLEANUP in finalizers:
            storage = f"{dig(obj, ('spec', 'names', 'plural'))}.{dig(obj, ('spec', 'group'))}"
            self._empty(key, (k for k, _ in self._store.select(storage)))

    def _empty(self, key: Key, content: Iterable[Key]) -> None:
        """Delete the content of a namespace or CRD, and the thing itself once nothing is left."""
        remaining = list(content)
        self._delete(remaining)
        if not any(self._store.get(inner) for inner in remaining):
            obj = self._store.get(key)
            assert obj is not None
            if key[0] == CRD_STORAGE:
                self._release(key, _CRD_CLEANUP)
            else:
                self._operations.put(key, replaced(obj, ("spec", "finalizers"), []))

    def _check_owners(self, key: Key, obj: Json, owners: dict[str, Key]) -> None:
        uids = {reference["uid"] for reference in metadata(obj)["ownerReferences"]}
        present = {uid for uid in uids if uid in owners and owners[uid][1] in ("", key[1])}
        waiting = {uid for uid in present if self._in_foreground(owners[uid])}
        if not present - waiting:
            self._operations.remove(key, DeleteOptions(policy="Foreground" if waiting else "Background"))
        elif present != uids:
            self._disown(key, uids - present)

    def _in_foreground(self, key: Key) -> bool:
        owner = self._store.get(key)
        return (
            owner is not None
            and "deletionTimestamp" in metadata(owner)
            and FOREGROUND in metadata(owner).get("finalizers", ())
        )

    def _delete(self, keys: Iterable[Key], policy: str | None = None) -> None:
        for key in keys:
            obj = self._store.get(key)
            if obj is not None and "deletionTimestamp" not in metadata(obj):
                self._operations.remove(key, DeleteOptions(policy=policy))

    def _release(self, key: Key, finalizer: str) -> None:
        obj = self._store.get(key)
        assert obj is not None
        left = [name for name in metadata(obj).get("finalizers") or [] if name != finalizer]
        self._operations.put(key, replaced(obj, ("metadata", "finalizers"), left))

    def _disown(self, key: Key, uids: set[str]) -> None:
        obj = self._store.get(key)
        if obj is not None:
            left = [reference for reference in metadata(obj).get("ownerReferences") or [] if reference["uid"] not in uids]
            self._operations.put(key, replaced(obj, ("metadata", "ownerReferences"), left))

    def _expired(self, event: Json) -> bool:
        series = dig(event, ("series", "lastObservedTime"))
        stamp = series or event.get("lastTimestamp") or event.get("eventTime")
        try:
            seen = dt.datetime.fromisoformat(stamp or metadata(event)["creationTimestamp"])
        except (TypeError, ValueError):  # whatever a client wrote there
            seen = dt.datetime.fromisoformat(metadata(event)["creationTimestamp"])
        return self._operations.clock() - seen.timestamp() > _EVENT_TTL_S


async def _relevant(inbox: Subscription) -> None:
    """Wait for a change that may give the collector work, at most a minute."""
    try:
        async with asyncio.timeout(_PERIOD_S):
            while not inbox.overflowed:
                change = await inbox.next()
                if change is None or change.new is None:
                    return
                meta = metadata(change.new)
                if "deletionTimestamp" in meta or meta.get("ownerReferences"):
                    return
    except TimeoutError:
        return


def _dependents(objects: dict[Key, Json]) -> dict[str, list[_Dependent]]:
    found: dict[str, list[_Dependent]] = {}
    for key, obj in objects.items():
        for reference in metadata(obj).get("ownerReferences") or []:
            found.setdefault(reference["uid"], []).append(_Dependent(key, bool(reference.get("blockOwnerDeletion"))))
    return found
