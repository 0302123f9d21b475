"""The scale subresource (`autoscaling/v1` Scale) and the binding of pods."""

from __future__ import annotations

from typing import Any

from paceline_local.apiserver.errors import FieldError, bad_request, conflict, invalid, no_route
from paceline_local.apiserver.objects import Json, dig, label_text, metadata, replaced
from paceline_local.apiserver.operations import Operations, check_format, patched
from paceline_local.apiserver.resources import ScalePaths
from paceline_local.apiserver.targets import Reply, Target, WriteOptions

__all__ = ["bind", "read_scale", "write_scale"]


def read_scale(operations: Operations, target: Target) -> Json:
    """Return the Scale of an object."""
    return _scale(operations.live(target), _paths(target))


def write_scale(operations: Operations, target: Target, content_type: str | None, body: Any, options: WriteOptions) -> Reply:
    """Set the replicas by a whole Scale (`content_type` None) or by a patch of it."""
    paths = _paths(target)
    if content_type is not None:
        check_format(content_type, target.resource)
    live = operations.live(target)
    scale = body if content_type is None else patched(_scale(live, paths), content_type, body, target.resource)
    replicas = dig(scale, ("spec", "replicas"), 0)
    if isinstance(replicas, bool) or not isinstance(replicas, int):
        raise bad_request(f"spec.replicas must be an integer, got {replicas!r}")
    if replicas < 0:
        error = FieldError("spec.replicas", "Invalid value", "must be greater than or equal to 0", replicas)
        raise invalid("autoscaling", "Scale", target.name, [error])
    meta = {"resourceVersion": metadata(scale).get("resourceVersion", ""), "uid": metadata(scale).get("uid", "")}
    wanted = replaced(live, paths.spec, replicas)
    wanted["metadata"] |= {key: value for key, value in meta.items() if value}
    reply = operations.replace(Target(target.resource, target.namespace, target.name), live, wanted, options)
    return Reply(_scale(reply.body, paths), reply.code, reply.warnings)


def bind(operations: Operations, target: Target, binding: Any, options: WriteOptions) -> Reply:
    """Give a pod its node."""
    node = dig(binding, ("target", "name"))
    if not node:
        raise invalid("", "Binding", target.name, [FieldError("target.name", "Required value")])
    pod = operations.live(target)
    if dig(pod, ("spec", "nodeName")):
        raise conflict(
            "pods/binding", target.name, f"pod {target.name} is already assigned to node {pod['spec']['nodeName']!r}"
        )
    operations.replace(
        Target(target.resource, target.namespace, target.name), pod, replaced(pod, ("spec", "nodeName"), node), options
    )
    return Reply({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201)


def _paths(target: Target) -> ScalePaths:
    if target.resource.scale is None:
        raise no_route()
    return target.resource.scale


def _scale(obj: Json, paths: ScalePaths) -> Json:
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    replicas = dig(obj, paths.spec, 0)
    status: Json = {"replicas": dig(obj, paths.status, 0)}
    selector = label_text(dig(obj, paths.selector)) if paths.selector else ""
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: value for key, value in metadata(obj).items() if key in kept},
        "spec": {"replicas": replicas} if replicas else {},  # the real server leaves a zero out
        "status": status | ({"selector": selector} if selector else {}),
    }
