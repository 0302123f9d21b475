"""From what the operator knows of a service to what its brain is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_core.durations import parse_duration
from paceline_core.knobs import Strategy, knobs_to_wire
from paceline_operator.effective import Effective, tuning_bounds
from paceline_operator.knob_sync import KnobState, PodKnobs
from paceline_operator.pods import Instance
from paceline_operator.spec import InferenceService
from paceline_operator.tuning.facts import PodFact, Situation

__all__ = ["situation_of"]


def situation_of(
    service: InferenceService, found: Effective, pods: Sequence[Instance], knobs: Mapping[str, PodKnobs],
    digest: str, deployment: Mapping[str, Any] | None, interval: float, dropped: str = "",
) -> Situation:  # fmt: skip
    """Return the situation. `digest` is that of what the pods shall have now, a trial included; `dropped` says why what
    tuning chose can't be in force any more.
    """
    slo = service.slo
    ttft, tpot = (None if text is None else parse_duration(text) for text in (slo.ttft, slo.tpot))
    return Situation(
        service=f"{service.namespace}/{service.name}",
        mode=service.tuning.mode,
        spec_hash=found.spec_hash,
        knobs=knobs_to_wire(found.knobs),
        bounds=tuning_bounds(service),
        pods=tuple(_fact(pod, knobs.get(pod.name), digest) for pod in pods),
        ttft=ttft,
        tpot=tpot,
        percentile=float(slo.percentile),
        interval=interval,
        busy=_busy(found, pods, deployment),
        dropped=dropped,
    )


def _fact(pod: Instance, known: PodKnobs | None, digest: str) -> PodFact:
    applied = known is not None and known.state is KnobState.SYNCED and known.verified == (digest, pod.process)
    refused = known.message if known is not None and known.state is KnobState.REFUSED else ""
    return PodFact(pod.name, pod.process, fresh=pod.ready, applied=applied, refused=refused)


def _busy(found: Effective, pods: Sequence[Instance], deployment: Mapping[str, Any] | None) -> str:
    """Return why nothing may be tried now, '' if it may."""
    if found.knobs.strategy is Strategy.STATIC:
        return "strategy static is what somebody wants to see: it isn't tuned"
    if deployment is None:
        return "the Deployment isn't there yet"
    status, wanted = deployment.get("status") or {}, int(deployment["spec"].get("replicas", 1))
    counts = {name: int(status.get(name) or 0) for name in ("updatedReplicas", "readyReplicas", "replicas")}
    current = int(status.get("observedGeneration") or 0) >= int(deployment["metadata"].get("generation") or 0)
    if not current or len(set(counts.values()) | {wanted}) > 1:
        return (
            f"a rollout is under way: {counts['updatedReplicas']} of {wanted} pods updated, {counts['readyReplicas']} ready"
        )
    if loading := [pod.name for pod in pods if not pod.ready]:
        return f"pods are loading: {', '.join(loading)}"
    return ""
