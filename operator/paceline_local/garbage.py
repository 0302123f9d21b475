"""Garbage collection by owner references, for a real API server without a controller manager (as envtest brings it).

The embedded API server does this itself, and so does a controller manager.
"""

from __future__ import annotations

import asyncio
import logging

from paceline_local.client import ApiClient
from paceline_local.errors import ApiError, ApiUnavailable
from paceline_local.manifests import Manifest, is_deleting, key_of
from paceline_local.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    PODS,
    REPLICA_SETS,
    SECRETS,
    SERVICES,
    Resource,
)

__all__ = ["GarbageCollector", "orphans"]

log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
_OLD_BUDGETS = Resource("policy", "v1beta1", "poddisruptionbudgets", "PodDisruptionBudget")
COLLECTED = (
    DEPLOYMENTS, REPLICA_SETS, PODS, SERVICES, CONFIG_MAPS, SECRETS, _SERVICE_ACCOUNTS, _POLICIES, _BUDGETS, _OLD_BUDGETS,
)  # fmt: skip


def orphans(objects: list[Manifest], living: set[str]) -> list[Manifest]:
    """Return the objects that have owners of which none lives any more. `living` holds the uids of those that do."""
    found = []
    for obj in objects:
        owners = obj["metadata"].get("ownerReferences") or ()
        if owners and not is_deleting(obj) and not any(owner["uid"] in living for owner in owners):
            found.append(obj)
    return found


class GarbageCollector:
    """Looks at everything that our kinds can own once a second: simple, and right for a few dozen objects."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                for resource in COLLECTED:
                    await self._collect(resource)
            except ApiUnavailable as error:
                log.debug("%s", error)
            await asyncio.sleep(_INTERVAL_S)

    async def _collect(self, resource: Resource) -> None:
        try:
            objects = (await self._client.list(resource)).items
        except ApiError as error:
            if not error.not_found:  # a version that this server doesn't have
                log.warning("%s: %s", resource.plural, error)
            return
        owned = [obj for obj in objects if obj["metadata"].get("ownerReferences")]
        living = {uid for obj in owned for uid in await self._living_owners(obj)}
        for obj in orphans(owned, living):
            await self._delete(resource, obj)

    async def _living_owners(self, obj: Manifest) -> list[str]:
        """Return the uids of the object's owners that exist. An owner that can't be looked up counts as living."""
        found = []
        for owner in obj["metadata"]["ownerReferences"]:
            group, _, version = owner["apiVersion"].rpartition("/")
            resource = Resource(group, version, f"{owner['kind'].lower()}s", owner["kind"])
            try:
                living = await self._client.get(resource, owner["name"], obj["metadata"].get("namespace"))
            except ApiError as error:
                found += [] if error.not_found else [owner["uid"]]
                continue
            found += [owner["uid"]] if living["metadata"]["uid"] == owner["uid"] else []
        return found

    async def _delete(self, resource: Resource, obj: Manifest) -> None:
        meta = obj["metadata"]
        log.info("deleting %s %s: its owner is gone", resource.kind, key_of(obj))
        try:
            await self._client.delete(resource, meta["name"], meta.get("namespace"), uid=meta["uid"])
        except ApiError as error:
            if not (error.not_found or error.conflict):
                log.warning("%s %s: %s", resource.kind, key_of(obj), error)
