"""An operator upgrade restarts no model: two versions of the operator, the later one with another template, in turn."""

import copy
import json

import pytest
from operator_fakes import ALL_APIS
from operator_kit import FULL, MINIMAL, service, set_at, settings
from operator_world import KEY, World, reconciler

from paceline_operator import render as render_module
from paceline_operator.names import INPUTS, RESTART_HASH, REVISION, TEMPLATE, UPGRADE
from paceline_operator.pod import pod_template, revision_of
from paceline_operator.render import render
from paceline_operator.upgrade import hold, inputs_hash


def deployment(spec=MINIMAL, upgrade="", **environment):
    return render(service(spec), settings(**environment), ALL_APIS, upgrade=upgrade)[-1]


def later_template(service, settings, base):
    """What a later version makes of the same spec: another environment, another annotation, another hash of knobs."""
    template = pod_template(service, settings, base)
    template["spec"]["containers"][0]["env"].append({"name": "LATER", "value": "1"})
    template["metadata"]["annotations"][RESTART_HASH] = "of-a-version-with-more-knobs"
    template["metadata"]["annotations"][REVISION] = revision_of(template)
    return template


@pytest.fixture
def later(monkeypatch):
    def switch():
        monkeypatch.setattr(render_module, "pod_template", later_template)

    return switch


def template(world):
    return world.cluster.objects["Deployment", "chat"]["spec"]["template"]


def succeed(world, **environment):
    """Another process of another version takes over, with what the API server has."""
    world.reconciler = reconciler(world.cluster, world.store, world.metrics, lambda: world.time, **environment)


async def test_pods_stay_while_nobody_asks_for_others(later):
    world = World()
    world.manifest(MINIMAL)
    await world.run()
    before = copy.deepcopy(template(world))
    later()
    succeed(world, RUNTIME_IMAGE="registry/runtime:2")
    result = await world.run()
    assert template(world) == before
    assert [call for call in world.cluster.calls if call[1] == "Deployment"] == []
    held = world.condition("UpgradeAvailable")
    assert (held["status"], held["reason"]) == ("True", "PodsKept")
    assert "registry/runtime:1 → registry/runtime:2" in held["message"]
    assert [event["reason"] for event in world.cluster.events] == ["UpgradeAvailable"]
    assert result.target.restart_hash == before["metadata"]["annotations"][RESTART_HASH]  # pods don't wait for a rollout
    await world.run()
    assert world.cluster.calls == []


async def test_replicas_and_knobs_of_kept_pods_are_served_on(later):
    world = World()
    world.manifest(MINIMAL)
    await world.run()
    before = copy.deepcopy(template(world))
    later()
    succeed(world)
    world.manifest(MINIMAL | {"replicas": 3, "batching": {"maxNumSeqs": 8}, "slo": {"ttft": "1s"}}, generation=2)
    await world.run()
    assert world.cluster.objects["Deployment", "chat"]["spec"]["replicas"] == 3
    assert json.loads(world.cluster.objects["ConfigMap", "chat-knobs"]["data"]["knobs.json"])["knobs"]["maxNumSeqs"] == 8
    assert template(world) == before


async def test_drift_of_a_kept_template_is_set_back_to_what_was_applied(later):
    world = World()
    world.manifest(MINIMAL)
    await world.run()
    before = copy.deepcopy(template(world))
    later()
    succeed(world)
    await world.run()
    drifted = copy.deepcopy(world.cluster.objects["Deployment", "chat"])
    drifted["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    world.sees("Deployment", drifted)
    await world.run()
    assert template(world) == before


async def test_an_edit_of_the_spec_rolls_to_the_later_template(later):
    world = World()
    world.manifest(MINIMAL)
    await world.run()
    later()
    succeed(world)
    world.manifest(set_at(MINIMAL, "model.maxModelLen", 128), generation=2)
    await world.run()
    assert "LATER" in str(template(world))
    assert world.condition("UpgradeAvailable")["status"] == "False"


async def test_the_annotation_rolls_once_per_value(later):
    world = World()
    world.manifest(MINIMAL)
    await world.run()
    later()
    succeed(world)
    annotate(world, "now")
    await world.run()
    assert "LATER" in str(template(world))
    succeed(world, RUNTIME_IMAGE="registry/runtime:3")  # the next upgrade of the operator, the same annotation
    await world.run()
    assert "registry/runtime:3" not in str(template(world))
    annotate(world, "and now")
    await world.run()
    assert "registry/runtime:3" in str(template(world))


def annotate(world, value):
    parent = copy.deepcopy(world.store.service(KEY))
    parent["metadata"]["annotations"] = {UPGRADE: value}
    world.sees("InferenceService", parent)


def test_a_record_that_somebody_edited_is_not_believed():
    live, fresh = deployment(), deployment(RUNTIME_IMAGE="registry/runtime:2")
    assert hold(fresh, live)[0]["spec"]["template"] == live["spec"]["template"]
    record = json.loads(live["metadata"]["annotations"][TEMPLATE])
    record["spec"]["containers"][0]["image"] = "registry/evil:1"
    for text in (json.dumps(record), "{", "[]", "null", '{"metadata": {}}'):
        live["metadata"]["annotations"][TEMPLATE] = text
        assert hold(fresh, live) == (fresh, "")


def test_a_deployment_of_before_there_were_records_is_made_anew():
    live = deployment()
    for annotation in (TEMPLATE, INPUTS):
        bare = copy.deepcopy(live)
        del bare["metadata"]["annotations"][annotation]
        fresh = deployment(RUNTIME_IMAGE="registry/runtime:2")
        assert hold(fresh, bare) == (fresh, "")
    assert hold(live, None) == (live, "")


LIVE = [
    ("replicas", 9), ("batching.maxNumSeqs", 8), ("slo.ttft", "9s"), ("tuning.mode", "Auto"), ("queueName", "a"),
    ("scaling", {"maxReplicas": 2, "waitingRequests": 1}), ("monitoring", {"podMonitor": True}),
    ("networkPolicy", {"enabled": False}), ("routing", {"gateway": {"name": "x"}}), ("rollout.progressDeadline", "2h"),
]  # fmt: skip
ROLLING = [
    ("model.uri", "hf://a/b"), ("model.maxModelLen", 64), ("batching.blockSize", 16), ("image", "registry/runtime:9"),
    ("resources.limits.memory", "65Gi"), ("accelerator.count", 4), ("env", []), ("nodeSelector", {}), ("template", {}),
    ("priorityClassName", "x"), ("sharedMemory", "3Gi"), ("rollout.drainTimeout", "1m"), ("tolerations", []),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), LIVE, ids=[path for path, _ in LIVE])
def test_what_does_not_reach_the_pods_is_no_input_of_theirs(path, value):
    assert inputs_hash(service(set_at(FULL, path, value))) == inputs_hash(service(FULL))


@pytest.mark.parametrize(("path", "value"), ROLLING, ids=[path for path, _ in ROLLING])
def test_what_reaches_the_pods_is_an_input(path, value):
    assert inputs_hash(service(set_at(FULL, path, value))) != inputs_hash(service(FULL))


def test_a_default_that_is_stated_is_no_other_input():
    """Otherwise a version with another default would roll every pod."""
    stated = MINIMAL | {"replicas": 1, "env": [], "rollout": {"drainTimeout": "30s", "progressDeadline": "1h"}}
    assert inputs_hash(service(MINIMAL | {"accelerator": {}})) == inputs_hash(
        service(MINIMAL | {"accelerator": {"count": 1}})
    )
    assert inputs_hash(service(MINIMAL)) == inputs_hash(service(stated))
