"""Server-side apply and field ownership: pure functions on objects and their `managedFields`."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline_local.apiserver.errors import ApiError
from paceline_local.apiserver.fields import Layout, Path, decode, encode, flatten, item_element, path_text
from paceline_local.apiserver.objects import Json, metadata, replaced

__all__ = ["Manager", "apply", "merge", "track_update"]


@dataclass(frozen=True, slots=True)
class Manager:
    """Who writes: `operation` is `Apply` or `Update`; each subresource counts as a manager of its own."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    manager: Manager
    time: str
    fields: frozenset[Path]


Entries = dict[Manager, _Entry]


def apply(live: Json, config: Json, layout: Layout, manager: Manager, *, force: bool, now: str) -> Json:
    """Return `live` with `config` applied: merged, pruned of what the manager no longer applies, ownership updated.

    Raises a 409 `ApiError` that names the other managers if they own a changed field and `force` is false.
    """
    entries = _entries(live)
    before = entries[manager].fields if manager in entries else frozenset()
    applied = frozenset(flatten(config, layout))
    merged = merge(live, config, layout)
    others = [entry for key, entry in entries.items() if key != manager]
    _prune(merged, before - applied, {p for e in others for p in e.fields} | applied, layout)
    changed, removed = _difference(flatten(live, layout), flatten(merged, layout))
    conflicts = {e.manager: e.fields & changed for e in others if e.fields & changed}
    if conflicts and not force:
        raise _conflict(conflicts)
    kept = {e.manager: _without(e, changed | removed, now) for e in others}
    if applied != before:
        kept[manager] = _Entry(manager, now, applied)
    elif manager in entries:
        kept[manager] = entries[manager]
    return _with_entries(merged, kept)


def track_update(live: Json, new: Json, layout: Layout, manager: Manager, now: str) -> Json:
    """Return `new` (written without apply) with `managedFields` that give the writer what it changed; it may also rewrite
    them itself, as clients do that turn to apply."""
    if metadata(new).get("managedFields") == [{}]:  # how a client drops all ownership
        return _with_entries(new, {})
    entries = _given(new) or _entries(live)
    changed, removed = _difference(flatten(live, layout), flatten(new, layout))
    kept = {key: _without(e, (changed | removed) if key != manager else removed, now) for key, e in entries.items()}
    mine = kept.get(manager) or _Entry(manager, now, frozenset())
    if changed - mine.fields:
        kept[manager] = _Entry(manager, now, mine.fields | changed)
    return _with_entries(new, kept)


def merge(live: Any, config: Any, layout: Layout) -> Any:
    """Return a copy of `live` with `config` laid over it."""
    if isinstance(live, dict) and isinstance(config, dict) and not layout.atomic:
        out = copy.deepcopy(live)
        out.update({name: merge(live.get(name), value, layout.child(name)) for name, value in config.items()})
        return out
    if isinstance(live, list) and isinstance(config, list) and layout.keys:
        return _merge_items(live, config, layout)
    if isinstance(live, list) and isinstance(config, list) and layout.is_set:
        return [*live, *(item for item in config if item not in live)]
    return copy.deepcopy(config)


def _merge_items(live: list[Any], config: list[Any], layout: Layout) -> list[Any]:
    items = {item_element(item, layout): copy.deepcopy(item) for item in live}
    for item in config:
        element = item_element(item, layout)
        items[element] = merge(items.get(element), item, layout.items())
    return list(items.values())


def _prune(obj: Json, gone: Collection[Path], kept: set[Path], layout: Layout) -> None:
    """Remove in place what the manager gave up, unless somebody owns it or something inside it.

    A list item lives on only if somebody owns the item itself; owning a field inside isn't enough (as in the real server).
    """
    items = {path for path in gone if path not in kept and not path[-1].startswith("f:")}
    prefixes = [[path[:size] for size in range(1, len(path) + 1)] for path in kept]
    alive = {prefix for chain in prefixes if items.isdisjoint(chain) for prefix in chain}
    for path in sorted(gone, key=len):  # an item goes whole, before what is inside it
        if path not in alive and not _identifies(path):
            _remove(obj, path, alive, layout)


def _identifies(path: Path) -> bool:
    """Tell whether `path` is a key of a list item, which goes only with the whole item."""
    parent = path[-2] if len(path) > 1 else ""
    return parent.startswith("k:") and path[-1].removeprefix("f:") in json.loads(parent[2:])


def _remove(obj: Json, path: Path, alive: set[Path], layout: Layout) -> None:
    steps: list[tuple[Any, Any]] = []  # (container, key) from the root to the field
    node: Any = obj
    for element in path:
        key = _locate(node, element, layout)
        if key is None:
            return
        steps.append((node, key))
        node = node[key]
        layout = _descend(layout, element)
    for size in range(len(path), 0, -1):
        container, key = steps[size - 1]
        if size < len(path) and (container[key] or path[:size] in alive or path[:size] == ("f:metadata",)):
            return
        del container[key]


def _locate(node: Any, element: str, layout: Layout) -> Any:
    """Return the key or index of `element` in `node`, None if it isn't there."""
    kind, _, rest = element.partition(":")
    if kind == "f":
        return rest if isinstance(node, dict) and rest in node else None
    if not isinstance(node, list):
        return None
    if kind == "v":
        wanted = json.loads(rest)
        return node.index(wanted) if wanted in node else None
    return next((index for index, item in enumerate(node) if item_element(item, layout) == element), None)


def _descend(layout: Layout, element: str) -> Layout:
    return layout.child(element[2:]) if element.startswith("f:") else layout.items()


def _difference(old: Mapping[Path, Any], new: Mapping[Path, Any]) -> tuple[frozenset[Path], frozenset[Path]]:
    changed = frozenset(path for path, value in new.items() if path not in old or old[path] != value)
    return changed, frozenset(old) - frozenset(new)


def _without(entry: _Entry, paths: frozenset[Path], now: str) -> _Entry:
    left = entry.fields - paths
    return entry if left == entry.fields else replace(entry, fields=left, time=now)


def _entries(obj: Json) -> Entries:
    found: Entries = {}
    for raw in metadata(obj).get("managedFields") or []:
        manager = Manager(raw.get("manager", ""), raw["operation"], raw["apiVersion"], raw.get("subresource", ""))
        found[manager] = _Entry(manager, raw.get("time", ""), frozenset(decode(raw.get("fieldsV1") or {})))
    return found


def _given(obj: Json) -> Entries:
    """Return the entries that a writer states; none if they can't be read: the real server overlooks them then."""
    try:
        entries = _entries(obj)
    except (AttributeError, KeyError, TypeError):
        return {}
    return entries if all(manager.operation in ("Apply", "Update") for manager in entries) else {}


def _with_entries(obj: Json, entries: Entries) -> Json:
    return replaced(obj, ("metadata", "managedFields"), [_raw(entry) for entry in entries.values() if entry.fields])


def _raw(entry: _Entry) -> Json:
    manager = entry.manager
    raw: Json = {
        "manager": manager.name,
        "operation": manager.operation,
        "apiVersion": manager.api_version,
        "time": entry.time,
    }
    raw |= {"fieldsType": "FieldsV1", "fieldsV1": encode(entry.fields)}
    return raw | ({"subresource": manager.subresource} if manager.subresource else {})


def _conflict(conflicts: Mapping[Manager, frozenset[Path]]) -> ApiError:
    causes = []
    for manager, paths in conflicts.items():
        # as the real server: an applier is named alone, an updater with its version
        using = f" using {manager.api_version}" if manager.operation == "Update" else ""
        message = f'conflict with "{manager.name}"{using}'
        causes += [
            {"reason": "FieldManagerConflict", "message": message, "field": path_text(path)} for path in sorted(paths)
        ]
    listed = ", ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    count = f"{len(causes)} conflict{'s' if len(causes) != 1 else ''}"
    return ApiError(409, "Conflict", f"Apply failed with {count}: {listed}", {"causes": causes})
