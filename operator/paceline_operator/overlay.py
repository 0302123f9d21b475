"""Overlays a piece of a pod template: objects key by key, lists of named things by name, other lists whole, null removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["list_key", "overlay"]

# the key by which Kubernetes merges a list of objects, by the list's name
_LIST_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "ownerReferences": "uid",
}


def list_key(name: str, items: Sequence[Any]) -> str | None:
    """Return the key by which the list `name` is merged, None if it is replaced whole (or an item lacks the key)."""
    keyed = _LIST_KEYS.get(name)
    if name == "ports" and not any(isinstance(item, Mapping) and "containerPort" in item for item in items):
        keyed = "port"  # a Service's ports
    whole = all(isinstance(item, Mapping) and keyed in item for item in items)
    return keyed if keyed and whole else None


def overlay(base: Any, top: Any, name: str = "") -> Any:
    """Return `base` with `top` on it; neither is changed. `name` is the key under which they stand."""
    if isinstance(base, Mapping) and isinstance(top, Mapping):
        return _objects(base, top)
    if isinstance(base, list) and isinstance(top, list) and (key := list_key(name, [*base, *top])):
        return _lists(base, top, key, replace=name == "volumes")
    return _without_nulls(top)


def _objects(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = overlay(merged[key], value, key) if key in merged else _without_nulls(value)
    return merged


def _lists(base: list[Any], top: list[Any], key: str, *, replace: bool) -> list[Any]:
    """Merge by `key`. A volume is replaced as Kubernetes does it: two sources in one volume are invalid."""
    merged = {entry[key]: entry for entry in base}
    for entry in top:
        known = {} if replace else merged.get(entry[key], {})
        merged[entry[key]] = _one_source(_objects(known, entry), entry)
    return list(merged.values())


def _one_source(merged: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the other of `value` and `valueFrom` when an overlay states one of them: both at once are invalid."""
    if "value" in entry:
        merged.pop("valueFrom", None)
    elif "valueFrom" in entry:
        merged.pop("value", None)
    return merged


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
