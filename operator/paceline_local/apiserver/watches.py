"""Lists and watches: selection, the stream of events, bookmarks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from paceline_local.apiserver.conversion import convert
from paceline_local.apiserver.errors import ApiError, bad_request, expired
from paceline_local.apiserver.objects import Json, replaced
from paceline_local.apiserver.resources import Resource
from paceline_local.apiserver.selectors import Predicate, selector
from paceline_local.apiserver.store import Change, Store
from paceline_local.apiserver.targets import Target

__all__ = ["Selection", "listed", "watch"]

_DEFAULT_TIMEOUT_S = 1800.0
_BOOKMARK_S = 15.0

Send = Callable[[bytes], Awaitable[None]]
Render = Callable[[Json], Json]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a collection are meant."""

    resource: Resource
    namespace: str
    predicate: Predicate

    @classmethod
    def from_query(cls, target: Target, query: Mapping[str, str]) -> Selection:
        """Read the selectors of a request."""
        kind = target.resource.kind if not target.resource.custom else ""
        accept = selector(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        return cls(target.resource, target.namespace, accept)

    def holds(self, change: Change, obj: Json | None) -> bool:
        """Tell whether `obj`, a side of `change`, is meant."""
        return obj is not None and self.namespace in ("", change.key[1]) and self.predicate(obj)

    def objects(self, store: Store) -> Iterator[Json]:
        """Yield what is meant, in its version."""
        for _, obj in store.select(self.resource.store_name, self.namespace):
            if self.predicate(obj):
                yield convert(obj, self.resource)


def listed(store: Store, selection: Selection) -> Json:
    """Return the list object."""
    resource = selection.resource
    return {
        "kind": resource.list_kind or f"{resource.kind}List",
        "apiVersion": resource.api_version,
        "metadata": {"resourceVersion": str(store.revision)},
        "items": list(selection.objects(store)),
    }


async def watch(store: Store, selection: Selection, query: Mapping[str, str], render: Render, send: Send) -> None:
    """Send the events of a watch until its timeout; a watch that can't go on ends with an ERROR event (410)."""
    inbox = store.subscribe(selection.resource.store_name)
    try:
        backlog = _backlog(store, selection, query.get("resourceVersion", ""))
        for event, obj in backlog:
            await send(_line(event, render(obj)))
        bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        deadline = time.monotonic() + _seconds(query.get("timeoutSeconds"))
        while (left := deadline - time.monotonic()) > 0:
            try:
                change = await asyncio.wait_for(inbox.next(), min(left, _BOOKMARK_S))
            except TimeoutError:
                if bookmarks:
                    await send(_line("BOOKMARK", _bookmark(store, selection.resource)))
                continue
            if change is None:
                return
            if inbox.overflowed:
                raise expired(change.revision, store.revision)
            for event, obj in _events(change, selection):
                await send(_line(event, render(obj)))
    except ApiError as error:
        await send(_line("ERROR", error.status()))
    finally:
        store.unsubscribe(inbox)


def _backlog(store: Store, selection: Selection, version: str) -> list[tuple[str, Json]]:
    """Return what happened since `version`, or everything there is as ADDED if no version is given."""
    if version in ("", "0"):
        return [("ADDED", obj) for obj in selection.objects(store)]
    if not version.isdigit():
        raise bad_request(f"invalid resource version {version!r}")
    changes = store.since(selection.resource.store_name, int(version))
    return [event for change in changes for event in _events(change, selection)]


def _events(change: Change, selection: Selection) -> Iterator[tuple[str, Json]]:
    before, after = selection.holds(change, change.old), selection.holds(change, change.new)
    if after and change.new is not None:
        yield ("MODIFIED" if before else "ADDED"), convert(change.new, selection.resource)
    elif before and change.old is not None:
        last = replaced(change.old, ("metadata", "resourceVersion"), str(change.revision))
        yield "DELETED", convert(last, selection.resource)


def _seconds(text: str | None) -> float:
    if text is None:
        return _DEFAULT_TIMEOUT_S
    if not text.isdigit():
        raise bad_request(f"timeoutSeconds must be a whole number, got {text!r}")
    return float(text) or _DEFAULT_TIMEOUT_S


def _bookmark(store: Store, resource: Resource) -> Json:
    return {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": {"resourceVersion": str(store.revision)}}


def _line(event: str, obj: Json) -> bytes:
    return json.dumps({"type": event, "object": obj}, separators=(",", ":")).encode() + b"\n"
