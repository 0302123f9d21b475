"""What a request asks for: the thing that its path names, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline_local.apiserver.errors import bad_request, no_route
from paceline_local.apiserver.journal import Key
from paceline_local.apiserver.objects import Json
from paceline_local.apiserver.resources import Registry, Resource

__all__ = ["DeleteOptions", "Reply", "Target", "WriteOptions", "parse_path"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names: a collection (no name), an object, or a subresource of one."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Return the key in the store."""
        return (self.resource.store_name, self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Query parameters of a write. `validation` is `Strict`, `Warn` or `Ignore`: what happens to unknown fields."""

    manager: str
    explicit_manager: bool = False
    dry_run: bool = False
    force: bool = False
    validation: str = "Warn"

    @classmethod
    def from_query(cls, query: Mapping[str, str], user_agent: str) -> WriteOptions:
        """Read the options; without `fieldManager` the program's name in `User-Agent` stands for it."""
        named = query.get("fieldManager", "")
        return cls(
            manager=named or user_agent.partition("/")[0] or "unknown",
            explicit_manager=bool(named),
            dry_run=query.get("dryRun") == "All",
            force=query.get("force") in ("true", "1"),
            validation=query.get("fieldValidation") or "Warn",
        )


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """What a deletion asks for; None leaves a choice to the kind."""

    grace: int | None = None
    policy: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    dry_run: bool = False

    @classmethod
    def from_request(cls, query: Mapping[str, str], body: Any) -> DeleteOptions:
        """Read the options from the body (`DeleteOptions`) and the query, which fills what the body leaves out."""
        given: Json = {**query, **(body if isinstance(body, dict) else {})}
        policy, orphan = given.get("propagationPolicy"), given.get("orphanDependents")
        if policy not in (None, "Background", "Foreground", "Orphan"):
            raise bad_request(f"propagationPolicy: Unsupported value: {policy!r}")
        if policy is None and orphan is not None:
            policy = "Orphan" if orphan in (True, "true") else "Background"
        grace, preconditions = given.get("gracePeriodSeconds"), given.get("preconditions") or {}
        if grace is not None and not str(grace).removeprefix("-").isdigit():
            raise bad_request(f"gracePeriodSeconds must be a whole number, got {grace!r}")
        if not isinstance(preconditions, dict):
            raise bad_request("preconditions must be an object")
        return cls(
            grace=None if grace is None else max(0, int(grace)),
            policy=policy,
            uid=preconditions.get("uid"),
            resource_version=preconditions.get("resourceVersion"),
            dry_run=given.get("dryRun") in ("All", ["All"]),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: the object, the HTTP status and warnings for the client."""

    body: Json
    code: int = 200
    warnings: tuple[str, ...] = ()


def parse_path(path: str, registry: Registry) -> Target:
    """Return what `/api/v1/…` or `/apis/GROUP/VERSION/…` names; raises the 404 of an unknown path."""
    parts = path.strip("/").split("/")
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    if not rest:  # a version alone: discovery has already answered for those that exist
        raise no_route()
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource = registry.find(group, version, rest[0])
    name, subresource = [*rest[1:], "", ""][:2]
    if len(rest) > 3 or (resource.namespaced and name and not namespace) or (namespace and not resource.namespaced):
        raise no_route()
    return Target(resource, namespace, name, subresource)
