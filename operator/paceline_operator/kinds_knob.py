"""The kind of a field that is a knob: type and bounds come from the core's table."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from paceline_core.errors import KnobError
from paceline_core.knobs import KnobSpec, Strategy
from paceline_operator.errors import Problem
from paceline_operator.kinds import DURATION_LENGTH, DURATION_PATTERN, Kind, Problems, Schema, refuse

__all__ = ["KnobKind"]

_MAX_INTS = 64  # preferredBatchSizes: more sizes than this say nothing


@dataclass(frozen=True, slots=True)
class KnobKind(Kind):
    """A knob of the core's table; its value stays in wire form."""

    knob: KnobSpec

    def schema(self) -> Schema:
        """Return the schema of the knob's type and bounds; bounds of durations are CEL rules."""
        return {
            "enum": {"type": "string", "enum": [s.value for s in Strategy]},
            "int": self._bounded({"type": "integer", "format": "int64"}, int),
            "float": self._bounded({"type": "number"}, float),
            "bool": {"type": "boolean"},
            "duration": self._duration_schema(),
            "ints": {
                "type": "array",
                "maxItems": _MAX_INTS,
                "items": self._bounded({"type": "integer", "format": "int64"}, int),
            },
        }[self.knob.kind]

    def _bounded(self, schema: Schema, convert: type[int] | type[float]) -> Schema:
        if self.knob.low is None or self.knob.high is None or self.knob.kind == "duration":
            return schema
        bounded = schema | {"minimum": convert(self.knob.low), "maximum": convert(self.knob.high)}
        if (
            self.knob.low_exclusive
        ):  # as a rule: the boolean exclusiveMinimum of OpenAPI 3.0 means something else in JSON Schema
            rule = {"rule": f"self > {float(self.knob.low)}", "message": f"must keep {self.knob.bound}"}
            bounded["x-kubernetes-validations"] = [rule]
        return bounded

    def _duration_schema(self) -> Schema:
        endless = self.knob.name == "staticFlush"
        pattern = DURATION_PATTERN[:-1] + "$|^never$" if endless else DURATION_PATTERN
        schema: Schema = {"type": "string", "maxLength": DURATION_LENGTH, "pattern": pattern}
        if self.knob.high is None or math.isinf(self.knob.high):
            return schema
        low = f" && duration(self) > duration('{int(self.knob.low or 0)}s')" if self.knob.low_exclusive else ""
        rule = f"duration(self) <= duration('{int(self.knob.high)}s'){low}"
        rule = f"self == 'never' || ({rule})" if endless else rule
        schema["x-kubernetes-validations"] = [{"rule": rule, "message": f"must keep {self.knob.bound}"}]
        return schema

    def parse(self, value: Any, path: str, problems: Problems) -> Any:
        """Return the wire value as given, once the knob accepts it."""
        if value is None or (self.knob.kind == "ints" and isinstance(value, list) and len(value) > _MAX_INTS):
            refuse(path, value, f"type {self.knob.kind}", "leave the field out or give a value", problems)
            return None
        try:
            self.knob.parse(value)
        except KnobError as error:
            problems.extend(Problem(path, v.value, v.bound, v.remedy) for v in error.violations)
            return None
        if self.knob.kind == "duration" and not re.search(self._duration_schema()["pattern"], value):
            refuse(path, value, "a duration", "write ASCII digits and a unit, as in '50ms'", problems)
            return None
        return value
