"""The `Table` answers that `kubectl get` prints."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_local.apiserver.objects import Json, dig, label_text, metadata
from paceline_local.apiserver.resources import Resource

__all__ = ["age", "json_path", "partial", "table"]


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[Json], Any]
    kind: str = "string"
    priority: int = 0
    format: str = ""


def table(resource: Resource, objects: Sequence[Json], revision: str, include: str) -> Json:
    """Return the objects as rows; `include` is `None`, `Metadata` or `Object` (what each row carries along)."""
    columns = _columns(resource)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": revision},
        "columnDefinitions": [_definition(column) for column in columns],
        "rows": [{"cells": [c.cell(obj) for c in columns], "object": _carried(obj, include)} for obj in objects],
    }


def partial(obj: Json) -> Json:
    """Return only the metadata of an object."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata(obj)}


def _carried(obj: Json, include: str) -> Json | None:
    return {"None": None, "Object": obj}.get(include, partial(obj))


def _definition(column: _Column) -> Json:
    described = {
        "name": column.name,
        "type": column.kind,
        "format": column.format,
        "description": "",
        "priority": column.priority,
    }
    return described | ({"format": "name"} if column.name == "Name" else {})


def age(stamp: str | None, now: float | None = None) -> str:
    """Return the time since `stamp` as kubectl shows it: `45s`, `3m12s`, `5h`, `12d`."""
    if not stamp:
        return "<unknown>"
    then = dt.datetime.fromisoformat(stamp).timestamp()
    seconds = max(0, int((time.time() if now is None else now) - then))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if days < 2 else f"{days}d"


def _columns(resource: Resource) -> list[_Column]:
    name = _Column("Name", lambda obj: metadata(obj).get("name", ""))
    created = _Column("Age", lambda obj: age(metadata(obj).get("creationTimestamp")))
    if resource.custom:
        return [name, *([_custom(spec) for spec in resource.columns] or [created])]
    if resource.kind == "Event":
        return list(_EVENT)
    return [name, *_BUILTIN.get(resource.kind, ()), created, *_WIDE.get(resource.kind, ())]


def _custom(spec: Mapping[str, Any]) -> _Column:
    path, kind = spec["jsonPath"], spec["type"]

    def cell(obj: Json) -> Any:
        found = json_path(obj, path)
        if kind == "date":
            return age(found[0]) if found and isinstance(found[0], str) else "<unknown>" if found else None
        return _typed(kind, found)

    return _Column(spec["name"], cell, kind, int(spec.get("priority") or 0), spec.get("format", ""))


def _typed(kind: str, found: list[Any]) -> Any:
    if not found:
        return None
    if kind != "string":
        return found[0]
    return ",".join(str(value).lower() if isinstance(value, bool) else str(value) for value in found)


_STEP = re.compile(
    r"""\.?(?P<name>(?:\\.|[^.\[\]\\])+)|\['(?P<quoted>[^']*)'\]|\[(?P<index>-?\d+|\*)\]
    |\[\?\(@\.(?P<key>[\w.]+)\s*==\s*["'](?P<value>[^"']*)["']\)\]""",
    re.VERBOSE,
)


def json_path(obj: Any, path: str) -> list[Any]:
    """Return what the simple JSONPath of a printer column finds: members, indexes, `[*]`, `[?(@.key=="value")]`."""
    found = [obj]
    for step in _STEP.finditer(path.strip("{}")):
        found = [value for node in found for value in _follow(node, step) if value is not None]
    return found


def _follow(node: Any, step: re.Match[str]) -> list[Any]:
    name = step["quoted"] if step["name"] is None else step["name"].replace("\\", "")
    if name is not None:
        return [node.get(name)] if isinstance(node, Mapping) else []
    if not isinstance(node, list):
        return []
    if step["key"] is not None:
        return [item for item in node if str(dig(item, step["key"].split("."))) == step["value"]]
    if step["index"] == "*":
        return node
    return node[int(step["index"]) :][:1]


def _number(name: str, *path: str) -> _Column:
    return _Column(name, lambda obj: int(dig(obj, path, 0)), "integer")


def _field(name: str, *path: str, missing: str = "<none>", priority: int = 0) -> _Column:
    return _Column(name, lambda obj: str(dig(obj, path, missing)), priority=priority)


def _statuses(obj: Json) -> list[Json]:
    return list(dig(obj, ("status", "containerStatuses"), []))


def _pod_ready(obj: Json) -> str:
    ready = sum(bool(status.get("ready")) for status in _statuses(obj))
    return f"{ready}/{len(dig(obj, ('spec', 'containers'), []))}"


def _pod_status(obj: Json) -> str:
    if "deletionTimestamp" in metadata(obj):
        return "Terminating"
    for status in _statuses(obj):
        for state in ("waiting", "terminated"):
            reason = dig(status, ("state", state, "reason"))
            if reason:
                return str(reason)
    return str(dig(obj, ("status", "reason")) or dig(obj, ("status", "phase"), "Unknown"))


def _deployment_ready(obj: Json) -> str:
    return f"{dig(obj, ('status', 'readyReplicas'), 0)}/{dig(obj, ('spec', 'replicas'), 0)}"


def _ports(obj: Json) -> str:
    ports = dig(obj, ("spec", "ports"), [])
    return ",".join(f"{port.get('port')}/{port.get('protocol', 'TCP')}" for port in ports) or "<none>"


def _node_status(obj: Json) -> str:
    ready = json_path(obj, '.status.conditions[?(@.type=="Ready")].status')
    return {"True": "Ready", "False": "NotReady"}.get(ready[0] if ready else "", "Unknown")


def _node_roles(obj: Json) -> str:
    prefix = "node-role.kubernetes.io/"
    roles = [key.removeprefix(prefix) for key in metadata(obj).get("labels") or {} if key.startswith(prefix)]
    return ",".join(sorted(roles)) or "<none>"


def _event_seen(obj: Json) -> str:
    return age(obj.get("lastTimestamp") or obj.get("eventTime") or metadata(obj).get("creationTimestamp"))


def _event_object(obj: Json) -> str:
    about = obj.get("involvedObject") or obj.get("regarding") or {}
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


_EVENT = (
    _Column("Last Seen", _event_seen),
    _field("Type", "type", missing=""),
    _field("Reason", "reason", missing=""),
    _Column("Object", _event_object),
    _Column("Message", lambda obj: str(obj.get("message") or obj.get("note") or "").strip()),
    _Column("Name", lambda obj: metadata(obj).get("name", ""), priority=1),
)
_BUILTIN: Mapping[str, Sequence[_Column]] = {
    "Namespace": (_field("Status", "status", "phase"),),
    "Node": (_Column("Status", _node_status), _Column("Roles", _node_roles)),
    "Pod": (
        _Column("Ready", _pod_ready),
        _Column("Status", _pod_status),
        _Column("Restarts", lambda obj: sum(int(s.get("restartCount", 0)) for s in _statuses(obj)), "integer"),
    ),
    "Deployment": (
        _Column("Ready", _deployment_ready),
        _number("Up-to-date", "status", "updatedReplicas"),
        _number("Available", "status", "availableReplicas"),
    ),
    "ReplicaSet": (
        _number("Desired", "spec", "replicas"),
        _number("Current", "status", "replicas"),
        _number("Ready", "status", "readyReplicas"),
    ),
    "Service": (
        _field("Type", "spec", "type"),
        _field("Cluster-IP", "spec", "clusterIP"),
        _Column("External-IP", lambda obj: ",".join(dig(obj, ("spec", "externalIPs"), [])) or "<none>"),
        _Column("Port(s)", _ports),
    ),
    "ConfigMap": (_Column("Data", lambda obj: len(obj.get("data") or {}) + len(obj.get("binaryData") or {}), "integer"),),
    "Secret": (_field("Type", "type"), _Column("Data", lambda obj: len(obj.get("data") or {}), "integer")),
    "ServiceAccount": (_Column("Secrets", lambda obj: len(obj.get("secrets") or []), "integer"),),
    "Lease": (_field("Holder", "spec", "holderIdentity", missing=""),),
    "PodDisruptionBudget": (
        _field("Min Available", "spec", "minAvailable", missing="N/A"),
        _field("Max Unavailable", "spec", "maxUnavailable", missing="N/A"),
        _number("Allowed Disruptions", "status", "disruptionsAllowed"),
    ),
}
_SELECTOR = _Column("Selector", lambda obj: label_text(dig(obj, ("spec", "selector"))) or "<none>", priority=1)
_WIDE: Mapping[str, Sequence[_Column]] = {
    "Pod": (
        _field("IP", "status", "podIP", priority=1),
        _field("Node", "spec", "nodeName", priority=1),
    ),
    "Deployment": (_SELECTOR,),
    "ReplicaSet": (_SELECTOR,),
    "Service": (_SELECTOR,),
    "Node": (_field("Version", "status", "nodeInfo", "kubeletVersion", missing="", priority=0),),
}
