"""Tuning of a service in plain words, out of its status. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["explain_service"]

_PHASES = {
    "Observing": "It watches the pods and changes nothing now.",
    "Canary": "It tries a change on one pod and compares it with the others.",
    "Promoting": "The change did no harm on one pod and goes on to the others.",
    "Verifying": "The change is in force on all pods; it waits to see whether the gain comes.",
    "Comparing": "The gain isn't seen: one pod went back to the knobs from before, to be compared with.",
    "Settled": "The last change is in force and did what it should.",
    "Reverted": "The last change was taken back.",
}


def explain_service(service: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about what tuning sees, wants, does and did."""
    name, status = service["metadata"]["name"], _part(service, "status")
    tuning = _part(status, "tuning")
    mode = tuning.get("mode") or "Off"
    yield f"{name}: tuning.mode is {mode}" + _mode(mode)
    if mode == "Off" or not tuning.get("state"):
        return
    yield f"{_PHASES.get(tuning['state'], tuning['state'])} ({tuning.get('reason')}: {tuning.get('message')})"
    yield from _observed(tuning.get("observed"), status.get("slo"))
    yield from _recommended(tuning.get("recommended"))
    if trial := tuning.get("trial"):
        where = ", ".join(trial.get("pods") or ()) or "all pods"
        yield f"On trial since {trial.get('since')}: {_knobs(_part(trial, 'knobs'))} on {where}."
    if applied := tuning.get("applied"):
        yield f"In force by tuning, beyond the spec: {_knobs(applied)}. An edit of a knob in the spec drops it."
    for change in tuning.get("history") or ():
        before = _part(change, "from")
        arrows = ", ".join(f"{k} {before.get(k)} → {v}" for k, v in _part(change, "to").items())
        why, effect = change.get("why"), change.get("measuredEffect")
        yield f"{change.get('time')} {arrows}: {change.get('outcome')}. Why: {why}. Measured: {effect}."
    for condition in status.get("conditions") or ():
        if condition["type"] == "MetricsAvailable" and condition["reason"] not in ("Observed", "Answering"):
            yield f"Figures that can't be used: {condition['message']}"


def _mode(mode: str) -> str:
    return {"Off": ": the knobs are the spec's.", "Recommend": ": it says what it would do, and does nothing."}.get(
        mode, "."
    )


def _observed(seen: Mapping[str, Any] | None, slo: str | None) -> Iterator[str]:
    if not seen:
        return
    yield (
        f"Seen on {seen.get('podsObserved')} of {seen.get('pods')} pods: {seen.get('requestRate')} requests/s with prompts "
        f"of {seen.get('promptTokensP50')} and answers of {seen.get('outputTokensP50')} tokens (medians); "
        f"{seen.get('sloAttainment') or 0:.0%} keep the objective ({slo or 'none stated'}), TTFT p95 {seen.get('ttftP95')}, "
        f"TPOT p95 {seen.get('tpotP95')}, KV in use {seen.get('kvUsage') or 0:.0%}."
    )


def _recommended(found: Mapping[str, Any] | None) -> Iterator[str]:
    if not found:
        return
    yield (
        f"Best by the twin: {_knobs(_part(found, 'target'))} (as good: {_knobs(_part(found, 'lowerBound'))} to "
        f"{_knobs(_part(found, 'upperBound'))}), expected gain {found.get('expectedGain')}, "
        f"confidence {found.get('confidence')}."
    )
    for text in found.get("advice") or ():
        yield f"For people to decide: {text}."
    if hardware := found.get("hardware"):
        yield f"Hardware: {hardware}."


def _part(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object within another; what is absent or null has nothing in it."""
    return data.get(name) or {}


def _knobs(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in knobs.items()) or "the current ones"
