"""Between the versions of one resource, and what a CRD's status says once it's served."""

from __future__ import annotations

from typing import Any

from paceline_local.apiserver.objects import Json, metadata, timestamp
from paceline_local.apiserver.resources import Resource

__all__ = ["convert", "established", "to_stored"]

# events.k8s.io and core events are one set of objects under two sets of names
_EVENT_FIELDS = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_CORE_FIELDS = {core: new for new, core in _EVENT_FIELDS.items()}


def convert(obj: Json, resource: Resource) -> Json:
    """Return a stored object in the version of `resource`."""
    if resource.store_name == "events" and resource.group:
        obj = _renamed(obj, _CORE_FIELDS)
    if obj.get("apiVersion") == resource.api_version and obj.get("kind") == resource.kind:
        return obj
    return {**obj, "apiVersion": resource.api_version, "kind": resource.kind}


def to_stored(obj: Json, resource: Resource) -> Json:
    """Return an object of `resource`'s version as it's kept."""
    if resource.store_name == "events" and resource.group:
        obj = _renamed(obj, _EVENT_FIELDS)
    return {**obj, "apiVersion": resource.stored_as or resource.api_version, "kind": resource.kind}


def _renamed(obj: Json, names: dict[str, str]) -> Json:
    return {names.get(name, name): value for name, value in obj.items()}


def established(crd: Json, now: float) -> Json:
    """Return `crd` with the status of one whose names are accepted and which is served."""
    spec, status = crd["spec"], dict(crd.get("status") or {})
    stored = next(version["name"] for version in spec["versions"] if version.get("storage"))
    kept = [version for version in status.get("storedVersions") or [] if version != stored]
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    for kind, reason, message in _CRD_CONDITIONS:
        conditions.setdefault(kind, _condition(kind, reason, message, now))
    fixed = {"acceptedNames": spec["names"], "storedVersions": [*kept, stored], "conditions": list(conditions.values())}
    meta = metadata(crd)
    if "deletionTimestamp" not in meta and _CLEANUP not in (meta.get("finalizers") or []):
        meta = {**meta, "finalizers": [*(meta.get("finalizers") or []), _CLEANUP]}
    return {**crd, "metadata": meta, "status": status | fixed}


_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
_CRD_CONDITIONS = (
    ("NamesAccepted", "NoConflicts", "no conflicts found"),
    ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
)


def _condition(kind: str, reason: str, message: str, now: float) -> dict[str, Any]:
    times = {"lastTransitionTime": timestamp(now)}
    return {"type": kind, "status": "True", "reason": reason, "message": message, **times}
