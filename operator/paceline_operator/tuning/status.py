"""What people are told of tuning: status.tuning and its conditions. Pure, and steady while nothing happens."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from paceline_core.durations import format_duration
from paceline_operator.conditions import Condition
from paceline_operator.status import TuningStatus
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.candidates import TUNED
from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.ledger import Health
from paceline_operator.tuning.state import Change, Phase, State
from paceline_operator.tuning.view import ServiceView

__all__ = ["report"]

_NEAR_BEST = 0.99  # of the best setting's goodput: the recommended range is what reaches that
_TOLD_PODS = 3


def report(brain: Brain, mode: str, knobs: Mapping[str, Any]) -> TuningStatus:
    """Return status.tuning of a service with `knobs` (wire form) in force."""
    state, decision = brain.state, brain.decision
    content: dict[str, Any] = {"mode": mode, "state": state.phase.value, "reason": state.reason, "message": state.message}
    if brain.view is not None:
        content["observed"] = _observed(brain.view)
    if decision is not None and decision.best is not None:
        content["recommended"] = _recommended(decision, knobs)
    if state.override:
        content["applied"] = dict(state.override)
    if state.trial is not None:
        content["trial"] = {
            "pods": sorted(state.trial.pods),
            "knobs": dict(state.trial.tried),
            "since": _time(state.trial.started),
        }
    if state.history:
        content["lastChange"] = _change(state.history[-1])
        content["history"] = [_change(change) for change in reversed(state.history)]
    return TuningStatus(content, (_metrics(brain.view), _recommendation(mode, state, decision), _tuned(mode, state)))


def _observed(view: ServiceView) -> dict[str, Any]:
    """Return the figures in two digits: what changes less than that isn't news, and would be a write each time."""
    return {
        "requestRate": _round(view.arrival_rate),
        "promptTokensP50": int(_round(view.prompt_p50)),
        "promptTokensP95": int(_round(view.prompt_p95)),
        "outputTokensP50": int(_round(view.output_p50)),
        "outputTokensP95": int(_round(view.output_p95)),
        "ttftP95": format_duration(_round(view.ttft_p95)),
        "tpotP95": format_duration(_round(view.tpot_p95)),
        "sloAttainment": round(view.attainment, 2),
        "kvUsage": round(view.kv_usage, 1),
        "pods": view.pods,
        "podsObserved": view.fresh,
    }


def _recommended(decision: Decision, knobs: Mapping[str, Any]) -> dict[str, Any]:
    assert decision.best is not None
    names = [name for name in TUNED if name in decision.target] or ["maxNumSeqs", "maxNumBatchedTokens"]
    target = {name: decision.target.get(name, knobs.get(name)) for name in names}
    low, high = _range(decision, names, knobs)
    content = {
        "target": target,
        "lowerBound": low,
        "upperBound": high,
        "expectedGain": f"{decision.gain if decision.kind == 'Change' else 0.0:+.0%}",
        "expectedAttainment": round(decision.best.attainment, 2),
        "confidence": round(decision.confidence, 1),
    }
    extra = {"advice": list(decision.advice), "hardware": decision.hardware}
    return content | {name: value for name, value in extra.items() if value}


def _range(decision: Decision, names: list[str], knobs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return per knob the lowest and highest value that the twin found about as good as the best."""
    assert decision.best is not None
    least = _NEAR_BEST * decision.best.goodput
    whole = [(changes, f) for changes, f in decision.tried if f.requests == decision.best.requests]  # others were on less
    good = [{**knobs, **changes} for changes, f in whole if f.goodput >= least]
    values = {name: [setting[name] for setting in good if isinstance(setting.get(name), int)] for name in names}
    return tuple({n: pick(v) for n, v in values.items() if v} for pick in (min, max))  # type: ignore[return-value]


def _metrics(view: ServiceView | None) -> Condition:
    if view is None or not view.pods:
        return Condition("MetricsAvailable", "Unknown", "NoPods", "no pod was observed yet")
    bad = [note for note in view.notes if note.health is not Health.FRESH]
    if not bad:
        return Condition("MetricsAvailable", "True", "Observed", "what the pods tell can be used")
    told = "; ".join(f"{note.name}: {note.health}: {note.why}" for note in bad[:_TOLD_PODS])
    more = f" and {len(bad) - _TOLD_PODS} more" if len(bad) > _TOLD_PODS else ""
    status = "False" if view.fresh == 0 else "True"
    return Condition("MetricsAvailable", status, "SomeUnusable" if view.fresh else "Unusable", f"{told}{more}")


def _recommendation(mode: str, state: State, decision: Decision | None) -> Condition:
    if mode == "Off":
        return Condition("Recommended", "False", "TuningOff", "tuning.mode is Off")
    if decision is None:
        return Condition("Recommended", "Unknown", state.reason, state.message)
    if decision.kind == "Freeze":
        return Condition("Recommended", "False", decision.reason, decision.message)
    if decision.kind == "Change":
        return Condition("Recommended", "True", "Better", decision.message)
    text = f"{decision.message}; {decision.hardware}" if decision.hardware else decision.message
    return Condition("Recommended", "True", decision.reason, text)


def _tuned(mode: str, state: State) -> Condition:
    if mode != "Auto":
        text = (
            "tuning.mode is Off: the knobs are the spec's"
            if mode == "Off"
            else "tuning.mode is Recommend: nothing is applied"
        )
        return Condition("Tuned", "False", f"Tuning{mode}", text)
    if state.trial is not None:
        return Condition("Tuned", "Unknown", state.phase.value, state.message)
    if state.phase is Phase.REVERTED and state.history:
        return Condition("Tuned", "False", f"Reverted{state.history[-1].outcome[9:-1]}", state.history[-1].effect)
    if state.override:
        return Condition("Tuned", "True", "Applied", f"tuning put in force: {_knobs(state.override)}")
    return Condition("Tuned", "True" if state.reason == "ObjectiveKept" else "Unknown", state.reason, state.message)


def _change(change: Change) -> dict[str, Any]:
    return {
        "time": _time(change.time),
        "from": dict(change.before),
        "to": dict(change.after),
        "why": change.why,
        "outcome": change.outcome,
        "measuredEffect": change.effect,
    }


def _knobs(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(knobs.items()))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _round(value: float) -> float:
    return float(f"{value:.1g}") if value < 10 else float(f"{value:.2g}")
