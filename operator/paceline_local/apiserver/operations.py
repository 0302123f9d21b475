"""Create, read, update, patch and delete on the store: the order in which the pure rules apply.

Nothing here awaits, so each operation is atomic on the server's one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline_local.apiserver import apply, lifecycle, patches, schema
from paceline_local.apiserver.admission import admit
from paceline_local.apiserver.conversion import convert, established, to_stored
from paceline_local.apiserver.errors import (
    ApiError,
    FieldError,
    already_exists,
    bad_request,
    conflict,
    invalid,
    modified,
    not_found,
    unsupported_media_type,
)
from paceline_local.apiserver.fields import Layout, root
from paceline_local.apiserver.journal import Key
from paceline_local.apiserver.objects import Json, metadata, replaced, timestamp
from paceline_local.apiserver.resources import CRD_STORAGE, Registry, Resource
from paceline_local.apiserver.store import Store
from paceline_local.apiserver.targets import DeleteOptions, Reply, Target, WriteOptions
from paceline_local.apiserver.validation import check_update

__all__ = ["APPLY", "JSON_PATCH", "MERGE", "STRATEGIC", "Operations"]

APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
JSON_PATCH, STRATEGIC = "application/json-patch+json", "application/strategic-merge-patch+json"


class Operations:
    """The verbs. `clock` gives Unix seconds."""

    def __init__(self, store: Store, registry: Registry, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.registry = registry
        self.clock = clock
        for _, crd in store.select(CRD_STORAGE):
            registry.define(crd)

    def live(self, target: Target) -> Json:
        """Return the object in the target's version; raises the 404."""
        obj = self.store.get(target.key)
        if obj is None:
            raise not_found(target.resource.qualified, target.name)
        return convert(obj, target.resource)

    def create(self, target: Target, body: Json, options: WriteOptions) -> Reply:
        """Create an object (POST)."""
        body = _without_managers(_identified(target, body))
        return self._create(target, body, options, _updater(target, options))

    def update(self, target: Target, body: Json, options: WriteOptions) -> Reply:
        """Replace an object or its status (PUT)."""
        live, body = self.live(target), _identified(target, body)
        if not metadata(body).get("resourceVersion") and (target.resource.custom or target.resource.kind == "Lease"):
            error = FieldError("metadata.resourceVersion", "Invalid value", "must be specified for an update", 0)
            raise invalid(target.resource.group, target.resource.kind, target.name, [error])
        return self.replace(target, live, body, options)

    def patch(self, target: Target, content_type: str, document: Any, options: WriteOptions) -> Reply:
        """Change an object as a patch document says (PATCH)."""
        if content_type == APPLY:
            return self._apply(target, document, options)
        check_format(content_type, target.resource)
        live = self.live(target)
        changed = patched(live, content_type, document, target.resource)
        return self.replace(target, live, _identified(target, changed), options)

    def _apply(self, target: Target, config: Json, options: WriteOptions) -> Reply:
        resource = target.resource
        if not options.explicit_manager:
            error = FieldError("fieldManager", "Required value", "is required for apply patch")
            raise invalid("meta.k8s.io", "PatchOptions", "", [error])
        config = _identified(target, config)
        if metadata(config).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        wanted = _applicable(resource, config, target.subresource)
        _check_declared(resource, wanted)
        manager = apply.Manager(options.manager, "Apply", resource.api_version, target.subresource)
        live = self.store.get(target.key)
        if live is None:
            if target.subresource:
                raise not_found(resource.qualified, target.name)
            new = apply.apply({}, wanted, _layout(resource), manager, force=options.force, now=self._now)
            return self._create(target, new, options, None)
        live = convert(live, resource)
        self._check_preconditions(target, live, metadata(config))
        new = apply.apply(live, wanted, _layout(resource), manager, force=options.force, now=self._now)
        return self._write(target, live, new, options, None)

    def _create(self, target: Target, body: Json, options: WriteOptions, updater: apply.Manager | None) -> Reply:
        resource = target.resource
        if resource.namespaced:
            self._check_namespace(target)
        new = lifecycle.born(resource, body, target.namespace, self.clock())
        new, warnings = admit(resource, new, options.validation, creating=True)
        if updater is not None:
            new = apply.track_update({}, new, _layout(resource), updater, self._now)
        key = (resource.store_name, target.namespace, metadata(new)["name"])
        if self.store.get(key) is not None:
            raise already_exists(resource.qualified, key[2])
        if options.dry_run:
            return Reply(new, 201, warnings)
        return Reply(convert(self.put(key, to_stored(new, resource)), resource), 201, warnings)

    def replace(self, target: Target, live: Json, body: Json, options: WriteOptions) -> Reply:
        """Write `body` over `live` with preconditions, isolation and field ownership."""
        self._check_preconditions(target, live, metadata(body))
        new = lifecycle.with_server_metadata(live, body)
        new = lifecycle.isolated(target.resource, live, new, target.subresource)
        return self._write(target, live, new, options, _updater(target, options))

    def _write(self, target: Target, live: Json, new: Json, options: WriteOptions, updater: apply.Manager | None) -> Reply:
        resource = target.resource
        new = lifecycle.with_server_metadata(live, new)
        new, warnings = admit(resource, new, options.validation, creating=False)
        if updater is not None:
            new = apply.track_update(live, new, _layout(resource), updater, self._now)
        wrong = check_update(resource, live, new)
        if wrong:
            raise invalid(resource.group, resource.kind, target.name, wrong)
        new = lifecycle.bumped(resource, live, new)
        if lifecycle.same_content(live, new) or options.dry_run:
            return Reply(live if not options.dry_run else new, 200, warnings)
        return Reply(convert(self.put(target.key, to_stored(new, resource)), resource), 200, warnings)

    def put(self, key: Key, new: Json) -> Json:
        """Store a finished object, or remove it if it was only waiting for this write; CRDs take effect at once."""
        if lifecycle.deletable(new) and self.store.get(key) is not None:
            return self.drop(key)
        if key[0] != CRD_STORAGE:
            return self.store.write(key, new)
        stored = self.store.write(key, established(new, self.clock()))
        self.registry.define(stored)
        return stored

    def drop(self, key: Key) -> Json:
        """Remove an object for good and return its last state."""
        last = self.store.delete(key)
        if key[0] == CRD_STORAGE:
            self.registry.forget(key[2])
            self.store.end_watches(key[2])
        return last

    def delete(self, target: Target, options: DeleteOptions) -> Reply:
        """Delete an object, or mark it for deletion while finalizers or a grace period hold it (DELETE)."""
        live = self.live(target)
        self._check_delete_preconditions(target, live, options)
        dying = lifecycle.doomed(live, options, self.clock())
        gone = lifecycle.deletable(dying)
        if not options.dry_run and (gone or not lifecycle.same_content(live, dying)):
            dying = convert(self.put(target.key, to_stored(dying, target.resource)), target.resource)
        if not gone or target.resource.kind in ("Pod", "ServiceAccount"):
            return Reply(dying)
        details = {"name": target.name, "kind": target.resource.plural, "uid": metadata(live)["uid"]}
        details |= {"group": target.resource.group} if target.resource.group else {}
        return Reply({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})

    def remove(self, key: Key, options: DeleteOptions) -> None:
        """Delete by key: what the collector does."""
        resource = self.registry.stored(key[0])
        if resource is None:  # its CRD went first
            self.drop(key)
        else:
            self.delete(Target(resource, key[1], key[2]), options)

    @property
    def _now(self) -> str:
        return timestamp(self.clock())

    def _check_namespace(self, target: Target) -> None:
        namespace = self.store.get(("namespaces", "", target.namespace))
        if namespace is None:
            raise not_found("namespaces", target.namespace)
        if "deletionTimestamp" in metadata(namespace):
            why = f"unable to create new content in namespace {target.namespace} because it is being terminated"
            message = f'{target.resource.qualified} "{target.name}" is forbidden: {why}'
            causes = [{"reason": "NamespaceTerminating", "message": f"namespace {target.namespace} is being terminated"}]
            raise ApiError(
                403, "Forbidden", message, {"name": target.name, "kind": target.resource.plural, "causes": causes}
            )

    def _check_preconditions(self, target: Target, live: Json, asked: Json) -> None:
        if asked.get("resourceVersion", "") not in ("", metadata(live)["resourceVersion"]):
            raise modified(target.resource.qualified, target.name)
        self._check_uid(target, live, asked.get("uid"))

    def _check_delete_preconditions(self, target: Target, live: Json, options: DeleteOptions) -> None:
        self._check_uid(target, live, options.uid)
        version = metadata(live)["resourceVersion"]
        if options.resource_version not in (None, version):
            why = f"the ResourceVersion in the precondition ({options.resource_version}) does not match the ResourceVersion "
            why += f"in record ({version}). The object might have been modified"
            raise conflict(target.resource.qualified, target.name, why)

    def _check_uid(self, target: Target, live: Json, uid: str | None) -> None:
        if uid and uid != metadata(live)["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {metadata(live)['uid']}"
            raise conflict(target.resource.qualified, target.name, why)


def check_format(content_type: str, resource: Resource) -> None:
    """Raise the 415 of a patch format that the resource doesn't take."""
    accepted = [JSON_PATCH, MERGE, APPLY] + ([] if resource.custom else [STRATEGIC])
    if content_type not in accepted:
        raise unsupported_media_type(content_type, accepted)


def patched(live: Json, content_type: str, document: Any, resource: Resource) -> Json:
    """Return `live` changed by a patch that isn't an apply."""
    if content_type == JSON_PATCH:
        result = patches.json_patch(live, document)
    elif not isinstance(document, dict):
        raise bad_request(f"a {content_type} document must be an object")
    elif content_type == MERGE:
        result = patches.merge_patch(live, document)
    else:
        result = patches.strategic_patch(live, document, _layout(resource))
    if not isinstance(result, dict):
        raise bad_request("the patch doesn't leave an object")
    return result


def _layout(resource: Resource) -> Layout:
    return root(custom=resource.custom, schema=resource.schema)


def _updater(target: Target, options: WriteOptions) -> apply.Manager:
    return apply.Manager(options.manager, "Update", target.resource.api_version, target.subresource)


def _applicable(resource: Resource, config: Json, subresource: str) -> Json:
    """Return the part of an applied configuration that the path may set."""
    if subresource == "status":
        return {key: value for key, value in config.items() if key in ("apiVersion", "kind", "status")}
    return {key: value for key, value in config.items() if key != "status" or not resource.status}


def _check_shape(resource: Resource, body: Json, meta: Any) -> None:
    """Raise a 400 for parts of the wrong type, which a typed server can't even decode."""
    parts = {"metadata": meta}
    if isinstance(meta, dict):
        for name in ("name", "generateName"):
            if not isinstance(meta.get(name), str | None):
                raise bad_request(f"metadata.{name} must be a string, got {type(meta[name]).__name__}")
        parts |= {f"metadata.{name}": meta.get(name) for name in ("labels", "annotations")}
    if not resource.custom:
        parts |= {name: body.get(name) for name in ("spec", "status", "data", "stringData", "involvedObject")}
    for name, part in parts.items():
        if part is not None and not isinstance(part, dict):
            raise bad_request(f"{name} must be an object, got {type(part).__name__}")
        flat = name not in ("metadata", "spec", "status", "involvedObject")
        if flat and any(not isinstance(value, str | None) for value in (part or {}).values()):
            raise bad_request(f"{name} must map strings to strings")


def _check_declared(resource: Resource, config: Json) -> None:
    """Raise the 500 that the real server answers when a field of an applied configuration isn't in the schema."""
    unknown = schema.prune(config, resource.schema)[1] if resource.custom else []
    if unknown:
        why = f"failed to create typed patch object: .{unknown[0]}: field not declared in schema"
        raise ApiError(500, "InternalError", why)


def _without_managers(body: Json) -> Json:
    return replaced(body, ("metadata", "managedFields"), []) if metadata(body).get("managedFields") else body


def _identified(target: Target, body: Any) -> Json:
    """Return `body` with the apiVersion, kind, name and namespace of the path; raises a 400 if they differ."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    resource, meta = target.resource, metadata(body)
    _check_shape(resource, body, meta)
    for field, wanted in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if body.get(field) not in (None, "", wanted):
            raise bad_request(f"{field} in the data ({body[field]}) does not match the expected {field} ({wanted})")
    if target.name and meta.get("name") not in (None, "", target.name):
        raise bad_request(f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})")
    if resource.namespaced and meta.get("namespace") not in (None, "", target.namespace):
        raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
    named = {"name": target.name} if target.name else {}
    return {**body, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": {**meta, **named}}
