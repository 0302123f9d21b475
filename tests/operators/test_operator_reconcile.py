"""Passes over one service against a small fake of the cluster: what is written when, and above all what isn't."""

import copy

import pytest
from operator_kit import MINIMAL, body, now
from operator_pods import deployment, running, waiting
from operator_world import KEY, World, reconciler

from paceline_operator.errors import ApiRefused, ApiUnavailable
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.names import APPLIED, SERVICE_LABEL
from paceline_operator.pods import instances


@pytest.fixture
def world():
    found = World()
    found.manifest()
    return found


async def test_the_first_pass_makes_every_child_and_says_so(world):
    result = await world.run()
    applied = [kind for verb, kind in world.cluster.calls if verb == "apply"]
    assert applied == ["Secret", "ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "Deployment"]
    assert result.target.knobs["maxNumSeqs"] == 256
    assert not result.retry
    assert world.condition("SpecValid")["status"] == "True"
    assert world.condition("Ready")["status"] == "False"


@pytest.fixture
def patient(world):
    world.reconciler.first_status_after = 1.0
    return world


async def test_a_first_status_waits_for_the_deployments_first_news(patient):
    assert (await patient.run()).again == 1.0
    assert ("status", "chat") not in patient.cluster.calls
    live = copy.deepcopy(patient.cluster.objects["Deployment", "chat"])
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 1)
    patient.sees("Deployment", live | {"status": {"observedGeneration": 1} | counts})
    patient.time = 0.5
    await patient.run()
    assert patient.condition("Ready")["status"] == "True"
    assert patient.cluster.calls == [("status", "chat")]


async def test_a_first_status_without_news_waits_a_second_at_most(patient):
    await patient.run()
    patient.time = 0.9
    assert (await patient.run()).again == pytest.approx(0.1)
    patient.time = 1.0
    await patient.run()
    assert patient.condition("Ready")["reason"] == "Starting"


async def test_bad_news_is_a_first_status_at_once(patient):
    patient.cluster.refuse["Deployment"] = ApiRefused(403, "exceeded quota: gpus")
    await patient.run()
    assert patient.condition("Ready")["message"] == "exceeded quota: gpus"


async def test_a_steady_service_causes_no_write_and_no_read(world):
    await world.run()
    for _ in range(3):
        await world.run()
        assert world.cluster.calls == []


async def test_a_restarted_operator_writes_nothing(world):
    await world.run()
    fresh = World()
    fresh.cluster = world.cluster
    fresh.reconciler = reconciler(world.cluster, fresh.store)
    for (kind, _), item in world.cluster.objects.items():
        if kind != "Secret":
            fresh.store.put(kind, copy.deepcopy(item))
    await fresh.run()
    assert world.cluster.writes() == []


async def test_a_server_that_rewrites_our_fields_causes_no_loop(world):
    def normalise(item):
        if item["kind"] == "Service":
            item["spec"]["ports"][0]["targetPort"] = "HTTP"
        return item

    world.cluster.normalise = normalise
    await world.run()
    await world.run()
    assert world.cluster.writes() == []
    drifted = copy.deepcopy(world.cluster.objects["Service", "chat"])
    drifted["spec"]["ports"][0]["port"] = 1
    world.sees("Service", drifted)
    await world.run()
    assert world.cluster.writes() == [("apply", "Service")]


async def test_drift_is_set_back_and_counted(world):
    await world.run()
    changed = copy.deepcopy(world.cluster.objects["Deployment", "chat"])
    changed["spec"]["replicas"] = 7
    world.sees("Deployment", changed)
    await world.run()
    assert world.cluster.objects["Deployment", "chat"]["spec"]["replicas"] == 1
    assert ("apply", "Deployment") in world.cluster.calls
    assert world.metrics.drift_corrected.labels("Deployment")._value.get() == 1


async def test_a_deleted_child_comes_back(world):
    await world.run()
    gone = world.cluster.objects.pop(("Service", "chat"))
    world.store.remove("Service", gone)
    await world.run()
    assert world.cluster.calls == [("apply", "Service")]


async def test_a_knob_edit_writes_the_config_map_and_the_status(world):
    await world.run()
    world.manifest(MINIMAL | {"batching": {"strategy": "static"}}, generation=2)
    result = await world.run()
    assert world.cluster.calls == [("apply", "ConfigMap"), ("status", "chat")]
    assert result.target.knobs["strategy"] == "static"
    assert "strategy continuous → static" in [event["message"] for event in world.cluster.events]


def foreign(kind, **meta):
    return {
        "kind": kind,
        "metadata": {"name": "chat", "namespace": "team-a", "uid": "other", **meta},
        "spec": {"replicas": 1},
    }


@pytest.mark.parametrize("kind", ["Deployment", "Service", "ServiceAccount"])
@pytest.mark.parametrize(
    "meta", [{}, {"ownerReferences": [{"uid": "x", "controller": True}]}, {"labels": {SERVICE_LABEL: "chat"}}]
)
async def test_a_foreign_object_is_never_taken_and_starts_no_pod(world, kind, meta):
    before = copy.deepcopy(world.cluster.add(foreign(kind, **meta)))
    result = await world.run()
    assert result.retry
    assert result.target is None
    assert ("apply", kind) not in world.cluster.calls
    assert ("apply", "Deployment") not in world.cluster.calls
    assert world.cluster.objects[kind, "chat"] == before
    ready = world.condition("Ready")
    assert ready["reason"] == "NameTaken"
    assert f"a {kind} called chat" in ready["message"]
    assert [event["reason"] for event in world.cluster.events] == ["NameTaken"]


async def test_a_foreign_deployment_does_not_count_as_ours(world):
    world.sees(
        "Deployment",
        {**deployment(ready=1, uid="other"), "metadata": foreign("Deployment", labels={SERVICE_LABEL: "chat"})["metadata"]},
    )
    await world.run()
    assert world.condition("Ready")["reason"] == "NameTaken"
    assert world.store.service(KEY)["status"]["readyReplicas"] == 0


async def test_what_an_earlier_service_of_the_name_left_is_waited_for(world):
    owner = {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService", "name": "chat", "uid": "earlier"}
    owner["controller"] = True
    world.cluster.add(foreign("Deployment", labels={SERVICE_LABEL: "chat"}, ownerReferences=[owner]))
    result = await world.run()
    assert result.retry
    assert ("apply", "Deployment") not in world.cluster.calls
    assert world.condition("Ready")["reason"] == "Replacing"
    assert world.cluster.events == []  # no news: it takes a moment
    del world.cluster.objects["Deployment", "chat"]
    assert not (await world.run()).retry


async def test_a_secret_that_goes_with_an_earlier_service_after_all_is_made_again(world):
    """A garbage collector that has seen it with its old owner deletes it, though it has a new one by then."""
    owner = {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService", "name": "chat", "uid": "earlier"}
    secret = foreign("Secret", ownerReferences=[owner | {"controller": True}])
    secret["metadata"]["name"] = "chat-admin"
    world.cluster.add(secret)
    result = await world.run()
    del world.cluster.objects["Secret", "chat-admin"]
    assert result.again == 5.0
    world.time += result.again
    result = await world.run()
    assert ("Secret", "chat-admin") in world.cluster.objects
    assert result.again == 25.0  # once more, in case that was too early
    world.time += result.again
    assert (await world.run()).again is None
    world.time += 60
    await world.run()
    assert world.cluster.writes() == []


async def test_a_service_whose_deployment_cannot_be_made_looks_for_its_secret_twice_and_no_more(world):
    world.cluster.refuse["Deployment"] = ApiRefused(422, "no")
    waits = []
    for _ in range(6):
        result = await world.run()
        waits.append(result.again)
        world.time += result.again or 60
    assert waits == [None, 5.0, 25.0, None, None, None]


async def test_a_secret_of_a_new_service_is_not_looked_for_again(world):
    assert (await world.run()).again is None


async def test_a_foreign_secret_is_found_by_its_type(world):
    world.cluster.refuse["Secret"] = ApiRefused(422, "type: field is immutable")
    result = await world.run()
    assert result.retry
    assert "a Secret called chat-admin" in world.condition("Ready")["message"]
    assert ("apply", "Deployment") not in world.cluster.calls


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (422, "Rejected"), (400, "Rejected")])
async def test_what_the_server_refuses_is_told(world, status, reason):
    world.cluster.refuse["Deployment"] = ApiRefused(status, "because of that")
    result = await world.run()
    assert result.retry
    assert world.condition("Ready")["reason"] == reason
    assert world.condition("Ready")["message"] == "because of that"


async def test_an_unreachable_server_ends_the_pass_without_a_word(world):
    world.cluster.refuse["ConfigMap"] = ApiUnavailable("gone")
    with pytest.raises(ApiUnavailable):
        await world.run()
    assert "status" not in world.store.service(KEY)


async def test_a_child_that_is_going_is_waited_for(world):
    await world.run()
    going = copy.deepcopy(world.cluster.objects["Service", "chat"])
    going["metadata"]["deletionTimestamp"] = now()
    world.sees("Service", going)
    with pytest.raises(ApiUnavailable, match="is being deleted"):
        await world.run()


async def test_a_bad_spec_touches_no_child(world):
    await world.run()
    before = copy.deepcopy(world.cluster.objects["Deployment", "chat"])
    world.manifest(MINIMAL | {"batching": {"maxNumSeqs": 64, "maxNumBatchedTokens": 8}}, generation=2)
    result = await world.run()
    assert result.target is None
    assert not result.retry
    assert world.cluster.calls == [("status", "chat")]
    assert world.cluster.objects["Deployment", "chat"] == before
    assert world.condition("SpecValid")["status"] == "False"
    assert "maxNumBatchedTokens" in world.condition("SpecValid")["message"]
    assert world.cluster.events[-1]["reason"] == "InvalidSpec"


async def test_what_the_settings_forbid_is_a_bad_spec():
    world = World()
    world.manifest(MINIMAL | {"template": {"spec": {"hostNetwork": True}}})
    await world.run()
    assert world.condition("SpecValid")["status"] == "False"
    assert "PACELINE_ALLOW" in world.condition("SpecValid")["message"]


async def test_a_service_that_is_going_is_left_to_the_garbage_collector(world):
    await world.run()
    going = copy.deepcopy(world.store.service(KEY))
    going["metadata"] |= {"deletionTimestamp": now(), "resourceVersion": "999"}
    world.store.put("InferenceService", going)
    await world.run()
    world.store.remove("InferenceService", going)
    await world.run()
    assert world.cluster.calls == []


async def test_a_secret_that_pods_wait_for_is_applied_again_but_not_all_the_time(world):
    await world.run()
    world.sees("Pod", waiting("ContainerCreating"))
    await world.run()
    assert ("apply", "Secret") not in world.cluster.calls
    world.time += 60
    await world.run()
    assert ("apply", "Secret") in world.cluster.calls
    await world.run()
    assert ("apply", "Secret") not in world.cluster.calls


async def test_another_operator_key_renews_the_secret_without_rolling_pods(world):
    await world.run()
    template = copy.deepcopy(world.cluster.objects["Deployment", "chat"]["spec"]["template"])
    renewed = "another-key-of-at-least-thirty-two-bytes"
    world.reconciler = reconciler(world.cluster, world.store, OPERATOR_KEY=renewed)
    await world.run()
    assert [kind for verb, kind in world.cluster.calls if verb == "apply"] == ["Secret", "Deployment"]
    assert world.cluster.objects["Deployment", "chat"]["spec"]["template"] == template


async def test_knobs_count_as_synced_only_once_pods_were_asked_for_these(world):
    target = (await world.run()).target
    world.sees("Pod", running(restarts=0))
    process = instances(world.store.all(KEY, "Pod"))[0].process
    synced = PodKnobs(KnobState.SYNCED, revision=2, epoch=1, verified=(target.digest, process))
    await world.run()
    assert world.condition("KnobsSynced")["reason"] == "Pending"  # nobody has asked it yet
    await world.run(**{"chat-1": synced})
    assert world.condition("KnobsSynced")["status"] == "True"
    world.manifest(MINIMAL | {"batching": {"maxNumSeqs": 8}}, generation=2)
    await world.run(**{"chat-1": synced})
    told = world.condition("KnobsSynced")
    assert (told["status"], told["reason"], told["observedGeneration"]) == ("False", "Pending", 2)
    assert world.store.service(KEY)["status"]["pods"]["chat-1"] == {"state": "Pending", "revision": 2, "epoch": 1}
    world.manifest(MINIMAL, generation=3)
    world.sees("Pod", running(restarts=1))  # a new process may have read older files
    await world.run(**{"chat-1": synced})
    assert world.condition("KnobsSynced")["reason"] == "Pending"


async def test_the_status_follows_pods(world):
    await world.run()
    live = copy.deepcopy(world.cluster.objects["Deployment", "chat"])
    live["status"] = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
    live["metadata"]["generation"] = 1
    world.sees("Deployment", live)
    world.sees("Pod", running())
    await world.run()
    assert world.condition("Ready")["status"] == "True"
    assert world.cluster.calls == [("status", "chat")]


@pytest.mark.parametrize("error", [ApiRefused(403, "namespace is being terminated"), ApiUnavailable("overloaded")])
async def test_a_lost_event_does_not_fail_the_pass(world, error):
    async def refuse(event):
        raise error

    world.cluster.create_event = refuse
    await world.run()
    assert world.condition("SpecValid")["status"] == "True"


async def test_a_status_of_a_service_that_vanished_is_dropped(world):
    async def gone(namespace, name, version, patch):
        return None

    world.cluster.patch_status = gone
    await world.run()
    assert world.cluster.events == []


async def test_what_was_found_out_about_one_service_is_not_told_of_the_next_one_of_its_name(world):
    world.cluster.add(body(uid="made-again-meanwhile"))
    with pytest.raises(ApiUnavailable, match="has changed meanwhile"):
        await world.run()
    assert world.cluster.status("chat") == {}


async def test_the_stamp_is_kept_while_a_field_is_taken_out(world):
    world.manifest(MINIMAL | {"env": [{"name": "A", "value": "b"}]}, generation=2)
    await world.run()
    first = world.cluster.objects["Deployment", "chat"]["metadata"]["annotations"][APPLIED]
    world.manifest(MINIMAL, generation=3)
    await world.run()
    assert ("apply", "Deployment") in world.cluster.calls  # everything we set is there, and yet one thing is too many
    assert world.cluster.objects["Deployment", "chat"]["metadata"]["annotations"][APPLIED] != first
