"""What one bad object, or a thing that happens over and over, may not do to the rest of a local stack."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest

from paceline_local import events as events_module
from paceline_local.addresses import Network
from paceline_local.apiserver.store import Change, Subscription
from paceline_local.client import Listing
from paceline_local.container import ContainerRunner, Launch
from paceline_local.container_state import Waiting
from paceline_local.errors import ApiUnavailable, ConfigMissing
from paceline_local.events import EventRecorder
from paceline_local.mirror import Mirror
from paceline_local.node import NodeAgent, _unplaceable
from paceline_local.pod import NodeFacts, PodWorker
from paceline_local.probes import Target
from paceline_local.resources import PODS
from paceline_local.scheduling import unschedulable
from paceline_local.state import StateDir
from paceline_local.volumes import decode_object


class Client:
    """Records writes; a watch delivers `told` and then breaks."""

    def __init__(self, *told):
        self.calls, self.told = [], told

    async def create(self, resource, body, namespace=None):
        self.calls.append(("create", body))
        return body

    async def patch(self, resource, name, body, namespace=None, **_):
        self.calls.append(("patch", body))
        return body

    async def delete(self, resource, name, namespace=None, **options):
        self.calls.append(("delete", options))

    async def list(self, resource, namespace=None, *, labels=""):
        return Listing([], "1")

    async def watch(self, resource, version, namespace=None):
        for item in self.told:
            yield "ADDED", item
        raise ApiUnavailable("broken")


def pod(name="web", **spec):
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1"}
    container = {"name": "c", "command": ["true"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [container]} | spec}


async def test_pods_that_come_and_go_while_a_new_agent_cleans_up_are_not_missed(tmp_path, monkeypatch):
    state = StateDir(tmp_path)
    state.pods.mkdir()
    agent = NodeAgent(Client(), state, Network(200), None)
    agent._pods.items["default/old"] = pod("old")
    agent._pods.synced.set()

    def clean_up(alive):
        assert set(alive) == {"uid-old"}
        del agent._pods.items["default/old"]
        agent._pods._apply("ADDED", pod("new"))

    seen = []
    monkeypatch.setattr(agent, "_clean_up", clean_up)
    monkeypatch.setattr(agent, "_bind", lambda pod: asyncio.sleep(0, seen.append(pod["metadata"]["name"])))
    await agent._adopt()
    assert seen == ["new"]


async def test_an_event_that_repeats_quickly_is_written_rarely_and_counted_whole():
    client, now = Client(), 0.0
    recorder = EventRecorder(client, "test", lambda: now)
    for _ in range(100):  # a probe that fails twice a second
        await recorder.emit(pod(), "Warning", "Unhealthy", "not yet")
        now += 0.5
    written = [body["count"] for _, body in client.calls]
    assert len(written) <= 1 + 50 / events_module._AGAIN_S
    assert written[0] == 1
    now += events_module._AGAIN_S
    await recorder.emit(pod(), "Warning", "Unhealthy", "not yet")
    assert client.calls[-1][1]["count"] == 101
    await recorder.emit(pod(), "Warning", "Unhealthy", "something else")
    assert client.calls[-1][0] == "create"


async def test_an_object_that_cannot_be_dealt_with_does_not_end_the_view_of_others(caplog):
    seen = []

    def on_change(kind, item):
        if item["metadata"]["name"] == "sick":
            raise KeyError("a bug")
        seen.append(item["metadata"]["name"])

    mirror = Mirror(Client(pod("sick"), pod("well")), PODS, on_change)
    caplog.set_level(logging.CRITICAL)
    task = asyncio.create_task(mirror.run())
    async with asyncio.timeout(10):
        while "well" not in seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()


async def test_a_pod_that_the_agent_failed_with_can_still_be_deleted(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    state, client = StateDir(tmp_path / "home"), Client()
    state.create()
    node = NodeFacts("local", "127.0.0.1", {}, state, client, EventRecorder(client, "test"), None)
    worker = PodWorker(pod(), "127.0.0.1", node)

    async def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker.files, "write_volumes", fail)
    caplog.set_level(logging.CRITICAL)
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    gone = pod()
    gone["metadata"] |= {"deletionTimestamp": "2030-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}
    worker.update(gone)
    async with asyncio.timeout(10):
        await task
    assert client.calls[-1] == ("delete", {"uid": "uid-web", "grace": 0})
    assert not worker.folder.exists()


@pytest.mark.parametrize(
    "obj", [{"kind": "Secret", "data": {"token": "not base64!="}}, {"kind": "ConfigMap", "binaryData": {"a": 7}}]
)
def test_data_that_is_not_base64_is_told_to_the_pod_that_needs_it(obj):
    with pytest.raises(ConfigMissing, match="isn't base64"):
        decode_object(obj | {"metadata": {"name": "odd"}})


class Hooks:
    """A pod whose container gets a variable that no process can have."""

    def __init__(self, folder):
        self.folder, self.session, self.notes = folder, None, []

    async def launch(self, container):
        env = {"PATH": os.environ["PATH"], "A": "a\0b"}
        return Launch(["true"], env, self.folder, Target("127.0.0.1", {}, env, self.folder))

    def changed(self):
        pass

    def note(self, kind, reason, message):
        self.notes.append((kind, reason, message))


async def test_a_nul_in_a_variable_is_an_error_that_the_container_tells(tmp_path):
    hooks = Hooks(tmp_path)
    runner = ContainerRunner("uid", {"name": "c"}, "Always", 1.0, hooks)
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(10):
        while not hooks.notes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert runner.state.waiting == Waiting("CreateContainerError", "embedded null byte")
    await runner.stop(0)
    async with asyncio.timeout(10):
        await task


def test_an_amount_that_is_no_quantity_leaves_the_pod_with_a_reason():
    odd = pod(containers=[{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "many"}}}])
    with pytest.raises(Exception, match="many"):
        unschedulable(odd, {}, {})
    assert "'many' is not a quantity" in _unplaceable(odd, {}, {})


def test_a_watch_that_lags_as_far_as_it_may_ends_with_its_kind():
    inbox, change = Subscription("pods"), Change(1, ("pods", "default", "web"), None, {})
    room = inbox._changes.maxsize
    for _ in range(room):
        inbox.offer(change)
    assert not inbox.overflowed
    inbox.end()
    assert inbox.overflowed, "or it would wait for changes of a kind that there isn't"
