"""The conditions of an InferenceService: each says one thing, with a reason for programs and words for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_operator.fetching import fetch_finding
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.names import UPGRADE
from paceline_operator.outcome import Applied, Trouble
from paceline_operator.pods import Finding, diagnose, is_leaving, is_ready, worst
from paceline_operator.rollout import Rollout, refused_pods, rollout_of
from paceline_operator.spec import InferenceService

__all__ = ["Condition", "conditions_of"]

Pods = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, not dated yet."""

    type: str
    status: str
    reason: str
    message: str


def conditions_of(
    service: InferenceService | None,
    spec_error: str,
    applied: Applied,
    *,
    deployment: Mapping[str, Any] | None,
    pods: Pods,
    knobs: Mapping[str, PodKnobs],
    now: float,
    spec_reason: str = "Invalid",
    fetchers: Pods = (),
) -> list[Condition]:
    """Return all conditions, in the order in which they are read. `now` is in seconds since 1970."""
    alive = [pod for pod in pods if not is_leaving(pod)]
    fetch = fetch_finding(applied.fetch, fetchers, now)
    findings = [found for found in (worst(pods, now), refused_pods(deployment), fetch) if found]
    finding, rollout = min(findings, key=lambda found: found.rank, default=None), rollout_of(deployment, pods)
    found = [
        _spec_valid(spec_error, spec_reason),
        _ready(spec_error, applied.failure, rollout, finding),
        _progressing(spec_error, applied, rollout, finding),
        _scheduled(alive, now),
        _model_ready(alive, finding),
        _children_applied(spec_error, applied),
        _knobs_synced(knobs),
        _metrics_available(knobs),
        _upgrade_available(applied),
    ]
    return found + (_tuned(service) if service and service.spec.tuning else [])


def _spec_valid(spec_error: str, reason: str) -> Condition:
    if spec_error:
        return Condition("SpecValid", "False", reason, spec_error)
    return Condition("SpecValid", "True", "Valid", "every field can be used")


def _ready(spec_error: str, failure: Trouble | None, rollout: Rollout | None, finding: Finding | None) -> Condition:
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
    if rollout.desired == 0 and not (finding and finding.reason == "Fetching"):
        return Condition("Ready", "False", "ScaledToZero", "replicas is 0: nothing answers requests")
    if rollout.ready >= rollout.desired > 0:
        return Condition("Ready", "True", "PodsReady", counts)
    return Condition("Ready", "False", finding.reason if finding else "Starting", f"{counts}{_because(finding)}")


def _progressing(spec_error: str, applied: Applied, rollout: Rollout | None, finding: Finding | None) -> Condition:
    if spec_error:
        return Condition("Progressing", "False", "InvalidSpec", "nothing is rolled out while the spec can't be used")
    if applied.failure:
        return Condition("Progressing", "False", *applied.failure)
    if applied.waiting:
        message = "the class has changed: the pods are replaced when other services of the class are done with theirs"
        return Condition("Progressing", "True", "WaitingForTurn", message)
    if rollout is None:
        return Condition("Progressing", "True", "Creating", "the Deployment is being made")
    if finding and finding.reason == "Fetching":
        return Condition("Progressing", "True", "Fetching", finding.message)
    if rollout.complete and not rollout.is_stuck(finding):
        return Condition("Progressing", "False", "Complete", "all pods are as the spec says")
    stuck = rollout.is_stuck(finding)
    counts = f"{rollout.counts}{rollout.consequence(stuck=stuck or rollout.late)}"
    if finding and stuck:
        return Condition("Progressing", "False", "Blocked", f"{counts}; {finding.reason}: {finding.message}")
    if rollout.late:
        message = f"{counts}; no progress within the rollout's deadline{_because(finding)}"
        return Condition("Progressing", "False", "DeadlineExceeded", message)
    reason = "RollingOut" if rollout.update else "Creating"
    return Condition("Progressing", "True", reason, f"{counts}{_because(finding)}")


def _children_applied(spec_error: str, applied: Applied) -> Condition:
    """Say whether everything that the spec asks for is there, also what pods can do without; the worst first."""
    if spec_error:
        return Condition("ChildrenApplied", "Unknown", "InvalidSpec", "the spec can't be used, see SpecValid")
    for trouble in [*([applied.failure] if applied.failure else []), *applied.troubles]:
        return Condition("ChildrenApplied", "False", *trouble)
    if applied.contested:
        return Condition("ChildrenApplied", "False", "Contested", "; ".join(applied.contested))
    if applied.missing:
        text = f"the API server has no {', '.join(applied.missing)}: install what serves it, or take it out of the spec"
        return Condition("ChildrenApplied", "False", "ApiMissing", text)
    return Condition("ChildrenApplied", "True", "Applied", "every child is as the spec says")


def _upgrade_available(applied: Applied) -> Condition:
    """Say whether this version of the operator would start the pods in another way than they were."""
    if not applied.held:
        return Condition("UpgradeAvailable", "False", "UpToDate", "new pods are as this version of the operator makes them")
    text = (
        f"this version of the operator would start pods differently ({applied.held}); pods stay as they are until the spec"
    )
    return Condition("UpgradeAvailable", "True", "PodsKept", f"{text} changes or {UPGRADE} gets a new value")


def _scheduled(alive: Pods, now: float) -> Condition:
    if not alive:
        return Condition("Scheduled", "Unknown", "NoPods", "there are no pods")
    # not the worst finding: one pod may crash while another finds no node
    for finding in filter(None, (diagnose(pod, now) for pod in alive)):
        if finding.reason == "Unschedulable":
            return Condition("Scheduled", "False", "Unschedulable", finding.message)
    if all(pod.get("spec", {}).get("nodeName") for pod in alive):
        return Condition("Scheduled", "True", "Scheduled", "every pod has a node")
    return Condition("Scheduled", "Unknown", "Waiting", "the scheduler hasn't looked at every pod yet")


def _model_ready(alive: Pods, finding: Finding | None) -> Condition:
    ready = sum(is_ready(pod) for pod in alive)
    if not alive and finding and (finding.crash or finding.reason == "Fetching"):
        return Condition("ModelReady", "False", finding.reason, finding.message)
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
    message = "no pod was observed yet"  # what the tuner says replaces this
    return [Condition(kind, "Unknown", "Starting", message) for kind in ("Recommended", "Tuned")]


def _because(finding: Finding | None) -> str:
    return f"; {finding.message}" if finding else ""
