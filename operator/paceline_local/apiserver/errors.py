"""Failures as the API reports them: `Status` objects with Kubernetes' codes, reasons and message shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline_core.errors import PacelineError

__all__ = [
    "ApiError",
    "FieldError",
    "StateError",
    "already_exists",
    "bad_request",
    "conflict",
    "expired",
    "invalid",
    "method_not_allowed",
    "modified",
    "no_route",
    "not_found",
    "unsupported_media_type",
]

_CAUSES = {
    "Invalid value": "FieldValueInvalid",
    "Required value": "FieldValueRequired",
    "Unsupported value": "FieldValueNotSupported",
    "Duplicate value": "FieldValueDuplicate",
    "Forbidden": "FieldValueForbidden",
}


class StateError(PacelineError):
    """The server can't start: state folder, lock or port. The message says what to do."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field that breaks a rule; `problem` is one of Kubernetes' words (`Invalid value`, `Required value`, …)."""

    field: str
    problem: str
    detail: str = ""
    value: Any = None

    @property
    def message(self) -> str:
        """Return the message without the field, as in a `Status` cause."""
        parts = [self.problem]
        if self.problem not in ("Required value", "Forbidden"):
            parts.append(_quoted(self.value))
        return ": ".join([*parts, self.detail] if self.detail else parts)

    def cause(self) -> dict[str, str]:
        """Return the entry of `details.causes`."""
        return {"reason": _CAUSES[self.problem], "message": self.message, "field": self.field}

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ApiError(PacelineError):
    """A refused request, with the `Status` that the client gets."""

    def __init__(self, code: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = details or {}

    def status(self) -> dict[str, Any]:
        """Return the `Status` object."""
        body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(self)}
        return {**body, "reason": self.reason, "details": self.details, "code": self.code}


def bad_request(message: str) -> ApiError:
    """400: the request itself makes no sense."""
    return ApiError(400, "BadRequest", message)


def no_route() -> ApiError:
    """404: no such path."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def not_found(group_resource: str, name: str) -> ApiError:
    """404: no such object. `group_resource` is `deployments.apps` or, in the core group, `pods`."""
    return ApiError(404, "NotFound", f'{group_resource} "{name}" not found', _details(group_resource, name))


def method_not_allowed() -> ApiError:
    """405: the path exists, this verb on it doesn't."""
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def already_exists(group_resource: str, name: str) -> ApiError:
    """409: create of a name that is taken."""
    return ApiError(409, "AlreadyExists", f'{group_resource} "{name}" already exists', _details(group_resource, name))


def conflict(group_resource: str, name: str, why: str) -> ApiError:
    """409: a precondition doesn't hold."""
    message = f'Operation cannot be fulfilled on {group_resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(group_resource, name))


def modified(group_resource: str, name: str) -> ApiError:
    """409: the writer's resourceVersion isn't the current one."""
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(group_resource, name, why)


def expired(asked: int, oldest: int) -> ApiError:
    """410: a watch wants events that are no longer kept."""
    return ApiError(410, "Expired", f"too old resource version: {asked} ({oldest})")


def unsupported_media_type(given: str, accepted: Sequence[str]) -> ApiError:
    """415: a body format that this resource doesn't take."""
    known = ", ".join(accepted)
    message = f"the body of the request was in an unknown format - accepted media types include: {known}"
    if "protobuf" in given:  # what `kubectl create KIND` sends
        message += (
            "; this development server reads no protobuf: use kubectl create --dry-run=client -o yaml | kubectl apply -f -"
        )
    return ApiError(415, "UnsupportedMediaType", message)


def invalid(group: str, kind: str, name: str, errors: Sequence[FieldError]) -> ApiError:
    """422: the object breaks its schema or its kind's rules; the message names every field."""
    listed = ", ".join(map(str, errors))
    text = f"[{listed}]" if len(errors) > 1 else listed
    details = {"name": name, "group": group, "kind": kind, "causes": [e.cause() for e in errors]}
    return ApiError(422, "Invalid", f'{kind}{"." + group if group else ""} "{name}" is invalid: {text}', details)


def _details(group_resource: str, name: str) -> dict[str, str]:
    kind, _, group = group_resource.partition(".")
    return {"name": name, "kind": kind, **({"group": group} if group else {})}


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
