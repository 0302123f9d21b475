"""The only module that talks to the API server: server-side apply, reads, status and events, with retries.

The official client is blocking, so each call runs on a bounded pool of threads and never holds up the event loop.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kubernetes import client, config

from paceline_operator.api_kinds import KINDS, OPTIONAL, Apis, Kind
from paceline_operator.errors import ApiRefused, ApiUnavailable, SettingsError
from paceline_operator.leader import Elected, Leadership
from paceline_operator.metrics import Metrics
from paceline_operator.names import (
    CLASS_KIND,
    CLASS_PLURAL,
    FIELD_MANAGER,
    GROUP,
    KIND,
    PLURAL,
    POSTED,
    SERVICE_LABEL,
    VERSION,
)
from paceline_operator.ownership import claimed
from paceline_operator.store import shared
from paceline_operator.transport import APPLY, MERGE, UNMADE, Answer, Object, send

__all__ = ["Cluster", "load_configuration"]

Query = list[tuple[str, str]]

_ATTEMPTS = 5
_FIRST_BACKOFF = 0.2  # seconds; doubles: 0.2 … 1.6, about 3 s in all, then the queue's own backoff takes over
_LONGEST_WAIT = 10.0  # seconds that a server's Retry-After may ask of one call
_TRANSIENT = (408, 409, 429)
_PAGE = 250  # objects of a list at once


_SERVICES, _CLASSES = Kind(GROUP, PLURAL, (VERSION,)), Kind(GROUP, CLASS_PLURAL, (VERSION,))
_WRITABLE = {"Secret": Kind("", "secrets"), "Event": Kind("", "events"), **KINDS}
# no object is ever in this version, so an apply that names it creates, or is refused with 409
_ABSENT = "1"


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

    def __init__(
        self,
        configuration: client.Configuration,
        metrics: Metrics,
        *,
        threads: int = 8,
        leadership: Leadership | None = None,
    ) -> None:
        configuration.connection_pool_maxsize = threads
        self._client = client.ApiClient(configuration)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="api")
        self._metrics = metrics
        self._leadership = leadership or Elected()
        self._posted = set[str]()  # kinds that the server doesn't take on the condition that there is none
        self.apis = Apis.of({})

    def close(self) -> None:
        """End the threads; calls in flight finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()  # type: ignore[no-untyped-call]

    async def discover(self) -> bool:
        """Find out which of the optional kinds the server has; return whether that has changed."""
        groups = (await self._call("GET", "/apis", "APIGroupList") or {}).get("groups", [])
        has = {version["groupVersion"] for group in groups for version in group["versions"]}
        asked = {kind.api_version(version) for kind in OPTIONAL.values() for version in kind.versions}
        served = {way: await self._plurals(way) for way in sorted(asked & has)}
        before, self.apis = self.apis, Apis.of(served)
        return self.apis != before

    async def _plurals(self, api_version: str) -> set[str]:
        """Return what a group version serves; nothing if it has gone meanwhile."""
        found = await self._call("GET", f"/apis/{api_version}", "APIResourceList") or {}
        return {resource["name"] for resource in found.get("resources", [])}

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return one object."""
        return await self._call("GET", self._path(kind, namespace, name), kind)

    async def children(self, kind: str, namespace: str | None) -> list[Object]:
        """Return all objects of `kind` that carry our label, in one namespace or (None) in all."""
        found = await self._list(self._path(kind, namespace), kind, [("labelSelector", SERVICE_LABEL)])
        # items of a list come without their kind
        return [{"kind": kind, **item} for item in found or []]

    async def services(self, namespace: str | None) -> list[Object]:
        """Return all InferenceServices, in one namespace or (None) in all."""
        found = await self._list(_SERVICES.path(f"{GROUP}/{VERSION}", namespace), KIND, [])
        if found is None:
            raise ApiUnavailable(f"the CRD {PLURAL}.{GROUP} isn't installed: run 'kubectl apply -f crds/'")
        return found

    async def classes(self) -> list[Object]:
        """Return all InferenceClasses."""
        found = await self._list(_CLASSES.path(f"{GROUP}/{VERSION}", None), CLASS_KIND, [])
        if found is None:
            raise ApiUnavailable(f"the CRD {CLASS_PLURAL}.{GROUP} isn't installed: run 'kubectl apply -f crds/'")
        return found

    async def _list(self, path: str, kind: str, query: Query) -> list[Object] | None:
        """Return all objects without their managedFields, None if there is no such kind. They are read in pages: a whole
        list decoded at once is the peak of an operator's memory. A list whose place isn't kept so long begins anew."""
        found, place = list[Object](), ""
        while True:
            asked = [*query, ("limit", str(_PAGE)), *([("continue", place)] if place else [])]
            try:
                page = await self._call("GET", path, kind, query=asked)
            except ApiRefused as error:
                if error.status != 410 or not place:
                    raise
                found, place = [], ""
                continue
            if page is None:
                return None
            for item in page.get("items", []):
                item["metadata"].pop("managedFields", None)
                found.append(shared(item))
            place = (page.get("metadata") or {}).get("continue") or ""
            if not place:
                return found

    async def patch_class_status(self, name: str, version: str, status: Mapping[str, Any]) -> Object | None:
        """Merge `status` into that of an InferenceClass, if it is still in `version`."""
        path = _CLASSES.path(f"{GROUP}/{VERSION}", None, name) + "/status"
        body = {"metadata": {"resourceVersion": version}, "status": status}
        return await self._patch_status(path, CLASS_KIND, name, body)

    async def apply(self, child: Mapping[str, Any], manager: str = FIELD_MANAGER) -> Object:
        """Apply a child with our field manager, forced for the fields that it states; return the live object."""
        kind, meta = child["kind"], child["metadata"]
        live = await self._call("PATCH", self._path(kind, meta["namespace"], meta["name"]), kind, child, APPLY, _by(manager))
        if live is None:
            raise ApiUnavailable(f"{kind} {meta['name']}: the API server has no such path now")
        return live

    async def create(self, child: Mapping[str, Any]) -> Object | None:
        """Make a child if there is no object of its name yet: None if there is one, which isn't touched then.

        It is applied on the condition that there is none. Where the server takes no such condition for a kind, and said so
        once, the child is posted instead, with a mark on it: `claim` it before it is applied.
        """
        kind, meta = child["kind"], child["metadata"]
        if kind not in self._posted:
            absent = {**child, "metadata": {**meta, "resourceVersion": _ABSENT}}
            try:
                return await self._make("PATCH", meta["name"], absent, APPLY, _by(FIELD_MANAGER))
            except ApiRefused as error:
                if UNMADE not in str(error):
                    raise
                self._posted.add(kind)
        marked = {**child, "metadata": {**meta, "annotations": {**meta["annotations"], POSTED: "true"}}}
        return await self._make("POST", "", marked, "application/json", [("fieldManager", FIELD_MANAGER)])

    async def _make(self, verb: str, name: str, child: Object, content_type: str, query: Query) -> Object | None:
        """Send what must not exist yet; None if it does."""
        kind, meta = child["kind"], child["metadata"]
        path = self._path(kind, meta["namespace"], name)
        try:
            live = await self._call(verb, path, kind, child, content_type, query, transient=(408, 429))
        except ApiRefused as error:
            if error.status != 409:
                raise
            return None
        if live is None:
            raise ApiUnavailable(f"{kind} {meta['name']}: the API server has no such path now")
        return live

    async def claim(self, live: Mapping[str, Any]) -> None:
        """Make what a POST wrote ours to take out: nothing if the object isn't marked as posted."""
        kind, meta = live["kind"], live["metadata"]
        if POSTED not in (meta.get("annotations") or {}):
            return
        found = await self.get(kind, meta["namespace"], meta["name"])
        if found is not None and found["metadata"]["uid"] == meta["uid"]:
            fields = claimed(found["metadata"].get("managedFields") or (), FIELD_MANAGER)
            patch = {"resourceVersion": found["metadata"]["resourceVersion"], "managedFields": fields}
            patch["annotations"] = {POSTED: None}
            await self.merge(kind, meta["namespace"], meta["name"], {"metadata": patch})

    async def delete(self, live: Mapping[str, Any]) -> None:
        """Delete this very object, in the background; another one of its name, and one that is gone, are fine."""
        meta = live["metadata"]
        options = {"preconditions": {"uid": meta["uid"]}, "propagationPolicy": "Background"}
        path = self._path(live["kind"], meta["namespace"], meta["name"])
        try:
            await self._call("DELETE", path, live["kind"], options, transient=(408, 429))
        except ApiRefused as error:
            if error.status != 409:
                raise

    async def merge(self, kind: str, namespace: str, name: str, patch: Mapping[str, Any]) -> Object | None:
        """Merge `patch` into a child, with a resourceVersion in it only if it is still that; return the live object."""
        return await self._call(
            "PATCH", self._path(kind, namespace, name), kind, patch, MERGE, [("fieldManager", FIELD_MANAGER)]
        )

    async def patch_status(self, namespace: str, name: str, version: str, patch: Mapping[str, Any]) -> Object | None:
        """Merge `patch` into the status of an InferenceService, if it is still in `version`: what a pass found out about one
        must not be told of another that was made under the same name meanwhile. Else `ApiUnavailable`: look again."""
        path = _SERVICES.path(f"{GROUP}/{VERSION}", namespace, name) + "/status"
        return await self._patch_status(path, KIND, name, {"metadata": {"resourceVersion": version}, "status": patch})

    async def _patch_status(self, path: str, kind: str, name: str, body: Object) -> Object | None:
        query = [("fieldManager", FIELD_MANAGER)]
        try:
            return await self._call("PATCH", path, kind, body, MERGE, query, transient=(408, 429))
        except ApiRefused as error:
            if error.status != 409:
                raise
            raise ApiUnavailable(f"{name} has changed meanwhile, so its status isn't written") from error

    async def create_event(self, event: Mapping[str, Any]) -> None:
        """Record an event; one that is there already (same name) is counted up."""
        meta = event["metadata"]
        collection = self._path("Event", meta["namespace"])
        try:
            await self._call("POST", collection, "Event", event, "application/json", transient=(408, 429))
        except ApiRefused as error:
            if error.status != 409:
                raise
            await self._count_event(f"{collection}/{meta['name']}", event)

    async def _count_event(self, path: str, event: Mapping[str, Any]) -> None:
        known = await self._call("GET", path, "Event") or {}
        patch = {"count": int(known.get("count") or 1) + 1}
        patch |= {field: event[field] for field in ("lastTimestamp", "message", "type")}
        await self._call("PATCH", path, "Event", patch, MERGE)

    def _path(self, kind: str, namespace: str | None, name: str = "") -> str:
        found = _WRITABLE[kind]
        return found.path(self.apis.versions.get(kind) or found.api_version(found.versions[0]), namespace, name)

    async def _call(
        self,
        verb: str,
        path: str,
        kind: str,
        body: Any = None,
        content_type: str = "application/json",
        query: Query | None = None,
        *,
        transient: tuple[int, ...] = _TRANSIENT,
    ) -> Object | None:
        loop = asyncio.get_running_loop()
        for attempt in range(_ATTEMPTS):
            answer = await loop.run_in_executor(self._threads, self._send, verb, path, body, content_type, query)
            self._metrics.api_calls.labels(verb, kind, str(answer.status)).inc()
            if not (answer.status == 0 or answer.status >= 500 or answer.status in transient):
                return answer.result(f"{verb} {path}")
            if attempt + 1 < _ATTEMPTS:
                backoff = _FIRST_BACKOFF * 2**attempt * random.uniform(0.75, 1.25)  # noqa: S311  spreads retries only
                await asyncio.sleep(max(backoff, min(answer.retry_after or 0.0, _LONGEST_WAIT)))
        raise ApiUnavailable(f"{verb} {path}: {answer.message}", retry_after=answer.retry_after)

    def _send(self, verb: str, path: str, body: Any, content_type: str, query: Query | None) -> Answer:
        """Send on a thread of the pool. The last look at the leadership comes here, when the call's turn has come."""
        if verb != "GET" and not self._leadership.may_act():
            return Answer(0, "this operator doesn't lead any more")
        return send(self._client, verb, path, body, content_type, query)


def _by(manager: str) -> Query:
    return [("fieldManager", manager), ("force", "true")]
