"""Rollouts and faults in words that somebody on call can act on."""

import pytest
from operator_kit import FULL, MINIMAL
from operator_pods import deployment, ended, pod, running, waiting
from test_operator_status import conditions, says, status

from paceline_operator.conditions import Condition
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.names import REVISION
from paceline_operator.outcome import Applied
from paceline_operator.pods import diagnose, steady_in
from paceline_operator.remedies import no_node, start_failure
from paceline_operator.status import TuningStatus

PLAN = (
    "KV pool: 512 blocks of 16 tokens, 1073741824 bytes = share of 1200000000 free bytes"
    " (limit 2147483648 - base 300000000 - weights 500000000 - activations 147483648)"
)


def of(revision, found):
    found["metadata"]["annotations"][REVISION] = revision
    return found


def progress(**seen):
    return conditions(status(**seen))["Progressing"]


def test_a_bad_revision_is_blocked_and_says_who_serves():
    rollout = deployment(replicas=2, ready=2, updated=1, total=3, revision=2, template="new")
    crash = of("new", waiting("CrashLoopBackOff", name="c", last=ended(1, "boom"), restarts=3))
    found = progress(deployment=rollout, pods=[of("old", running("a")), of("old", running("b")), crash])
    assert (found["status"], found["reason"]) == ("False", "Blocked")
    assert "1 of 2 pods updated, 2 ready; 2 pods of the earlier template keep serving; Crashed: c: " in found["message"]


def test_a_rollout_that_never_gets_ready_says_who_serves():
    rollout = deployment(replicas=1, ready=1, updated=1, total=2, revision=2, template="new")
    rollout["status"]["conditions"] = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    found = progress(deployment=rollout, pods=[of("old", running("a")), of("new", pod("b", state={"running": {}}))])
    assert found["reason"] == "DeadlineExceeded"
    assert "1 pod of the earlier template keeps serving" in found["message"]
    assert "/health/ready" in found["message"]


def test_one_replica_without_a_spare_device_states_the_outage():
    rollout = deployment(replicas=1, ready=0, updated=1, total=1, revision=2, surge=0, template="new")
    found = progress(deployment=rollout, pods=[of("new", pod("b", state={"running": {}}))])
    assert found["reason"] == "RollingOut"
    assert "nothing answers requests until a new pod is ready: with one replica and no spare device" in found["message"]
    first = deployment(replicas=1, ready=0, updated=1, total=1, revision=1, surge=0, template="new")
    assert "nothing answers" not in progress(deployment=first, pods=[])["message"]


def test_the_first_rollout_is_a_creation():
    found = progress(deployment=deployment(), pods=[waiting("ContainerCreating")])
    assert (found["status"], found["reason"]) == ("True", "Creating")


def fell(at, restarts=3, **last):
    """A pod that is ready, and fell over before."""
    end = {"terminated": {"exitCode": 1, "reason": "Error", "message": "boom", "finishedAt": at, **last}}
    return running(last=end, restarts=restarts)


def test_a_pod_that_falls_over_again_and_again_is_not_ready_in_between():
    seen = {"deployment": deployment(ready=1), "pods": [fell("2029-12-31T23:59:00Z")]}  # a minute ago
    found = status(**seen)
    assert says(found, "Ready") == ("False", "Crashed")
    assert says(status(now="2030-01-01T00:01:01Z", **seen), "Ready") == ("True", "PodsReady")


def test_the_look_at_it_is_made_up_for():
    now = 1893456000.0  # 2030-01-01
    assert steady_in([fell("2029-12-31T23:59:00Z")], now) == 60.0
    assert steady_in([fell("2029-12-31T23:50:00Z"), running()], now) == 0.0
    assert steady_in([fell("2029-12-31T23:59:00Z", restarts=1)], now) == 0.0  # once may happen to anybody
    assert steady_in([fell("2029-12-31T23:59:00Z", exitCode=0)], now) == 0.0
    assert steady_in([], now) == 0.0


def test_memory_is_accounted_for_in_bytes():
    killed = ended(137, f"serving\n{PLAN}\nstep 17", "OOMKilled")
    message = diagnose(waiting("CrashLoopBackOff", last=killed, restarts=1), 0.0).message
    assert "its memory limit of 2Gi (2147483648 bytes)" in message
    assert "weights 500000000 - activations 147483648" in message
    assert "step 17" not in message
    early = diagnose(waiting("CrashLoopBackOff", last=ended(137, "loading", "OOMKilled"), restarts=1), 0.0).message
    assert "before it had planned its KV cache" in early


@pytest.mark.parametrize(
    ("line", "reason", "word"),
    [
        ("error: model 'hf://a/b' can't be fetched: 401 Client Error", "ModelGated", "secretRef"),
        ("error: Access to model a/b is restricted: accept the license", "ModelGated", "licence"),
        ("error: model 'hf://a/b' can't be fetched: Max retries exceeded", "ModelDownload", "HF_ENDPOINT"),
        ("error: model 'file:///x' not found: /x doesn't exist", "ModelNotFound", "spec.model.uri"),
        ("error: hf://a/b at 'main' isn't in the cache /x, and HF_HUB_OFFLINE is set", "ModelNotFound", "spec.model.uri"),
        ("error: hf://a/b can't be fetched: hub knows no such repository, or it is private", "ModelNotFound", "secretRef"),
        ("error: hub refuses HF_TOKEN for hf://a/b (403): is it valid?", "ModelGated", "secretRef"),
        ("error: no memory for a KV cache under kvMemoryFraction 0.9", "OutOfMemory", "limits.memory"),
        ("error: the model's architecture is unknown", "StartFailed", "architecture"),
    ],
)
def test_a_runtime_that_cannot_start_says_what_to_do(line, reason, word):
    found, words = start_failure(line)
    assert found == reason
    assert words.startswith(line)
    assert word in words


def asking(resources=None, selector=None):
    found = pod(node=None)
    found["spec"]["containers"][0]["resources"]["requests"] = resources or {}
    found["spec"]["nodeSelector"] = selector or {}
    return found


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "0/3 nodes: 3 Insufficient nvidia.com/gpu.",
            ["no node has 2 free nvidia.com/gpu of product H100", "accelerator.count"],
        ),
        ("0/3 nodes: 3 Insufficient memory.", ["no node has 64Gi of memory free", "resources.requests.memory"]),
        ("0/3 nodes: 3 node(s) didn't match node selector.", ["nvidia.com/gpu.product=H100", "spec.nodeSelector"]),
        ("0/3 nodes: 3 node(s) had taint {gpu: true}.", ["spec.tolerations"]),
        ('persistentvolumeclaim "weights" not found', ["kubectl get pvc"]),
        ("something new", ["something new"]),
    ],
)
def test_no_node_says_what_is_missing(message, words):
    found = asking({"nvidia.com/gpu": "2", "memory": "64Gi"}, {"nvidia.com/gpu.product": "H100"})
    told = no_node(found, message)
    assert all(word in told for word in words), told
    assert message in told


def test_a_status_shows_few_pods_and_those_with_trouble():
    knobs = {f"p-{i:03}": PodKnobs(KnobState.SYNCED) for i in range(100)} | {"z": PodKnobs(KnobState.REFUSED, "no")}
    found = status(pods=[], knobs=knobs)
    assert len(found["pods"]) == 32
    assert "z" in found["pods"]
    assert found["podCount"] == 101


def test_what_the_tuner_says_replaces_what_is_known_without_it():
    told = (
        Condition("Tuned", "True", "Promoted", "maxNumSeqs 64 → 96"),
        Condition("MetricsAvailable", "True", "Fresh", "x"),
    )
    spec = MINIMAL | {"tuning": {"mode": "Auto"}}
    found = status(spec, tuning=TuningStatus({"mode": "Auto"}, told))
    assert says(found, "Tuned") == ("True", "Promoted")
    assert [c["type"] for c in found["conditions"]].count("MetricsAvailable") == 1
    assert found["tuning"] == {"mode": "Auto"}


def test_a_held_upgrade_is_told():
    found = status(FULL, applied=Applied(held="image a → b"))
    assert says(found, "UpgradeAvailable") == ("True", "PodsKept")
    assert "paceline.io/upgrade" in conditions(found)["UpgradeAvailable"]["message"]
    assert says(status(FULL), "UpgradeAvailable") == ("False", "UpToDate")
