"""The conditions of an InferenceService: each says one thing, with a reason for programs and words for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.pods import Finding, diagnose, is_leaving, is_ready, worst
from paceline_operator.spec import InferenceService

__all__ = ["Condition", "conditions_of"]

Pods = Sequence[Mapping[str, Any]]
# findings that time alone doesn't mend
_BLOCKING = {"ContainerConfig", "ImagePull", "PodsRefused", "Unschedulable"}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, not dated yet."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class _Rollout:
    """The Deployment in numbers. `current` says that its controller has seen our last change, `late` that it has given up
    waiting for progress."""

    desired: int
    updated: int
    ready: int
    total: int
    current: bool
    late: bool

    @property
    def complete(self) -> bool:
        return self.current and self.updated == self.total == self.ready == self.desired


def conditions_of(
    service: InferenceService | None,
    spec_error: str,
    failure: tuple[str, str] | None,
    *,
    deployment: Mapping[str, Any] | None,
    pods: Pods,
    knobs: Mapping[str, PodKnobs],
) -> list[Condition]:
    """Return all conditions, in the order in which they are read."""
    alive = [pod for pod in pods if not is_leaving(pod)]
    findings = [found for found in (worst(pods), _refused_pods(deployment)) if found]
    finding, rollout = min(findings, key=lambda found: found.rank, default=None), _rollout(deployment)
    found = [
        _spec_valid(spec_error),
        _ready(spec_error, failure, rollout, finding),
        _progressing(spec_error, failure, rollout, finding),
        _scheduled(alive),
        _model_ready(alive, finding),
        _knobs_synced(knobs),
        _metrics_available(knobs),
    ]
    return found + (_tuned(service) if service and service.spec.tuning else [])


def _rollout(deployment: Mapping[str, Any] | None) -> _Rollout | None:
    if deployment is None:
        return None
    status, desired = deployment.get("status") or {}, int(deployment["spec"].get("replicas", 1))
    updated, ready, total = (int(status.get(name) or 0) for name in ("updatedReplicas", "readyReplicas", "replicas"))
    current = int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
    late = _deployment_condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"
    return _Rollout(desired, updated, ready, total, current, late)


def _deployment_condition(deployment: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any]:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _refused_pods(deployment: Mapping[str, Any] | None) -> Finding | None:
    """Return the finding that pods can't even be made: a quota, an admission policy, a missing service account."""
    failure = _deployment_condition(deployment, "ReplicaFailure")
    if failure.get("status") == "True":
        return Finding(2, "PodsRefused", f"pods can't be made: {failure.get('message', '')}")
    return None


def _spec_valid(spec_error: str) -> Condition:
    if spec_error:
        return Condition("SpecValid", "False", "Invalid", spec_error)
    return Condition("SpecValid", "True", "Valid", "every field can be used")


def _ready(spec_error: str, failure: tuple[str, str] | None, rollout: _Rollout | None, finding: Finding | None) -> Condition:
    """Ready means: as many pods as wanted take requests under the spec as it is, and none of them falls over."""
    if spec_error:
        return Condition("Ready", "False", "InvalidSpec", "the spec can't be used, see SpecValid; pods stay as they were")
    if failure:
        return Condition("Ready", "False", *failure)
    if rollout is None or not rollout.current:
        return Condition("Ready", "False", "Creating", "waits for the Deployment's controller")
    counts = f"{rollout.ready} of {rollout.desired} pods ready"
    if finding and finding.crash:
        return Condition("Ready", "False", finding.reason, f"{counts}; {finding.message}")
    if rollout.desired == 0:
        return Condition("Ready", "False", "ScaledToZero", "replicas is 0: nothing answers requests")
    if rollout.ready >= rollout.desired:
        return Condition("Ready", "True", "PodsReady", counts)
    return Condition("Ready", "False", finding.reason if finding else "Starting", f"{counts}{_because(finding)}")


def _progressing(
    spec_error: str, failure: tuple[str, str] | None, rollout: _Rollout | None, finding: Finding | None
) -> Condition:
    if spec_error:
        return Condition("Progressing", "False", "InvalidSpec", "nothing is rolled out while the spec can't be used")
    if failure:
        return Condition("Progressing", "False", *failure)
    if rollout is None:
        return Condition("Progressing", "True", "Creating", "the Deployment is being made")
    if rollout.complete:
        return Condition("Progressing", "False", "Complete", "all pods are as the spec says")
    counts = f"{rollout.updated} of {rollout.desired} pods updated, {rollout.ready} ready"
    if finding and (finding.crash or finding.reason in _BLOCKING):
        return Condition("Progressing", "False", "Blocked", f"{counts}; {finding.reason}: {finding.message}")
    if rollout.late:
        return Condition(
            "Progressing",
            "False",
            "DeadlineExceeded",
            f"{counts}, no progress within the rollout's deadline{_because(finding)}",
        )
    return Condition("Progressing", "True", "RollingOut", f"{counts}{_because(finding)}")


def _scheduled(alive: Pods) -> Condition:
    if not alive:
        return Condition("Scheduled", "Unknown", "NoPods", "there are no pods")
    # not the worst finding: one pod may crash while another finds no node
    for finding in filter(None, map(diagnose, alive)):
        if finding.reason == "Unschedulable":
            return Condition("Scheduled", "False", "Unschedulable", finding.message)
    if all(pod.get("spec", {}).get("nodeName") for pod in alive):
        return Condition("Scheduled", "True", "Scheduled", "every pod has a node")
    return Condition("Scheduled", "Unknown", "Waiting", "the scheduler hasn't looked at every pod yet")


def _model_ready(alive: Pods, finding: Finding | None) -> Condition:
    ready = sum(is_ready(pod) for pod in alive)
    if not alive:
        return Condition("ModelReady", "Unknown", "NoPods", "there are no pods")
    counts = f"{ready} of {len(alive)} pods have loaded the model"
    if finding and finding.crash:
        return Condition("ModelReady", "False", finding.reason, f"{counts}; {finding.message}")
    if ready:
        return Condition("ModelReady", "True", "Loaded", counts)
    return Condition("ModelReady", "False", finding.reason if finding else "Loading", f"{counts}{_because(finding)}")


def _knobs_synced(knobs: Mapping[str, PodKnobs]) -> Condition:
    """Say whether every running pod works with the spec's knobs; trouble first, then what is under way."""
    if not knobs:
        return Condition("KnobsSynced", "Unknown", "NoPods", "no pod runs yet")
    for state in (KnobState.REFUSED, KnobState.UNREACHABLE, KnobState.NEEDS_RESTART, KnobState.PENDING):
        pods = sorted(name for name, pod in knobs.items() if pod.state is state)
        if pods:
            message = knobs[pods[0]].message
            return Condition("KnobsSynced", "False", state.value, f"{', '.join(pods)}: {message}")
    return Condition("KnobsSynced", "True", "Synced", "every running pod has the spec's knobs")


def _metrics_available(knobs: Mapping[str, PodKnobs]) -> Condition:
    """Say whether the admin ports answer: without them nothing can be observed or changed live."""
    if not knobs:
        return Condition("MetricsAvailable", "Unknown", "NoPods", "no pod runs yet")
    silent = sorted(name for name, pod in knobs.items() if pod.state is KnobState.UNREACHABLE)
    if silent:
        return Condition("MetricsAvailable", "False", "Unreachable", f"the admin port doesn't answer: {', '.join(silent)}")
    answered = [name for name, pod in knobs.items() if pod.revision is not None]
    if not answered:
        return Condition("MetricsAvailable", "Unknown", "Starting", "no admin port has answered yet")
    return Condition("MetricsAvailable", "True", "Answering", "the admin ports of the running pods answer")


def _tuned(service: InferenceService) -> list[Condition]:
    if service.tuning.mode == "Off":
        return [Condition("Tuned", "False", "TuningOff", "tuning.mode is Off: the knobs are the spec's")]
    message = f"tuning.mode {service.tuning.mode} is accepted, but this version only applies the spec's knobs"
    return [
        Condition("Recommended", "False", "NotImplemented", message),
        Condition("Tuned", "False", "NotImplemented", message),
    ]


def _because(finding: Finding | None) -> str:
    return f"; {finding.message}" if finding else ""
