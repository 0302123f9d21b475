"""Discovery and OpenAPI: what `kubectl` and dynamic clients ask before they do anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_local.apiserver.errors import no_route
from paceline_local.apiserver.objects import Json
from paceline_local.apiserver.resources import Registry, Resource

__all__ = ["VERSION", "discovery"]

VERSION: Mapping[str, str] = {"major": "1", "minor": "32", "gitVersion": "v1.32.0-paceline.local", "platform": "linux/amd64"}

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUB_VERBS = ["get", "patch", "update"]
_SELF_REVIEW = {"name": "selfsubjectaccessreviews", "singularName": "", "namespaced": False, "verbs": ["create"]}
_REVIEW_GROUP = "authorization.k8s.io"
_FIXED: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("api",): {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
    ("version",): VERSION,
}


def discovery(path: str, registry: Registry) -> Json | None:
    """Return the discovery or OpenAPI document at `path`, None if the path isn't one."""
    parts = tuple(path.strip("/").split("/"))
    if parts[:2] == ("openapi", "v3"):
        return _openapi_index(registry) if len(parts) == 2 else _openapi(parts[2:], registry)
    if parts in _FIXED:
        return dict(_FIXED[parts])
    if parts == ("apis",):
        return _group_list(registry)
    if parts[0] == "apis" and len(parts) == 2:
        return _group(parts[1], _groups(registry).get(parts[1]))
    if parts == ("api", "v1"):
        return _resources("", "v1", registry)
    return _resources(parts[1], parts[2], registry) if parts[0] == "apis" and len(parts) == 3 else None


def _group_list(registry: Registry) -> Json:
    groups = [_group(name, versions) for name, versions in _groups(registry).items()]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _groups(registry: Registry) -> dict[str, list[str]]:
    return {**registry.groups(), _REVIEW_GROUP: ["v1"]}


def _group(name: str, versions: list[str] | None) -> Json:
    if versions is None:
        raise no_route()
    served = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": served, "preferredVersion": served[0]}


def _resources(group: str, version: str, registry: Registry) -> Json:
    listed = [entry for resource in registry.of_group(group, version) for entry in _entries(resource)]
    if (group, version) == (_REVIEW_GROUP, "v1"):
        listed.append({**_SELF_REVIEW, "kind": "SelfSubjectAccessReview"})
    if not listed:
        raise no_route()
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": listed}


def _entries(resource: Resource) -> list[Json]:
    common = {"namespaced": resource.namespaced, "kind": resource.kind}
    main: Json = {"name": resource.plural, "singularName": resource.singular or resource.kind.lower(), **common}
    main |= {"verbs": _VERBS}
    main |= {"shortNames": list(resource.short_names)} if resource.short_names else {}
    main |= {"categories": list(resource.categories)} if resource.categories else {}
    entries = [main]
    if resource.status:
        entries.append({"name": f"{resource.plural}/status", "singularName": "", **common, "verbs": _SUB_VERBS})
    if resource.scale:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": _SUB_VERBS}
        entries.append({"name": f"{resource.plural}/scale", "singularName": "", **common, **scale})
    if resource.kind == "Pod" and not resource.group:
        binding = {"kind": "Binding", "verbs": ["create"]}
        entries.append({"name": "pods/binding", "singularName": "", **common, **binding})
    return entries


def _openapi_index(registry: Registry) -> Json:
    versions = ["api/v1", *(f"apis/{group}/{version}" for group, names in registry.groups().items() for version in names)]
    return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in versions}}


def _openapi(parts: tuple[str, ...], registry: Registry) -> Json:
    """Return the OpenAPI v3 document of a group version: kinds (with a custom one's schema) and how they are patched.

    kubectl looks for the `fieldValidation` parameter of a kind's PATCH before it leaves validation to the server.
    """
    group, version = ("", parts[1]) if parts[0] == "api" else (parts[1], parts[-1])
    resources = registry.of_group(group, version)
    if not resources:
        raise no_route()
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": {_url(resource): {"patch": _patch(resource)} for resource in resources},
        "components": {"schemas": {_schema_name(resource): _schema(resource) for resource in resources}},
    }


def _url(resource: Resource) -> str:
    root = f"/apis/{resource.api_version}" if resource.group else f"/api/{resource.version}"
    scope = "/namespaces/{namespace}" if resource.namespaced else ""
    return f"{root}{scope}/{resource.plural}/{{name}}"


def _identity(resource: Resource) -> Json:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _patch(resource: Resource) -> Json:
    text = {"type": "string", "uniqueItems": True}
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    reference = {"$ref": f"#/components/schemas/{_schema_name(resource)}"}
    return {
        "operationId": f"patch{resource.kind}",
        "parameters": [{"name": name, "in": "query", "schema": text} for name in names],
        "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": reference}}}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": _identity(resource),
    }


def _schema_name(resource: Resource) -> str:
    prefix = ".".join(reversed((resource.group or "core").split(".")))
    return f"{prefix}.{resource.version}.{resource.kind}"


def _schema(resource: Resource) -> Json:
    known: dict[str, Any] = dict(resource.schema) or {"type": "object"}
    return {**known, "x-kubernetes-group-version-kind": [_identity(resource)]}
