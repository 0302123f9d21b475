"""Structural schemas of custom resources: prune, default, validate, with the messages of the real server."""

from __future__ import annotations

import copy
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline_local.apiserver.errors import FieldError

__all__ = ["default", "prune", "validate"]

Schema = Mapping[str, Any]

_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_EMBEDDED = "x-kubernetes-embedded-resource"
_INT_OR_STRING = "x-kubernetes-int-or-string"
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_ANYTHING: Schema = {_PRESERVE: True}
_IDENTITY = frozenset({"apiVersion", "kind", "metadata"})


def prune(value: Any, schema: Schema, path: str = "", *, whole: bool = True) -> tuple[Any, list[str]]:
    """Return `value` without the fields that `schema` doesn't know, and their paths. `whole`: an object with identity."""
    unknown: list[str] = []
    return _pruned(value, schema, path, unknown, whole=whole), unknown


def _pruned(value: Any, schema: Schema, path: str, unknown: list[str], *, whole: bool = False) -> Any:
    if isinstance(value, list):
        # below a field that keeps what it doesn't know, lists keep it too
        items = schema.get("items") or (_ANYTHING if schema is _ANYTHING else {})
        return [_pruned(item, items, f"{path}[{index}]", unknown) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    out = {}
    for name, inner in value.items():
        here = f"{path}.{name}" if path else name
        known = _member(schema, name)
        if (whole or schema.get(_EMBEDDED)) and name in _IDENTITY:
            out[name] = inner
        elif known is not None:
            out[name] = _pruned(inner, known, here, unknown)
        else:
            unknown.append(here)
    return out


def _member(schema: Schema, name: str) -> Schema | None:
    """Return the schema of a member: `_ANYTHING` where anything goes, None where it's unknown."""
    known: Schema | None = (schema.get("properties") or {}).get(name)
    if known is not None:
        return known
    extra = schema.get("additionalProperties")
    if isinstance(extra, Mapping):
        return extra
    return _ANYTHING if extra or schema.get(_PRESERVE) else None


def default(value: Any, schema: Schema) -> Any:
    """Return `value` with the defaults of `schema`; a null for a declared field that isn't nullable counts as absent."""
    if isinstance(value, list):
        return [default(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    out = {name: inner for name, inner in value.items() if inner is not None or _takes_null(schema, name)}
    for name, known in (schema.get("properties") or {}).items():
        if "default" in known and name not in out:
            out[name] = copy.deepcopy(known["default"])
    return {name: default(inner, _member(schema, name) or {}) for name, inner in out.items()}


def _takes_null(schema: Schema, name: str) -> bool:
    known = _member(schema, name)
    return known is None or known is _ANYTHING or bool(known.get("nullable"))


def validate(value: Any, schema: Schema, path: str = "") -> list[FieldError]:
    """Return every field that breaks `schema`. `path` is empty for a whole object."""
    if value is None and schema.get("nullable"):
        return []
    wrong = _type_error(value, schema, path)
    return (
        [wrong] if wrong else [*_rules(value, schema, path), *_inner(value, schema, path), *_junctors(value, schema, path)]
    )


def _type_error(value: Any, schema: Schema, path: str) -> FieldError | None:
    if schema.get(_INT_OR_STRING):
        if isinstance(value, int | str) and not isinstance(value, bool):
            return None
        return _invalid(path, f"must be of type integer,string: {json.dumps(_type_name(value))}", _type_name(value))
    wanted = schema.get("type")
    if wanted is None or _is_a(value, wanted):
        return None
    return _invalid(path, f"must be of type {wanted}: {json.dumps(_type_name(value))}", _type_name(value))


def _is_a(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted == "boolean"
    if wanted == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[wanted])


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    return next(name for name in ("boolean", "integer", "number", "string", "array", "object") if _is_a(value, name))


def _invalid(path: str, rule: str, value: Any) -> FieldError:
    return FieldError(path or "<nil>", "Invalid value", f"{path} in body {rule}", value)


def _rules(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    if "enum" in schema and value not in schema["enum"]:
        listed = ", ".join(json.dumps(allowed) for allowed in schema["enum"])
        yield FieldError(path, "Unsupported value", f"supported values: {listed}", value)
    for name, (applies, holds, words) in _RULES.items():
        if name in schema and isinstance(value, applies) and not isinstance(value, bool):
            rule = words(schema) if callable(words) else words.format(schema[name])
            if not holds(value, schema[name], schema):
                yield _invalid(path, rule, value)


def _fits_format(value: str, name: str) -> bool:
    try:
        if name == "date-time":
            dt.datetime.fromisoformat(value)
        elif name == "date":
            dt.date.fromisoformat(value)
    except ValueError:
        return False
    return True


def _at_least(schema: Schema) -> str:
    return f"should be greater than {'' if schema.get('exclusiveMinimum') else 'or equal to '}{schema['minimum']}"


def _at_most(schema: Schema) -> str:
    return f"should be less than {'' if schema.get('exclusiveMaximum') else 'or equal to '}{schema['maximum']}"


_Rule = tuple[Any, Callable[[Any, Any, Schema], bool], Any]
_NUMBER = (int, float)
_RULES: Mapping[str, _Rule] = {
    "minimum": (_NUMBER, lambda v, b, s: v > b if s.get("exclusiveMinimum") else v >= b, _at_least),
    "maximum": (_NUMBER, lambda v, b, s: v < b if s.get("exclusiveMaximum") else v <= b, _at_most),
    "multipleOf": (_NUMBER, lambda v, b, _: (v / b).is_integer(), "should be a multiple of {}"),
    "minLength": (str, lambda v, b, _: len(v) >= b, "should be at least {} chars long"),
    "maxLength": (str, lambda v, b, _: len(v) <= b, "should be at most {} chars long"),
    "pattern": (str, lambda v, b, _: re.search(b, v) is not None, "should match '{}'"),
    "format": (str, lambda v, b, _: _fits_format(v, b), "must be of type {}"),
    "minItems": (list, lambda v, b, _: len(v) >= b, "should have at least {} items"),
    "maxItems": (list, lambda v, b, _: len(v) <= b, "should have at most {} items"),
    "minProperties": (dict, lambda v, b, _: len(v) >= b, "should have at least {} properties"),
    "maxProperties": (dict, lambda v, b, _: len(v) <= b, "should have at most {} properties"),
    "uniqueItems": (list, lambda v, b, _: not b or _unique(v), "shouldn't contain duplicates"),
}


def _unique(items: list[Any]) -> bool:
    return len({json.dumps(item, sort_keys=True) for item in items}) == len(items)


def _inner(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from validate(item, schema.get("items") or {}, f"{path}[{index}]")
        yield from _duplicates(value, schema, path)
    elif isinstance(value, dict):
        for name in schema.get("required") or ():
            if name not in value:
                yield FieldError(_join(path, name), "Required value")
        for name, inner in value.items():
            if path or name not in ("apiVersion", "kind", "metadata"):
                yield from validate(inner, _member(schema, name) or {}, _join(path, name))


def _duplicates(items: list[Any], schema: Schema, path: str) -> Iterator[FieldError]:
    keys, seen = schema.get("x-kubernetes-list-map-keys"), set()
    for index, item in enumerate(items if schema.get("x-kubernetes-list-type") in ("map", "set") else []):
        identity = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
        text = json.dumps(identity, sort_keys=True)
        if text in seen:
            yield FieldError(f"{path}[{index}]", "Duplicate value", "", identity)
        seen.add(text)


def _junctors(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    for inner in schema.get("allOf") or ():
        yield from validate(value, inner, path)
    matches = {name: sum(not validate(value, s, path) for s in schema.get(name) or ()) for name in ("anyOf", "oneOf")}
    if schema.get("anyOf") and not matches["anyOf"]:
        yield _invalid(path, "must validate at least one schema (anyOf)", value)
    if schema.get("oneOf") and matches["oneOf"] != 1:
        yield _invalid(path, "must validate one and only one schema (oneOf)", value)
    if "not" in schema and not validate(value, schema["not"], path):
        yield _invalid(path, "must not validate the schema (not)", value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
