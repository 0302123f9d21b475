"""The objects, their revisions and the window of recent changes that watches read."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paceline_local.apiserver.errors import expired
from paceline_local.apiserver.journal import Journal, Key
from paceline_local.apiserver.objects import Json, replaced

__all__ = ["Change", "Store", "Subscription"]

_log = logging.getLogger(__name__)
_WINDOW = 1000  # changes kept for watches that resume; a pod's takes 27 kB (measured), so that's 30 MB; later ones list anew
_BACKLOG = 1000  # changes that a slow watch may lag behind before it's cut off


@dataclass(frozen=True, slots=True)
class Change:
    """One write: `new` is None for a deletion, `old` for a creation. `new` and `old` are never changed in place."""

    revision: int
    key: Key
    old: Json | None
    new: Json | None


class Subscription:
    """A watch's inbox for one storage, or for everything."""

    def __init__(self, storage: str | None) -> None:
        self.storage = storage
        self.overflowed = False
        self._changes: asyncio.Queue[Change | None] = asyncio.Queue(_BACKLOG)

    def offer(self, change: Change) -> None:
        """Take a change if it's of our storage; a full inbox is marked and takes no more."""
        if self.storage in (None, change.key[0]) and not self.overflowed:
            try:
                self._changes.put_nowait(change)
            except asyncio.QueueFull:
                self.overflowed = True

    def end(self) -> None:
        """Let the watch end after what it has, or at once if its inbox is full: its kind is served no more."""
        try:
            self._changes.put_nowait(None)
        except asyncio.QueueFull:
            self.overflowed = True

    async def next(self) -> Change | None:
        """Wait for the next change; None: there will be no more."""
        return await self._changes.get()


class Store:
    """All objects in memory, every change journaled first. Used from one event loop only, so that writes are atomic."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.revision, self._objects = journal.load()
        self._forgotten = self.revision  # changes up to here are no longer kept
        self._window: deque[Change] = deque()
        self._subscriptions: set[Subscription] = set()
        self._by_storage: dict[str, dict[Key, Json]] = {}
        for key, obj in self._objects.items():
            self._by_storage.setdefault(key[0], {})[key] = obj

    def get(self, key: Key) -> Json | None:
        """Return the object, or None."""
        return self._objects.get(key)

    def select(self, storage: str, namespace: str = "") -> Iterator[tuple[Key, Json]]:
        """Yield the objects of a storage, of one namespace or of all, ordered by namespace and name."""
        for key, obj in sorted(self._by_storage.get(storage, {}).items(), key=lambda item: item[0]):
            if namespace in ("", key[1]):
                yield key, obj

    def all(self) -> list[tuple[Key, Json]]:
        """Return every object."""
        return list(self._objects.items())

    def write(self, key: Key, new: Json) -> Json:
        """Store `new` under the next revision and return it as stored."""
        stored = replaced(new, ("metadata", "resourceVersion"), str(self.revision + 1))
        self._commit(key, stored)
        return stored

    def delete(self, key: Key) -> Json:
        """Remove the object and return its last state with the deletion's revision, as watches see it."""
        last = replaced(self._objects[key], ("metadata", "resourceVersion"), str(self.revision + 1))
        self._commit(key, None)
        return last

    def _commit(self, key: Key, new: Json | None) -> None:
        revision = self.revision + 1
        self._journal.append(revision, key, new)
        self.revision = revision
        old = self._objects.pop(key, None)
        self._by_storage.setdefault(key[0], {}).pop(key, None)
        if new is not None:
            self._objects[key] = self._by_storage[key[0]][key] = new
        self._publish(Change(revision, key, old, new))
        if self._journal.bloated:
            self._compact()

    def _compact(self) -> None:
        """Compact the journal. The write that made it due is safe already, so a failure isn't its failure."""
        try:
            self._journal.compact(self.revision, self._objects.items())
        except OSError as error:
            _log.warning("the journal can't be compacted now: %s", error)
            self._journal.defer()

    def _publish(self, change: Change) -> None:
        self._window.append(change)
        if len(self._window) > _WINDOW:
            self._forgotten = self._window.popleft().revision
        for subscription in self._subscriptions:
            subscription.offer(change)

    def since(self, storage: str, revision: int) -> list[Change]:
        """Return the changes of a storage after `revision`; raises a 410 `ApiError` if they are no longer kept."""
        if revision < self._forgotten:
            raise expired(revision, self._forgotten)
        return [change for change in self._window if change.revision > revision and change.key[0] == storage]

    def subscribe(self, storage: str | None) -> Subscription:
        """Return an inbox of all changes from now on; `unsubscribe` it in the end."""
        subscription = Subscription(storage)
        self._subscriptions.add(subscription)
        return subscription

    def end_watches(self, storage: str) -> None:
        """End the watches of a storage whose kind has gone."""
        for subscription in self._subscriptions:
            if subscription.storage == storage:
                subscription.end()

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget an inbox."""
        self._subscriptions.discard(subscription)
