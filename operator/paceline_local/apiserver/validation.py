"""The rules of built-in kinds and of metadata that clients run into; not all that the real server checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from paceline_local.apiserver.errors import FieldError
from paceline_local.apiserver.objects import Json, dig, metadata
from paceline_local.apiserver.resources import Resource

__all__ = ["check", "check_update"]

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_NAMED = ("Namespace", "Service")
_FREELY_NAMED = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


def check(resource: Resource, obj: Json) -> list[FieldError]:
    """Return what is wrong with a whole object, apart from a custom resource's schema."""
    kind_rules = _KINDS.get(resource.kind) if not resource.custom else None
    return [*_metadata(resource, metadata(obj)), *(kind_rules(obj) if kind_rules else ())]


def _metadata(resource: Resource, meta: Json) -> Iterator[FieldError]:
    name = meta.get("name")
    if not name:
        yield FieldError("metadata.name", "Required value", "name or generateName is required")
    elif resource.kind in _LABEL_NAMED and not (re.fullmatch(_LABEL, name) and len(name) <= 63):
        yield FieldError("metadata.name", "Invalid value", _dns("label", _LABEL, "my-name"), name)
    elif resource.kind not in _FREELY_NAMED and not (re.fullmatch(_SUBDOMAIN, name) and len(name) <= 253):
        yield FieldError("metadata.name", "Invalid value", _dns("subdomain", _SUBDOMAIN, "example.com"), name)
    for value in (meta.get("labels") or {}).values():
        if not isinstance(value, str) or not _VALUE.fullmatch(value) or len(value) > 63:
            yield FieldError(
                "metadata.labels",
                "Invalid value",
                "a valid label must be an empty string or consist of alphanumerics, '-', '_' or '.'",
                value,
            )
    yield from _owners(meta.get("ownerReferences") or [])


def _owners(references: list[Json]) -> Iterator[FieldError]:
    for index, owner in enumerate(references):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield FieldError(f"metadata.ownerReferences[{index}].{field}", "Invalid value", "must not be empty", "")
    first, *more = [owner.get("name") for owner in references if owner.get("controller") is True] or [""]
    for other in more:
        why = f'Only one reference can have Controller set to true. Found "true" in references for {first} and {other}'
        yield FieldError("metadata.ownerReferences", "Invalid value", why, references)


def _dns(what: str, pattern: str, example: str) -> str:
    allowed = "'-' or '.'" if what == "subdomain" else "'-'"
    return (
        f"a lowercase RFC 1123 {what} must consist of lower case alphanumeric characters, {allowed}, and must start and end "
        f"with an alphanumeric character (e.g. '{example}', regex used for validation is '{pattern}')"
    )


def _pod_spec(spec: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    containers = spec.get("containers") or []
    if not containers:
        yield FieldError(f"{path}.containers", "Required value")
    names: set[str] = set()
    for index, container in enumerate(containers):
        for field in ("name", "image"):
            if not container.get(field) and (field == "name" or path != "spec"):
                yield FieldError(f"{path}.containers[{index}].{field}", "Required value")
        if container.get("name") in names:
            yield FieldError(f"{path}.containers[{index}].name", "Duplicate value", "", container["name"])
        names.add(container.get("name", ""))


def _pod(obj: Json) -> Iterator[FieldError]:
    yield from _pod_spec(obj.get("spec") or {}, "spec")


def _workload(obj: Json) -> Iterator[FieldError]:
    spec = obj.get("spec") or {}
    wanted, labels = dig(spec, ("selector", "matchLabels"), {}), dig(spec, ("template", "metadata", "labels"), {})
    if not spec.get("selector"):
        yield FieldError("spec.selector", "Required value")
    if any(labels.get(key) != value for key, value in wanted.items()):
        yield FieldError(
            "spec.template.metadata.labels", "Invalid value", "`selector` does not match template `labels`", labels
        )
    if spec.get("replicas", 0) < 0:
        yield FieldError("spec.replicas", "Invalid value", "must be greater than or equal to 0", spec["replicas"])
    if dig(spec, ("strategy", "type")) == "Recreate" and dig(spec, ("strategy", "rollingUpdate")):
        detail = "may not be specified when strategy `type` is 'Recreate'"
        yield FieldError("spec.strategy.rollingUpdate", "Forbidden", detail)
    yield from _pod_spec(dig(spec, ("template", "spec"), {}), "spec.template.spec")


def _service(obj: Json) -> Iterator[FieldError]:
    spec = obj.get("spec") or {}
    if not spec.get("ports") and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        yield FieldError("spec.ports", "Required value")


def _crd(obj: Json) -> Iterator[FieldError]:
    spec = obj.get("spec") or {}
    wanted = f"{dig(spec, ('names', 'plural'), '')}.{spec.get('group', '')}"
    if metadata(obj).get("name") != wanted:
        yield FieldError(
            "metadata.name", "Invalid value", 'must be spec.names.plural+"."+spec.group', metadata(obj).get("name")
        )
    for field in ("group", "scope", "versions"):
        if not spec.get(field):
            yield FieldError(f"spec.{field}", "Required value")
    for field in ("kind", "plural"):
        if not dig(spec, ("names", field)):
            yield FieldError(f"spec.names.{field}", "Required value")
    versions = spec.get("versions") or []
    if sum(bool(version.get("storage")) for version in versions) != 1:
        yield FieldError(
            "spec.versions", "Invalid value", "must have exactly one version marked as storage version", len(versions)
        )
    for index, version in enumerate(versions):
        if not version.get("name"):
            yield FieldError(f"spec.versions[{index}].name", "Required value")
        if dig(version, ("schema", "openAPIV3Schema", "type")) != "object":
            path = f"spec.versions[{index}].schema.openAPIV3Schema"
            yield FieldError(path, "Required value", "schemas are required, of type object at the root")


_KINDS = {
    "Pod": _pod,
    "Deployment": _workload,
    "ReplicaSet": _workload,
    "Service": _service,
    "CustomResourceDefinition": _crd,
}
_IMMUTABLE = {
    "Deployment": (("spec", "selector"),),
    "ReplicaSet": (("spec", "selector"),),
    "Secret": (("type",),),
    "CustomResourceDefinition": (("spec", "group"), ("spec", "scope"), ("spec", "names", "plural")),
}


def check_update(resource: Resource, live: Json, new: Json) -> list[FieldError]:
    """Return what may not change that way."""
    paths = _IMMUTABLE.get(resource.kind, ()) if not resource.custom else ()
    wrong = [
        FieldError(".".join(path), "Invalid value", "field is immutable", dig(new, path))
        for path in paths
        if dig(live, path) not in (None, "", dig(new, path))
    ]
    return [*wrong, *_new_finalizers(live, new), *_immutable_data(live, new)]


def _new_finalizers(live: Json, new: Json) -> Iterator[FieldError]:
    added = set(metadata(new).get("finalizers") or ()) - set(metadata(live).get("finalizers") or ())
    if added and "deletionTimestamp" in metadata(live):
        detail = f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}"
        yield FieldError("metadata.finalizers", "Forbidden", detail)


def _immutable_data(live: Json, new: Json) -> Iterator[FieldError]:
    if live.get("immutable") is True and (live.get("data") != new.get("data") or not new.get("immutable")):
        yield FieldError("data", "Forbidden", "field is immutable when `immutable` is set")
