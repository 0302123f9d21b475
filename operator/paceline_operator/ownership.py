"""Whose fields an object has, as its `managedFields` say it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

__all__ = ["claimed"]

Entry = Mapping[str, Any]


def claimed(managed: Sequence[Entry], manager: str) -> list[Entry]:
    """Return `managed` with what `manager` has written without apply counted as applied by it.

    To the server a manager's own POST is somebody else's: what a later apply leaves out would stay, because that one still
    owns it. This is client-go's `csaupgrade` for an object of one version. Defaults of the server's that came with the POST
    are claimed too; an apply without them has them made anew.
    """
    ours = [entry for entry in managed if entry.get("manager") == manager and not entry.get("subresource")]
    if not ours:
        return list(managed)
    fields: Mapping[str, Any] = reduce(_union, (entry.get("fieldsV1") or {} for entry in ours))
    return [*(entry for entry in managed if entry not in ours), {**ours[-1], "operation": "Apply", "fieldsV1": fields}]


def _union(left: Mapping[str, Any], right: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of two `fieldsV1`: trees of objects whose leaves are empty."""
    shared = {name: _union(left[name], right[name]) for name in left.keys() & right.keys()}
    return {**left, **right, **shared}
