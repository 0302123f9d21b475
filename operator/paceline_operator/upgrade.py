"""An operator upgrade restarts no model: while spec and class ask for the same pods, the pod template stays as it was. Pure.

The template that was applied stands in an annotation of the Deployment, beside a hash of what spec and class asked for then.
While that hash is the same, a template that a newer operator would make differently is held back, until the spec changes or
the InferenceService is annotated with a new value of `paceline.io/upgrade`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from paceline_core.knobs import KNOBS, CostClass, knobs_to_wire
from paceline_operator.children import Manifest, stamped
from paceline_operator.drift import difference
from paceline_operator.names import APPLIED, INPUTS, OWN, REVISION, TEMPLATE, UPGRADE, digest
from paceline_operator.pod import revision_of
from paceline_operator.spec import InferenceService

__all__ = ["ELSEWHERE", "held_back", "hold", "inputs_hash", "notes", "recorded"]

# fields of a spec that don't reach the pod template
ELSEWHERE = {
    "batching", "class_name", "monitoring", "network_policy", "queue_name", "replicas", "routing", "scaling", "slo",
    "tuning",
}  # fmt: skip


def inputs_hash(service: InferenceService) -> str:
    """Return the hash of what spec and class ask of the pods. Defaults are left out: a version with another default, or with
    more fields, gives the same hash."""
    stated = {name: value for name, value in _stated(service.spec).items() if name not in ELSEWHERE}
    rollout = {name: value for name, value in stated.pop("rollout", {}).items() if name != "progress_deadline"}
    stated |= {"rollout": rollout} if rollout else {}
    wire = knobs_to_wire(service.knobs)
    named = service.given | service.inherited
    restart = {spec.name: wire[spec.name] for spec in KNOBS if spec.cost is CostClass.RESTART and spec.name in named}
    return digest({"spec": stated, "knobs": restart})


def notes(service: InferenceService, template: Manifest, request: str) -> Manifest:
    """Return the annotations by which a later operator knows what the pods were made from. `request` is the value of the
    InferenceService's upgrade annotation."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return {INPUTS: inputs_hash(service), OWN: service.own, TEMPLATE: text} | ({UPGRADE: request} if request else {})


def hold(deployment: Manifest, live: Mapping[str, Any] | None) -> tuple[Manifest, str]:
    """Return the Deployment to apply, and what is held back of an upgrade, in words ("": nothing)."""
    wanted, have = deployment["metadata"]["annotations"], ((live or {}).get("metadata") or {}).get("annotations") or {}
    kept = recorded(have)
    asked = wanted.get(UPGRADE, "") not in ("", have.get(UPGRADE, ""))
    fresh = deployment["spec"]["template"]
    if kept is None or asked or have.get(INPUTS) != wanted[INPUTS] or kept == fresh:
        return deployment, ""
    return held_back(deployment, kept, {}), _words(kept, fresh)


def held_back(deployment: Manifest, kept: Manifest, notes: Mapping[str, str]) -> Manifest:
    """Return the Deployment with the template that it had, and with `notes` in place of its own annotations."""
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    meta = deployment["metadata"]
    annotations = {name: value for name, value in meta["annotations"].items() if name != APPLIED} | {TEMPLATE: text, **notes}
    held = deployment | {
        "metadata": {name: value for name, value in meta.items() if name != "annotations"},
        "spec": deployment["spec"] | {"template": kept},
    }
    return stamped(held, annotations)


def recorded(annotations: Mapping[str, Any]) -> Manifest | None:
    """Return the template that was applied; None without one, or if somebody has edited the record."""
    try:
        template: Manifest = json.loads(annotations[TEMPLATE])
        intact = template["metadata"]["annotations"][REVISION] == revision_of(template)
    except (KeyError, TypeError, ValueError):
        return None
    return template if intact else None


def _words(kept: Manifest, fresh: Manifest) -> str:
    images = [template["spec"]["containers"][0].get("image") for template in (kept, fresh)]
    if images[0] != images[1]:
        return f"image {images[0]} → {images[1]}"
    return f"first difference at {difference(_bare(fresh), kept) or difference(_bare(kept), fresh) or 'metadata'}"


def _bare(template: Manifest) -> Manifest:
    """Return a template without its revision, which differs whenever anything does."""
    meta = template["metadata"]
    rest = {name: value for name, value in meta["annotations"].items() if name != REVISION}
    return template | {"metadata": meta | {"annotations": rest}}


def _stated(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that differ from their defaults, as JSON data."""
    values = ((field, getattr(record, field.name)) for field in dataclasses.fields(record))
    return {field.name: _plain(value) for field, value in values if value != field.default}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _stated(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
