"""Make an object what its kind says it must be: prune, default, validate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline_local.apiserver import schema
from paceline_local.apiserver.defaults import apply_defaults, initial_status
from paceline_local.apiserver.errors import bad_request, invalid
from paceline_local.apiserver.fields import mistyped
from paceline_local.apiserver.objects import Json, drop_nulls, metadata
from paceline_local.apiserver.resources import Resource
from paceline_local.apiserver.validation import check

__all__ = ["admit"]


def admit(resource: Resource, obj: Json, validation: str, *, creating: bool) -> tuple[Json, tuple[str, ...]]:
    """Return the object to store and warnings about its unknown fields.

    Raises a 400 `ApiError` for unknown fields under `Strict`, a 422 one for what is wrong with it. A new object's status
    isn't the client's to set.
    """
    warnings: tuple[str, ...] = ()
    if resource.custom:
        new, warnings = _custom(resource, obj, validation, creating=creating)
    else:
        with _typed(resource.kind, obj):
            new = apply_defaults(resource.kind, drop_nulls(obj))
        status = initial_status(resource.kind) if creating else None
        if status is not None:
            new = {**new, "status": status}
    with _typed(resource.kind, obj):
        errors = check(resource, new)
    if resource.custom:
        errors += schema.validate(new, resource.schema)
    if errors:
        raise invalid(resource.group, resource.kind, metadata(new).get("name", ""), errors)
    return new, warnings


@contextlib.contextmanager
def _typed(kind: str, obj: Json) -> Iterator[None]:
    """Raise a 400 if the rules stumble over a part of the wrong type: metadata and built-in kinds have no schema here."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        where = mistyped(obj) or "a part of it has the wrong type"
        raise bad_request(f"the object can't be decoded as a {kind}: {where}") from error


def _custom(resource: Resource, obj: Json, validation: str, *, creating: bool) -> tuple[Json, tuple[str, ...]]:
    new = {**obj, "metadata": drop_nulls(metadata(obj))}
    if creating and resource.status:
        new.pop("status", None)
    new, unknown = schema.prune(new, resource.schema)
    if unknown and validation == "Strict":
        listed = ", ".join(f'unknown field "{path}"' for path in unknown)
        kind = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
        raise bad_request(f"{kind}: strict decoding error: {listed}")
    new = schema.default(new, resource.schema)
    return new, tuple(f'unknown field "{path}"' for path in unknown) if validation == "Warn" else ()
