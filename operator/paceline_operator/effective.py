"""Which knobs are in force, and why: class ⊕ spec ⊕ what the tuner found. Pure.

The tuner writes what it found into the ConfigMap `<name>-tuned`, next to the hash of what spec and class stated then. Who
edits a knob wants that value, so an override of another hash isn't in force any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paceline_core.errors import KnobError
from paceline_core.knobs import KNOBS, CostClass, Knobs, knob, knobs_to_wire
from paceline_operator.names import base_name, digest
from paceline_operator.spec import InferenceService

__all__ = [
    "KNOBS_FILE",
    "Effective",
    "Origin",
    "Override",
    "effective",
    "override_text",
    "read_override",
    "spec_hash",
    "tuned_name",
    "tuning_bounds",
]

KNOBS_FILE = "knobs.json"  # the key of both ConfigMaps, and the file that pods read


class Origin(StrEnum):
    """Where a value comes from, weakest first."""

    DEFAULT = "default"
    CLASS = "class"
    SPEC = "spec"
    TUNED = "tuned"


@dataclass(frozen=True, slots=True)
class Override:
    """What the tuner wrote: some knobs in wire form, for a service whose stated knobs hash to `spec_hash`."""

    spec_hash: str
    knobs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Effective:
    """The knobs in force and the origin of each by wire name. `dropped` says why an override isn't in force."""

    knobs: Knobs
    origins: Mapping[str, Origin]
    spec_hash: str
    dropped: str = ""


def tuned_name(name: str) -> str:
    """Return the name of the ConfigMap that holds the overrides of the InferenceService `name`."""
    return f"{base_name(name)}-tuned"


def spec_hash(service: InferenceService) -> str:
    """Return the hash of the knobs that spec and class state; `50ms` and `0.05s` are the same statement."""
    wire = knobs_to_wire(service.knobs)
    return digest({name: wire[name] for name in service.given | service.inherited})


def override_text(override: Override) -> str:
    """Return the text of the override's knobs.json."""
    return json.dumps({"specHash": override.spec_hash, "knobs": dict(override.knobs)}, indent=2, sort_keys=True) + "\n"


def read_override(config_map: Mapping[str, Any] | None) -> Override | None:
    """Return the override in a ConfigMap, None if it holds none. What can't be read matches no spec, so it gets dropped."""
    text = ((config_map or {}).get("data") or {}).get(KNOBS_FILE)
    if text is None:
        return None
    try:
        data = json.loads(text)
        return Override(str(data["specHash"]), dict(data["knobs"]))
    except (ValueError, TypeError, KeyError):
        return Override("", {})


def effective(service: InferenceService, override: Override | None) -> Effective:
    """Return the knobs in force for `service`. An override counts whole or not at all: its knobs were found together."""
    origins = {spec.name: _stated(service, spec.name) for spec in KNOBS}
    own = spec_hash(service)
    if override is None:
        return Effective(service.knobs, origins, own)
    if reason := next(_objections(service, override, own), ""):
        return Effective(service.knobs, origins, own, reason)
    try:
        knobs = service.knobs.updated(override.knobs)
    except KnobError as error:
        return Effective(service.knobs, origins, own, f"it doesn't fit the spec: {error}")
    return Effective(knobs, origins | dict.fromkeys(override.knobs, Origin.TUNED), own)


def tuning_bounds(service: InferenceService) -> dict[str, tuple[Any, Any]]:
    """Return the lowest and highest value that tuning may choose, in Python form, by knob (without bounds: absent).

    They are the spec's, inside the limits of the class.
    """
    found = dict(service.limits)
    for name, ends in (service.tuning.bounds or {}).items():
        spec = knob(name)
        low, high = found.get(name, (spec.low, spec.high))
        low = max(low, spec.parse(ends["min"])) if "min" in ends else low
        high = min(high, spec.parse(ends["max"])) if "max" in ends else high
        found[name] = (low, high)
    return found


def _stated(service: InferenceService, name: str) -> Origin:
    if name in service.given:
        return Origin.SPEC
    return Origin.CLASS if name in service.inherited else Origin.DEFAULT


def _objections(service: InferenceService, override: Override, own: str) -> Iterator[str]:
    """Yield why `override` isn't in force."""
    if service.tuning.mode != "Auto":
        yield f"tuning.mode is {service.tuning.mode}"
    if override.spec_hash != own:
        yield "the knobs of the spec or of its class have changed since"
    live = {spec.name for spec in KNOBS if spec.cost is not CostClass.RESTART}
    if strange := sorted(override.knobs.keys() - live):
        yield f"not knobs of a running pod: {', '.join(strange)}"
        return
    bounds = tuning_bounds(service)
    for name in sorted(override.knobs.keys() & bounds.keys()):
        low, high = bounds[name]
        if not _inside(name, override.knobs[name], low, high):
            yield f"{name} {override.knobs[name]} is outside the bounds that tuning has now"


def _inside(name: str, value: Any, low: Any, high: Any) -> bool:
    try:
        return bool(low <= knob(name).parse(value) <= high)
    except KnobError:
        return False
