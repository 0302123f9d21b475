"""A client of the API server under test, and the objects that the suite makes there.

Where an old real server can't do what a current one does, `Api` says so in one place (its properties).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import kubernetes

from paceline_local.kubeconfig import load_connection

JSON = "application/json"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
SETTLE_S = 30.0  # what a loaded machine may take for what the server does by itself


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any
    headers: httpx.Headers

    @property
    def reason(self) -> str:
        return str(self.body.get("reason"))

    @property
    def version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])

    def ok(self) -> dict[str, Any]:
        assert self.status < 300, f"{self.status}: {self.body}"
        return self.body


@dataclass
class Api:
    kubeconfig: Path
    real: bool
    prefix: str = field(default_factory=lambda: "cp-" + secrets.token_hex(4))
    created: list[str] = field(default_factory=list)

    @cached_property
    def http(self) -> httpx.Client:
        connection = load_connection(self.kubeconfig)
        return httpx.Client(
            base_url=connection.server,
            headers={**connection.headers, "User-Agent": "suite/1.0"},
            verify=connection.tls or True,
            trust_env=False,
            timeout=60,
        )

    @cached_property
    def client(self) -> kubernetes.client.ApiClient:
        return kubernetes.config.new_client_from_config(str(self.kubeconfig))

    @cached_property
    def minor(self) -> int:
        return int("".join(c for c in self.get("/version").ok()["minor"] if c.isdigit()))

    @property
    def policy_version(self) -> str:
        return "v1" if self.minor >= 21 else "v1beta1"

    @property
    def tracks_subresources(self) -> bool:
        """managedFields tell a subresource's writers apart, and don't let them own what they can't write."""
        return self.minor >= 22

    @property
    def validates_fields(self) -> bool:
        """The `fieldValidation` parameter and its warnings exist."""
        return self.minor >= 25

    def request(self, method: str, path: str, body: Any = None, content: str = JSON, **params: Any) -> Answer:
        headers = {"Content-Type": content} if body is not None else {}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        response = self.http.request(method, path, content=data, headers=headers, params=params)
        text = response.text
        return Answer(response.status_code, json.loads(text) if text.startswith("{") else text, response.headers)

    def get(self, path: str, **params: Any) -> Answer:
        return self.request("GET", path, **params)

    def post(self, path: str, body: Any, **params: Any) -> Answer:
        return self.request("POST", path, body, **params)

    def put(self, path: str, body: Any, **params: Any) -> Answer:
        return self.request("PUT", path, body, **params)

    def patch(self, path: str, body: Any, content: str = MERGE, **params: Any) -> Answer:
        return self.request("PATCH", path, body, content, **params)

    def apply(self, path: str, body: Any, manager: str = "applier", **params: Any) -> Answer:
        return self.request("PATCH", path, body, APPLY, fieldManager=manager, **params)

    def delete(self, path: str, body: Any = None, **params: Any) -> Answer:
        return self.request("DELETE", path, body, **params)

    @contextlib.contextmanager
    def watching(self, path: str, **params: Any) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        query = {"watch": "1", "timeoutSeconds": 20, **params}
        with self.http.stream("GET", path, params=query) as response:
            assert response.status_code == 200, response.read()
            yield ((event["type"], event["object"]) for event in map(json.loads, response.iter_lines()))

    def table(self, path: str, **params: Any) -> dict[str, Any]:
        accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
        response = self.http.get(path, headers={"Accept": accept}, params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def new_namespace(self) -> str:
        name = f"{self.prefix}-{secrets.token_hex(3)}"
        self.post("/api/v1/namespaces", {"metadata": {"name": name}}).ok()
        self.created.append(name)
        return name

    def close(self) -> None:
        """Give every connection back, so that none is left to the garbage collector (a warning, and so an error)."""
        self.http.close()
        if "client" in self.__dict__:
            self.client.rest_client.pool_manager.clear()
            self.client.close()

    def gone(self, path: str) -> bool:
        return self.get(path).status == 404


def eventually(check: Callable[[], Any], what: str = "") -> Any:
    """Poll until `check` returns something true; for what a server does by itself."""
    deadline = time.monotonic() + SETTLE_S
    while not (found := check()):
        assert time.monotonic() < deadline, what or "it did not happen"
        time.sleep(0.05)
    return found


def widget_crd(
    group: str, plural: str = "widgets", kind: str = "Widget", more: dict[str, Any] | None = None
) -> dict[str, Any]:
    part = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
    spec = {
        "type": "object",
        "required": ["size"],
        "properties": {
            "size": {"type": "integer", "minimum": 1, "maximum": 100},
            "ratio": {"type": "number", "exclusiveMinimum": True, "minimum": 0},
            "replicas": {"type": "integer"},
            "mode": {"type": "string", "enum": ["static", "continuous"]},
            "code": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
            "note": {"type": "string", "nullable": True},
            "plain": {"type": "string"},
            "level": {"type": "string", "default": "low"},
            "nested": {"type": "object", "properties": {"on": {"type": "boolean", "default": True}}},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "list": {"type": "array", "maxItems": 3, "items": {"type": "string"}},
            **(more or {}),
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "parts": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": part,
            },
        },
    }
    status = {
        "type": "object",
        "properties": {
            "replicas": {"type": "integer"},
            "selector": {"type": "string"},
            "phase": {"type": "string"},
            "observed": {"type": "integer"},
        },
    }
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": status}}},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
            {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
            {"name": "Level", "type": "string", "jsonPath": ".spec.level", "priority": 1},
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "shortNames": ["wd"]},
            "versions": [version],
        },
    }


def config_map(name: str, data: dict[str, str] | None = None, **meta: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **meta}, "data": data or {}}


def deployment(name: str, **spec: Any) -> dict[str, Any]:
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"containers": [{"name": "main", "image": "localhost/none:1", "env": [{"name": "A", "value": "1"}]}]},
    }
    body = {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": template, **spec}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": body}


def pod(name: str, **meta: Any) -> dict[str, Any]:
    # a node selector that no node fulfils: a real scheduler leaves the pod alone
    spec = {
        "nodeSelector": {"paceline.dev/nowhere": "true"},
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "localhost/none:1", "ports": [{"containerPort": 80}]}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **meta}, "spec": spec}


def managers(obj: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return `fieldsV1` by (manager, operation)."""
    return {(e["manager"], e["operation"]): e["fieldsV1"] for e in obj["metadata"].get("managedFields") or []}
