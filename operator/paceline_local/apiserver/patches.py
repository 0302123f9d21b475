"""What a patch document makes of an object: JSON merge patch, JSON patch, strategic merge patch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_local.apiserver.errors import ApiError, bad_request
from paceline_local.apiserver.fields import Layout
from paceline_local.apiserver.objects import Json

__all__ = ["json_patch", "merge_patch", "strategic_patch"]

_ORDER, _DROP = "$setElementOrder/", "$deleteFromPrimitiveList/"


def merge_patch(target: Any, patch: Any) -> Any:
    """Return `target` changed by an RFC 7386 merge patch."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    out = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = merge_patch(out.get(name), value)
    return out


def json_patch(target: Json, operations: Any) -> Any:
    """Return `target` changed by an RFC 6902 patch; a failing operation is a 422 `ApiError`."""
    if not isinstance(operations, list):
        raise bad_request("a JSON patch must be an array of operations")
    holder: Json = {"": copy.deepcopy(target)}  # so that the whole document has a place too
    for operation in operations:
        try:
            _operate(holder, operation)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            shown = f"{operation.get('op')} {operation.get('path')}" if isinstance(operation, dict) else repr(operation)
            message = f"the server rejected our request due to an error in our request: JSON patch {shown} failed ({error})"
            raise ApiError(422, "Invalid", message) from error
    return holder[""]


def _operate(holder: Json, operation: Json) -> None:
    kind, path = operation["op"], _pointer(operation["path"])
    if kind in ("move", "copy"):
        source = _pointer(operation["from"])
        value = copy.deepcopy(_read(holder, source))
        if kind == "move":
            _drop(holder, source)
        _insert(holder, path, value)
    elif kind == "add":
        _insert(holder, path, copy.deepcopy(operation["value"]))
    elif kind == "remove":
        _drop(holder, path)
    elif kind == "replace":
        parent, key = _place(holder, path)
        parent[key]  # must exist
        parent[key] = copy.deepcopy(operation["value"])
    elif kind == "test":
        if _read(holder, path) != operation.get("value"):
            raise ValueError("test failed")
    else:
        raise ValueError(f"unknown operation {kind!r}")


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError("a path starts with /")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")]


def _read(node: Any, path: Sequence[str]) -> Any:
    for part in path:
        node = node[_key(node, part)]
    return node


def _place(holder: Json, path: Sequence[str]) -> tuple[Any, Any]:
    parent = _read(holder, path[:-1])
    return parent, _key(parent, path[-1])


def _key(node: Any, part: str) -> Any:
    if not isinstance(node, list):
        return part
    index = len(node) if part == "-" else int(part)
    if index < 0:
        raise IndexError("negative index")
    return index


def _insert(holder: Json, path: Sequence[str], value: Any) -> None:
    parent, key = _place(holder, path)
    if isinstance(parent, list):
        if key > len(parent):
            raise IndexError("index out of range")
        parent.insert(key, value)
    else:
        parent[key] = value


def _drop(holder: Json, path: Sequence[str]) -> None:
    parent, key = _place(holder, path)
    del parent[key]


def strategic_patch(target: Json, patch: Mapping[str, Any], layout: Layout) -> Json:
    """Return `target` changed by a strategic merge patch; lists merge by the first key of their layout."""
    if patch.get("$patch") == "replace":
        replacement: Json = _plain(patch)
        return replacement
    if patch.get("$patch") == "delete":
        return {}
    out = _retained(target, patch.get("$retainKeys"))
    for name, value in patch.items():
        if name.startswith(_DROP):
            field = name.removeprefix(_DROP)
            out[field] = [item for item in out.get(field) or [] if item not in value]
        elif not name.startswith("$"):
            _set_member(out, name, value, layout.child(name))
    for name in [name for name in patch if name.startswith(_ORDER)]:
        field = name.removeprefix(_ORDER)
        out[field] = _ordered(out.get(field) or [], patch[name], target.get(field) or [], layout.child(field))
    return out


def _retained(target: Json, kept: Sequence[str] | None) -> Json:
    return {name: value for name, value in target.items() if kept is None or name in kept}


def _set_member(out: Json, name: str, value: Any, layout: Layout) -> None:
    if value is None:
        out.pop(name, None)
    elif isinstance(value, dict):
        merged = strategic_patch(out.get(name) or {}, value, layout)
        if value.get("$patch") == "delete":
            out.pop(name, None)
        else:
            out[name] = merged
    elif isinstance(value, list) and layout.keys:
        present = out.get(name) or []
        out[name] = _ordered(_merge_list(present, value, layout), value, present, layout)
    elif isinstance(value, list) and layout.is_set:
        present = out.get(name) or []
        out[name] = [*present, *(item for item in value if item not in present)]
    else:
        out[name] = copy.deepcopy(value)


def _merge_list(target: Sequence[Json], patch: Sequence[Json], layout: Layout) -> list[Json]:
    key = layout.keys[0]
    if not all(isinstance(item, Mapping) for item in patch):
        raise bad_request(f"a list of objects with the key {key!r} is expected, got {patch!r}")
    items = [item for item in patch if item.get("$patch") != "replace" or len(item) > 1]
    out = list(target) if len(items) == len(patch) else []  # a bare {"$patch": "replace"} replaces the list
    for item in items:
        if key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {key}")
        index = next((i for i, present in enumerate(out) if present.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            out = [present for present in out if present.get(key) != item[key]]
        elif index is None:
            out.append(_plain(item))
        else:
            out[index] = strategic_patch(out[index], item, layout.items())
    return out


def _ordered(items: list[Any], wanted: Sequence[Any], live: Sequence[Any], layout: Layout) -> list[Any]:
    """Sort merged `items` as `wanted` says; each other one goes before what followed it in `live`."""
    names = [_name(item, layout) for item in live]
    order = [_name(item, layout) for item in wanted]
    named = sorted(
        (item for item in items if _name(item, layout) in order), key=lambda item: order.index(_name(item, layout))
    )
    rest = [item for item in items if _name(item, layout) not in order]
    out = []
    while named and rest:
        first, second = _name(rest[0], layout), _name(named[0], layout)
        before = first in names and second in names and names.index(first) < names.index(second)
        out.append((rest if before else named).pop(0))
    return [*out, *rest, *named]


def _name(item: Any, layout: Layout) -> Any:
    return item.get(layout.keys[0]) if layout.keys else item


def _plain(value: Any) -> Any:
    """Return a copy without the patch's directives."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items() if not name.startswith("$")}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
