"""One pod on this machine: its folder, address, volumes and containers, from binding to removal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from paceline_local.backoff import pauses
from paceline_local.client import ApiClient
from paceline_local.container import ContainerRunner, Launch
from paceline_local.container_record import trim_log
from paceline_local.environment import PodFacts
from paceline_local.errors import ApiError, ApiUnavailable, LocalError
from paceline_local.events import EventRecorder
from paceline_local.manifests import Manifest, is_deleting, key_of, parse_timestamp
from paceline_local.pod_files import PodFiles
from paceline_local.pod_status import Placement, pod_status
from paceline_local.resources import PODS
from paceline_local.state import StateDir
from paceline_local.volumes import referenced
from paceline_local.waiting import set_within

__all__ = ["NodeFacts", "PodWorker"]

log = logging.getLogger(__name__)
_RETRY_S = 1.0
_LONGEST_RETRY_S = 15.0
_DEFAULT_GRACE_S = 30.0


@dataclass(frozen=True)
class NodeFacts:
    """The node that all pods share."""

    name: str
    address: str
    allocatable: Mapping[str, str]
    state: StateDir
    client: ApiClient
    events: EventRecorder
    session: aiohttp.ClientSession


class PodWorker:
    """Runs one pod. Start `run` as a task, feed it with `update`, and end it with `stop` or by a deletion timestamp."""

    def __init__(self, pod: Manifest, address: str, node: NodeFacts) -> None:
        self._pod, self._node = pod, node
        self.uid: str = pod["metadata"]["uid"]
        self.session = node.session
        started = (pod.get("status") or {}).get("startTime")
        self._place = Placement(address, node.address, parse_timestamp(started) if started else time.time())
        self._dirty, self._deleting = asyncio.Event(), asyncio.Event()
        self._notes: set[asyncio.Task[None]] = set()
        self.files = PodFiles(pod, node.state, node.client, self._facts)
        self.folder = self.files.folder
        self._init = self._runners("initContainers", init=True)
        self._main = self._runners("containers", init=False)
        self._published: Manifest | None = None
        self.update(pod)

    def _runners(self, key: str, *, init: bool) -> dict[str, ContainerRunner]:
        policy = self._pod["spec"].get("restartPolicy", "Always")
        containers = self._pod["spec"].get(key) or ()
        return {c["name"]: ContainerRunner(self.uid, c, policy, self._grace, self, init=init) for c in containers}

    @property
    def _grace(self) -> float:
        meta, spec = self._pod["metadata"], self._pod["spec"]
        for value in (meta.get("deletionGracePeriodSeconds"), spec.get("terminationGracePeriodSeconds")):
            if value is not None:
                return float(value)
        return _DEFAULT_GRACE_S

    def update(self, pod: Manifest) -> None:
        """Take note of the pod's newest object."""
        self._pod = pod
        if is_deleting(pod):
            self._deleting.set()
        self._dirty.set()

    def vanish(self) -> None:
        """Note that the pod's object is gone (deleted by force): the processes go as if it had been deleted."""
        self._deleting.set()

    def changed(self) -> None:
        """Note that a container's state changed."""
        self._dirty.set()

    def note(self, kind: str, reason: str, message: str) -> None:
        """Record an event about the pod, in the background."""
        task = asyncio.create_task(self._node.events.emit(self._pod, kind, reason, message))
        self._notes.add(task)
        task.add_done_callback(self._notes.discard)

    async def run(self) -> None:
        """Run the pod until it is deleted; its object is gone from the API when this returns."""
        publisher = asyncio.create_task(self._publish_forever())
        work = asyncio.create_task(self._work())
        work.add_done_callback(self._report)
        try:
            await self._deleting.wait()
            await self._stop_containers(self._grace)
            await asyncio.wait([work])  # also after a failure of ours, which is told, the pod has to go
        finally:
            publisher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await publisher
        await self._finish()

    def _report(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and work.exception() is not None:
            log.error("%s: the agent failed", key_of(self._pod), exc_info=work.exception())

    async def shut_down(self, most: float) -> None:
        """Stop all processes within the pod's grace period (at most `most` seconds), but leave the pod in the API."""
        await self._stop_containers(min(self._grace, most))
        with contextlib.suppress(ApiError, ApiUnavailable):
            await self._publish()

    def trim_logs(self) -> None:
        """Keep the containers' logs bounded."""
        for runner in (*self._init.values(), *self._main.values()):
            trim_log(runner.log)

    async def refresh(self) -> None:
        """Bring the content of volumes up to date after a ConfigMap or Secret changed."""
        try:
            await self.files.write_volumes()
        except LocalError as error:
            log.warning("%s keeps its old volumes: %s", key_of(self._pod), error)

    def mentions(self, obj: Manifest) -> bool:
        """Whether the pod refers to this ConfigMap or Secret."""
        if obj["metadata"]["namespace"] != self._pod["metadata"]["namespace"]:
            return False
        return any(r.kind == obj["kind"] and name == obj["metadata"]["name"] for r, name in referenced(self._pod))

    async def _work(self) -> None:
        await self._prepare()
        for runner in self._init.values():
            await runner.run()
            ended = runner.state.ended
            if ended is None or ended.exit_code != 0:
                return
        await asyncio.gather(*(runner.run() for runner in self._main.values()))

    async def _prepare(self) -> None:
        """Make the volumes; wait for what they need."""
        while not self._deleting.is_set():
            try:
                await self.files.write_volumes()
                return
            except ApiUnavailable as error:
                log.info("%s waits: %s", key_of(self._pod), error)
            except (LocalError, OSError) as error:
                self.note("Warning", "FailedMount", str(error))
            await set_within(self._deleting, _RETRY_S)

    async def _stop_containers(self, grace: float) -> None:
        runners = [*self._init.values(), *self._main.values()]
        await asyncio.gather(*(runner.stop(grace) for runner in runners))

    async def _finish(self) -> None:
        """Tell the API server that nothing of the pod is left, and remove its folder."""
        meta = self._pod["metadata"]
        for pause in pauses(_RETRY_S, _LONGEST_RETRY_S):
            try:
                await self._node.client.delete(PODS, meta["name"], meta["namespace"], uid=self.uid, grace=0)
                break
            except ApiUnavailable:
                await asyncio.sleep(pause)
            except ApiError as error:
                if not (error.not_found or error.conflict):
                    log.warning("%s can't be removed from the API: %s", key_of(self._pod), error)
                break
        self.files.remove()

    def _facts(self) -> PodFacts:
        node = self._node
        return PodFacts(self._pod, self._place.pod_ip, node.address, node.name, node.allocatable)

    async def launch(self, container: Manifest) -> Launch:
        """Return how to start the container; volumes are brought up to date first."""
        return await self.files.launch(container)

    # status

    async def _publish_forever(self) -> None:
        waits = pauses(_RETRY_S, _LONGEST_RETRY_S)
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._publish()
                waits = pauses(_RETRY_S, _LONGEST_RETRY_S)
            except ApiUnavailable:
                self._dirty.set()
                await asyncio.sleep(next(waits))
            except ApiError as error:
                if not error.not_found:
                    log.warning("status of %s refused: %s", key_of(self._pod), error)
                    self._dirty.set()
                    await asyncio.sleep(next(waits))

    async def _publish(self) -> None:
        """Write the status if it differs from what was written last."""
        init = {name: runner.state for name, runner in self._init.items()}
        main = {name: runner.state for name, runner in self._main.items()}
        status = pod_status(self._basis(), init, main, self._place, time.time())
        if status == self._published:
            return
        meta = self._pod["metadata"]
        await self._node.client.patch(PODS, meta["name"], {"status": status}, meta["namespace"], subresource="status")
        self._published = status

    def _basis(self) -> Manifest:
        """Return the pod with our own last status: what the watch delivers may be older than what we wrote."""
        if self._published is None:
            return self._pod
        ours = {c["type"] for c in self._published["conditions"]}
        given = (self._pod.get("status") or {}).get("conditions") or ()
        conditions = [*self._published["conditions"], *(c for c in given if c["type"] not in ours)]
        return self._pod | {"status": self._published | {"conditions": conditions}}
