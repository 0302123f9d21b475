"""The controllers that turn Deployments into ReplicaSets and those into Pods, where no real controller manager runs.

Every round reads the true state from the API server (three lists) instead of a cache, decides with pure functions and
acts: so a round never acts twice on stale data. Rounds happen only after a change, or when a timer says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable

from paceline_local.backoff import BackOff
from paceline_local.client import ApiClient
from paceline_local.deployment_status import deployment_status, progress_deadline
from paceline_local.errors import ApiError, ApiUnavailable
from paceline_local.manifests import Manifest, controller_of, is_deleting, key_of
from paceline_local.mirror import Mirror
from paceline_local.replicaset import new_pod, next_available, plan_pods, replica_set_status
from paceline_local.resources import DEPLOYMENTS, PODS, REPLICA_SETS, Resource
from paceline_local.rollout import (
    REVISION,
    Action,
    AnnotateReplicaSet,
    CreateReplicaSet,
    DeleteReplicaSet,
    ScaleReplicaSet,
    plan_rollout,
)
from paceline_local.waiting import set_within

__all__ = ["Controllers"]

log = logging.getLogger(__name__)
_SETTLE_S = 0.02  # one user action makes several events; one round is enough for them
_RETRY_S = 1.0
_QUOTA_RETRY_S = 5.0
_BACK_OFF = BackOff(first=1.0, limit=60.0, failures=1)  # for an object that can't be worked on; waits from the first time on


class Controllers:
    """Deployment and ReplicaSet controllers over one API client."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._changed = asyncio.Event()
        self._wake_at: float | None = None
        self._failures: dict[str, str] = {}  # ReplicaSet uid → why its pods can't be created
        self._stuck: dict[str, BackOff] = {}  # by uid: objects whose work failed in the last round

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for resource in (DEPLOYMENTS, REPLICA_SETS, PODS):
                group.create_task(Mirror(self._client, resource, lambda *_: self._changed.set()).run())
            group.create_task(self._loop())

    async def _loop(self) -> None:
        while True:
            await self._wait()
            try:
                await self.sync()
            except ApiUnavailable as error:
                log.debug("%s", error)
                self._wake(time.time() + _RETRY_S)
            except ApiError as error:
                log.warning("round stopped, trying again: %s", error)
                self._wake(time.time() + _RETRY_S)

    async def _wait(self) -> None:
        timeout = None if self._wake_at is None else max(self._wake_at - time.time(), 0.0)
        self._wake_at = None
        if await set_within(self._changed, timeout):
            await asyncio.sleep(_SETTLE_S)
        self._changed.clear()

    def _wake(self, when: float | None) -> None:
        if when is not None:
            self._wake_at = when if self._wake_at is None else min(self._wake_at, when)

    async def sync(self) -> None:
        """Do one round: pods of every ReplicaSet, then ReplicaSets of every Deployment."""
        deployments = (await self._client.list(DEPLOYMENTS)).items
        replica_sets = (await self._client.list(REPLICA_SETS)).items
        pods = _by_controller((await self._client.list(PODS)).items)
        self._forget({obj["metadata"]["uid"] for obj in (*deployments, *replica_sets)})
        for replica_set in replica_sets:
            await self._alone(replica_set, self._sync_pods(replica_set, pods[replica_set["metadata"]["uid"]]))
        owned = _by_controller(replica_sets)
        for deployment in deployments:
            if not is_deleting(deployment):
                work = self._sync_deployment(deployment, owned[deployment["metadata"]["uid"]])
                await self._alone(deployment, work)

    def _forget(self, alive: set[str]) -> None:
        for uids in (self._failures, self._stuck):
            for uid in uids.keys() - alive:
                del uids[uid]

    async def _alone(self, obj: Manifest, work: Coroutine[None, None, None]) -> None:
        """Do one object's work; its refusal by the server, or nonsense in it, must not keep the others from theirs."""
        uid = obj["metadata"]["uid"]
        try:
            await work
            self._stuck.pop(uid, None)
            return
        except ApiUnavailable:
            raise
        except ApiError as error:
            why: object = error
        except Exception as error:  # noqa: BLE001  # a Deployment that no server checked: one such thing must not end the agent
            why = repr(error)
        back_off = self._stuck[uid] = self._stuck.get(uid, _BACK_OFF).ended(0.0)
        log.warning("%s %s, trying again in %g s: %s", obj["kind"], key_of(obj), back_off.delay, why)
        self._wake(time.time() + back_off.delay)

    async def _sync_pods(self, replica_set: Manifest, pods: list[Manifest]) -> None:
        uid, now = replica_set["metadata"]["uid"], time.time()
        plan = plan_pods(replica_set, pods)
        for pod in plan.delete:
            await self._delete(PODS, pod)
        for _ in range(plan.create):
            if not await self._create_pod(replica_set):
                break
        if not plan.create:
            self._failures.pop(uid, None)
        self._wake(next_available(replica_set, pods, now))
        status = replica_set_status(replica_set, pods, now, self._failures.get(uid))
        await self._put_status(REPLICA_SETS, replica_set, status)

    async def _create_pod(self, replica_set: Manifest) -> bool:
        meta = replica_set["metadata"]
        try:
            await self._client.create(PODS, new_pod(replica_set), meta["namespace"])
        except ApiError as error:
            # quota or an invalid template: the ReplicaSet says why, and we try again without an event to wake us
            self._failures[meta["uid"]] = str(error)
            self._wake(time.time() + _QUOTA_RETRY_S)
            return False
        self._failures.pop(meta["uid"], None)
        return True

    async def _sync_deployment(self, deployment: Manifest, replica_sets: list[Manifest]) -> None:
        plan = plan_rollout(deployment, replica_sets)
        for action in plan.actions:
            await self._act(deployment, action)
        if plan.revision is not None:
            body = {"metadata": {"annotations": {REVISION: plan.revision}}}
            await self._patch(DEPLOYMENTS, deployment, body)
        status = deployment_status(deployment, replica_sets, time.time())
        await self._put_status(DEPLOYMENTS, deployment, status)
        self._wake(progress_deadline(deployment))

    async def _act(self, deployment: Manifest, action: Action) -> None:
        namespace = deployment["metadata"]["namespace"]
        match action:
            case CreateReplicaSet(manifest):
                await self._create_replica_set(deployment, manifest)
            case ScaleReplicaSet(name, replicas):
                await self._client.patch(REPLICA_SETS, name, {"spec": {"replicas": replicas}}, namespace)
            case AnnotateReplicaSet(name, revision):
                await self._client.patch(REPLICA_SETS, name, {"metadata": {"annotations": {REVISION: revision}}}, namespace)
            case DeleteReplicaSet(name):
                await self._client.delete(REPLICA_SETS, name, namespace)

    async def _create_replica_set(self, deployment: Manifest, manifest: Manifest) -> None:
        try:
            await self._client.create(REPLICA_SETS, manifest, deployment["metadata"]["namespace"])
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            # another template has this hash (or a foreign object this name): the next round hashes differently
            count = int((deployment.get("status") or {}).get("collisionCount") or 0) + 1
            body = {"status": {"collisionCount": count}}
            await self._patch(DEPLOYMENTS, deployment, body, subresource="status")
            log.warning("%s: name taken, collisionCount is now %d", manifest["metadata"]["name"], count)

    async def _put_status(self, resource: Resource, obj: Manifest, status: Manifest) -> None:
        """Write the status if it differs from what the object has, and keep the given object current for this round."""
        before = obj.get("status") or {}
        # zero, an empty list and an absent field are the same status
        if all((before.get(key) or None) == (value or None) for key, value in status.items()):
            return
        await self._patch(resource, obj, {"status": status}, subresource="status")
        obj["status"] = before | status

    async def _patch(self, resource: Resource, obj: Manifest, body: Manifest, subresource: str | None = None) -> None:
        meta = obj["metadata"]
        try:
            await self._client.patch(resource, meta["name"], body, meta["namespace"], subresource=subresource)
        except ApiError as error:
            if not error.not_found:  # deleted meanwhile: nothing left to write
                raise

    async def _delete(self, resource: Resource, obj: Manifest) -> None:
        meta = obj["metadata"]
        log.info("deleting %s %s", resource.kind, key_of(obj))
        try:
            await self._client.delete(resource, meta["name"], meta["namespace"], uid=meta["uid"])
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise


def _by_controller(objects: Iterable[Manifest]) -> defaultdict[str, list[Manifest]]:
    """Group objects by the uid of the owner that controls them."""
    groups: defaultdict[str, list[Manifest]] = defaultdict(list)
    for obj in objects:
        reference = controller_of(obj)
        if reference is not None:
            groups[reference["uid"]].append(obj)
    return groups
