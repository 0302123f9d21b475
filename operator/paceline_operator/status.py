"""The status of an InferenceService from what was observed: pure, and the same for the same observations.

Nothing in it changes while nothing happens, so a steady service is never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from paceline_core.knobs import KNOBS, knobs_to_wire
from paceline_operator.conditions import Condition, conditions_of
from paceline_operator.effective import Effective, effective
from paceline_operator.fetching import cache_status
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.names import selector
from paceline_operator.outcome import Applied
from paceline_operator.render import service_url
from paceline_operator.spec import InferenceService

__all__ = ["Observation", "TuningStatus", "dated", "merge_patch", "status_of"]

_MOST_PODS = 32
_OF_SPEC = ("strategy", "model", "slo", "tuning", "url", "effective", "className")


@dataclass(frozen=True, slots=True)
class TuningStatus:
    """What the tuner says of a service: the content of status.tuning, and conditions, which replace those of their type."""

    content: Any
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything that the status is made of.

    `service` is None if the spec can't be used; `spec_error` says why then, `spec_reason` in one word. `effective` are the
    knobs in force (None: those of the service). `applied` is what came of applying the children. `knobs` is the knob state
    by pod name, `tuning` what the tuner says (None: nothing), `fetchers` the pods that fetch a model. `now` is an RFC 3339
    time.
    """

    body: Mapping[str, Any]
    service: InferenceService | None
    now: str
    effective: Effective | None = None
    spec_error: str = ""
    spec_reason: str = "Invalid"
    applied: Applied = field(default_factory=Applied)
    deployment: Mapping[str, Any] | None = None
    pods: Sequence[Mapping[str, Any]] = ()
    knobs: Mapping[str, PodKnobs] = field(default_factory=dict)
    tuning: TuningStatus | None = None
    fetchers: Sequence[Mapping[str, Any]] = ()


def status_of(seen: Observation) -> dict[str, Any]:
    """Return the whole status."""
    meta, old = seen.body["metadata"], seen.body.get("status") or {}
    generation = int(meta.get("generation", 0))
    deployed = (seen.deployment or {}).get("status") or {}
    found = _conditions(seen)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "replicas": int(deployed.get("replicas") or 0),
        "readyReplicas": int(deployed.get("readyReplicas") or 0),
        "selector": ",".join(f"{key}={value}" for key, value in sorted(selector(meta["name"]).items())),
        "conditions": [dated(condition, old, generation, seen.now) for condition in found],
        "pods": _pods(seen.knobs),
        "podCount": len(seen.knobs),
        **cache_status(seen.applied.fetch),
    }
    if seen.service is None:
        return status | _kept(old)
    status |= _of_spec(seen.service, seen.effective or effective(seen.service, None))
    return status | {"tuning": seen.tuning.content if seen.tuning else _untuned(seen.service, old)}


def _conditions(seen: Observation) -> list[Condition]:
    """Return all conditions; what the tuner says of an aspect is said instead of what is known without it."""
    found = conditions_of(
        seen.service,
        seen.spec_error,
        seen.applied,
        spec_reason=seen.spec_reason,
        deployment=seen.deployment,
        pods=seen.pods,
        knobs=seen.knobs,
        now=datetime.fromisoformat(seen.now).timestamp(),
        fetchers=seen.fetchers,
    )
    told = seen.tuning.conditions if seen.tuning else ()
    return list({condition.type: condition for condition in (*found, *told)}.values())


def _of_spec(service: InferenceService, found: Effective) -> dict[str, Any]:
    return {
        "strategy": found.knobs.strategy.value,
        "model": service.model_name,
        "slo": _slo_text(service),
        "url": service_url(service),
        "effective": _rows(found) | _stated_rows(service),
        **({"className": service.class_name} if service.class_name else {}),
    }


def _untuned(service: InferenceService, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return status.tuning where the tuner says nothing: what it did stays to be read."""
    past = old.get("tuning") or {}
    return {"mode": service.tuning.mode} | {name: past[name] for name in ("lastChange", "history") if name in past}


def _kept(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the last usable spec left: with a broken edit the pods keep running under it."""
    return {name: old[name] for name in _OF_SPEC if name in old}


def _rows(found: Effective) -> dict[str, dict[str, Any]]:
    """Return every knob's value and origin; objectives that nobody stated are left out (there is no null in a status)."""
    wire = knobs_to_wire(found.knobs)
    return {
        spec.name: {"value": wire[spec.name], "origin": found.origins[spec.name].value}
        for spec in KNOBS
        if wire[spec.name] is not None
    }


def _stated_rows(service: InferenceService) -> dict[str, dict[str, Any]]:
    return {path: {"value": value, "origin": origin} for path, (value, origin) in service.stated.items()}


def _slo_text(service: InferenceService) -> str:
    slo = service.slo
    parts = [f"{name} {value}" for name, value in (("ttft", slo.ttft), ("tpot", slo.tpot)) if value]
    return f"{', '.join(parts)} p{slo.percentile}" if parts else "none"


def _pods(knobs: Mapping[str, PodKnobs]) -> dict[str, Any]:
    """Return the knob state by pod, of so many pods that a status stays small; those with trouble first."""
    order = sorted(knobs, key=lambda name: (knobs[name].state is KnobState.SYNCED, name))
    return {name: _pod(knobs[name]) for name in sorted(order[:_MOST_PODS])}


def _pod(knobs: PodKnobs) -> dict[str, Any]:
    figures = {"revision": knobs.revision, "epoch": knobs.epoch}
    return {"state": knobs.state.value} | {name: value for name, value in figures.items() if value is not None}


def dated(condition: Condition, old: Mapping[str, Any], generation: int, now: str) -> dict[str, Any]:
    """Return a condition's data; its time changes only with its status."""
    known = next((c for c in old.get("conditions") or [] if c.get("type") == condition.type), None)
    same = known is not None and known.get("status") == condition.status
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "observedGeneration": generation,
        "lastTransitionTime": known["lastTransitionTime"] if same and known and known.get("lastTransitionTime") else now,
    }


def merge_patch(old: Any, new: Any) -> dict[str, Any]:
    """Return the JSON merge patch that turns the object `old` into `new`: empty if they are equal."""
    old = old if isinstance(old, Mapping) else {}
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(old.get(key), Mapping):
            if inner := merge_patch(old[key], value):
                patch[key] = inner
        elif key not in old or old[key] != value:
            patch[key] = value
    return patch
