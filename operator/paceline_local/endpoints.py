"""Which pods stand behind a Service's ports, and which of them gets the next connection. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline_local.manifests import Manifest, is_deleting, is_ready, matches

__all__ = ["Backend", "backends_of", "order", "service_ports"]


@dataclass(frozen=True, slots=True, order=True)
class Backend:
    """Where connections go: a pod's address and port."""

    host: str
    port: int


def service_ports(service: Manifest) -> list[Manifest]:
    """Return the TCP ports of a Service that has an address and a selector; a headless one has none to serve."""
    spec = service["spec"]
    if spec.get("clusterIP") == "None" or spec.get("type") == "ExternalName" or not spec.get("selector"):
        return []
    return [port for port in spec.get("ports") or () if port.get("protocol", "TCP") == "TCP"]


def backends_of(service: Manifest, port: Manifest, pods: Iterable[Manifest]) -> tuple[Backend, ...]:
    """Return the backends of one port: pods that match, are ready (unless the Service wants all) and aren't going away."""
    spec, namespace = service["spec"], service["metadata"]["namespace"]
    every = bool(spec.get("publishNotReadyAddresses"))
    found = []
    for pod in pods:
        address = (pod.get("status") or {}).get("podIP")
        chosen = pod["metadata"]["namespace"] == namespace and matches(spec["selector"], pod["metadata"].get("labels"))
        if chosen and address and not is_deleting(pod) and (every or is_ready(pod)):
            number = _target_port(port, pod)
            found += [Backend(address, number)] if number is not None else []
    return tuple(sorted(found))


def _target_port(port: Manifest, pod: Manifest) -> int | None:
    """Return the port's number on this pod: a name means what the pod's containers call so, and may differ per pod."""
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int) or target.isdigit():
        return int(target)
    named = (p for c in pod["spec"]["containers"] for p in c.get("ports") or () if p.get("name") == target)
    return next((int(p["containerPort"]) for p in named), None)


def order(backends: Iterable[Backend], open_connections: Mapping[Backend, int], turn: int) -> list[Backend]:
    """Return the backends in the order to try them: fewest open connections first, equals in rotation by `turn`."""
    ring = list(backends)
    start = turn % len(ring) if ring else 0
    return sorted(ring[start:] + ring[:start], key=lambda backend: open_connections.get(backend, 0))
