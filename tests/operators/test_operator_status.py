"""The status tells the truth, in words that somebody on call can act on, and stands still while nothing happens."""

import jsonschema
import pytest
from operator_kit import FULL, MINIMAL, body, service
from operator_pods import deployment, ended, pod, running, unschedulable, waiting

from paceline_operator.crd import status_schema
from paceline_operator.events import decisions, event_of
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.outcome import Applied
from paceline_operator.pods import diagnose, instances, is_mounting, worst
from paceline_operator.status import Observation, merge_patch, status_of

NOW, LATER = "2030-01-01T00:00:00Z", "2030-01-01T00:05:00Z"
SYNCED = PodKnobs(KnobState.SYNCED, revision=2, epoch=3, verified=("d", "p"))


def status(spec=MINIMAL, *, now=NOW, old=None, generation=1, **seen):
    valid = "spec_error" not in seen
    found = status_of(
        Observation(
            body=body(spec, status=old, generation=generation), service=service(spec) if valid else None, now=now, **seen
        )
    )
    jsonschema.Draft202012Validator(status_schema()).validate(found)
    return found


def conditions(found):
    return {c["type"]: c for c in found["conditions"]}


def says(found, kind):
    condition = conditions(found)[kind]
    return condition["status"], condition["reason"]


def test_a_service_whose_pods_answer_is_ready():
    found = status(
        deployment=deployment(replicas=2, ready=2), pods=[running("a"), running("b")], knobs={"a": SYNCED, "b": SYNCED}
    )
    assert says(found, "Ready") == ("True", "PodsReady")
    assert says(found, "Progressing") == ("False", "Complete")
    assert says(found, "Scheduled") == ("True", "Scheduled")
    assert says(found, "ModelReady") == ("True", "Loaded")
    assert says(found, "KnobsSynced") == ("True", "Synced")
    assert says(found, "MetricsAvailable") == ("True", "Answering")
    assert (found["replicas"], found["readyReplicas"]) == (2, 2)
    assert found["pods"]["a"] == {"state": "Synced", "revision": 2, "epoch": 3}


def test_the_status_shows_what_is_in_force_and_why():
    found = status(FULL)
    assert found["strategy"] == "iteration"
    assert found["slo"] == "ttft 500ms, tpot 50ms p99"
    assert found["effective"]["maxNumSeqs"] == {"value": 32, "origin": "spec"}
    assert found["effective"]["sloTtft"] == {"value": "500ms", "origin": "spec"}
    assert status()["effective"]["maxNumSeqs"] == {"value": 256, "origin": "default"}
    assert "sloTtft" not in status()["effective"]
    assert found["url"] == "http://chat.team-a.svc:8000"
    assert found["selector"] == "app.kubernetes.io/name=paceline-runtime,paceline.io/service=chat"
    assert found["model"] == "org/model-7b"


def test_nothing_changes_while_nothing_happens():
    seen = {"deployment": deployment(ready=1), "pods": [running()], "knobs": {"chat-1": SYNCED}}
    first = status(**seen)
    assert merge_patch(first, status(old=first, now=LATER, **seen)) == {}


def test_the_time_of_a_condition_moves_only_with_its_status():
    first = status(deployment=deployment(), pods=[waiting("ContainerCreating")])
    second = status(old=first, now=LATER, deployment=deployment(ready=1), pods=[running()])
    before, after = conditions(first), conditions(second)
    assert after["Ready"]["lastTransitionTime"] == LATER
    assert after["SpecValid"]["lastTransitionTime"] == before["SpecValid"]["lastTransitionTime"] == NOW


def test_a_condition_of_an_older_generation_says_so():
    found = status(generation=4)
    assert found["observedGeneration"] == 4
    assert {c["observedGeneration"] for c in found["conditions"]} == {4}


def test_an_unusable_spec_keeps_what_the_pods_run_under():
    first = status(FULL, deployment=deployment(ready=1), pods=[running()])
    broken = status(old=first, spec_error="spec.x: unknown field", deployment=deployment(ready=1), pods=[running()])
    assert says(broken, "SpecValid") == ("False", "Invalid")
    assert conditions(broken)["SpecValid"]["message"] == "spec.x: unknown field"
    assert says(broken, "Ready") == ("False", "InvalidSpec")
    assert broken["strategy"] == "iteration"
    assert broken["effective"] == first["effective"]
    assert broken["readyReplicas"] == 1


def test_a_child_that_cannot_be_applied_is_told():
    found = status(applied=Applied(failure=("NameTaken", "a Deployment called chat exists")))
    assert says(found, "Ready") == says(found, "Progressing") == says(found, "ChildrenApplied") == ("False", "NameTaken")


def test_ready_waits_for_the_controller_to_see_the_change():
    assert says(status(deployment=deployment(ready=1, seen=False), pods=[running()]), "Ready") == ("False", "Creating")


def test_zero_replicas_are_not_ready():
    assert says(status(deployment=deployment(replicas=0)), "Ready") == ("False", "ScaledToZero")


def test_a_rollout_keeps_ready_while_old_pods_serve():
    pods = [running("old"), waiting("ContainerCreating", name="new")]
    found = status(deployment=deployment(ready=1, total=2, revision=2), pods=pods)
    assert says(found, "Ready") == ("True", "PodsReady")
    assert says(found, "Progressing") == ("True", "RollingOut")


def test_ready_is_never_true_while_a_pod_crashes():
    crashing = pod("new", state={"waiting": {"reason": "CrashLoopBackOff"}}, last=ended(1, "boom"), restarts=3)
    found = status(deployment=deployment(ready=1, total=2), pods=[running("old"), crashing])
    assert says(found, "Ready") == ("False", "Crashed")
    assert "1 of 1 pods ready" in conditions(found)["Ready"]["message"]
    assert says(found, "Progressing") == ("False", "Blocked")


ONE_LINE = "Traceback …\n  File x\nerror: model file /nowhere/model.gguf doesn't exist\n"
FAULTS = [
    (waiting("ImagePullBackOff", "not found: registry/runtime:1"), "ImagePull", ["ImagePullBackOff", "registry/runtime:1"]),
    (waiting("ErrImageNeverPull"), "ImagePull", ["registry/runtime:1"]),
    (waiting("CreateContainerConfigError", 'secret "hf-token" not found'), "ContainerConfig", ["hf-token"]),
    (waiting("RunContainerError", "exec: paceline-runtime not found"), "ContainerConfig", ["paceline-runtime"]),
    (unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "Unschedulable", ["nvidia.com/gpu"]),
    (
        waiting("CrashLoopBackOff", last=ended(2, ONE_LINE), restarts=1),
        "ModelNotFound",
        ["/nowhere/model.gguf doesn't exist", "spec.model.uri"],
    ),
    (pod(state=ended(2, ONE_LINE)), "ModelNotFound", ["/nowhere/model.gguf"]),
    (
        waiting("CrashLoopBackOff", last=ended(137, reason="OOMKilled"), restarts=2),
        "OutOfMemory",
        ["2Gi", "kvMemoryFraction"],
    ),
    (pod(state={"running": {}}, last=ended(137, reason="OOMKilled"), restarts=2), "OutOfMemory", ["limits.memory"]),
    (
        waiting("CrashLoopBackOff", last=ended(139, "", reason="Error"), restarts=4),
        "Crashed",
        ["139", "4 times", "no message"],
    ),
    (pod(state={"running": {}}, last=ended(1, "boom"), restarts=1), "Crashed", ["boom", "once"]),
    (waiting("CrashLoopBackOff", last=ended(0), restarts=3), "Crashed", ["ends at once"]),
    (pod(phase="Failed") | {"status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}}, "Evicted", ["disk"]),
    (waiting("ContainerCreating"), "Starting", ["ContainerCreating"]),
    (pod(node=None, phase="Pending"), "Starting", ["node"]),
    (pod(state={"running": {}}), "Loading", ["/health/ready"]),
]


@pytest.mark.parametrize(("found", "reason", "words"), FAULTS, ids=[f"{r}-{i}" for i, (_, r, _) in enumerate(FAULTS)])
def test_each_fault_has_its_reason_and_its_words(found, reason, words):
    finding = diagnose(found, 0.0)
    assert finding.reason == reason
    assert all(word in finding.message for word in [found["metadata"]["name"], *words]), finding.message
    ready = conditions(status(deployment=deployment(), pods=[found]))["Ready"]
    assert ready["status"] == "False"
    assert finding.message in ready["message"]


def test_a_long_message_is_cut():
    assert len(diagnose(waiting("ImagePullBackOff", "x" * 3000), 0.0).message) < 800


def test_healthy_and_leaving_pods_have_no_finding():
    assert diagnose(running(), 0.0) is None
    assert diagnose(pod(state=ended(1), deletionTimestamp=NOW), 0.0) is None


def test_the_worst_pod_is_told_first():
    crash = pod("b", state=ended(1, "boom"))
    assert worst([waiting("ContainerCreating"), unschedulable("x"), crash], 0.0).reason == "Crashed"
    assert worst([running()], 0.0) is None


def test_a_pod_without_a_node_is_not_scheduled():
    assert says(status(deployment=deployment(), pods=[unschedulable("no")]), "Scheduled") == ("False", "Unschedulable")
    assert says(status(deployment=deployment(), pods=[pod(node=None)]), "Scheduled") == ("Unknown", "Waiting")
    assert says(status(), "Scheduled") == ("Unknown", "NoPods")


@pytest.mark.parametrize(
    ("state", "synced", "available"),
    [
        (KnobState.REFUSED, ("False", "Refused"), ("True", "Answering")),
        (KnobState.UNREACHABLE, ("False", "Unreachable"), ("False", "Unreachable")),
        (KnobState.NEEDS_RESTART, ("False", "NeedsRestart"), ("True", "Answering")),
        (KnobState.PENDING, ("False", "Pending"), ("True", "Answering")),
    ],
)
def test_a_pod_with_other_knobs_is_told(state, synced, available):
    found = status(pods=[running("a"), running("b")], knobs={"a": SYNCED, "b": PodKnobs(state, "because")})
    assert says(found, "KnobsSynced") == synced
    assert "b: because" in conditions(found)["KnobsSynced"]["message"]
    assert says(found, "MetricsAvailable") == available


@pytest.mark.parametrize(
    ("mode", "told"),
    [("Off", ("False", "TuningOff")), ("Recommend", ("Unknown", "Starting")), ("Auto", ("Unknown", "Starting"))],
)
def test_tuning_is_told_honestly(mode, told):
    found = status(MINIMAL | {"tuning": {"mode": mode}})
    assert says(found, "Tuned") == told
    assert found["tuning"] == {"mode": mode}
    assert "Tuned" not in conditions(status())


def test_pods_that_the_server_refuses_to_make_are_told():
    refused = deployment(total=0, updated=0)
    message = 'pods "chat-1" is forbidden: exceeded quota: gpus'
    refused["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": message}]
    found = status(deployment=refused)
    assert says(found, "Ready") == ("False", "PodsRefused")
    assert message in conditions(found)["Ready"]["message"]
    assert says(found, "Progressing") == ("False", "Blocked")


def test_a_pod_without_a_node_is_told_while_another_crashes():
    found = status(deployment=deployment(replicas=2), pods=[pod(state=ended(2, ONE_LINE)), unschedulable("no GPU")])
    assert says(found, "Scheduled") == ("False", "Unschedulable")
    assert says(found, "Ready") == ("False", "ModelNotFound")


def test_pods_that_are_refused_are_told_while_others_load():
    short = deployment(replicas=2, updated=1, total=1)
    short["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]
    found = status(deployment=short, pods=[pod(state={"running": {}})])
    assert says(found, "Ready") == ("False", "PodsRefused")


def test_a_rollout_that_makes_no_progress_is_told():
    stuck = deployment(replicas=2, ready=1, updated=1, total=2, revision=2)
    first = status(deployment=stuck, pods=[running("old"), pod(name="new", state={"running": {}})])
    assert says(first, "Progressing") == ("True", "RollingOut")
    reason = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    stuck["status"]["conditions"] = [reason]
    late = status(old=first, deployment=stuck, pods=[running("old"), pod(name="new", state={"running": {}})])
    assert says(late, "Progressing") == ("False", "DeadlineExceeded")
    assert ("RolloutDeadlineExceeded", True) in events(first, late)


def test_only_running_containers_can_be_asked():
    found = instances([running("a"), waiting("CrashLoopBackOff"), running("gone", deletionTimestamp=NOW), pod(node=None)])
    assert [instance.name for instance in found] == ["a"]
    assert found[0].ready
    restarted = instances([running("a", restarts=1)])
    assert restarted[0].process != found[0].process


def test_a_pod_that_waits_for_its_volumes_is_seen():
    assert is_mounting(waiting("ContainerCreating"))
    assert not is_mounting(running())
    assert not is_mounting(pod())


def events(old, new):
    return [(d.reason, d.warning) for d in decisions(old, new)]


def test_a_service_that_starts_tells_once_that_it_is_ready():
    first = status(deployment=deployment(), pods=[waiting("ContainerCreating")])
    second = status(old=first, deployment=deployment(ready=1), pods=[running()])
    assert events({}, first) == []
    assert events(first, second) == [("Ready", False)]
    assert events(second, second) == []


def test_a_knob_edit_is_one_event_with_both_values():
    first, second = status(MINIMAL), status(MINIMAL | {"batching": {"strategy": "static", "maxNumSeqs": 4}})
    (decision,) = decisions(first, second)
    assert decision.reason == "KnobsChanged"
    assert decision.message == "maxNumSeqs 256 → 4, strategy continuous → static"


def test_a_mistake_is_a_warning_and_so_is_the_next_one():
    first = status(spec_error="spec.a: bad")
    second = status(spec_error="spec.b: bad", old=first)
    assert events({}, first) == [("InvalidSpec", True)]
    assert events(first, second) == [("InvalidSpec", True)]
    assert events(second, status(spec_error="spec.b: bad", old=second)) == []


def test_a_crash_is_a_warning_told_once():
    first = status(deployment=deployment(ready=1), pods=[running()])
    crash = status(old=first, deployment=deployment(), pods=[pod(state=ended(2, ONE_LINE))])
    found = events(first, crash)
    assert ("ModelNotFound", True) in found
    again = status(old=crash, deployment=deployment(), pods=[pod(state=ended(2, ONE_LINE), restarts=5)])
    assert events(crash, again) == []


def test_refused_knobs_are_a_warning():
    first = status(pods=[running()], knobs={"chat-1": SYNCED})
    second = status(old=first, pods=[running()], knobs={"chat-1": PodKnobs(KnobState.REFUSED, "no")})
    assert events(first, second) == [("KnobsRefused", True)]


def test_an_event_is_about_the_service_and_fits():
    decision = decisions({}, status(spec_error="x" * 5000))[0]
    event = event_of(body(), decision, NOW)
    assert event["involvedObject"]["uid"] == "uid-1"
    assert event["type"] == "Warning"
    assert len(event["message"]) <= 1024
    assert len(event["metadata"]["name"]) <= 253
    assert event["metadata"]["name"] == event_of(body(), decision, LATER)["metadata"]["name"]
    assert event["metadata"]["name"] != event_of(body(generation=2), decision, NOW)["metadata"]["name"]
