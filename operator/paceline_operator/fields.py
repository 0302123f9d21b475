"""Field definitions: `item` describes a field once; schema and parser are both derived from it.

A `Record` is built from a frozen dataclass whose fields are `item`s, or from a table (the knobs). Attributes are
snake_case, fields of the manifest camelCase. A field that is left out is None, or the dataclass's default.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_operator.errors import Problem
from paceline_operator.kinds import Kind, Problems, Schema

__all__ = ["Item", "Record", "camel", "item", "record", "table", "unknown_fields", "wire_form"]

_KEY = "paceline"


@dataclass(frozen=True, slots=True)
class Item:
    """The definition of one field: kind, description, whether it must be there, and the CRD's default if it has one."""

    kind: Kind
    description: str
    required: bool = False
    crd_default: Any = None

    def schema(self) -> Schema:
        """Return the kind's schema with the description and the default on top."""
        described: Schema = {"description": self.description} | self.kind.schema()
        return described if self.crd_default is None else described | {"default": self.crd_default}


def item(kind: Kind, description: str, *, required: bool = False, default: Any = None, crd_default: Any = None) -> Any:
    """Return a dataclass field defined by `kind` and `description`; `default` is what the parser gives if it is left out."""
    metadata = {_KEY: Item(kind, description, required, crd_default)}
    return dataclasses.field(metadata=metadata) if required else dataclasses.field(default=default, metadata=metadata)


def camel(name: str) -> str:
    """Return the manifest's name of an attribute: `max_model_len` → `maxModelLen`."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def unknown_fields(given: Mapping[str, Any], known: list[str], path: str) -> Iterator[Problem]:
    """Yield a problem for each key that isn't known, with the likeliest right spelling."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"remove it; known here: {', '.join(known)}"
            yield Problem(f"{path}.{key}".lstrip("."), given[key], "unknown field", remedy)


@dataclass(frozen=True, slots=True)
class Record(Kind):
    """An object with known fields. `rules` are CEL rules (`rule`, `message`) over several of them.

    The server keeps unknown fields (`x-kubernetes-preserve-unknown-fields`) instead of dropping them without a word, so
    that the operator sees them and says so in status: a typo such as `maxNumSeq` must not pass as a default.
    """

    fields: Mapping[str, Item]
    build: Callable[[dict[str, Any]], Any]
    rules: tuple[tuple[str, str], ...] = ()

    def schema(self) -> Schema:
        """Return the schema of the object."""
        schema: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        if required := [name for name, definition in self.fields.items() if definition.required]:
            schema["required"] = required
        schema["properties"] = {name: definition.schema() for name, definition in self.fields.items()}
        if self.rules:
            schema["x-kubernetes-validations"] = [{"rule": rule, "message": message} for rule, message in self.rules]
        return schema

    def parse(self, value: Any, path: str, problems: Problems) -> Any:
        """Return what `build` makes of the parsed fields."""
        if not isinstance(value, Mapping):
            problems.append(Problem(path, value, "an object", "write its fields indented below it"))
            return None
        before = len(problems)
        problems.extend(unknown_fields(value, list(self.fields), path))
        parsed: dict[str, Any] = {}
        for name, definition in self.fields.items():
            if name in value:
                parsed[name] = definition.kind.parse(value[name], f"{path}.{name}", problems)
            elif definition.required:
                problems.append(Problem(f"{path}.{name}", None, "required", f"add it: {definition.description}"))
        return self.build(parsed) if len(problems) == before else None


def record(cls: type[Any], *rules: tuple[str, str]) -> Record:
    """Return the Record of a dataclass whose fields are all defined by `item`."""
    attributes = {camel(field.name): field.name for field in dataclasses.fields(cls)}
    fields = {camel(field.name): field.metadata[_KEY] for field in dataclasses.fields(cls)}
    return Record(fields, lambda parsed: cls(**{attributes[name]: value for name, value in parsed.items()}), rules)


def table(fields: Mapping[str, Item], *rules: tuple[str, str]) -> Record:
    """Return a Record that parses to a plain dict of the fields that were given."""
    return Record(fields, dict, rules)


def wire_form(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that are set, under their manifest names."""
    values = ((camel(field.name), getattr(record, field.name)) for field in dataclasses.fields(record))
    return {name: value for name, value in values if value is not None}
