"""Events out of status changes: one per decision, told once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_core.knobs import KNOBS
from paceline_operator.names import FIELD_MANAGER, GROUP, KIND, VERSION, digest

__all__ = ["Decision", "decisions", "event_of"]

# conditions whose turns people want to hear of; the rest is told by these
_TOLD = ("SpecValid", "Ready", "Progressing", "ChildrenApplied", "KnobsSynced", "UpgradeAvailable")
# on the way to the good state: no news
_QUIET = {
    "Applied", "Creating", "InvalidSpec", "Loading", "NeedsRestart", "NoPods", "Pending", "Replacing", "ScaledToZero",
    "Starting", "Synced", "UpToDate", "Valid",
}  # fmt: skip
_STUCK = ("Blocked", "DeadlineExceeded")
_BAD_WHEN_FALSE = {"SpecValid", "Ready", "ChildrenApplied", "KnobsSynced"}
# told by the event of this condition if both turn together
_TWINS = {"ChildrenApplied": "Ready", "Progressing": "Ready"}
_KNOB_NAMES = {spec.name for spec in KNOBS}
_LONGEST = 1000  # the API server refuses messages above 1024 characters


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the operator decided or saw: `warning` if somebody should look. Decisions of one `series` about one
    generation are one event that counts, whatever figures are in their messages ("": each message is news)."""

    reason: str
    message: str
    warning: bool = False
    series: str = ""


def decisions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Decision]:
    """Return what happened between two statuses, in words."""
    return [*_knob_changes(old, new), *_turns(old, new)]


def _knob_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Decision]:
    before, after = old.get("effective") or {}, new.get("effective") or {}
    if not before:
        return
    changes = [
        f"{name} {_value(before, name)} → {_value(after, name)}"
        for name in sorted(_KNOB_NAMES & {*before, *after})
        if _value(before, name) != _value(after, name)
    ]
    if changes:
        yield Decision("KnobsChanged", ", ".join(changes))


def _value(rows: Mapping[str, Any], name: str) -> Any:
    return rows.get(name, {}).get("value", "unset")


def _turns(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Decision]:
    before = {condition["type"]: condition for condition in old.get("conditions") or []}
    turned = {c["type"]: c for c in new["conditions"] if c["type"] in _TOLD and _is_news(before.get(c["type"], {}), c)}
    for kind, condition in turned.items():
        reason = condition["reason"]
        if reason in _QUIET or _is_told_by_ready(kind, reason) or _has_twin(condition, turned.get(_TWINS.get(kind, ""))):
            continue
        bad = (condition["status"] == "False" and kind in _BAD_WHEN_FALSE) or reason in _STUCK
        series = "" if kind == "SpecValid" else f"{kind}/{reason}"
        yield Decision(_event_reason(kind, reason), condition["message"], bad, series)


def _is_news(known: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    same = known.get("status") == condition["status"] and known.get("reason") == condition["reason"]
    # another mistake in a spec that was wrong before is news too
    return not same or (condition["type"] == "SpecValid" and known.get("message") != condition["message"])


def _has_twin(condition: Mapping[str, Any], twin: Mapping[str, Any] | None) -> bool:
    """Return whether `twin` says the same: the same trouble, or that a rollout ended with all pods ready."""
    if twin is None:
        return False
    done = twin["status"] == "True" and condition["reason"] == "Complete"
    return done or bool(twin["reason"] == condition["reason"])


def _is_told_by_ready(kind: str, reason: str) -> bool:
    """A failure to apply stands in Ready and Progressing."""
    return kind == "Progressing" and reason not in ("RollingOut", "Complete", *_STUCK)


def _event_reason(kind: str, reason: str) -> str:
    if kind == "KnobsSynced":
        return f"Knobs{reason}"
    if reason in ("Complete", *_STUCK):
        return f"Rollout{reason}"
    return {"Invalid": "InvalidSpec", "PodsReady": "Ready", "PodsKept": "UpgradeAvailable"}.get(reason, reason)


def event_of(body: Mapping[str, Any], decision: Decision, now: str) -> dict[str, Any]:
    """Return a core/v1 Event about an InferenceService. The same decision about the same generation has the same name."""
    meta = body["metadata"]
    kind = "Warning" if decision.warning else "Normal"
    identity = digest([meta["uid"], meta.get("generation"), decision.reason, decision.series or decision.message])
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
