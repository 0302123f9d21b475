"""A small asyncio client of the Kubernetes API: what the controllers, the node agent and the commands need, no more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from paceline_local.errors import ApiError, ApiUnavailable
from paceline_local.kubeconfig import Connection, load_connection
from paceline_local.manifests import Manifest
from paceline_local.resources import Resource

__all__ = ["APPLY", "JSON", "MERGE", "ApiClient", "Listing"]

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
JSON = "application/json"
_AGENT = {"User-Agent": "paceline-local/1"}  # servers take the field manager of a write from it
_TIMEOUT_S = 30.0
_WATCH_S = 300  # the server ends a watch after this; the caller starts the next one where it stopped


@dataclass(frozen=True, slots=True)
class Listing:
    """What a list request answered: the objects, and the version from which a watch goes on."""

    items: list[Manifest]
    version: str


class ApiClient:
    """One connection pool to one API server. Use as an async context manager."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_kubeconfig(cls, kubeconfig: Path) -> ApiClient:
        """Return a client of the kubeconfig's current context. Raises `LocalError` if it can't be read."""
        return cls(load_connection(kubeconfig))

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(ssl=self._connection.tls or False, limit=0)
        self._session = aiohttp.ClientSession(
            self._connection.server, connector=connector, headers=_AGENT | self._connection.headers, trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> Any:
        """Send one request and return the decoded answer. Raises `ApiError` or `ApiUnavailable`."""
        assert self._session is not None, "use the client as a context manager"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": accept} | ({"Content-Type": content} if data is not None else {})
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.request(
                method, path, params=params, data=data, headers=headers, timeout=timeout
            ) as response:
                return _decode(response.status, await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnavailable(f"the API server at {self._connection.server} doesn't answer: {error!r}") from error

    async def list(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> Listing:
        """Return the objects of a kind, in one or all namespaces, each with apiVersion and kind (lists leave them out)."""
        answer = await self.request("GET", resource.path(namespace), params={"labelSelector": labels} if labels else None)
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        return Listing([kind | item for item in answer.get("items") or ()], answer["metadata"]["resourceVersion"])

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Manifest:
        """Return one object."""
        answer: Manifest = await self.request("GET", resource.path(namespace, name))
        return answer

    async def create(self, resource: Resource, body: Manifest, namespace: str | None = None) -> Manifest:
        """Create an object and return it as stored."""
        whole = {"apiVersion": resource.api_version, "kind": resource.kind} | body
        answer: Manifest = await self.request("POST", resource.path(namespace), body=whole)
        return answer

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Manifest,
        namespace: str | None = None,
        *,
        subresource: str | None = None,
        content: str = MERGE,
        params: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Patch one object (JSON merge patch unless `content` says otherwise) and return it as stored."""
        path = resource.path(namespace, name, subresource)
        answer: Manifest = await self.request("PATCH", path, body=body, content=content, params=params)
        return answer

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Delete one object; with `uid` only that very object, with `grace` 0 at once."""
        options: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        await self.request("DELETE", resource.path(namespace, name), body=options)

    async def watch(
        self, resource: Resource, version: str, namespace: str | None = None
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield (`ADDED|MODIFIED|DELETED|BOOKMARK`, object) from `version` on, until the server ends the watch.

        Raises `ApiError` (`expired` where a fresh list is needed) or `ApiUnavailable`.
        """
        assert self._session is not None, "use the client as a context manager"
        params = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        # a dead connection must not look like a quiet one: silence for much longer than the watch lasts is an error
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_WATCH_S + _TIMEOUT_S)
        try:
            async with self._session.get(resource.path(namespace), params=params, timeout=timeout) as response:
                if response.status != 200:
                    _decode(response.status, await response.read())
                async for line in _lines(response.content):
                    yield _watch_event(json.loads(line))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiUnavailable(f"watch of {resource.plural} broke: {error!r}") from error


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines; the stream's own readline refuses objects over 128 KiB."""
    pending = b""
    async for chunk in stream.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def _watch_event(event: Manifest) -> tuple[str, Manifest]:
    if event["type"] == "ERROR":
        raise _error(int(event["object"].get("code", 500)), event["object"])
    return event["type"], event["object"]


def _decode(status: int, raw: bytes) -> Any:
    try:
        answer = json.loads(raw) if raw else {}
    except ValueError:
        answer = raw.decode(errors="replace")
    if status >= 400:
        raise _error(status, answer)
    return answer


def _error(status: int, answer: Any) -> ApiError:
    if not isinstance(answer, dict):
        return ApiError(status, "Unknown", str(answer).strip() or f"HTTP {status}")
    message = answer.get("message") or f"HTTP {status}"
    return ApiError(status, answer.get("reason") or "Unknown", message, answer.get("details"))
