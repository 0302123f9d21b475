"""Knobs in force: what the tuner found counts only for the spec it was found for, and never comes back once dropped."""

import json

import pytest
from operator_kit import MINIMAL, body, service
from test_operator_reconcile import KEY, World

from paceline_operator.effective import Override, effective, override_text, read_override, spec_hash, tuned_name
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.names import SERVICE_LABEL
from paceline_operator.render import knobs_document
from paceline_runtime.settings import merge_knobs

AUTO = MINIMAL | {"batching": {"maxNumSeqs": 32, "maxQueueDelay": "50ms"}, "tuning": {"mode": "Auto"}}


def tuned(spec, **knobs):
    return Override(spec_hash(service(spec)), knobs)


def test_without_an_override_the_spec_counts():
    found = effective(service(AUTO), None)
    assert (found.knobs.max_num_seqs, found.dropped) == (32, "")
    assert (found.origins["maxNumSeqs"], found.origins["blockSize"]) == ("spec", "default")


def test_an_override_of_this_spec_counts():
    found = effective(service(AUTO), tuned(AUTO, maxNumSeqs=48))
    assert (found.knobs.max_num_seqs, found.origins["maxNumSeqs"], found.dropped) == (48, "tuned", "")
    assert found.origins["maxQueueDelay"] == "spec"


def edited(**spec):
    return AUTO | spec


BOUNDED = {"mode": "Auto", "bounds": {"maxNumSeqs": {"max": 40}}}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (edited(batching={"maxNumSeqs": 33, "maxQueueDelay": "50ms"}), "have changed"),
        (edited(batching={"maxNumSeqs": 32}), "have changed"),
        (edited(slo={"ttft": "1s"}), "have changed"),
        (edited(tuning={"mode": "Recommend"}), "tuning.mode is Recommend"),
        (edited(tuning={"mode": "Off"}), "tuning.mode is Off"),
        (edited(tuning=BOUNDED), "maxNumSeqs 48"),
    ],
)
def test_an_edit_drops_it(spec, why):
    found = effective(service(spec), tuned(AUTO, maxNumSeqs=48))
    assert why in found.dropped
    assert found.knobs == service(spec).knobs
    assert "tuned" not in found.origins.values()


def test_another_spelling_is_no_edit():
    same = edited(batching={"maxNumSeqs": 32, "maxQueueDelay": "0.05s"}, replicas=3)
    assert effective(service(same), tuned(AUTO, maxNumSeqs=48)).dropped == ""


@pytest.mark.parametrize("knobs", [{"blockSize": 32}, {"maxNumSeq": 1}, {"maxNumSeqs": 0}, {"maxNumSeqs": 100_000}])
def test_an_override_that_no_pod_could_take_is_dropped(knobs):
    assert effective(service(AUTO), tuned(AUTO, **knobs)).dropped


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"knobs": {}}', '{"specHash": "x", "knobs": 3}'])
def test_an_unreadable_override_is_dropped(text):
    assert effective(service(AUTO), read_override({"data": {"knobs.json": text}})).dropped


@pytest.mark.parametrize("config_map", [None, {}, {"data": None}, {"data": {"other": "x"}}])
def test_no_override_is_none(config_map):
    assert read_override(config_map) is None


def test_what_is_written_is_read_back():
    override = tuned(AUTO, maxNumSeqs=48)
    assert read_override({"data": {"knobs.json": override_text(override)}}) == override


def files(folder, spec, override):
    found = [folder / "knobs.json", folder / "tuned.json"]
    found[0].write_text(knobs_document(service(spec)))
    found[1].write_text(override_text(override))
    return found


def test_a_new_pod_reads_both_files_as_the_operator_does(tmp_path):
    override = tuned(AUTO, maxNumSeqs=48)
    assert merge_knobs(files(tmp_path, AUTO, override), {}) == effective(service(AUTO), override).knobs
    changed = edited(batching={"maxNumSeqs": 16})
    assert merge_knobs(files(tmp_path, changed, override), {}) == service(changed).knobs


def test_a_file_without_a_hash_counts_always(tmp_path):
    found = files(tmp_path, AUTO, tuned(AUTO, maxNumSeqs=48))
    found[1].write_text(json.dumps({"knobs": {"maxNumSeqs": 7}}))
    assert merge_knobs(found, {}).max_num_seqs == 7


PAST = '{"phase": "Settled", "history": []}'


def config_map(override, uid="uid-1"):
    reference = {"uid": uid, "controller": True}
    meta = {"name": tuned_name("chat"), "namespace": "team-a", "labels": {SERVICE_LABEL: "chat"}}
    return {
        "kind": "ConfigMap",
        "metadata": meta | {"ownerReferences": [reference], "uid": "uid-tuned"},
        "data": {"knobs.json": override_text(override), "trial.json": "{}", "state.json": PAST},
    }


@pytest.fixture
async def world():
    found = World()
    found.manifest(AUTO)
    await found.run()
    found.sees("ConfigMap", config_map(tuned(AUTO, maxNumSeqs=48)))
    return found


async def test_pods_are_asked_for_what_was_tuned_and_the_status_says_so(world):
    result = await world.run()
    assert result.target.knobs["maxNumSeqs"] == 48
    assert world.cluster.writes() == [("status", "chat")]
    assert world.store.service(KEY)["status"]["effective"]["maxNumSeqs"] == {"value": 48, "origin": "tuned"}
    await world.run()
    assert world.cluster.calls == []


async def test_what_a_pod_has_counts_for_the_tuned_target(world):
    target = (await world.run()).target
    told = PodKnobs(KnobState.SYNCED, revision=2, verified=(target.digest, "process"))
    assert (await world.run(other=told)).target == target


async def test_an_edit_empties_the_override_so_that_taking_it_back_does_not_bring_it_back(world):
    await world.run()
    world.manifest(edited(batching={"maxNumSeqs": 16}), generation=2)
    assert (await world.run()).target.knobs["maxNumSeqs"] == 16
    assert ("merge", "ConfigMap") in world.cluster.calls
    assert world.store.get(KEY, "ConfigMap", tuned_name("chat"))["data"] == {"state.json": PAST}  # what was tried is kept
    world.manifest(AUTO, generation=3)
    assert (await world.run()).target.knobs["maxNumSeqs"] == 32
    assert ("merge", "ConfigMap") not in world.cluster.calls


async def test_an_override_of_an_earlier_service_of_the_name_is_not_read(world):
    world.sees("ConfigMap", config_map(tuned(AUTO, maxNumSeqs=48), uid="uid-0"))
    assert (await world.run()).target.knobs["maxNumSeqs"] == 32
    assert body(AUTO)["metadata"]["uid"] == "uid-1"


async def test_what_tuning_did_stays_in_the_status_when_it_is_switched_off(world):
    await world.run()
    past = {"lastChange": {"outcome": "Settled(Verified)"}, "history": [{"outcome": "Settled(Verified)"}]}
    told = {"mode": "Auto", "state": "Settled", "applied": {"maxNumSeqs": 48}}
    world.cluster.objects["InferenceService", "chat"]["status"]["tuning"] = told | past
    world.manifest(edited(tuning={"mode": "Off"}), generation=2)
    await world.run()
    assert world.store.service(KEY)["status"]["tuning"] == {"mode": "Off"} | past
