"""Which knobs next: one question in, one decision out, always the same for the same question. Pure; seconds of CPU.

```
 few requests? ─▶ wait      twin wrong? ─▶ freeze      objective kept? ─▶ leave it
 search around the current knobs ─▶ better by more than the twin's own error, now and under the load to come? ─▶ change
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline_core.knobs import KNOBS, Knobs, knobs_from_wire, knobs_to_wire
from paceline_operator.tuning.advice import advise, hardware
from paceline_operator.tuning.candidates import allowed
from paceline_operator.tuning.fidelity import Fidelity, check
from paceline_operator.tuning.preference import DRAIN_TIE, certain_gain, clearly_better, drain_gain
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.search import Found, search
from paceline_operator.tuning.twin import Forecast, Twin

__all__ = ["MIN_REQUESTS", "Decision", "decide"]

MIN_REQUESTS = 30  # that count: the 95th percentile of fewer is one request
_GAIN = 0.03  # least relative gain that is worth a change
_LOSS = 0.02  # relative: 480 requests tell a share to within 2 in a hundred
_SERVED = 0.5  # of the requests within the objective
_FAR_MORE = 2.0  # times as many: within a burst that no setting outlasts, few more are the luck of who came when
_DRAINING = 3.0  # times the load of now under which settings that have to work a queue off are compared: all have work then
_TWIN_ERRORS = 1.0  # the gain must exceed the twin's own error this many times


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: `Change` to `target` (changed knobs, wire form), `Hold`, or `Freeze` (the twin can't be trusted).

    `current` and `best` are the twin's forecasts at the load to come and that of now, half and half, `gain` the relative
    gain in goodput (without a stated objective: in tokens/s), `error` the twin's own error, `confidence` from 0 to 1 how far
    the gain is beyond it.
    `advice` is what only people decide about, `hardware` what would help where no setting does.
    """

    kind: str
    reason: str
    message: str
    target: Mapping[str, Any] = field(default_factory=dict)
    current: Forecast | None = None
    best: Forecast | None = None
    gain: float = 0.0
    error: float = 0.0
    confidence: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    tried: tuple[tuple[Mapping[str, Any], Forecast], ...] = ()
    advice: tuple[str, ...] = ()
    hardware: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "kind": self.kind,
            "reason": self.reason,
            "message": self.message,
            "target": dict(self.target),
            "current": self.current and self.current.to_json(),
            "best": self.best and self.best.to_json(),
            "gain": round(self.gain, 6),
            "error": round(self.error, 6),
            "confidence": round(self.confidence, 3),
            "errors": {name: round(value, 6) for name, value in self.errors.items()},
            "tried": [{"knobs": dict(changes), **forecast.to_json()} for changes, forecast in self.tried],
            "advice": list(self.advice),
            "hardware": self.hardware,
        }


def decide(question: Question) -> Decision:
    """Return the decision.

    What serves the load to come works a queue off, too, if not as fast: only where nothing does is speed what counts. Where
    no setting is faster either it is again how many are served in time, if that is far more of them.
    """
    if not question.objective.draining:
        return _decide(question)
    found = _decide(replace(question, objective=replace(question.objective, draining=False)))
    if found.kind == "Change" and found.best is not None and found.best.attainment >= _SERVED:
        return found
    fastest = _decide(replace(question, load=max(question.load, _DRAINING)))
    return found if fastest.kind == "Hold" and _serves_far_more(found) else fastest


def _serves_far_more(decision: Decision) -> bool:
    if decision.kind != "Change" or decision.best is None or decision.current is None:
        return False
    return decision.best.attainment >= _FAR_MORE * decision.current.attainment


def _decide(question: Question) -> Decision:
    knobs = knobs_from_wire(question.knobs)
    question, twin, fidelity = _checked(question, knobs)
    counted = sum(r.counted for sample in twin.samples for r in sample)
    if counted < MIN_REQUESTS:
        return Decision("Hold", "TooFewRequests", f"{counted} requests under the current knobs, {MIN_REQUESTS} are needed")
    if not fidelity.ok:
        return Decision("Freeze", "TwinOff", fidelity.complaint, errors=fidelity.errors)
    ahead = twin.forecast(knobs, load=question.load, watch=True)
    if question.only is None and _is_kept(question, ahead):
        # no search: the cheapest answer is the usual one
        return Decision(
            "Hold", "ObjectiveKept", _kept_text(question, ahead), current=ahead, best=ahead, errors=fidelity.errors,
            error=fidelity.attainment_error, tried=(({}, ahead),),
        )  # fmt: skip
    found = search(twin, twin.traffic, knobs, question, ahead)
    return _judge(question, twin, knobs, found, fidelity.errors)


def _checked(question: Question, knobs: Knobs) -> tuple[Question, Twin, Fidelity]:
    """Return the question, the twin, and how it did: with steps as they are told, or with the gaps between them.

    What an engine does between two steps (hand tokens on, plan, wait for a core) is in no step's time but in all requests'.
    Where the pods' time per token tells of such gaps, and the twin does better with them, each step is that much longer.
    """
    twin = Twin(question)
    plain = check(twin, knobs, question.objective, question.step_error)
    if not plain.gap:
        return question, twin, plain
    base = question.model.base
    model = replace(question.model, base=replace(base, constant=base.constant + plain.gap))
    slower = replace(question, model=model)
    patient = Twin(slower)
    found = check(patient, knobs, question.objective, question.step_error)
    return (slower, patient, found) if found.worst < plain.worst else (question, twin, plain)


def _judge(question: Question, twin: Twin, knobs: Knobs, found: Found, errors: Mapping[str, float]) -> Decision:
    error = errors.get("attainment", 0.0)
    gain, share_gain = gain_of(question, found.current, found.best), found.best.attainment - found.current.attainment
    confidence = max(0.0, min(1.0, 1.0 - error / share_gain)) if share_gain > 0 else 0.0
    common: dict[str, Any] = {
        "current": found.current, "best": found.best, "gain": gain, "error": error, "confidence": confidence,
        "errors": errors, "tried": found.tried, "advice": advise(question, twin, knobs, found),
        "hardware": hardware(question, twin, found),
    }  # fmt: skip
    if not found.changes:
        return Decision("Hold", "NoBetter", "no setting within the bounds does better than the current one", **common)
    drains = _drains(question, found, errors)
    least = max(_TWIN_ERRORS * error, question.doubt) if question.objective.stated else 0.0
    if not drains and (gain < _GAIN or share_gain < least):
        text = f"the best setting would gain {gain:.1%}, which is within the twin's own error or not worth a change"
        return Decision("Hold", "WithinError", text, **common)
    if not drains and question.objective.stated and question.only is None and not _is_certain(found):
        text = f"the best setting would gain {gain:.1%} on these requests, which may be chance"
        return Decision("Hold", "Chance", text, **common)
    if clearly_better(question.objective, *found.now, by=_LOSS):
        return Decision("Hold", "WorseNow", "what is best for the load to come would be worse for the load of now", **common)
    assert allowed(found.changes, question.bounds) or question.only is not None, "the search leaves the bounds"
    return Decision("Change", "Better", _change_text(question, found, gain), target=found.changes, **common)


def _drains(question: Question, found: Found, errors: Mapping[str, float]) -> bool:
    """Return whether a queue is to be worked off, and the best setting does that faster by more than the twin's error."""
    faster = drain_gain(found.current, found.best)
    return question.objective.draining and faster > max(DRAIN_TIE, _TWIN_ERRORS * errors.get("token rate", 0.0))


def _is_certain(found: Found) -> bool:
    """Return whether the gain is more than chance: of both loads together, or of that of now if the other is beyond any."""
    return certain_gain(found.current, found.best) > 0 or certain_gain(*found.now) > 0


def gain_of(question: Question, current: Forecast, best: Forecast) -> float:
    """Return the relative gain of `best`: of goodput; without a stated objective, or with a queue to drain, of tokens/s."""
    if question.objective.draining:
        return drain_gain(current, best)
    before, after = (
        (f.goodput if question.objective.stated else f.token_rate * (f.attainment > 0.5)) for f in (current, best)
    )
    return (after - before) / max(before, 0.05 * after, 1e-9)


def _is_kept(question: Question, forecast: Forecast) -> bool:
    return question.objective.stated and 100 * forecast.attainment >= question.objective.percentile


def _kept_text(question: Question, ahead: Forecast) -> str:
    share, load = ahead.attainment, question.load
    return f"{share:.1%} of the requests keep the objective also at {load:.2f} times the load ({question.objective.slo()})"


def _change_text(question: Question, found: Found, gain: float) -> str:
    own = knobs_to_wire(knobs_from_wire(question.knobs))
    steps = [f"{spec.name} {own[spec.name]} → {found.changes[spec.name]}" for spec in KNOBS if spec.name in found.changes]
    text = f"{', '.join(steps)}: at loads from that of now to {question.load:.2f} times as much, "
    if question.objective.draining:
        return text + f"{gain:+.1%} tokens/s to work off the queue that keeps everybody beyond the objective"
    if question.objective.stated:
        return (
            text
            + f"{found.best.attainment:.1%} of the requests keep the objective instead of {found.current.attainment:.1%}"
        )
    return text + f"{gain:+.1%} tokens/s within the latency guard"
