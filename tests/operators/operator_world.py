"""A reconciler in a world of its own: fake cluster, store and clock."""

from operator_fakes import FakeCluster
from operator_kit import MINIMAL, body, settings

from paceline_operator.acceptance import Acceptor
from paceline_operator.classes import ClassBook
from paceline_operator.metrics import Metrics
from paceline_operator.reconcile import Reconciler
from paceline_operator.store import Key, Store

KEY = Key("team-a", "chat")


def reconciler(cluster, store, metrics=None, clock=lambda: 0.0, *, classes=None, wake=lambda _: None, **environment):
    """Return a reconciler of a process with these variables."""
    own = settings(**environment)
    acceptor = Acceptor(ClassBook() if classes is None else classes, own)
    return Reconciler(own, cluster, store, metrics or Metrics(), clock, acceptor, wake=wake)


class World:
    """A reconciler with its fake cluster, store and clock."""

    def __init__(self, **environment):
        self.cluster, self.store, self.time = FakeCluster(), Store(), 0.0
        self.metrics = Metrics()
        self.reconciler = reconciler(self.cluster, self.store, self.metrics, lambda: self.time, **environment)

    def manifest(self, spec=MINIMAL, **identity):
        old = self.cluster.objects.get(("InferenceService", "chat"), {})
        self.store.put("InferenceService", self.cluster.add(body(spec, status=old.get("status"), **identity)))

    def sees(self, kind, item):
        self.store.put(kind, self.cluster.add(item))

    async def run(self, **knobs):
        self.cluster.calls.clear()
        return await self.reconciler.reconcile(KEY, knobs)

    def condition(self, kind):
        found = self.store.service(KEY)["status"]["conditions"]
        return next(c for c in found if c["type"] == kind)
