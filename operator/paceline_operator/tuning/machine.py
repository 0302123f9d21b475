"""What happens next to a service's tuning: state and facts in, state and effects out. Pure; the time is an argument.

```
 Observing ─▶ Canary ─▶ Promoting ─▶ Verifying ─▶ Settled ──▶ (observing again)
                 └──────────┴────────────┴──────▶ Reverted ──▶
```
Whatever isn't clear ends in Reverted: the knobs from before are known to work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.guard import Evidence, Verdict
from paceline_operator.tuning.state import Blocked, Change, Phase, Reason, State, Trial
from paceline_operator.tuning.traffic import is_due, looked, moved, signature_of
from paceline_operator.tuning.view import ServiceView

__all__ = ["Ask", "Facts", "PodFact", "Tell", "advance"]

_CANARY_MOST = 10  # intervals: what isn't clear by then is LowTraffic
_APPLY_MOST = 2  # intervals for a pod to take a change over
_VERIFY_LEAST, _VERIFY_MOST = 2, 12  # intervals
_VERIFY_REQUESTS = 40  # that are judged
_GAIN_SHARE = 0.25  # of the expected gain that has to come
_WORSE = 0.05  # share of requests by which it must not be worse, where the twin can't tell whether it is
_CALM = {Reason.HARM: 5, Reason.NO_GAIN: 5, Reason.LOW_TRAFFIC: 10}  # intervals until the next search
_CALM_ELSE, _CALM_SETTLED = 2, 3
_BLOCKED = 60  # intervals that a harmful setting isn't tried again; doubles each time
_MOST_CHANGES = 3  # per shift of the traffic


@dataclass(frozen=True, slots=True)
class PodFact:
    """A pod: its process, whether what it tells counts, and whether it runs the knobs that it shall."""

    name: str
    process: str
    fresh: bool = True
    applied: bool = True
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is the case. `busy`: nothing may be changed now, and why; `searching`: an answer of the twin is under way.

    `evidence` is that of the trial's guard; `after` (requests, share within the objective) is what came of a promotion.
    `knobs` are all knobs in force in wire form, without the trial.
    """

    mode: str
    spec_hash: str
    knobs: Mapping[str, Any]
    pods: tuple[PodFact, ...]
    view: ServiceView | None
    interval: float
    percentile: float = 95.0
    busy: str = ""
    searching: bool = False
    decision: Decision | None = None
    evidence: Evidence | None = None
    after: tuple[int, float] = (0, 0.0)
    score: float = 1.0

    def pod(self, name: str) -> PodFact | None:
        """Return the pod of that name."""
        return next((pod for pod in self.pods if pod.name == name), None)


@dataclass(frozen=True, slots=True)
class Tell:
    """Something to tell people: an event and a line in the log."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for the twin; with `only` whether those changes would do better than what is in force."""

    only: tuple[Mapping[str, Any], ...] | None = None


Effects = tuple[Tell | Ask, ...]


def advance(state: State, facts: Facts, now: float) -> tuple[State, Effects]:
    """Return the state and what to do."""
    if facts.spec_hash != state.spec_hash:
        return _begin_anew(state, facts, now)
    if state.trial is None:
        return _idle(state, facts, now)
    if facts.mode != "Auto":
        return _revert(state, facts, now, Reason.MODE_CHANGED, f"tuning.mode is {facts.mode} now")
    if state.phase is Phase.VERIFYING:
        return _verify(state, state.trial, facts, now)
    if facts.busy:
        return _revert(state, facts, now, Reason.ROLLOUT, facts.busy)
    return _try(state, state.trial, facts, now)


def _begin_anew(state: State, facts: Facts, now: float) -> tuple[State, Effects]:
    """Drop overrides and trials: somebody has stated other knobs, and those count."""
    fresh = State(spec_hash=facts.spec_hash, since=now, history=state.history)
    if state.trial is None and not state.override:
        return fresh, ()
    text = "the knobs of the spec or its class have changed: they count, what tuning had found is dropped"
    if state.trial is not None:
        fresh = fresh.with_change(_change(state.trial, now, f"Reverted({Reason.SPEC_CHANGED})", text))
    return fresh.told(Reason.SPEC_CHANGED, text), (Tell("TuningDropped", text),)


def _idle(state: State, facts: Facts, now: float) -> tuple[State, Effects]:
    if facts.decision is not None:
        return _decided(state, facts, facts.decision, now)
    if facts.mode != "Auto" and state.override:
        state = replace(state, override={})  # it counts under Auto only: the spec's knobs are back in force
    if facts.mode == "Off":
        return state.told("Off", "tuning.mode is Off"), ()
    if facts.busy:
        return state.told("Frozen", facts.busy), ()
    view = facts.view
    if view is None or not view.fresh:
        return state.told("NoMetrics", "no pod's figures can be used, see MetricsAvailable"), ()
    if moved(state.shift, signature_of(view)):
        state = replace(state, shift=signature_of(view), changes=0)
    early = now - state.since < facts.interval  # a few seconds say nothing about traffic
    if early or facts.searching or now < state.cooldown or not is_due(state, view, now, facts.percentile):
        return state, ()
    return looked(state, view, now, facts.percentile), (Ask(),)


def _decided(state: State, facts: Facts, decision: Decision, now: float) -> tuple[State, Effects]:
    text = decision.message
    if decision.kind != "Change":
        news = decision.kind == "Freeze" and state.reason != decision.reason
        return _later(state, facts, now).told(decision.reason, text), (Tell("TuningFrozen", text, warning=True),) * news
    if facts.mode != "Auto":
        news = state.message != text
        return _later(state, facts, now).told("Recommended", text), (Tell("TuningRecommended", text),) * news
    state = replace(state, next_search=now + facts.interval, idle_searches=0)
    if facts.busy:
        return state.told("Frozen", facts.busy), ()
    if state.changes >= _MOST_CHANGES:
        text = f"{_MOST_CHANGES} changes were made since the traffic shifted: no more until it shifts again"
        return state.told("EnoughChanges", text), ()
    return _start(state, facts, decision, now)


def _later(state: State, facts: Facts, now: float) -> State:
    """Return the state that asks again ever more rarely while nothing is to be done and the traffic stays what it is."""
    waits = min(16, 2**state.idle_searches)
    return replace(state, next_search=now + waits * facts.interval, idle_searches=state.idle_searches + 1)


def _start(state: State, facts: Facts, decision: Decision, now: float) -> tuple[State, Effects]:
    candidates = [pod for pod in facts.pods if pod.fresh and pod.applied]
    assert facts.view is not None and decision.best is not None, "a decision is about what was observed"
    if not candidates:
        return state.told("NoMetrics", "no pod can be tried on"), ()
    first = min(candidates, key=lambda pod: pod.name)
    trial = Trial(
        before={name: facts.knobs[name] for name in decision.target},
        after=dict(decision.target),
        why=decision.message,
        started=now,
        pods=(first.name,),
        process=first.process,
        baseline=facts.view.attainment,
        score=facts.score,
        predicted=decision.best.attainment,
        gain=decision.gain,
        single=len(facts.pods) == 1,
        override=dict(state.override),
    )
    text = f"tried on {first.name}: {decision.message}"
    state = replace(state, phase=Phase.CANARY, since=now, trial=trial, changes=state.changes + 1)
    return state.told("Trying", text), (Tell("TuningCanary", text),)


def _try(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """Canary and promotion: the guard watches the pods that run the change against those that don't."""
    if reason := _broken(trial, facts):
        return _revert(state, facts, now, *reason)
    running = [pod for name in trial.pods if (pod := facts.pod(name)) is not None]
    if not trial.applied:
        if all(pod.applied for pod in running):
            return replace(state, trial=replace(trial, applied=now, stepped=now)), ()
        if now - trial.started > _APPLY_MOST * facts.interval:
            return _revert(state, facts, now, Reason.NOT_APPLIED, f"{running[0].name} didn't take the change over")
        return state, ()
    evidence = facts.evidence
    if evidence is not None and evidence.verdict is Verdict.HARM:
        return _revert(state, facts, now, Reason.HARM, f"worse than before: {evidence.text}")
    if state.phase is Phase.PROMOTING:
        return _promote(state, trial, facts, now)
    if evidence is not None and evidence.verdict is Verdict.PASS:
        text = f"no worse on {trial.pods[0]}, it goes on to the others: {evidence.text}"
        state = replace(state, phase=Phase.PROMOTING, since=now).told("Passed", text)
        state, effects = _promote(state, trial, facts, now)
        return state, (Tell("TuningPromoting", text), *effects)
    if now - trial.applied > _CANARY_MOST * facts.interval:
        seen = evidence.text if evidence is not None else "nothing could be judged"
        return _revert(state, facts, now, Reason.LOW_TRAFFIC, f"too little traffic to tell whether it is worse: {seen}")
    return state, ()


def _broken(trial: Trial, facts: Facts) -> tuple[Reason, str] | None:
    first = facts.pod(trial.pods[0])
    if first is None or first.process != trial.process:
        return Reason.POD_GONE, f"{trial.pods[0]} is gone or was restarted while it was tried on"
    for name in trial.pods:
        pod = facts.pod(name)
        if pod is not None and pod.refused:
            return Reason.REFUSED, f"{name} refused it: {pod.refused}"
    return None


def _promote(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """Double the pods that run it, half an interval a step; the last step makes it the service's."""
    if len(trial.pods) > 1 and now - trial.stepped < facts.interval / 2:
        return state, ()
    if 2 * len(trial.pods) < len(facts.pods):
        others = sorted(pod.name for pod in facts.pods if pod.name not in trial.pods)
        return replace(state, trial=replace(trial, pods=(*trial.pods, *others[: len(trial.pods)]), stepped=now)), ()
    text = f"in force on all {len(facts.pods)} pods, now verified: {_arrow(trial)}"
    state = replace(
        state, phase=Phase.VERIFYING, since=now, override={**state.override, **trial.after}, trial=replace(trial, pods=())
    )
    return state.told("Promoted", text), (Tell("TuningPromoted", text),)


def _verify(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    requests, share = facts.after
    waited = now - state.since
    if facts.decision is not None:
        return _compared(state, trial, facts, facts.decision, now)
    if facts.searching:
        return state, ()
    if waited < _VERIFY_LEAST * facts.interval or requests < _VERIFY_REQUESTS:
        if waited > _VERIFY_MOST * facts.interval:
            return _revert(state, facts, now, Reason.LOW_TRAFFIC, f"only {requests} requests to verify the gain by")
        return state, ()
    came = share >= trial.baseline + _GAIN_SHARE * max(0.0, trial.predicted - trial.baseline)
    if came or 100 * share >= facts.percentile:
        return _settle(state, trial, facts, now, "Verified")
    return state, (Ask(only=(dict(trial.before),)),)


def _compared(state: State, trial: Trial, facts: Facts, decision: Decision, now: float) -> tuple[State, Effects]:
    """The gain hasn't come: keep the change only if the twin says that the old knobs would do worse on what came since."""
    share = facts.after[1]
    if decision.reason in ("NoBetter", "WithinError") and share >= trial.baseline - _WORSE:
        return _settle(state, trial, facts, now, "Kept")
    if decision.reason == "NoBetter":
        return _settle(state, trial, facts, now, "TrafficChanged")
    text = f"the gain didn't come: {share:.1%} of the requests keep the objective, {trial.baseline:.1%} did before"
    return _revert(state, facts, now, Reason.NO_GAIN, text)


def _settle(state: State, trial: Trial, facts: Facts, now: float, how: str) -> tuple[State, Effects]:
    effect = f"{facts.after[1]:.1%} of the requests keep the objective, {trial.baseline:.1%} did before"
    state = replace(state, phase=Phase.SETTLED, since=now, trial=None, cooldown=now + _CALM_SETTLED * facts.interval)
    state = state.with_change(_change(trial, now, f"Settled({how})", effect)).told(how, f"{_arrow(trial)}: {effect}")
    return state, (Tell("TuningSettled", state.message),)


def _revert(state: State, facts: Facts, now: float, reason: Reason, text: str) -> tuple[State, Effects]:
    """Back to the knobs from before; what did harm or nothing isn't tried again soon."""
    trial = state.trial
    assert trial is not None, "there is something to take back"
    override = dict(trial.override if state.phase is Phase.VERIFYING else state.override)
    blocked = state.blocked
    if reason in (Reason.HARM, Reason.NO_GAIN, Reason.REFUSED):
        blocked = _block(blocked, trial.after, now, facts.interval)
    calm = now + _CALM.get(reason, _CALM_ELSE) * facts.interval
    state = replace(state, phase=Phase.REVERTED, since=now, trial=None, override=override, blocked=blocked, cooldown=calm)
    state = state.with_change(_change(trial, now, f"Reverted({reason})", text)).told(reason, text)
    return state, (Tell("TuningReverted", f"{_arrow(trial)} taken back: {text}", reason is not Reason.LOW_TRAFFIC),)


def _block(blocked: tuple[Blocked, ...], changes: Mapping[str, Any], now: float, interval: float) -> tuple[Blocked, ...]:
    known = next((b for b in blocked if b.changes == changes), None)
    times = known.times + 1 if known else 1
    others = tuple(b for b in blocked if b is not known and b.until > now)
    return (*others, Blocked(dict(changes), now + _BLOCKED * 2 ** (times - 1) * interval, times))


def _change(trial: Trial, now: float, outcome: str, effect: str) -> Change:
    return Change(now, dict(trial.before), dict(trial.after), trial.why, outcome, effect)


def _arrow(trial: Trial) -> str:
    return ", ".join(f"{name} {trial.before[name]} → {trial.after[name]}" for name in sorted(trial.after))
