"""Events out of status changes: one per decision, told once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_operator.names import FIELD_MANAGER, GROUP, KIND, VERSION, digest

__all__ = ["Decision", "decisions", "event_of"]

# conditions whose turns people want to hear of; the rest is told by these
_TOLD = ("SpecValid", "Ready", "Progressing", "KnobsSynced")
# on the way to the good state: no news
_QUIET = {
    "Creating", "InvalidSpec", "Loading", "NeedsRestart", "NoPods", "Pending", "Replacing", "ScaledToZero", "Starting",
    "Synced", "Valid",
}  # fmt: skip
_STUCK = ("Blocked", "DeadlineExceeded")
_BAD_WHEN_FALSE = {"SpecValid", "Ready", "KnobsSynced"}
_LONGEST = 1000  # the API server refuses messages above 1024 characters


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the operator decided or saw: `warning` if somebody should look."""

    reason: str
    message: str
    warning: bool = False


def decisions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Decision]:
    """Return what happened between two statuses, in words."""
    return [*_knob_changes(old, new), *_turns(old, new)]


def _knob_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Decision]:
    before, after = old.get("effective") or {}, new.get("effective") or {}
    if not before:
        return
    changes = [
        f"{name} {_value(before, name)} → {_value(after, name)}"
        for name in sorted({*before, *after})
        if _value(before, name) != _value(after, name)
    ]
    if changes:
        yield Decision("KnobsChanged", ", ".join(changes))


def _value(rows: Mapping[str, Any], name: str) -> Any:
    return rows.get(name, {}).get("value", "unset")


def _turns(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Decision]:
    before = {condition["type"]: condition for condition in old.get("conditions") or []}
    for condition in new["conditions"]:
        kind, reason = condition["type"], condition["reason"]
        known = before.get(kind, {})
        same = known.get("status") == condition["status"] and known.get("reason") == reason
        # another mistake in a spec that was wrong before is news too
        same = same and (kind != "SpecValid" or known.get("message") == condition["message"])
        if kind not in _TOLD or same or reason in _QUIET or _is_told_by_ready(kind, reason):
            continue
        bad = (condition["status"] == "False" and kind in _BAD_WHEN_FALSE) or reason in _STUCK
        yield Decision(_event_reason(kind, reason), condition["message"], bad)


def _is_told_by_ready(kind: str, reason: str) -> bool:
    """A failure to apply stands in Ready and Progressing; a rollout that ends stands in Ready."""
    return kind == "Progressing" and reason not in ("RollingOut", "Complete", *_STUCK)


def _event_reason(kind: str, reason: str) -> str:
    if kind == "KnobsSynced":
        return f"Knobs{reason}"
    if reason in ("Complete", *_STUCK):
        return f"Rollout{reason}"
    return {"Invalid": "InvalidSpec", "PodsReady": "Ready"}.get(reason, reason)


def event_of(body: Mapping[str, Any], decision: Decision, now: str) -> dict[str, Any]:
    """Return a core/v1 Event about an InferenceService. The same decision about the same generation has the same name."""
    meta = body["metadata"]
    kind = "Warning" if decision.warning else "Normal"
    identity = digest([meta["uid"], meta.get("generation"), decision.reason, decision.message])
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name'][:200]}.{identity}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": kind,
        "reason": decision.reason,
        "message": decision.message[:_LONGEST],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
