"""What the server serves: the built-in resources and those that CustomResourceDefinitions add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_local.apiserver.errors import no_route

__all__ = ["BUILTIN", "CRD_STORAGE", "Registry", "Resource", "ScalePaths"]

CRD_STORAGE = "customresourcedefinitions.apiextensions.k8s.io"


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """Where the scale subresource finds its numbers, as field paths without the leading dot."""

    spec: tuple[str, ...] = ("spec", "replicas")
    status: tuple[str, ...] = ("status", "replicas")
    selector: tuple[str, ...] = ("spec", "selector")


@dataclass(frozen=True, slots=True)
class Resource:
    """One served version of one resource.

    `storage` names where its objects are kept (`deployments.apps`), shared by the versions of one resource. `generation`
    says that `metadata.generation` counts spec changes. `schema` is a custom resource's OpenAPI v3 schema.
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    status: bool = False
    scale: ScalePaths | None = None
    generation: bool = False
    storage: str = ""
    stored_as: str = ""
    custom: bool = False
    schema: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[Mapping[str, Any], ...] = ()
    list_kind: str = ""
    singular: str = ""

    @property
    def api_version(self) -> str:
        """Return `group/version`, or only the version in the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def store_name(self) -> str:
        """Return the name that objects are kept under."""
        return self.storage or (f"{self.plural}.{self.group}" if self.group else self.plural)

    @property
    def qualified(self) -> str:
        """Return the name that error messages use."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _core(kind: str, plural: str, *short: str, **more: Any) -> Resource:
    return Resource("", "v1", kind, plural, short_names=short, **more)


def _rbac(kind: str, plural: str, *, namespaced: bool) -> Resource:
    return Resource("rbac.authorization.k8s.io", "v1", kind, plural, namespaced=namespaced)


_APPS = {"categories": ("all",), "status": True, "scale": ScalePaths(), "generation": True}

BUILTIN: tuple[Resource, ...] = (
    _core("Namespace", "namespaces", "ns", namespaced=False, status=True),
    _core("Node", "nodes", "no", namespaced=False, status=True),
    _core("Pod", "pods", "po", categories=("all",), status=True),
    _core("Service", "services", "svc", categories=("all",), status=True),
    _core("ServiceAccount", "serviceaccounts", "sa"),
    _core("ConfigMap", "configmaps", "cm"),
    _core("Secret", "secrets"),
    _core("PersistentVolumeClaim", "persistentvolumeclaims", "pvc", status=True),
    _core("Endpoints", "endpoints", "ep"),
    _core("Event", "events", "ev"),
    Resource("apps", "v1", "Deployment", "deployments", short_names=("deploy",), **_APPS),  # type: ignore[arg-type]
    Resource("apps", "v1", "ReplicaSet", "replicasets", short_names=("rs",), **_APPS),  # type: ignore[arg-type]
    Resource(
        "policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", short_names=("pdb",), status=True, generation=True
    ),
    Resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", short_names=("netpol",), generation=True),
    Resource("coordination.k8s.io", "v1", "Lease", "leases"),
    Resource("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", short_names=("hpa",), status=True),
    Resource("events.k8s.io", "v1", "Event", "events", short_names=("ev",), storage="events", stored_as="v1"),
    _rbac("Role", "roles", namespaced=True),
    _rbac("RoleBinding", "rolebindings", namespaced=True),
    _rbac("ClusterRole", "clusterroles", namespaced=False),
    _rbac("ClusterRoleBinding", "clusterrolebindings", namespaced=False),
    Resource(
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        namespaced=False,
        short_names=("crd", "crds"),
        categories=("api-extensions",),
        status=True,
        generation=True,
    ),
)


class Registry:
    """The resources that are served now."""

    def __init__(self) -> None:
        self._builtin = {(r.group, r.version, r.plural): r for r in BUILTIN}
        self._custom: dict[str, list[Resource]] = {}

    def __iter__(self) -> Iterator[Resource]:
        yield from self._builtin.values()
        for resources in self._custom.values():
            yield from resources

    def define(self, crd: Mapping[str, Any]) -> None:
        """Serve (or serve anew) what `crd` defines."""
        self._custom[crd["metadata"]["name"]] = list(_defined(crd))

    def forget(self, crd_name: str) -> None:
        """Stop serving what the CRD of that name defined."""
        self._custom.pop(crd_name, None)

    def find(self, group: str, version: str, plural: str) -> Resource:
        """Return the resource; raises the 404 of an unknown path."""
        for resource in self:
            if (resource.group, resource.version, resource.plural) == (group, version, plural):
                return resource
        raise no_route()

    def stored(self, storage: str) -> Resource | None:
        """Return the resource whose version `storage` keeps its objects in, if it's still served."""
        named = [r for r in self if r.store_name == storage]
        return next((r for r in named if r.stored_as in ("", r.api_version)), named[0] if named else None)

    def of_group(self, group: str, version: str) -> list[Resource]:
        """Return the resources of one group version."""
        return [r for r in self if (r.group, r.version) == (group, version)]

    def groups(self) -> dict[str, list[str]]:
        """Return the named groups with their versions, the preferred one first."""
        found: dict[str, list[str]] = {}
        for resource in self:
            versions = found.setdefault(resource.group, [])
            if resource.version not in versions:
                versions.append(resource.version)
        return {group: versions for group, versions in found.items() if group}


def _defined(crd: Mapping[str, Any]) -> Iterable[Resource]:
    spec, names = crd["spec"], crd["spec"]["names"]
    stored = next(v["name"] for v in spec["versions"] if v.get("storage"))
    for version in spec["versions"]:
        if version.get("served"):
            yield _version(spec, names, version, f"{spec['group']}/{stored}")


def _version(spec: Mapping[str, Any], names: Mapping[str, Any], version: Mapping[str, Any], stored_as: str) -> Resource:
    subresources = version.get("subresources") or {}
    return Resource(
        group=spec["group"],
        version=version["name"],
        kind=names["kind"],
        plural=names["plural"],
        namespaced=spec["scope"] == "Namespaced",
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        status="status" in subresources,
        scale=_scale(subresources.get("scale")),
        generation=True,
        stored_as=stored_as,
        custom=True,
        schema=(version.get("schema") or {}).get("openAPIV3Schema") or {},
        columns=tuple(version.get("additionalPrinterColumns") or ()),
        list_kind=names.get("listKind", ""),
        singular=names.get("singular", ""),
    )


def _scale(paths: Mapping[str, str] | None) -> ScalePaths | None:
    if paths is None:
        return None
    selector = paths.get("labelSelectorPath", "")
    replicas = (paths.get("specReplicasPath", ".spec.replicas"), paths.get("statusReplicasPath", ".status.replicas"))
    return ScalePaths(_path(replicas[0]), _path(replicas[1]), _path(selector))


def _path(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(".") if part)
