"""The loop around the passes: it goes on whatever a pass does, and pods' knobs follow their service."""

import asyncio
import itertools
import logging

import aiohttp
import kopf
import pytest
from kopf._cogs.structs.references import Insights
from operator_fakes import FakeCluster
from operator_kit import MINIMAL, body, service, settings
from operator_pods import running

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.wire import KnobsDocument
from paceline_operator import __main__ as command
from paceline_operator import handlers, workqueue
from paceline_operator.controller import Controller
from paceline_operator.errors import AdminError, ApiRefused, ApiUnavailable
from paceline_operator.metrics import Metrics
from paceline_operator.names import RESTART_HASH
from paceline_operator.pod import restart_hash


class Admin:
    """The admin ports of all pods, as one."""

    fence = 0

    def __init__(self):
        self.knobs_now, self.revision, self.reads = Knobs(), 1, 0

    async def knobs(self, address, token):
        self.reads += 1
        wire = knobs_to_wire(self.knobs_now)
        return KnobsDocument(self.revision, 0, wire, dict.fromkeys(wire, "applied"))

    async def patch_knobs(self, address, token, knobs, revision):
        self.knobs_now, self.revision = self.knobs_now.updated(knobs), self.revision + 1
        return await self.knobs(address, token)

    async def progress(self, address, token):
        return None

    async def close(self):
        pass


@pytest.fixture
async def loop(monkeypatch):
    monkeypatch.setattr(workqueue, "_FIRST_RETRY", 0.01)
    monkeypatch.setattr("paceline_operator.controller._START_RETRY", 0.01)
    cluster, admin, metrics = FakeCluster(), Admin(), Metrics()
    controller = Controller(settings(RESYNC_INTERVAL="0.05"), cluster, admin, metrics)
    yield controller, cluster, admin, metrics
    await controller.stop()


async def eventually(check):
    async with asyncio.timeout(10):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def create(controller, cluster, item):
    """Make an object, and tell the operator as a watch would."""
    controller.observe(item["kind"], {"type": "ADDED", "object": cluster.add(item)})


async def test_what_is_listed_at_start_is_looked_at_once_the_server_answers(loop):
    controller, cluster, _, _ = loop
    cluster.add(body(name="a"))
    cluster.add(body(name="b", uid="uid-2"))
    cluster.outages = 3
    await controller.start()
    await eventually(lambda: cluster.status("a") and cluster.status("b"))
    assert cluster.outages == 0


async def test_a_bug_with_one_service_leaves_the_others_alone(loop, caplog):
    controller, cluster, _, metrics = loop
    caplog.set_level(logging.CRITICAL)
    cluster.refuse["sick"] = ZeroDivisionError("a bug")
    await controller.start()
    create(controller, cluster, body(name="sick"))
    create(controller, cluster, body(name="well", uid="uid-2"))
    await eventually(lambda: cluster.status("well"))
    await eventually(lambda: metrics.reconciles.labels("error")._value.get() >= 2)  # and it is tried again
    del cluster.refuse["sick"]
    await eventually(lambda: cluster.status("sick"))


async def test_a_queue_that_stands_still_shows_in_the_metrics(loop, monkeypatch):
    """The alert PacelineQueueStuck asks for a queue and for a rate of passes that is 0, so both must be there."""
    controller, cluster, _, metrics = loop

    async def hang(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster, "create", hang)
    await controller.start()
    for number in range(12):  # with 8 workers
        create(controller, cluster, body(name=f"s{number}", uid=f"uid-{number}"))
    await eventually(lambda: metrics.registry.get_sample_value("paceline_operator_queue_length") == 4)
    assert metrics.registry.get_sample_value("paceline_operator_reconciles_total", {"outcome": "done"}) == 0


async def test_an_unreachable_server_is_tried_again(loop):
    controller, cluster, _, metrics = loop
    cluster.refuse["chat"] = ApiUnavailable("away")
    await controller.start()
    create(controller, cluster, body())
    await eventually(lambda: metrics.reconciles.labels("unavailable")._value.get() >= 2)
    del cluster.refuse["chat"]
    await eventually(lambda: ("Deployment", "chat") in cluster.objects)


async def test_knobs_follow_the_spec_and_stay(loop):
    controller, cluster, admin, _ = loop
    await controller.start()
    create(controller, cluster, body(MINIMAL | {"batching": {"maxNumSeqs": 8}}))
    create(controller, cluster, running())
    await eventually(lambda: admin.knobs_now.max_num_seqs == 8)
    await eventually(lambda: cluster.status("chat").get("pods", {}).get("chat-1", {}).get("state") == "Synced")
    admin.knobs_now = Knobs()  # somebody else
    await eventually(lambda: admin.knobs_now.max_num_seqs == 8)


async def test_a_pod_that_refuses_in_other_words_each_time_is_not_asked_in_a_loop(loop, monkeypatch):
    monkeypatch.setattr(workqueue, "_FIRST_RETRY", 30.0)
    controller, cluster, admin, _ = loop
    refusals = itertools.count()

    async def refuse(address, token, knobs, revision):
        raise AdminError(422, f"{next(refusals)} bytes are free")

    admin.patch_knobs = refuse
    await controller.start()
    create(controller, cluster, body(MINIMAL | {"batching": {"maxNumSeqs": 8}}))
    create(controller, cluster, running(annotations={RESTART_HASH: restart_hash(service(MINIMAL))}))
    await eventually(lambda: cluster.status("chat").get("pods", {}).get("chat-1", {}).get("state") == "Refused")
    await asyncio.sleep(0.3)
    assert next(refusals) <= 10  # about every 50 ms, which is this test's resync


async def test_a_status_that_the_server_refuses_is_told_in_one_line(loop, caplog):
    controller, cluster, _, metrics = loop

    async def refuse(namespace, name, version, patch):
        raise ApiRefused(403, "status is forbidden")

    cluster.patch_status = refuse
    await controller.start()
    create(controller, cluster, body())
    await eventually(lambda: metrics.reconciles.labels("refused")._value.get() >= 2)  # and it is tried again
    assert "status is forbidden" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_listing_by_the_watch_is_taken_as_a_gap(loop, monkeypatch):
    monkeypatch.setattr("paceline_operator.controller._DEBOUNCE", 0.0)
    controller, cluster, admin, _ = loop
    await controller.start()
    create(controller, cluster, body())
    create(controller, cluster, running())
    await eventually(lambda: cluster.status("chat").get("pods"))
    cluster.objects.clear()  # all went while nobody watched
    controller.observe("Deployment", {"type": None, "object": {"metadata": {"name": "x", "namespace": "y", "labels": {}}}})
    await eventually(lambda: controller.known_services == 0)
    await asyncio.sleep(0.1)  # a call in flight may end
    reads = admin.reads
    await asyncio.sleep(0.2)
    assert admin.reads == reads  # its pods aren't asked any more


async def test_many_hints_at_a_gap_are_one_list(loop, monkeypatch):
    monkeypatch.setattr("paceline_operator.controller._DEBOUNCE", 0.2)
    controller, cluster, _, _ = loop
    await controller.start()
    lists, services = [], cluster.services

    async def counted(namespace):
        lists.append(namespace)
        return await services(namespace)

    monkeypatch.setattr(cluster, "services", counted)
    for _ in range(20):
        controller.observe("InferenceService", {"type": None, "object": body()})
        await asyncio.sleep(0.03)
    assert lists == []
    await eventually(lambda: lists)
    await asyncio.sleep(0.5)
    assert len(lists) == 1


async def test_a_deleted_service_is_forgotten(loop):
    controller, cluster, _, _ = loop
    await controller.start()
    create(controller, cluster, body())
    await eventually(lambda: cluster.status("chat"))
    controller.observe("InferenceService", {"type": "DELETED", "object": cluster.objects.pop(("InferenceService", "chat"))})
    await eventually(lambda: controller.known_services == 0)


async def test_new_kinds_are_watched_also_if_the_server_is_away_when_they_come(loop, monkeypatch):
    controller, cluster, _, _ = loop
    served, asked = [True], []

    async def discover():
        return bool(served) and served.pop()

    async def watch():
        asked.append(None)
        if len(asked) < 3:
            raise ApiUnavailable("away")

    await controller.start()
    controller.on_apis = watch
    monkeypatch.setattr(cluster, "discover", discover)
    await eventually(lambda: len(asked) == 3)
    await asyncio.sleep(0.2)  # four times this test's resync
    assert len(asked) == 3


async def test_a_bug_in_one_round_is_not_the_last_round(loop, monkeypatch, caplog):
    controller, cluster, _, metrics = loop
    caplog.set_level(logging.CRITICAL)
    rounds = []

    async def discover():
        rounds.append(None)
        raise ZeroDivisionError("a bug")

    await controller.start()
    monkeypatch.setattr(cluster, "discover", discover)
    await eventually(lambda: len(rounds) > 2)
    assert metrics.errors.labels("ZeroDivisionError")._value.get() >= 2


async def test_a_server_that_fails_while_kinds_are_looked_for_is_unavailable(monkeypatch):
    async def scan(**_):
        raise aiohttp.ClientConnectionError("reset")

    monkeypatch.setattr(handlers.scanning, "scan_resources", scan)
    with pytest.raises(ApiUnavailable, match="reset"):
        await handlers.watch_new_kinds(kopf.OperatorRegistry(), handlers.make_settings(), Insights())


@pytest.mark.parametrize(
    ("attempt", "told"), [(1, True), (2, True), (3, False), (29, False), (30, True), (31, False), (60, True)]
)
def test_an_outage_is_told_rarely(attempt, told):
    record = logging.LogRecord(
        "kopf", logging.ERROR, "", 0, f"Request attempt #{attempt} failed; will retry: GET …", None, None
    )
    assert command._tell_outages_rarely(record) is told


def test_other_news_are_all_told():
    assert command._tell_outages_rarely(logging.LogRecord("x", logging.INFO, "", 0, "ready", None, None))
