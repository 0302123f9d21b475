"""Small helpers over Kubernetes objects as plain dictionaries, shared by controllers, node agent and balancer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeAlias

__all__ = [
    "Manifest",
    "age",
    "condition",
    "controller_of",
    "is_deleting",
    "is_ready",
    "key_of",
    "matches",
    "merge_condition",
    "micro_timestamp",
    "owned_by",
    "owner_reference",
    "parse_timestamp",
    "timestamp",
]

Manifest: TypeAlias = dict[str, Any]


def timestamp(now: float) -> str:
    """Return Unix seconds as the API writes times (`2026-01-31T12:00:00Z`)."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(now: float) -> str:
    """Return Unix seconds as the API's MicroTime, which Leases use."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_timestamp(text: str) -> float:
    """Return Unix seconds for the API's text form of a time."""
    return datetime.fromisoformat(text).timestamp()


def age(created: str, now: float) -> str:
    """Return how long ago `created` was, as kubectl prints it (`45s`, `3m`, `2h`, `5d`)."""
    seconds = max(int(now - parse_timestamp(created)), 0)
    # like kubectl, a unit is used from two of it on, so that 90 s doesn't shrink to "1m"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def key_of(obj: Manifest) -> str:
    """Return `namespace/name` (or just the name for a cluster-scoped object)."""
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])


def is_deleting(obj: Manifest) -> bool:
    """Whether somebody has asked for the object's deletion."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def controller_of(obj: Manifest) -> Manifest | None:
    """Return the owner reference that manages the object, if one does."""
    return next((ref for ref in obj["metadata"].get("ownerReferences") or () if ref.get("controller")), None)


def owned_by(obj: Manifest, owner: Manifest) -> bool:
    """Whether `owner` is the controller of `obj`, by uid."""
    reference = controller_of(obj)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def owner_reference(owner: Manifest) -> Manifest:
    """Return the reference that makes `owner` the controller of another object. `owner` must carry apiVersion and kind."""
    meta = owner["metadata"]
    reference: Manifest = {key: owner[key] for key in ("apiVersion", "kind")}
    return reference | {"name": meta["name"], "uid": meta["uid"], "controller": True, "blockOwnerDeletion": True}


def condition(obj: Manifest, kind: str) -> Manifest | None:
    """Return the condition of that type in the object's status."""
    return next((c for c in (obj.get("status") or {}).get("conditions") or () if c["type"] == kind), None)


def is_ready(obj: Manifest) -> bool:
    """Whether the Ready condition of a pod or a node is true."""
    ready = condition(obj, "Ready")
    return ready is not None and ready["status"] == "True"


def matches(selector: Manifest | None, labels: Manifest | None) -> bool:
    """Whether labels satisfy a plain map of labels (a Service's selector). An empty selector matches nothing."""
    given = labels or {}
    return bool(selector) and all(given.get(key) == value for key, value in (selector or {}).items())


def merge_condition(before: Manifest | None, after: Manifest, now: float) -> Manifest:
    """Return `after` with its transition time: the old one where the status hasn't changed, else now."""
    same = before is not None and before.get("status") == after["status"]
    since = before.get("lastTransitionTime") if before is not None and same else None
    return after | {"lastTransitionTime": since or timestamp(now)}
