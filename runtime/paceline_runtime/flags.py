"""Command-line options for the knobs, made from the knob table, under vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from paceline_core.errors import KnobError
from paceline_core.knobs import KNOBS, KnobSpec

__all__ = ["knob_options", "knobs_given"]

F = TypeVar("F", bound=Callable[..., Any])

# where vLLM's name (or a plainer one) isn't just the knob's own in kebab case
_NAMES = {
    "strategy": "--batching-strategy",
    "prefixCaching": "--enable-prefix-caching/--no-enable-prefix-caching",
}
_METAVARS = {"int": "N", "float": "X", "duration": "DURATION", "ints": "N,N,…", "enum": "NAME"}


class _KnobType(click.ParamType[Any]):
    """Turns a flag's text into the knob's wire value, with the table's own bounds and words."""

    def __init__(self, spec: KnobSpec) -> None:
        self.name = spec.kind
        self._spec = spec

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        wire = self._wire_value(value)
        try:
            self._spec.parse(wire)
        except KnobError as error:
            violation = error.violations[0]
            self.fail(f"{value!r} breaks {violation.bound}: {violation.remedy}", param, ctx)
        return wire

    def _wire_value(self, value: Any) -> Any:
        """Read numbers where the knob wants them; what can't be read stays as it is, for the table to refuse."""
        number = {"int": int, "float": float}.get(self._spec.kind)
        try:
            if number is not None:
                return number(value)
            if self._spec.kind == "ints" and isinstance(value, str):
                return [int(part) for part in value.split(",") if part.strip()]
        except ValueError:
            return value
        return None if self._spec.nullable and value == "none" else value


def knob_options(command: F) -> F:
    """Decorate a click command with one option for each knob; see `knobs_given`."""
    for spec in reversed(KNOBS):
        command = _option(spec)(command)
    return command


def knobs_given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that the user gave as flags: wire names and wire values."""
    return {spec.name: value for spec in KNOBS if (value := parameters[_parameter(spec)]) is not None}


def _option(spec: KnobSpec) -> Callable[[F], F]:
    name = _NAMES.get(spec.name, "--" + spec.attribute.replace("_", "-"))
    default = spec.to_wire(spec.default)
    shown = f"{spec.description}  [{spec.bound}; default: {'none' if default in (None, []) else default}]"
    if spec.kind == "bool":
        return click.option(name, _parameter(spec), default=None, help=spec.description)
    return click.option(name, _parameter(spec), type=_KnobType(spec), metavar=_METAVARS[spec.kind], default=None, help=shown)


def _parameter(spec: KnobSpec) -> str:
    return "knob_" + spec.attribute
