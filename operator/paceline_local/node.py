"""The node agent: registers this machine as a Node, binds pods to it and runs them as processes.

Left out on purpose, because processes on a development machine have none of it: images, users, capabilities, memory and CPU
limits (they are only passed on through the downward API), cluster DNS, `*_SERVICE_HOST` variables. `kubectl exec` and
`kubectl logs` don't work either; `paceline local logs` reads the files.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import Callable, Coroutine

import aiohttp

from paceline_local.addresses import AddressBook, Network
from paceline_local.backoff import pauses
from paceline_local.client import ApiClient
from paceline_local.container import CONTAINER_MARKER
from paceline_local.errors import ApiError, ApiUnavailable, LocalError
from paceline_local.events import EventRecorder
from paceline_local.manifests import Manifest, is_deleting, key_of
from paceline_local.mirror import Mirror
from paceline_local.node_object import LEASE_NAMESPACE, NODE_NAME, lease, machine_resources, node_manifest, node_status
from paceline_local.pod import NodeFacts, PodWorker
from paceline_local.pod_files import pod_folder_name, scratch_name
from paceline_local.pod_status import unschedulable_status
from paceline_local.processes import ProcessId, kill_all, marked
from paceline_local.resources import CONFIG_MAPS, LEASES, NAMESPACES, NODES, PODS, SECRETS, Resource
from paceline_local.scheduling import unschedulable, unsupported
from paceline_local.state import MARKER, StateDir

__all__ = ["NodeAgent"]

log = logging.getLogger(__name__)
_HEARTBEAT_S = 10.0
_STATUS_EVERY = 30  # heartbeats: the Lease says "alive", the status only has to be refreshed now and then
_RETRY_S = 1.0
_LONGEST_RETRY_S = 15.0  # somebody is watching: a server that is back must be seen
_LOG_CHECK_S = 5.0
_SHUTDOWN_GRACE_S = 15.0  # `down` is for people who wait; in-flight work of a development machine may be cut after this
_ENDED = {"Succeeded", "Failed"}


class NodeAgent:
    """Runs this machine's pods over one API client. `run` until cancelled, then `shut_down`."""

    def __init__(self, client: ApiClient, state: StateDir, network: Network, session: aiohttp.ClientSession) -> None:
        self._client, self._state, self._network = client, state, network
        self._resources = machine_resources()
        self._events = EventRecorder(client, "paceline-node")
        self._node = NodeFacts(NODE_NAME, network.node, self._resources, state, client, self._events, session)
        self._addresses = AddressBook(state.pods / "addresses.json", network.pods)
        self._workers: dict[str, PodWorker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._binding: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._labels: dict[str, str] = node_manifest()["metadata"]["labels"]
        self._adopted = False
        self._since = time.time()
        self._pods = Mirror(client, PODS, self._on_pod)

    async def run(self) -> None:
        """Register the node and run pods until cancelled."""
        await self._register()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods.run())
            group.create_task(self._adopt())
            group.create_task(self._heartbeat())
            group.create_task(self._bound_logs())
            for resource in (CONFIG_MAPS, SECRETS):
                group.create_task(Mirror(self._client, resource, self._on_content).run())

    async def shut_down(self) -> None:
        """Stop all processes of all pods within their grace periods; the pods stay in the API."""
        await asyncio.gather(*(worker.shut_down(_SHUTDOWN_GRACE_S) for worker in self._workers.values()))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # the node

    async def _register(self) -> None:
        for pause in pauses(_RETRY_S, _LONGEST_RETRY_S):
            try:
                await self._ensure(NAMESPACES, {"metadata": {"name": LEASE_NAMESPACE}})
                await self._ensure(NODES, node_manifest())
                await self._ensure(LEASES, lease(), LEASE_NAMESPACE)
                node = await self._client.get(NODES, NODE_NAME)
                self._labels = node["metadata"].get("labels") or {}
                await self._write_status()
                return
            except (ApiError, ApiUnavailable) as error:
                log.warning("node not registered yet: %s", error)
                await asyncio.sleep(pause)

    async def _ensure(self, resource: Resource, body: Manifest, namespace: str | None = None) -> None:
        try:
            await self._client.create(resource, body, namespace)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise

    async def _write_status(self) -> None:
        status = node_status(self._network.node, self._resources, self._since, time.time())
        await self._client.patch(NODES, NODE_NAME, {"status": status}, subresource="status")

    async def _heartbeat(self) -> None:
        beats = 0
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            beats += 1
            try:
                await self._client.patch(LEASES, NODE_NAME, {"spec": lease()["spec"]}, LEASE_NAMESPACE)
                if beats % _STATUS_EVERY == 0:
                    await self._write_status()
            except ApiUnavailable as error:
                log.debug("heartbeat not written: %s", error)
            except ApiError as error:
                log.warning("heartbeat refused, registering again: %s", error)
                await self._register()

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            for worker in list(self._workers.values()):
                await asyncio.to_thread(worker.trim_logs)

    # pods

    async def _adopt(self) -> None:
        """Once all pods are known: start their workers, and end what pods left behind that no longer exist."""
        await self._pods.synced.wait()
        alive = {pod["metadata"]["uid"]: pod for pod in self._pods.items.values()}
        self._addresses.retain(set(alive))
        await asyncio.to_thread(self._clean_up, alive)
        self._adopted = True
        for pod in list(self._pods.items.values()):  # as they are now: some have come and gone during the clean-up
            self._on_pod("ADDED", pod)

    def _clean_up(self, alive: dict[str, Manifest]) -> None:
        kept = {pod_folder_name(pod) for pod in alive.values()} | {scratch_name(uid) for uid in alive}
        for folder in (*self._state.pods.iterdir(), *self._state.scratch.iterdir()):
            if folder.is_dir() and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        for process in _strays(self._state, set(alive)):
            log.warning("ending process %d: its pod doesn't exist any more", process.pid)
            kill_all([process], signal.SIGKILL)

    def _on_pod(self, kind: str, pod: Manifest) -> None:
        if not self._adopted:
            return  # a worker that starts before leftovers are gone might take them for its own
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if kind == "DELETED":
            if worker is not None:
                worker.vanish()
        elif worker is not None:
            worker.update(pod)
        elif pod["spec"].get("nodeName") == NODE_NAME:
            self._begin(pod)
        elif not pod["spec"].get("nodeName") and not is_deleting(pod) and uid not in self._binding:
            self._spawn(self._bind(pod))

    def _on_content(self, kind: str, obj: Manifest) -> None:
        if kind == "DELETED":
            return  # running containers keep what they have
        for worker in self._workers.values():
            if worker.mentions(obj):
                self._spawn(worker.refresh())

    def _begin(self, pod: Manifest) -> None:
        if (pod.get("status") or {}).get("phase") in _ENDED and not is_deleting(pod):
            return
        uid = pod["metadata"]["uid"]
        worker = PodWorker(pod, self._addresses.allocate(uid), self._node)
        self._workers[uid] = worker
        self._tasks[uid] = asyncio.create_task(self._run_pod(uid, worker))

    async def _run_pod(self, uid: str, worker: PodWorker) -> None:
        try:
            await worker.run()
        except Exception:  # one pod's trouble must not stop the node
            log.exception("pod %s", uid)
            return
        self._addresses.release(uid)
        self._workers.pop(uid, None)
        self._tasks.pop(uid, None)

    async def _bind(self, pod: Manifest) -> None:
        """Bind a pending pod to this node, or say why it can't run here. Pods of other schedulers are left alone."""
        uid = pod["metadata"]["uid"]
        if pod["spec"].get("schedulerName", "default-scheduler") != "default-scheduler":
            return
        self._binding.add(uid)
        try:
            message = _unplaceable(pod, self._labels, self._resources)
            await self._retry(pod, lambda: self._assign(pod) if message is None else self._refuse(pod, message))
        finally:
            self._binding.discard(uid)
        self._reconsider(pod)

    async def _retry(self, pod: Manifest, act: Callable[[], Coroutine[None, None, None]]) -> None:
        """Do something about a pod until it worked, or the pod is gone or taken."""
        for pause in pauses(_RETRY_S, _LONGEST_RETRY_S):
            try:
                await act()
                return
            except ApiUnavailable as error:
                log.debug("%s", error)
            except ApiError as error:
                if error.not_found or error.conflict:
                    return
                log.warning("%s can't be placed: %s", key_of(pod), error)
            await asyncio.sleep(pause)

    async def _assign(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE_NAME}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}, "target": target}
        await self._client.request("POST", PODS.path(meta["namespace"], meta["name"], "binding"), body=binding)
        await self._events.emit(pod, "Normal", "Scheduled", f"Successfully assigned {key_of(pod)} to {NODE_NAME}")

    def _reconsider(self, pod: Manifest) -> None:
        """Look at the pod again if the watch showed it unbound while we were at it."""
        current = self._pods.items.get(key_of(pod))
        if current is not None and current["metadata"]["resourceVersion"] != pod["metadata"]["resourceVersion"]:
            self._on_pod("MODIFIED", current)

    async def _refuse(self, pod: Manifest, message: str) -> None:
        meta = pod["metadata"]
        status = unschedulable_status(pod, message, time.time())
        if (pod.get("status") or {}).get("conditions") != status["conditions"]:
            await self._client.patch(PODS, meta["name"], {"status": status}, meta["namespace"], subresource="status")
            await self._events.emit(pod, "Warning", "FailedScheduling", message)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _unplaceable(pod: Manifest, labels: dict[str, str], resources: dict[str, str]) -> str | None:
    try:
        return unschedulable(pod, labels, resources) or unsupported(pod)
    except LocalError as error:  # a quantity that isn't one
        return str(error)


def _strays(state: StateDir, uids: set[str]) -> list[ProcessId]:
    """Return the container processes of this stack whose pod isn't one of `uids`."""
    ours = marked(MARKER, str(state.home))
    return [process for process, env in ours if CONTAINER_MARKER in env and env[CONTAINER_MARKER].split("/")[0] not in uids]
