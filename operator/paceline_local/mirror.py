"""A local copy of all objects of one kind, kept current by list and watch, with a callback for every change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline_local.backoff import pauses
from paceline_local.client import ApiClient
from paceline_local.errors import ApiError, ApiUnavailable
from paceline_local.manifests import Manifest, key_of
from paceline_local.resources import Resource

__all__ = ["Mirror", "OnChange"]

log = logging.getLogger(__name__)
_RETRY_S = 0.5
_LONGEST_RETRY_S = 8.0

OnChange = Callable[[str, Manifest], None]  # (ADDED|MODIFIED|DELETED, object)


class Mirror:
    """The objects of one kind in all namespaces, by `namespace/name`.

    While the API server is away the last known state stays: the data path must not depend on the control plane.
    """

    def __init__(self, client: ApiClient, resource: Resource, on_change: OnChange) -> None:
        self._client = client
        self._resource = resource
        self._on_change = on_change
        self.items: dict[str, Manifest] = {}
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        version: str | None = None
        waits = pauses(_RETRY_S, _LONGEST_RETRY_S)
        while True:
            try:
                version = version or await self._list()
                version = await self._follow(version)
                waits = pauses(_RETRY_S, _LONGEST_RETRY_S)
            except ApiError as error:
                version = None
                if not error.expired:
                    log.warning("%s: %s", self._resource.plural, error)
                    await asyncio.sleep(next(waits))
            except ApiUnavailable as error:
                # after a restart the server may have forgotten our version, or count from another: list again
                version = None
                log.debug("%s", error)
                await asyncio.sleep(next(waits))

    async def _list(self) -> str:
        listing = await self._client.list(self._resource)
        fresh = {key_of(item): item for item in listing.items}
        for key, old in list(self.items.items()):
            new = fresh.get(key)
            if new is None or new["metadata"]["uid"] != old["metadata"]["uid"]:
                self._apply("DELETED", old)
        for key, item in fresh.items():
            known = self.items.get(key)
            if known is None or known["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._apply("MODIFIED" if known else "ADDED", item)
        self.synced.set()
        return listing.version

    async def _follow(self, version: str) -> str:
        async for kind, item in self._client.watch(self._resource, version):
            version = item["metadata"]["resourceVersion"]
            if kind != "BOOKMARK":
                self._apply(kind, item)
        return version

    def _apply(self, kind: str, item: Manifest) -> None:
        if kind == "DELETED":
            self.items.pop(key_of(item), None)
        else:
            self.items[key_of(item)] = item
        try:
            self._on_change(kind, item)
        except Exception:  # one object's trouble must not end the view of all others
            log.exception("%s of %s %s can't be dealt with", kind, self._resource.kind, key_of(item))
