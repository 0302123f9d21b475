"""What surrounds the operator in the fleet bench: the users who write services, and the Deployment controller."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from bench.fleet_plane import MERGE, Client

GROUP = "/apis/paceline.io/v1alpha1"
PER_NAMESPACE = 50
CLASS = "fleet"
Object = dict[str, Any]


def place(number: int) -> tuple[str, str]:
    """Return namespace and name of a service."""
    return f"team-{number // PER_NAMESPACE:02d}", f"chat-{number:04d}"


def path_of(number: int) -> str:
    namespace, name = place(number)
    return f"{GROUP}/namespaces/{namespace}/inferenceservices/{name}"


def manifest(number: int, replicas: int) -> Object:
    """Return the manifest of a service with a model that nobody will load: there is no kubelet."""
    namespace, name = place(number)
    spec = {
        "model": {"uri": "hf://example/model"},
        "className": CLASS,
        "replicas": replicas,
        "batching": {"strategy": "continuous"},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        "tuning": {"mode": "Off"},
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec}


def inference_class(slots: int) -> Object:
    """Return the class of all services; it gives them `maxNumSeqs`."""
    spec = {"defaults": {"batching": {"maxNumSeqs": slots}}, "allowed": {"models": ["hf://*"]}}
    return {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceClass", "metadata": {"name": CLASS}, "spec": spec}


def create(client: Client, numbers: range, replicas: int) -> None:
    """Create services, and the namespaces that are missing."""
    known = {item["metadata"]["name"] for item in client.call("GET", "/api/v1/namespaces")["items"]}
    spaces = sorted({place(number)[0] for number in numbers} - known)
    client.many([("POST", "/api/v1/namespaces", {"metadata": {"name": name}}, "application/json") for name in spaces])
    bodies = [manifest(number, replicas) for number in numbers]
    client.many(
        [
            ("POST", f"{GROUP}/namespaces/{b['metadata']['namespace']}/inferenceservices", b, "application/json")
            for b in bodies
        ]
    )


@dataclass
class Watch:
    """Follows a kind in all namespaces on its own thread and keeps what `_take` makes of it."""

    client: Client
    path: str
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Any:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()

    def _follow(self) -> None:
        version = ""
        while not self._stop.is_set():
            try:
                for event in self._events(version):
                    version = event["object"]["metadata"].get("resourceVersion", "")
                    self._take(event["type"], event["object"])
                    if self._stop.is_set():
                        return
            except (httpx.HTTPError, KeyError):  # a cut stream or an outdated version: begin anew
                version = ""
                self._stop.wait(0.2)

    def _events(self, version: str) -> Iterator[Any]:
        query = {"watch": "1", "timeoutSeconds": "600", **({"resourceVersion": version} if version else {})}
        timeout = httpx.Timeout(10.0, read=660.0)
        with self.client.http.stream("GET", self.path, params=query, timeout=timeout) as answer:
            yield from map(json.loads, answer.iter_lines())

    def _take(self, kind: str, item: Object) -> None:
        raise NotImplementedError


@dataclass
class Services(Watch):
    """What the services' statuses say: `ready` and `current` (the status is about the newest spec), with times."""

    ready: dict[str, float] = field(default_factory=dict)
    current: dict[str, int] = field(default_factory=dict)

    def _take(self, kind: str, item: Object) -> None:
        name, status = item["metadata"]["name"], item.get("status") or {}
        if kind == "DELETED":
            self.ready.pop(name, None)
            self.current.pop(name, None)
            return
        self.current[name] = int(status.get("observedGeneration") or 0)
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        if conditions.get("Ready") == "True":
            self.ready.setdefault(name, time.monotonic())
        else:
            self.ready.pop(name, None)


@dataclass
class Knobs(Watch):
    """The services' knob files, each with the time at which this text was first seen."""

    seen: dict[str, tuple[float, str]] = field(default_factory=dict)

    def _take(self, kind: str, item: Object) -> None:
        name, text = item["metadata"]["name"].removesuffix("-knobs"), (item.get("data") or {}).get("knobs.json", "")
        if self.seen.get(name, (0.0, ""))[1] != text:
            self.seen[name] = (time.monotonic(), text)

    def slots(self, name: str) -> int:
        """Return the `maxNumSeqs` that a service's file has, 0 if there is none."""
        text = self.seen.get(name, (0.0, ""))[1]
        return int(json.loads(text)["knobs"]["maxNumSeqs"]) if text else 0


@dataclass
class DeploymentController(Watch):
    """Says of every Deployment that its replicas are ready, as the controller does once pods run."""

    _writers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))
    writes: int = 0

    def _take(self, kind: str, item: Object) -> None:
        generation, status = item["metadata"]["generation"], item.get("status") or {}
        if kind != "DELETED" and status.get("observedGeneration") != generation:
            self._writers.submit(self._write, item, generation)

    def _write(self, item: Object, generation: int) -> None:
        meta, replicas = item["metadata"], item["spec"].get("replicas", 1)
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas)
        path = f"/apis/apps/v1/namespaces/{meta['namespace']}/deployments/{meta['name']}/status"
        self.client.call("PATCH", path, {"status": {"observedGeneration": generation, **counts}}, MERGE)
        self.writes += 1

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._writers.shutdown(cancel_futures=True)
