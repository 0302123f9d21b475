"""The kinds that the operator makes or watches, where each lives in the API, and which of them a server has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["KINDS", "OPTIONAL", "WATCHED", "Apis", "Kind"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a kind lives. `versions` are those whose fields we know, best first; an optional kind may be missing."""

    group: str
    plural: str
    versions: tuple[str, ...] = ("v1",)
    optional: bool = False

    def api_version(self, version: str) -> str:
        """Return the `apiVersion` of manifests: `group/version`, in the core group only the version."""
        return f"{self.group}/{version}" if self.group else version

    def path(self, api_version: str, namespace: str | None, name: str = "") -> str:
        """Return the path of one object or, without a name, of the collection (None: of all namespaces)."""
        root = "/apis/" if self.group else "/api/"
        space = f"/namespaces/{namespace}" if namespace else ""
        return f"{root}{api_version}{space}/{self.plural}" + (f"/{name}" if name else "")


# Secrets are missing on purpose: the operator writes its own and never reads one
KINDS: Mapping[str, Kind] = {
    "ServiceAccount": Kind("", "serviceaccounts"),
    "ConfigMap": Kind("", "configmaps"),
    "Service": Kind("", "services"),
    "PersistentVolumeClaim": Kind("", "persistentvolumeclaims"),
    "PodDisruptionBudget": Kind("policy", "poddisruptionbudgets", ("v1", "v1beta1"), optional=True),
    "NetworkPolicy": Kind("networking.k8s.io", "networkpolicies", optional=True),
    "HorizontalPodAutoscaler": Kind("autoscaling", "horizontalpodautoscalers", ("v2", "v2beta2"), optional=True),
    "Job": Kind("batch", "jobs", optional=True),
    "ScaledObject": Kind("keda.sh", "scaledobjects", ("v1alpha1",), optional=True),
    "PodMonitor": Kind("monitoring.coreos.com", "podmonitors", optional=True),
    "PrometheusRule": Kind("monitoring.coreos.com", "prometheusrules", optional=True),
    "InferencePool": Kind("inference.networking.k8s.io", "inferencepools", optional=True),
    "HTTPRoute": Kind("gateway.networking.k8s.io", "httproutes", ("v1", "v1beta1"), optional=True),
    "Deployment": Kind("apps", "deployments"),
    "Pod": Kind("", "pods"),
}
OPTIONAL = {name: kind for name, kind in KINDS.items() if kind.optional}
# (group, plural) → name of what is watched by our label
WATCHED = {(kind.group, kind.plural): name for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Apis:
    """What one API server serves, as far as it matters here: `apiVersion` by kind."""

    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, served: Mapping[str, Iterable[str]]) -> Apis:
        """Return the best known version of each kind. `served` gives the plurals of each group version (`batch/v1`)."""
        found = {}
        for name, kind in KINDS.items():
            ways = [kind.api_version(version) for version in kind.versions]
            if not kind.optional:
                found[name] = ways[0]
            elif best := next((way for way in ways if kind.plural in served.get(way, ())), None):
                found[name] = best
        return cls(found)

    def __contains__(self, kind: str) -> bool:
        return kind in self.versions

    def __getitem__(self, kind: str) -> str:
        return self.versions[kind]
