"""Answers of the validating webhook, as data: the same rules as `SpecValid`, told before an object is stored. Pure.

Nothing is defaulted. What is wrong already and isn't made worse may be changed: a service that a new limit has made invalid
can still be scaled down, labelled, or lose its finalizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline_operator.acceptance import accept
from paceline_operator.class_spec import parse_class
from paceline_operator.classes import ClassBook
from paceline_operator.errors import SpecError
from paceline_operator.names import CLASS_KIND, KIND
from paceline_operator.settings import Settings

__all__ = ["answer", "review"]

Body = Mapping[str, Any]
_UNMET = {"ClassNotFound", "ClassInvalid"}  # what may come later, in whatever order manifests are applied


def review(data: Any, classes: ClassBook, settings: Settings) -> dict[str, Any]:
    """Return the AdmissionReview that answers `data`. Raises `ValueError` if that is none."""
    request = data.get("request") if isinstance(data, Mapping) else None
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise ValueError("not an AdmissionReview with a request")
    version = data.get("apiVersion")
    if version != "admission.k8s.io/v1":
        raise ValueError(f"AdmissionReview {version} isn't supported, only admission.k8s.io/v1")
    return {"apiVersion": version, "kind": "AdmissionReview", "response": answer(request, classes, settings)}


def answer(request: Body, classes: ClassBook, settings: Settings) -> dict[str, Any]:
    """Return the response to one request: every problem of the first depth that has any, each with its field."""
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    check = _CHECKS.get((request.get("kind") or {}).get("kind", ""))
    body, old = request.get("object"), request.get("oldObject")
    if check is None or not isinstance(body, Mapping) or _is_unchanged(body, old):
        return response
    try:
        check(_identified(body, request), classes, settings)
    except SpecError as error:
        if error.reason in _UNMET:
            return response | {"warnings": [str(error)]}
        return response | {"allowed": False, "status": _status(request, error)}
    return response


_CHECKS: dict[str, Callable[[Body, ClassBook, Settings], object]] = {
    KIND: accept,
    CLASS_KIND: lambda body, _classes, _settings: parse_class(body),
}


def _is_unchanged(body: Body, old: Any) -> bool:
    """Return whether an update leaves alone what is checked, or the object is going anyway."""
    if "deletionTimestamp" in (body.get("metadata") or {}):
        return True
    return isinstance(old, Mapping) and _checked(body) == _checked(old)


def _checked(body: Body) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("metadata", "status")}


def _identified(body: Body, request: Body) -> Body:
    """Return the object with what the API server may give it only afterwards."""
    meta = {"name": request.get("name") or "new", "namespace": request.get("namespace") or "", "uid": ""}
    return {**body, "metadata": meta | {key: value for key, value in (body.get("metadata") or {}).items() if value}}


def _status(request: Body, error: SpecError) -> dict[str, Any]:
    kind, name = request["kind"]["kind"], request.get("name") or (request["object"].get("metadata") or {}).get("name", "")
    causes = [
        {"reason": "FieldValueInvalid", "field": problem.field, "message": str(problem).removeprefix(f"{problem.field}: ")}
        for problem in error.problems
    ]
    return {
        "code": 422,
        "reason": "Invalid",
        "message": _words(error),
        "details": {"kind": kind, "group": request["kind"].get("group", ""), "name": name, "causes": causes},
    }


def _words(error: SpecError) -> str:
    if len(error.problems) == 1:
        return str(error)
    return "\n".join([f"{len(error.problems)} problems:", *(f"  {problem}" for problem in error.problems)])
