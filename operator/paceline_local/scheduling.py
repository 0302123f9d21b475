"""Which pods this machine can run. Pure. CPU and memory requests aren't counted: a laptop may be overcommitted."""

from __future__ import annotations

from collections.abc import Mapping

from paceline_local.environment import parse_quantity
from paceline_local.manifests import Manifest
from paceline_local.volumes import SUPPORTED_VOLUMES

__all__ = ["unschedulable", "unsupported"]

_UNCOUNTED = frozenset({"cpu", "memory", "ephemeral-storage"})
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HANDLERS = ("httpGet", "tcpSocket", "exec")


def unschedulable(pod: Manifest, labels: Mapping[str, str], allocatable: Mapping[str, str]) -> str | None:
    """Return why no node fits, in the words of Kubernetes' scheduler, or None if this node does."""
    reasons = [f"Insufficient {name}" for name in _missing_resources(pod, allocatable)]
    if not _selected(pod, labels):
        reasons.append("node(s) didn't match Pod's node affinity/selector")
    return f"0/1 nodes are available: {', '.join(f'1 {reason}' for reason in reasons)}." if reasons else None


def _missing_resources(pod: Manifest, allocatable: Mapping[str, str]) -> list[str]:
    wanted: dict[str, object] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        wanted |= (resources.get("limits") or {}) | (resources.get("requests") or {})
    return sorted(
        name
        for name, amount in wanted.items()
        if name not in _UNCOUNTED and parse_quantity(str(amount)) > parse_quantity(allocatable.get(name, "0"))
    )


def _selected(pod: Manifest, labels: Mapping[str, str]) -> bool:
    plain = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in plain.items()):
        return False
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return required is None or any(_term(term, labels) for term in required.get("nodeSelectorTerms") or ())


def _term(term: Manifest, labels: Mapping[str, str]) -> bool:
    return all(_expression(e, labels.get(e["key"])) for e in term.get("matchExpressions") or ())


def _expression(expression: Manifest, value: str | None) -> bool:
    values, operator = expression.get("values") or [], expression["operator"]
    if operator in {"Gt", "Lt"}:
        if value is None or not value.isdigit():
            return False
        return int(value) > int(values[0]) if operator == "Gt" else int(value) < int(values[0])
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }[operator]


def unsupported(pod: Manifest) -> str | None:
    """Return what of the pod's spec can't be had from local processes, None if all of it can."""
    for volume in pod["spec"].get("volumes") or ():
        kinds = set(volume) - {"name"}
        if kinds and not kinds & SUPPORTED_VOLUMES:
            known = ", ".join(sorted(SUPPORTED_VOLUMES))
            return f"volume {volume['name']!r} of type {min(kinds)} isn't available locally: use one of {known}"
    for container in pod["spec"]["containers"]:
        for kind in _PROBES:
            probe = container.get(kind)
            if probe and not any(handler in probe for handler in _HANDLERS):
                return f"{kind} of container {container['name']!r} needs one of {', '.join(_HANDLERS)} locally"
    return None
