"""Kinds of fields: each knows its OpenAPI schema and how to check a value, so that the CRD and the parser can't disagree.

`parse` appends to `problems` instead of raising: a user sees every mistake of a manifest at once.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline_core.durations import parse_duration
from paceline_core.errors import FormatError
from paceline_operator.errors import Problem

__all__ = [
    "DURATION_LENGTH",
    "DURATION_PATTERN",
    "Boolean",
    "Duration",
    "Integer",
    "Kind",
    "ListOf",
    "MapOf",
    "Problems",
    "Quantity",
    "Raw",
    "Schema",
    "Text",
    "refuse",
]

Schema = dict[str, Any]
Problems = list[Problem]

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(us|µs|ms|s|m|h))+$"
DURATION_LENGTH = 32
# the API server's own grammar of quantities, without signs: no amount of ours may be negative
_QUANTITY = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"


class Kind(ABC):
    """What values a field takes."""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the OpenAPI v3 schema (structural, no defaults)."""

    @abstractmethod
    def parse(self, value: Any, path: str, problems: Problems) -> Any:
        """Return the Python form of a JSON value, or None after adding what is wrong with it to `problems`."""


def refuse(path: str, value: Any, bound: str, remedy: str, problems: Problems) -> None:
    """Add what is wrong with a value to `problems`."""
    problems.append(Problem(path, value, bound, remedy))


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text; `pattern` must match all of it, `choices` close the set."""

    max_length: int = 253
    pattern: str = ""
    choices: tuple[str, ...] = ()
    example: str = ""
    min_length: int = 1

    def schema(self) -> Schema:
        """Return the schema: length, pattern, enum."""
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        limits: Schema = {"type": "string", "minLength": self.min_length, "maxLength": self.max_length}
        return limits | ({"pattern": self.pattern} if self.pattern else {})

    @property
    def bound(self) -> str:
        """The rule in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return f"text of {self.min_length} to {self.max_length} characters" + (
            f" like {self.example}" if self.example else ""
        )

    def _fits(self, value: str) -> bool:
        if self.choices:
            return value in self.choices
        # `$` would also accept a line feed at the end, which Go's engine on the server doesn't
        whole = not self.pattern or (re.search(self.pattern, value) is not None and not value.endswith("\n"))
        return self.min_length <= len(value) <= self.max_length and whole

    def parse(self, value: Any, path: str, problems: Problems) -> str | None:
        """Return the text."""
        if isinstance(value, str) and self._fits(value):
            return value
        example = self.choices[0] if self.choices else self.example
        refuse(path, value, self.bound, f"write a text such as {example!r}" if example else "write a text", problems)
        return None


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """A whole number between two inclusive bounds."""

    low: int
    high: int

    def schema(self) -> Schema:
        """Return the schema: 64 bits, minimum, maximum."""
        return {"type": "integer", "format": "int64", "minimum": self.low, "maximum": self.high}

    def parse(self, value: Any, path: str, problems: Problems) -> int | None:
        """Return the number."""
        if isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high:
            return value
        refuse(path, value, f"{self.low} ≤ value ≤ {self.high}", "give a whole number inside the bound", problems)
        return None


@dataclass(frozen=True, slots=True)
class Duration(Kind):
    """A Go-style duration (`30s`, `1m30s`) between two inclusive bounds in seconds."""

    low: int
    high: int

    def schema(self) -> Schema:
        """Return the schema: pattern, and the bounds as a CEL rule."""
        rule = f"duration(self) >= duration('{self.low}s') && duration(self) <= duration('{self.high}s')"
        bounds = {"rule": rule, "message": f"must keep {self.bound}"}
        text = {"type": "string", "maxLength": DURATION_LENGTH, "pattern": DURATION_PATTERN}
        return text | {"x-kubernetes-validations": [bounds]}

    @property
    def bound(self) -> str:
        """The rule in words."""
        return f"{self.low}s ≤ value ≤ {self.high}s"

    def parse(self, value: Any, path: str, problems: Problems) -> str | None:
        """Return the text."""
        try:
            fits = self.low <= parse_duration(value) <= self.high
        except FormatError:
            fits = False
        if fits:
            return str(value)
        refuse(
            path, value, f"{self.low}s ≤ value ≤ {self.high}s", "write a number and a unit, as in '30s' or '5m'", problems
        )
        return None


@dataclass(frozen=True, slots=True)
class Boolean(Kind):
    """True or false."""

    def schema(self) -> Schema:
        """Return the schema."""
        return {"type": "boolean"}

    def parse(self, value: Any, path: str, problems: Problems) -> bool | None:
        """Return the truth value."""
        if isinstance(value, bool):
            return value
        refuse(path, value, "true or false", "write true or false", problems)
        return None


@dataclass(frozen=True, slots=True)
class Quantity(Kind):
    """A Kubernetes quantity (`500m`, `4Gi`, 2), never negative."""

    def schema(self) -> Schema:
        """Return the schema that Kubernetes itself uses for quantities, plus the sign."""
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY,
            "minimum": 0,
            "x-kubernetes-int-or-string": True,
        }

    def parse(self, value: Any, path: str, problems: Problems) -> str | None:
        """Return the quantity as text."""
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if whole or (isinstance(value, str) and re.fullmatch(_QUANTITY.strip("^$"), value)):
            return str(value)
        refuse(path, value, "a quantity ≥ 0", "write a Kubernetes quantity such as '500m' or '4Gi'", problems)
        return None


@dataclass(frozen=True, slots=True)
class MapOf(Kind):
    """An object with free keys, at most `most` of them if that is stated, and values of one kind."""

    values: Kind
    most: int | None = None

    def schema(self) -> Schema:
        """Return the schema."""
        schema: Schema = {"type": "object", "additionalProperties": self.values.schema()}
        return schema if self.most is None else schema | {"maxProperties": self.most}

    def parse(self, value: Any, path: str, problems: Problems) -> dict[str, Any] | None:
        """Return a dict of parsed values."""
        if isinstance(value, Mapping) and (self.most is None or len(value) <= self.most):
            return {str(key): self.values.parse(item, f"{path}[{key}]", problems) for key, item in value.items()}
        bound = "an object of key: value" + ("" if self.most is None else f", at most {self.most}")
        refuse(path, value, bound, "write one key: value per line", problems)
        return None


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    """A list of at most `max_items` items of one kind."""

    items: Kind
    max_items: int

    def schema(self) -> Schema:
        """Return the schema."""
        return {"type": "array", "items": self.items.schema(), "maxItems": self.max_items}

    def parse(self, value: Any, path: str, problems: Problems) -> tuple[Any, ...] | None:
        """Return a tuple of parsed items."""
        if isinstance(value, list | tuple) and len(value) <= self.max_items:
            return tuple(self.items.parse(item, f"{path}[{i}]", problems) for i, item in enumerate(value))
        refuse(path, value, f"a list of at most {self.max_items} items", "write a list, one '- item' per line", problems)
        return None


@dataclass(frozen=True, slots=True)
class Raw(Kind):
    """An object of Kubernetes' own types, passed on as it is; the API server checks it when we apply it."""

    keys: tuple[str, ...] = ()

    def schema(self) -> Schema:
        """Return the schema: an object whose content is kept."""
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

    def parse(self, value: Any, path: str, problems: Problems) -> dict[str, Any] | None:
        """Return the object."""
        if not isinstance(value, Mapping):
            refuse(path, value, "an object", "write an object", problems)
            return None
        for key in value if self.keys else ():
            if key not in self.keys:
                refuse(f"{path}.{key}", value[key], "unknown field", f"known here: {', '.join(self.keys)}", problems)
        return dict(value)
