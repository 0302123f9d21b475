"""How fast the API server takes the operator's own writes when nobody thinks between them."""

from __future__ import annotations

import json
import time
from typing import Any

from bench.fleet_plane import APPLY, JSON, MERGE, Client
from bench.fleet_world import GROUP, place

_SAMPLE = 100  # services' worth of writes: some seconds, enough to even out the server's compactions
_SPACE = "own-speed"
_SERVER_SET = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid", "ownerReferences")
_PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "PodDisruptionBudget": "/apis/policy/{policy}/namespaces/{}/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
_FEW = ("InferenceClass", "Lease")  # not per service
Call = tuple[str, str, Any, str]


def replay(client: Client, count: int, writes: dict[str, int]) -> float:
    """Return the seconds that `writes` (by kind, of `count` services) take: measured on copies of some of the services'
    objects and scaled up. Raises `KeyError` about a kind that it can't copy."""
    sample = min(_SAMPLE, count)
    client.call("POST", "/api/v1/namespaces", {"metadata": {"name": _SPACE}})
    services = [
        _copy(client.call("GET", f"{GROUP}/namespaces/{place(n)[0]}/inferenceservices/{place(n)[1]}")) for n in range(sample)
    ]
    collection = f"{GROUP}/namespaces/{_SPACE}/inferenceservices"
    client.many([("POST", collection, service, JSON) for service in services])
    calls = _calls(client, count, sample, writes, services)
    begin = time.monotonic()
    client.many(calls)
    seconds = time.monotonic() - begin
    client.many([("DELETE", f"{collection}/{service['metadata']['name']}", None, JSON) for service in services])
    client.many([("DELETE", path.partition("?")[0], None, JSON) for verb, path, _, content in calls if content == APPLY])
    return seconds * count / sample


def _calls(client: Client, count: int, sample: int, writes: dict[str, int], services: list[Any]) -> list[Call]:
    found = list[Call]()
    for kind, total in writes.items():
        each = max(1, round(total / count))
        if kind == "InferenceService":
            found += [_status(service, turn) for turn in range(each) for service in services]
        elif kind == "Event":
            found += [_event(service, turn) for turn in range(each) for service in services]
        elif kind not in _FEW:
            found += [_apply(kind, item) for item in _children(client, kind, sample)]
    return found


def _policy(client: Client) -> str:
    versions = [v["version"] for v in client.call("GET", "/apis/policy")["versions"]]
    return "v1" if "v1" in versions else "v1beta1"


def _children(client: Client, kind: str, sample: int) -> list[Any]:
    found = list[Any]()
    for number in range(0, sample, 50):
        path = _PATHS[kind].format(place(number)[0], policy=_policy(client))
        answer = client.call("GET", f"{path}?labelSelector=paceline.io/service&limit={sample - len(found)}")
        version = answer["apiVersion"]
        found += [_copy({"apiVersion": version, "kind": kind, **item}) for item in answer["items"]]
    return found[:sample]


def _copy(item: Any) -> Any:
    """Return an object as somebody would write it anew, in the bench's own namespace."""
    meta = {name: value for name, value in item["metadata"].items() if name not in _SERVER_SET}
    copied = {name: value for name, value in item.items() if name != "status"} | {"metadata": meta | {"namespace": _SPACE}}
    if item["kind"] == "Service":
        copied["spec"] = {name: value for name, value in item["spec"].items() if name not in ("clusterIP", "clusterIPs")}
    return copied


def _apply(kind: str, item: Any) -> Call:
    version = item["apiVersion"].rpartition("/")[2]
    path = _PATHS[kind].format(_SPACE, policy=version) + f"/{item['metadata']['name']}?fieldManager=bench&force=true"
    return ("PATCH", path, json.dumps(item).encode(), APPLY)


def _status(service: Any, turn: int) -> Call:
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": f"Turn{turn}",
            "message": "m" * 60,
            "lastTransitionTime": "2030-01-01T00:00:00Z",
        }
        for kind in ("Ready", "Progressing", "SpecValid", "ModelReady", "Scheduled", "KnobsSynced", "MetricsAvailable")
    ]
    path = f"{GROUP}/namespaces/{_SPACE}/inferenceservices/{service['metadata']['name']}/status"
    return ("PATCH", path, json.dumps({"status": {"observedGeneration": 1, "conditions": conditions}}).encode(), MERGE)


def _event(service: Any, turn: int) -> Call:
    name = service["metadata"]["name"]
    body = {
        "metadata": {"name": f"{name}.{turn}", "namespace": _SPACE},
        "involvedObject": {"kind": "InferenceService", "name": name, "namespace": _SPACE},
        "reason": "Ready", "message": "m" * 60, "type": "Normal", "count": 1,
    }  # fmt: skip
    return ("POST", f"/api/v1/namespaces/{_SPACE}/events", json.dumps(body).encode(), JSON)
