"""Helpers on plain JSON objects. Stored objects are shared and never changed in place."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Json", "dig", "drop_nulls", "label_text", "metadata", "put", "replaced", "timestamp"]

Json = dict[str, Any]


def timestamp(seconds: float | None = None) -> str:
    """Return Unix `seconds` (default: now) as the API writes times."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def metadata(obj: Mapping[str, Any]) -> Json:
    """Return the object's metadata (empty if it has none)."""
    return obj.get("metadata") or {}


def dig(obj: Any, path: Sequence[str], default: Any = None) -> Any:
    """Return the value under `path`, or `default`."""
    for part in path:
        if not isinstance(obj, Mapping) or obj.get(part) is None:
            return default
        obj = obj[part]
    return obj


def put(obj: Json, path: Sequence[str], value: Any) -> None:
    """Set the value under `path` in place, making the objects on the way."""
    for part in path[:-1]:
        obj = obj.setdefault(part, {})
    obj[path[-1]] = value


def replaced(obj: Mapping[str, Any], path: Sequence[str], value: Any) -> Json:
    """Return a deep copy of `obj` with the value under `path` set."""
    new: Json = copy.deepcopy(dict(obj))
    put(new, path, value)
    return new


def drop_nulls(value: Any) -> Any:
    """Return a copy without null members, which built-in kinds never store."""
    if isinstance(value, dict):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [drop_nulls(inner) for inner in value]
    return value


def label_text(selector: Mapping[str, Any] | str | None) -> str:
    """Return a label selector (map, `LabelSelector` or text) as text: `a=b,c in (d,e)`."""
    if not isinstance(selector, Mapping):
        return selector or ""
    labels = selector.get("matchLabels") or {} if {"matchLabels", "matchExpressions"} & set(selector) else selector
    parts = [f"{key}={value}" for key, value in sorted(labels.items())]
    rules = selector.get("matchExpressions") or [] if labels is not selector else []
    parts += [_expression(rule["key"], rule["operator"], ",".join(rule.get("values") or [])) for rule in rules]
    return ",".join(parts)


def _expression(key: str, operator: str, values: str) -> str:
    unary = {"Exists": key, "DoesNotExist": f"!{key}"}
    return unary.get(operator) or f"{key} {operator.lower()} ({values})"
