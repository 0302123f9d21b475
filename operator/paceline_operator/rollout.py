"""Where a rollout stands, in numbers and in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_operator.names import REVISION
from paceline_operator.pods import Finding, is_leaving, is_ready

__all__ = ["Rollout", "refused_pods", "rollout_of"]

# findings that time alone doesn't mend
_BLOCKING = {"ContainerConfig", "ImagePull", "PodsRefused", "Unschedulable"}
_DEPLOYMENT_REVISION = "deployment.kubernetes.io/revision"  # counts the templates that the Deployment has had


@dataclass(frozen=True, slots=True)
class Rollout:
    """The Deployment in numbers. `current` says that its controller has seen our last change, `late` that it has given up
    waiting for progress, `update` that there were pods of another template before, `earlier` how many of those still take
    requests, `gap` that a pod has to go before its successor may come."""

    desired: int
    updated: int
    ready: int
    total: int
    current: bool
    late: bool
    update: bool = False
    earlier: int = 0
    gap: bool = False

    @property
    def complete(self) -> bool:
        """Whether exactly the pods that are wanted exist, all of the newest template and ready."""
        return self.current and self.updated == self.total == self.ready == self.desired

    @property
    def counts(self) -> str:
        """The numbers in words."""
        return f"{self.updated} of {self.desired} pods updated, {self.ready} ready"

    def is_stuck(self, finding: Finding | None) -> bool:
        """Whether somebody has to do something for the rollout to go on."""
        return finding is not None and (finding.crash or finding.reason in _BLOCKING)

    def consequence(self, *, stuck: bool) -> str:
        """Return what the rollout means for clients now, in words that follow a count ("": nothing)."""
        if not self.update or self.complete:
            return ""
        if self.earlier:
            pods = "1 pod" if self.earlier == 1 else f"{self.earlier} pods"
            return f"; {pods} of the earlier template keep{'s' if self.earlier == 1 else ''} serving" if stuck else ""
        if self.ready:
            return ""
        why = ": with one replica and no spare device the old pod had to go first" if self.gap and self.desired == 1 else ""
        return f"; nothing answers requests until a new pod is ready{why}"


def rollout_of(deployment: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]]) -> Rollout | None:
    """Return where the Deployment's rollout stands, None without a Deployment."""
    if deployment is None:
        return None
    spec, status, meta = deployment["spec"], deployment.get("status") or {}, deployment["metadata"]
    updated, ready, total = (int(status.get(name) or 0) for name in ("updatedReplicas", "readyReplicas", "replicas"))
    surge = ((spec.get("strategy") or {}).get("rollingUpdate") or {}).get("maxSurge", 1)
    return Rollout(
        desired=int(spec.get("replicas", 1)),
        updated=updated,
        ready=ready,
        total=total,
        current=int(status.get("observedGeneration") or 0) >= int(meta.get("generation") or 0),
        late=_condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded",
        update=_number((meta.get("annotations") or {}).get(_DEPLOYMENT_REVISION)) > 1,
        earlier=sum(_is_earlier(pod, spec) and is_ready(pod) for pod in pods if not is_leaving(pod)),
        gap=surge in (0, "0%"),
    )


def refused_pods(deployment: Mapping[str, Any] | None) -> Finding | None:
    """Return the finding that pods can't even be made: a quota, an admission policy, a missing service account."""
    failure = _condition(deployment, "ReplicaFailure")
    if failure.get("status") == "True":
        return Finding(2, "PodsRefused", f"pods can't be made: {failure.get('message', '')}")
    return None


def _is_earlier(pod: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    wanted = _revision(spec.get("template") or {})
    return bool(wanted) and _revision(pod) != wanted


def _revision(owner: Mapping[str, Any]) -> str:
    return str(((owner.get("metadata") or {}).get("annotations") or {}).get(REVISION, ""))


def _condition(deployment: Mapping[str, Any] | None, kind: str) -> Mapping[str, Any]:
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _number(text: Any) -> int:
    return int(text) if str(text).isdigit() else 0
