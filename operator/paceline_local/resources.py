"""Where each kind lives in the API: group, version, plural, and whether it has a namespace."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CONFIG_MAPS",
    "CRDS",
    "DEPLOYMENTS",
    "EVENTS",
    "INFERENCE_SERVICES",
    "LEASES",
    "NAMESPACES",
    "NODES",
    "PODS",
    "REPLICA_SETS",
    "SECRETS",
    "SERVICES",
    "Resource",
]


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind as the API serves it; `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The `apiVersion` that manifests carry."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection (of one or all namespaces), of one object, or of its subresource."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root, *(("namespaces", namespace) if self.namespaced and namespace else ()), self.plural]
        return "/".join([*parts, *(part for part in (name, subresource) if part)])


PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
EVENTS = Resource("", "v1", "events", "Event")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
INFERENCE_SERVICES = Resource("paceline.io", "v1alpha1", "inferenceservices", "InferenceService")
