"""What the operator last saw of the services and their children, fed by watches and mended by periodic lists."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from paceline_operator.names import KIND, SERVICE_LABEL, base_name

__all__ = ["Key", "Store", "key_of", "shared"]

Object = dict[str, Any]
_GONE = 16_384  # objects that ended last: more than a fleet loses in the seconds that an answer may take
_SHORT = 64  # characters: longer texts are hardly ever the same


class Key(NamedTuple):
    """A service: its namespace and the name of its children (`names.base_name`)."""

    namespace: str
    base: str


def key_of(kind: str, item: Mapping[str, Any]) -> Key | None:
    """Return the service that an object is or belongs to; None if it carries no label of ours."""
    meta = item["metadata"]
    base = base_name(meta["name"]) if kind == KIND else (meta.get("labels") or {}).get(SERVICE_LABEL)
    return Key(meta["namespace"], base) if base else None


class Store:
    """Objects by service. An older version of an object never replaces a newer one, a list never what a watch has told
    since the list was asked for, and an object that is gone never comes back: the answer to a write may arrive after the
    watch has told of the object's end and of its successor's beginning."""

    def __init__(self) -> None:
        self._objects: dict[Key, dict[tuple[str, str], Object]] = {}
        self._gone: dict[str, None] = {}  # the uids that ended last, in this order
        self._told: set[tuple[str, Key, str]] | None = None  # what changed while a list is under way

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._objects))

    def put(self, kind: str, item: Mapping[str, Any]) -> Key | None:
        """Keep an object (without its managedFields, which are its bulk); return the service it belongs to."""
        key = key_of(kind, item)
        if key is None:
            return None
        self._note(kind, key, item)
        uid = item["metadata"]["uid"]
        if uid in self._gone:
            return key
        known = self.get(key, kind, item["metadata"]["name"])
        if known is None or not _is_older(item, known):
            self._keep(kind, key, item)
        elif known["metadata"]["uid"] != uid:
            self._bury(item)  # it has a successor
        return key

    def _keep(self, kind: str, key: Key, item: Mapping[str, Any]) -> None:
        """Keep an object that exists, in place of whatever had its name."""
        meta = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
        known = self.get(key, kind, meta["name"])
        if known is not None and known["metadata"]["uid"] != meta["uid"]:
            self._bury(known)
        self._objects.setdefault(key, {})[kind, meta["name"]] = shared({"kind": kind, **item, "metadata": meta})

    def remove(self, kind: str, item: Mapping[str, Any]) -> Key | None:
        """Forget a deleted object; return the service it belonged to."""
        key = key_of(kind, item)
        if key is None:
            return None
        self._note(kind, key, item)
        self._bury(item)
        if key not in self._objects:
            return key
        name = item["metadata"]["name"]
        known = self._objects[key].get((kind, name))
        if known is not None and known["metadata"]["uid"] == item["metadata"]["uid"]:
            del self._objects[key][kind, name]
            if not self._objects[key]:
                del self._objects[key]
        return key

    def _bury(self, item: Mapping[str, Any]) -> None:
        """Note that an object is gone for ever: its uid isn't given again."""
        self._gone[item["metadata"]["uid"]] = None
        if len(self._gone) > _GONE:
            del self._gone[next(iter(self._gone))]

    def _note(self, kind: str, key: Key, item: Mapping[str, Any]) -> None:
        if self._told is not None:
            self._told.add((kind, key, item["metadata"]["name"]))

    def begin_list(self) -> None:
        """Note that a list is asked for now: until `replace`, whatever a watch tells is newer than it. One at a time."""
        self._told = set()

    def replace(self, kind: str, items: Iterable[Mapping[str, Any]], namespace: str | None) -> set[Key]:
        """Make the objects of one kind (None: of all namespaces) those of a fresh list; return which services differed."""
        told, self._told = self._told or set(), None
        listed = {(key, item["metadata"]["name"]): item for item in items if (key := key_of(kind, item))}
        fresh = {found: item for found, item in listed.items() if (kind, *found) not in told}
        changed = set()
        for key in self:
            for known in self.all(key, kind) if namespace in (None, key.namespace) else []:
                if (key, known["metadata"]["name"]) not in fresh and (kind, key, known["metadata"]["name"]) not in told:
                    self.remove(kind, known)
                    changed.add(key)
        for (key, name), item in fresh.items():
            live = self.get(key, kind, name)
            if live is None or live["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion"):
                self._gone.pop(item["metadata"]["uid"], None)  # an etcd restored from a backup knows it again
                self._keep(kind, key, item)
                changed.add(key)
        return changed

    def service(self, key: Key) -> Object | None:
        """Return the InferenceService of `key`."""
        found = self.all(key, KIND)
        return found[0] if found else None

    def get(self, key: Key, kind: str, name: str) -> Object | None:
        """Return one child."""
        return self._objects.get(key, {}).get((kind, name))

    def all(self, key: Key, kind: str) -> list[Object]:
        """Return all objects of a kind that belong to `key`, by name."""
        objects = self._objects.get(key, {})
        return [objects[found] for found in sorted(objects) if found[0] == kind]

    def count(self, kind: str) -> int:
        """Return how many objects of a kind are known."""
        return sum(known == kind for objects in self._objects.values() for known, _ in objects)


def shared(value: Any) -> Any:
    """Return a copy whose short texts are shared with those of all other objects: a fleet's objects differ in little, and
    the decoder makes every key anew."""
    if isinstance(value, dict):
        return {sys.intern(name): shared(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shared(item) for item in value]
    return sys.intern(value) if isinstance(value, str) and len(value) <= _SHORT else value


def _is_older(item: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Compare resource versions: numbers on every API server, and one sequence for all objects of a kind."""
    versions = [str(each["metadata"].get("resourceVersion", "")) for each in (item, known)]
    return all(map(str.isdigit, versions)) and int(versions[0]) < int(versions[1])
