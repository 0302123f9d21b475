"""Does a live object still say what we applied? Pure; fields that we don't set are nobody's business of ours."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from paceline_operator.names import APPLIED, GROUP, KIND
from paceline_operator.overlay import list_key

__all__ = ["difference", "drift", "is_left_over", "is_owned_by", "project"]

_QUANTITIES = {"limits", "requests"}


def drift(desired: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Return the path of the first of our fields that differs in `live`, None if all are as desired.

    A stamp of another hash counts as a difference: something may have been taken out since.
    """
    stamp = desired["metadata"]["annotations"][APPLIED]
    if (live.get("metadata", {}).get("annotations") or {}).get(APPLIED) != stamp:
        return f"metadata.annotations[{APPLIED}]"
    # a watch may show the same object in another API version than the one we apply
    return difference({key: value for key, value in desired.items() if key not in ("apiVersion", "kind")}, live)


def difference(desired: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Return the path of the first field of `desired` that differs in `live`, None if all are there."""
    return _difference(desired, live, "", "")


def is_owned_by(live: Mapping[str, Any], uid: str) -> bool:
    """Return whether the object of `uid` is the live object's controller."""
    references = live.get("metadata", {}).get("ownerReferences") or []
    return any(reference.get("controller") and reference.get("uid") == uid for reference in references)


def is_left_over(live: Mapping[str, Any], name: str, uid: str) -> bool:
    """Return whether the live object's controller is an earlier InferenceService of this name, so that it is going. One of
    KServe's has the same kind and stays."""
    references = live.get("metadata", {}).get("ownerReferences") or []
    controllers = [reference for reference in references if reference.get("controller")]
    earlier = [r for r in controllers if str(r.get("apiVersion")).startswith(f"{GROUP}/")]
    return any((r.get("kind"), r.get("name")) == (KIND, name) and r.get("uid") != uid for r in earlier)


def project(desired: Any, live: Any, name: str = "") -> Any:
    """Return what `live` has in the places that `desired` names: the server's own form of what we applied."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return {key: project(value, live[key], key) for key, value in desired.items() if key in live}
    if isinstance(desired, list) and isinstance(live, list):
        key = list_key(name, desired)
        if key and list_key(name, live) == key:
            found = {item[key]: item for item in live}
            return [project(item, found[item[key]]) for item in desired if item[key] in found]
    return live


def _difference(desired: Any, live: Any, path: str, name: str) -> str | None:
    if isinstance(desired, Mapping):
        return _object_difference(desired, live, path, name)
    if isinstance(desired, list):
        return _list_difference(desired, live, path, name)
    # booleans first: True == 1 in Python, not in JSON
    same = desired == live and isinstance(desired, bool) == isinstance(live, bool)
    return None if same else path


def _object_difference(desired: Mapping[str, Any], live: Any, path: str, name: str) -> str | None:
    if not isinstance(live, Mapping):
        return None if not desired and live is None else path  # the server drops empty objects
    for key, value in desired.items():
        where = f"{path}.{key}".lstrip(".")
        if name in _QUANTITIES and (amount := _quantity(value)) is not None and amount == _quantity(live.get(key)):
            continue
        if found := _difference(value, live.get(key), where, key):
            return found
    return None


def _list_difference(desired: list[Any], live: Any, path: str, name: str) -> str | None:
    if not isinstance(live, list):
        return None if not desired and live is None else path
    key = list_key(name, desired)
    if key and list_key(name, live) == key:
        found = {item[key]: item for item in live}
        pairs = [(item, found.get(item[key])) for item in desired]
    elif len(desired) != len(live):
        return path
    else:
        pairs = list(zip(desired, live, strict=True))
    differences = (_difference(item, other, f"{path}[{i}]", "") for i, (item, other) in enumerate(pairs))
    return next((difference for difference in differences if difference), None)


def _quantity(value: Any) -> Decimal | None:
    if not isinstance(value, str | int):
        return None
    try:
        amount: Decimal = parse_quantity(value)  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return amount
