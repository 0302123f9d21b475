"""The operator's loop: keys come from watches, workers make passes over services, and pods' knobs follow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, TypeVar

from paceline_operator.acceptance import Acceptor
from paceline_operator.admin_client import AdminClient
from paceline_operator.api_kinds import KINDS
from paceline_operator.class_keeper import ClassKeeper, concerned
from paceline_operator.cluster import Cluster
from paceline_operator.errors import ApiRefused, ApiUnavailable
from paceline_operator.knob_sync import KnobState, KnobSync, PodKnobs, Target
from paceline_operator.metrics import Metrics
from paceline_operator.names import CLASS_KIND, KIND
from paceline_operator.pods import Instance, instances
from paceline_operator.reconcile import Reconciler
from paceline_operator.settings import Settings
from paceline_operator.store import Key, Store
from paceline_operator.tuning.loop import Tuner
from paceline_operator.workqueue import WorkQueue

__all__ = ["Controller"]

logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
_START_RETRY = 1.0  # seconds between attempts to list everything at start
_RELIST = 600.0  # seconds between lists when nothing hints at a gap in the watches
_DEBOUNCE = 1.0  # seconds without another hint: a gap hits all watches at once, and each tells of every object
_MOST_DEBOUNCES = 20  # then everything is listed even if the hints go on
_FIRST_STATUS = 1.0  # seconds in which a Deployment controller tells of a new Deployment
_FAILED = {KnobState.REFUSED, KnobState.UNREACHABLE}


class Controller:
    """Holds the store and the queues; `observe` feeds it, `start` and `stop` frame it."""

    def __init__(self, settings: Settings, cluster: Cluster, admin: AdminClient, metrics: Metrics) -> None:
        self._settings = settings
        self._cluster = cluster
        self._admin = admin
        self._metrics = metrics
        self._store = Store()
        self._classes = ClassKeeper(cluster)
        self._class_queue: WorkQueue[str] = WorkQueue(_waits(metrics, "classes"))
        self._sync = KnobSync(admin, metrics)
        self._queue: WorkQueue[Key] = WorkQueue(_waits(metrics, "services"))
        metrics.queue_length.set_function(self._queue.__len__)  # read when it is asked for: also while no pass ends
        self._targets: dict[Key, Target] = {}
        self._knobs: dict[Key, dict[str, PodKnobs]] = {}
        acceptor = Acceptor(self._classes.book, settings)
        self._tuner = Tuner(settings, cluster, self._store, acceptor, metrics, self._targets, self._knobs, self._queue.add)
        self._reconciler = Reconciler(
            settings, cluster, self._store, metrics, time.monotonic, acceptor, self._tuner.status, self._queue.add,
            admin.progress, _FIRST_STATUS,
        )  # fmt: skip
        self._knob_queue: WorkQueue[Key] = WorkQueue(_waits(metrics, "knobs"))
        self._asked: dict[Key, tuple[Target, list[Instance]]] = {}  # what the last look at a service's pods was about
        self._verify: set[Key] = set()
        self._gap = asyncio.Event()
        self._complaint = ""
        self._unwatched = False  # the server serves other kinds than those that are watched
        self._tasks: list[asyncio.Task[None]] = []
        self.started = False  # everything has been listed, and workers are at it
        self.on_apis: Callable[[], Awaitable[None]] = _nothing  # called when the API server serves other kinds than before

    @property
    def known_services(self) -> int:
        """The services that a pass has looked at and that still exist."""
        return len(self._targets)

    def observe(self, kind: str, event: Mapping[str, Any]) -> None:
        """Take one watch event (`type`, `object`) and queue a look at the service that it is about."""
        item = event["object"]
        if kind == CLASS_KIND:
            self._observe_class(event)
            return
        key = self._store.remove(kind, item) if event["type"] == "DELETED" else self._store.put(kind, item)
        if event["type"] is None:
            self._gap.set()  # the watch had to list again: deletions in between were not told
        if key is not None:
            self._queue.add(key)

    def _observe_class(self, event: Mapping[str, Any]) -> None:
        name = event["object"]["metadata"]["name"]
        if event["type"] is None:
            self._gap.set()
        if self._classes.observe(event):
            services = ((key, body) for key in self._store if (body := self._store.service(key)) is not None)
            for key in concerned(services, name):
                self._queue.add(key)
        self._class_queue.add(name)

    async def start(self) -> None:
        """List everything, then start the workers: what exists must be known before something seems to be missing."""
        while not await self._relist():  # noqa: ASYNC110  polls a server, not a flag of ours
            await asyncio.sleep(_START_RETRY)
        self._reconciler.resume()
        jobs = [self._work(self._queue, self._reconcile) for _ in range(self._settings.workers)]
        jobs += [self._work(self._knob_queue, self._sync_knobs) for _ in range(self._settings.workers)]
        jobs += [self._work(self._class_queue, self._report_class)]
        loops = (self._watch_gaps, self._verify_periodically, self._discover_periodically)
        jobs += [*map(self._keep_on, loops), self._tune()]
        self._tasks = [asyncio.create_task(job) for job in jobs]
        self.started = True

    async def stop(self) -> None:
        """Stop the workers; a pass that is cut short is made again by the next operator."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._queue.close()
        self._knob_queue.close()
        self._class_queue.close()
        await self._admin.close()
        self._cluster.close()

    async def _keep_on(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop whose end nobody would notice: what it fails with is told, and it begins anew."""
        while True:
            try:
                await loop()
            except Exception as error:  # a bug in one round must not be the last round
                logger.exception("a loop of the operator failed, it begins anew")
                self._metrics.errors.labels(type(error).__name__).inc()
            await asyncio.sleep(_START_RETRY)

    async def _tune(self) -> None:
        try:
            await self._tuner.run()
        except Exception as error:
            logger.exception("tuning has ended: start the operator anew")
            self._metrics.errors.labels(type(error).__name__).inc()

    async def _work(self, queue: WorkQueue[K], job: Callable[[K], Awaitable[bool]]) -> None:
        while True:
            key = await queue.get()
            try:
                if await job(key):
                    queue.succeed(key)
                else:
                    queue.retry(key)
            except (ApiUnavailable, ApiRefused) as error:  # refused: the status; a child's refusal is told in it
                logger.warning("%s: %s; tried again in %.1f s", _words(key), error, queue.retry(key))
                self._count(error, "refused" if isinstance(error, ApiRefused) else "unavailable")
            except Exception as error:  # a bug with one service must not stop the others
                logger.exception("%s: the pass failed", _words(key))
                self._count(error, "error")
                queue.retry(key)
            finally:
                queue.done(key)

    def _count(self, error: Exception, outcome: str) -> None:
        self._metrics.reconciles.labels(outcome).inc()
        self._metrics.errors.labels(type(error).__name__).inc()

    async def _report_class(self, name: str) -> bool:
        await self._classes.report(name)
        return True

    async def _reconcile(self, key: Key) -> bool:
        """Make one pass; return False to have it tried again soon."""
        self._metrics.services.set(self._store.count(KIND))
        with self._metrics.reconcile_seconds.time():
            result = await self._reconciler.reconcile(key, self._knobs.get(key, {}))
        self._metrics.reconciles.labels("refused" if result.retry else "done").inc()
        if self._store.service(key) is None:
            for known in (self._targets, self._knobs, self._asked):
                known.pop(key, None)
        elif result.target is not None:
            self._targets[key] = result.target
            self._look_at_pods(key, result.target)
        if result.again is not None:
            self._queue.add_later(key, result.again)
        return not result.retry

    def _look_at_pods(self, key: Key, target: Target) -> None:
        """Queue the pods' knobs if what they shall have or who they are has changed. Otherwise their own retries bring them
        back: a pod that refuses in other words each time must not be asked again because its words changed the status."""
        about = (target, instances(self._store.all(key, "Pod")))
        if self._asked.get(key) != about:
            self._asked[key] = about
            self._knob_queue.add(key)

    async def _sync_knobs(self, key: Key) -> bool:
        """Bring the pods' knobs up to date; return False if a pod has to be asked again after a growing delay."""
        target = self._targets.get(key)
        if target is None:
            return True
        verify = key in self._verify
        self._verify.discard(key)
        known = self._knobs.get(key, {})
        fresh = await self._sync.sync(target, instances(self._store.all(key, "Pod")), known, verify=verify)
        if fresh != known and key in self._targets:
            self._knobs[key] = fresh
            self._queue.add(key)
        if delays := [pod.again for pod in fresh.values() if pod.again is not None]:
            self._knob_queue.add_later(key, min(delays))
        return not any(pod.state in _FAILED for pod in fresh.values())

    async def _watch_gaps(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._gap.wait(), _RELIST)
                await self._last_hint()
            except TimeoutError:
                pass
            if not await self._relist():
                self._gap.set()

    async def _last_hint(self) -> None:
        """Wait until no watch hints at a gap any more: one list then makes up for all of them."""
        for _ in range(_MOST_DEBOUNCES):
            self._gap.clear()
            await asyncio.sleep(_DEBOUNCE)
            if not self._gap.is_set():
                return
        self._gap.clear()

    async def _relist(self) -> bool:
        """Make the store what the API server has now; return False if that didn't work."""
        try:
            await self._discover()
            await self._relist_classes()
            for namespace in self._settings.watch_namespaces or (None,):
                for kind in (KIND, *(kind for kind in KINDS if kind in self._cluster.apis)):
                    await self._relist_kind(kind, namespace)
        except (ApiUnavailable, ApiRefused) as error:
            if str(error) != self._complaint:  # told once, not every second
                logger.warning("the objects can't be listed: %s; tried again until they can", error)
            self._complaint = str(error)
            return False
        self._complaint = ""
        return True

    async def _relist_classes(self) -> None:
        if self._settings.use_classes:
            if await self._classes.relist():
                for key in self._store:
                    self._queue.add(key)
            for name in self._classes.names():
                self._class_queue.add(name)

    async def _relist_kind(self, kind: str, namespace: str | None) -> None:
        self._store.begin_list()
        listing = self._cluster.services(namespace) if kind == KIND else self._cluster.children(kind, namespace)
        for key in self._store.replace(kind, await listing, namespace):
            self._queue.add(key)

    async def _verify_periodically(self) -> None:
        """Ask all pods for their knobs now and then: somebody may have changed them behind our back."""
        while True:
            await asyncio.sleep(self._settings.resync_interval)
            for key in list(self._targets):
                self._verify.add(key)
                self._knob_queue.add(key)

    async def _discover_periodically(self) -> None:
        """See now and then whether a CRD has come or gone: watching CRDs would need rights on the whole cluster."""
        while True:
            await asyncio.sleep(self._settings.resync_interval)
            try:
                await self._discover()
            except (ApiUnavailable, ApiRefused) as error:
                logger.debug("the kinds can't be listed: %s", error)  # the watches tell of an outage

    async def _discover(self) -> None:
        """See which kinds the API server has; if that has changed, watch them and look at every service again."""
        if await self._cluster.discover() and self._tasks:
            logger.info("the API server serves other kinds now: %s", ", ".join(sorted(self._cluster.apis.versions)))
            self._unwatched = True
        if not self._unwatched:
            return
        await self.on_apis()
        self._unwatched = False
        self._gap.set()
        for key in self._store:
            self._queue.add(key)


def _waits(metrics: Metrics, queue: str) -> Callable[[float], None]:
    return metrics.queue_seconds.labels(queue).observe


def _words(key: Hashable) -> str:
    return "/".join(key) if isinstance(key, tuple) else f"{CLASS_KIND} {key}"


async def _nothing() -> None:
    pass
