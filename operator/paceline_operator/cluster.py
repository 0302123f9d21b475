"""The only module that talks to the API server: server-side apply, reads, status and events, with retries.

The official client is blocking, so each call runs on a bounded pool of threads and never holds up the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from paceline_operator.errors import ApiRefused, ApiUnavailable, SettingsError
from paceline_operator.metrics import Metrics
from paceline_operator.names import FIELD_MANAGER, GROUP, PLURAL, SERVICE_LABEL, VERSION

__all__ = ["KINDS", "Cluster", "load_configuration"]

Object = dict[str, Any]
_ATTEMPTS = 5
_FIRST_BACKOFF = 0.2  # seconds; doubles: 0.2 … 1.6, about 3 s in all, then the queue's own backoff takes over
_LONGEST_WAIT = 10.0  # seconds that a server's Retry-After may ask of one call
_TIMEOUT = (5.0, 30.0)  # seconds to connect, to answer
_TRANSIENT = (408, 409, 429)
# servers up to 1.20 (seen there) answer 500 to an apply of a wrong type or an unknown field: trying again can't help
_MISTYPED = ("failed to create typed patch object", "failed to convert new object")


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a kind lives in the API."""

    group_version: str
    plural: str

    def path(self, namespace: str | None, name: str = "") -> str:
        """Return the path of one object or, without a name, of the collection (None: of all namespaces)."""
        root = "/api/" if "/" not in self.group_version else "/apis/"
        space = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{self.group_version}{space}/{self.plural}" + (f"/{name}" if name else "")


# Secrets are missing on purpose: the operator writes its own and never reads one
KINDS = {
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "ConfigMap": Kind("v1", "configmaps"),
    "Service": Kind("v1", "services"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Pod": Kind("v1", "pods"),
}
_SERVICES = Kind(f"{GROUP}/{VERSION}", PLURAL)
_WRITABLE = {"Secret": Kind("v1", "secrets"), "Event": Kind("v1", "events"), **KINDS}


def load_configuration() -> client.Configuration:
    """Return the client configuration: of KUBECONFIG if it is set, else in-cluster, else of ~/.kube/config.

    Raises `SettingsError` if there is none that can be used.
    """
    configuration = client.Configuration()
    configuration.retries = False  # ours are counted and bounded; the client's would hide an overloaded server
    try:
        kubeconfig = os.environ.get("KUBECONFIG") or None  # the client itself looks only when it is imported
        if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            config.load_kube_config(kubeconfig, client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError, ValueError) as error:
        raise SettingsError(f"no API server to talk to: {error}; set KUBECONFIG or run in a cluster") from error
    return configuration


class Cluster:
    """Calls to one API server. Methods return JSON data, None where the object isn't there.

    They raise `ApiRefused` for what a retry can't mend and `ApiUnavailable` when the retries are used up.
    """

    def __init__(self, configuration: client.Configuration, metrics: Metrics, *, threads: int = 8) -> None:
        configuration.connection_pool_maxsize = threads
        self._client = client.ApiClient(configuration)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="api")
        self._metrics = metrics
        self.pdb_version = "policy/v1"

    def close(self) -> None:
        """End the threads; calls in flight finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()  # type: ignore[no-untyped-call]

    async def discover(self) -> None:
        """Find out which version of PodDisruptionBudget the server has (policy/v1 since 1.21)."""
        group = await self._call("GET", "/apis/policy", "APIGroup") or {}
        served = [version["groupVersion"] for version in group.get("versions", [])]
        self.pdb_version = "policy/v1" if "policy/v1" in served else "policy/v1beta1"

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return one object."""
        return await self._call("GET", self._kind(kind).path(namespace, name), kind)

    async def children(self, kind: str, namespace: str | None) -> list[Object]:
        """Return all objects of `kind` that carry our label, in one namespace or (None) in all."""
        found = await self._call("GET", self._kind(kind).path(namespace), kind, query=[("labelSelector", SERVICE_LABEL)])
        # items of a list come without their kind
        return [{"kind": kind, **item} for item in (found or {}).get("items", [])]

    async def services(self, namespace: str | None) -> list[Object]:
        """Return all InferenceServices, in one namespace or (None) in all."""
        found = await self._call("GET", _SERVICES.path(namespace), "InferenceService")
        if found is None:
            raise ApiUnavailable(f"the CRD {PLURAL}.{GROUP} isn't installed: run 'kubectl apply -f crds/'")
        return list(found.get("items", []))

    async def apply(self, child: Mapping[str, Any], manager: str = FIELD_MANAGER) -> Object:
        """Apply a child with our field manager, forced for the fields that it states; return the live object."""
        kind, meta = child["kind"], child["metadata"]
        path = self._kind(kind).path(meta["namespace"], meta["name"])
        query = [("fieldManager", manager), ("force", "true")]
        live = await self._call("PATCH", path, kind, child, "application/apply-patch+yaml", query)
        if live is None:
            raise ApiUnavailable(f"{kind} {meta['name']}: the API server has no such path now")
        return live

    async def merge(self, kind: str, namespace: str, name: str, patch: Mapping[str, Any]) -> Object | None:
        """Merge `patch` into a child, with a resourceVersion in it only if it is still that; return the live object."""
        path, merge = self._kind(kind).path(namespace, name), "application/merge-patch+json"
        return await self._call("PATCH", path, kind, patch, merge, [("fieldManager", FIELD_MANAGER)])

    async def patch_status(self, namespace: str, name: str, version: str, patch: Mapping[str, Any]) -> Object | None:
        """Merge `patch` into the status of an InferenceService, if it is still in `version`: what a pass found out about one
        must not be told of another that was made under the same name meanwhile. Else `ApiUnavailable`: look again."""
        path = _SERVICES.path(namespace, name) + "/status"
        body = {"metadata": {"resourceVersion": version}, "status": patch}
        query, merge = [("fieldManager", FIELD_MANAGER)], "application/merge-patch+json"
        try:
            return await self._call("PATCH", path, "InferenceService", body, merge, query, transient=(408, 429))
        except ApiRefused as error:
            if error.status != 409:
                raise
            raise ApiUnavailable(f"{name} has changed meanwhile, so its status isn't written") from error

    async def create_event(self, event: Mapping[str, Any]) -> None:
        """Record an event; one that is there already (same name) is counted up."""
        meta = event["metadata"]
        collection = _WRITABLE["Event"].path(meta["namespace"])
        try:
            await self._call("POST", collection, "Event", event, "application/json", transient=(408, 429))
        except ApiRefused as error:
            if error.status != 409:
                raise
            await self._count_event(f"{collection}/{meta['name']}", event)

    async def _count_event(self, path: str, event: Mapping[str, Any]) -> None:
        known = await self._call("GET", path, "Event") or {}
        patch = {"count": int(known.get("count") or 1) + 1, "lastTimestamp": event["lastTimestamp"]}
        await self._call("PATCH", path, "Event", patch, "application/merge-patch+json")

    def _kind(self, kind: str) -> Kind:
        found = _WRITABLE[kind]
        return Kind(self.pdb_version, found.plural) if kind == "PodDisruptionBudget" else found

    async def _call(
        self,
        verb: str,
        path: str,
        kind: str,
        body: Any = None,
        content_type: str = "application/json",
        query: list[tuple[str, str]] | None = None,
        *,
        transient: tuple[int, ...] = _TRANSIENT,
    ) -> Object | None:
        loop = asyncio.get_running_loop()
        for attempt in range(_ATTEMPTS):
            answer = await loop.run_in_executor(self._threads, self._send, verb, path, body, content_type, query or [])
            self._metrics.api_calls.labels(verb, kind, str(answer.status)).inc()
            if not (answer.status == 0 or answer.status >= 500 or answer.status in transient):
                return answer.result(f"{verb} {path}")
            if attempt + 1 < _ATTEMPTS:
                backoff = _FIRST_BACKOFF * 2**attempt * random.uniform(0.75, 1.25)  # noqa: S311  spreads retries only
                await asyncio.sleep(max(backoff, min(answer.retry_after or 0.0, _LONGEST_WAIT)))
        raise ApiUnavailable(f"{verb} {path}: {answer.message}", retry_after=answer.retry_after)

    def _send(self, verb: str, path: str, body: Any, content_type: str, query: list[tuple[str, str]]) -> _Answer:
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if body is not None else {})
        request = self._client.param_serialize(verb, path, {}, query, headers, body, auth_settings=["BearerToken"])
        try:
            response = self._client.call_api(*request, _request_timeout=_TIMEOUT)
            text = response.read()  # type: ignore[no-untyped-call]
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            return _Answer(int(getattr(error, "status", 0) or 0), str(error), None, None)
        retry_after = response.headers.get("Retry-After", "")
        return _Answer.of(response.status, text, float(retry_after) if retry_after.isdigit() else None)


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer of the API server; status 0 means that there was none."""

    status: int
    message: str
    data: Object | None
    retry_after: float | None

    @classmethod
    def of(cls, status: int, text: bytes, retry_after: float | None) -> _Answer:
        try:
            data = json.loads(text)
        except ValueError:
            return cls(status if status >= 300 else 502, text[:200].decode(errors="replace"), None, retry_after)
        message = str(data.get("message", ""))
        if status == 500 and message.startswith(_MISTYPED):
            status = 400
        return cls(status, message, data, retry_after)

    def result(self, what: str) -> Object | None:
        if self.status == 404:
            return None
        if self.status >= 300:
            raise ApiRefused(self.status, self.message or f"{what}: HTTP {self.status}")
        return self.data
