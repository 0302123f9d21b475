"""The metadata rules of create, update and delete, as pure functions."""

from __future__ import annotations

import copy
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_local.apiserver.objects import Json, metadata, replaced, timestamp
from paceline_local.apiserver.resources import Resource
from paceline_local.apiserver.targets import DeleteOptions

__all__ = [
    "FOREGROUND",
    "ORPHAN",
    "born",
    "bumped",
    "deletable",
    "doomed",
    "isolated",
    "same_content",
    "with_server_metadata",
]

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
_IDENTITY = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, as the real server: names spell no words


def born(resource: Resource, obj: Json, namespace: str, now: float) -> Json:
    """Return `obj` with the metadata of a new object; a missing name comes from `generateName`."""
    new = copy.deepcopy(obj)
    meta = new.setdefault("metadata", {})
    if not meta.get("name") and meta.get("generateName"):
        meta["name"] = meta["generateName"][:248] + "".join(secrets.choice(_SUFFIX) for _ in range(5))
    for name in (
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "resourceVersion",
        "selfLink",
        "generation",
        "namespace",
    ):
        meta.pop(name, None)
    meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp(now)}
    if resource.namespaced:
        meta["namespace"] = namespace
    if resource.generation:
        meta["generation"] = 1
    return new


def with_server_metadata(live: Json, new: Json) -> Json:
    """Return `new` with the metadata that only the server sets taken from `live`."""
    meta = {key: value for key, value in metadata(new).items() if key not in _IDENTITY}
    meta |= {key: value for key, value in metadata(live).items() if key in _IDENTITY or key == "resourceVersion"}
    if not meta.get("managedFields") and "managedFields" in metadata(live):
        meta["managedFields"] = metadata(live)["managedFields"]
    return {**new, "metadata": meta}


def isolated(resource: Resource, live: Mapping[str, Any], new: Json, subresource: str) -> Json:
    """Return what a write through the main path (or through `status`) may change: the other part stays as in `live`."""
    if subresource == "status":
        kept = {key: value for key, value in live.items() if key != "status"}
        meta = {**metadata(live), "managedFields": metadata(new).get("managedFields", [])}
        return {**kept, "metadata": meta, **({"status": new["status"]} if "status" in new else {})}
    if not resource.status:
        return new
    body = {key: value for key, value in new.items() if key != "status"}
    return {**body, **({"status": live["status"]} if "status" in live else {})}


def bumped(resource: Resource, live: Json, new: Json) -> Json:
    """Return `new` with `generation` raised if its desired state differs from that of `live`."""
    if not resource.generation or _desired(resource, live) == _desired(resource, new):
        return new
    return replaced(new, ("metadata", "generation"), metadata(live).get("generation", 0) + 1)


def _desired(resource: Resource, obj: Json) -> Any:
    if resource.custom:
        rest = {"apiVersion", "kind", "metadata", *(["status"] if resource.status else [])}
        return {key: value for key, value in obj.items() if key not in rest}
    if resource.kind == "Deployment":
        return obj.get("spec"), metadata(obj).get("annotations") or {}
    return obj.get("spec")


def same_content(live: Json, new: Json) -> bool:
    """Tell whether writing `new` over `live` would change nothing."""
    return _content(live) == _content(new)


def _content(obj: Json) -> Json:
    meta = {key: value for key, value in metadata(obj).items() if key != "resourceVersion" and value not in ({}, [])}
    if "managedFields" in meta:  # when an owner wrote last is no content
        meta["managedFields"] = [{k: v for k, v in entry.items() if k != "time"} for entry in meta["managedFields"]]
    return {**obj, "metadata": meta}


def deletable(obj: Json) -> bool:
    """Tell whether nothing holds a dying object back any more: no finalizer and no grace period."""
    meta = metadata(obj)
    held = meta.get("finalizers") or (obj.get("kind") == "Namespace" and (obj.get("spec") or {}).get("finalizers"))
    return "deletionTimestamp" in meta and not held and not meta.get("deletionGracePeriodSeconds")


def doomed(obj: Json, options: DeleteOptions, now: float) -> Json:
    """Return `obj` marked for deletion, with the finalizer that the propagation policy asks for.

    A second deletion may shorten the grace period and change the policy; it never lengthens either.
    """
    new = copy.deepcopy(obj)
    meta = new["metadata"]
    meta["finalizers"] = _propagated(meta.get("finalizers") or [], options.policy)
    if not meta["finalizers"]:
        del meta["finalizers"]
    grace = _grace(obj, options.grace)
    if "deletionTimestamp" not in meta:
        meta |= {"deletionTimestamp": timestamp(now + grace), "deletionGracePeriodSeconds": grace}
        if "generation" in meta:
            meta["generation"] += 1
    elif grace < meta.get("deletionGracePeriodSeconds", 0):
        meta |= {"deletionTimestamp": timestamp(now + grace), "deletionGracePeriodSeconds": grace}
    if new.get("kind") == "Namespace":
        new["status"] = {**(new.get("status") or {}), "phase": "Terminating"}
    return new


def _propagated(finalizers: Sequence[str], policy: str | None) -> list[str]:
    if policy is None:
        return list(finalizers)
    others = [name for name in finalizers if name not in (FOREGROUND, ORPHAN)]
    return others + {"Foreground": [FOREGROUND], "Orphan": [ORPHAN]}.get(policy, [])


def _grace(obj: Json, asked: int | None) -> int:
    """Return the seconds that a Pod gets to end; everything else, and a Pod that doesn't run, gets none."""
    spec, phase = obj.get("spec") or {}, (obj.get("status") or {}).get("phase")
    if obj.get("kind") != "Pod" or not spec.get("nodeName") or phase in ("Failed", "Succeeded"):
        return 0
    return int(spec.get("terminationGracePeriodSeconds", 30)) if asked is None else asked
