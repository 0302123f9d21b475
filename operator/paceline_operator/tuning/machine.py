"""What happens next to a service's tuning: state and facts in, state and effects out. Pure; the time is an argument.

```
 Observing ─▶ Canary ─▶ Promoting ─▶ Verifying ─┬──────────────▶ Settled ──▶ (observing again)
                 │          │            │        └─▶ Comparing ─┤
                 └──────────┴────────────┴───────────────────────▶ Reverted ──▶
```
Whatever isn't clear ends in Reverted: the knobs from before are known to work.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.facts import Ask, Effects, Facts, Tell
from paceline_operator.tuning.guard import ALPHA, HARM_MARGIN, Evidence, batch_seconds, batches_had, batches_needed
from paceline_operator.tuning.outcome import arrow, change, revert
from paceline_operator.tuning.state import Phase, Reason, State, Trial
from paceline_operator.tuning.traffic import MOST_CHANGES, budget_left, follow, is_due, is_lost, looked
from paceline_operator.tuning.verify import enough, verify

__all__ = ["advance"]

# Intervals: what isn't clear by the first is LowTraffic, unless it is no worse so far and will be clear by the second if it
# goes on like this. The test may be looked at for as long as one likes; to give up and begin again costs more than waiting.
_CANARY_MOST, _CANARY_LONGEST = 10, 24
_UNHEARD = 1  # interval without a pod that is heard: a trial that nobody watches must not go on
_APPLY_MOST = 2  # intervals for a pod to take a change over
_LATEST = 32  # intervals between two searches at most: all requests that the twin is asked about are others then
_DRAINS = 4  # intervals between two searches at most while a queue keeps everybody beyond the objective
_FORGIVEN = 0.7  # of the doubt is left after another search, on other requests: a guard is wrong once in twenty times
_FROZEN, _FROZEN_SOON, _FROZEN_MOST = 2, 3, 8  # intervals until the twin is checked again: so many times, and at most


def advance(state: State, facts: Facts, now: float) -> tuple[State, Effects]:
    """Return the state and what to do."""
    if facts.spec_hash != state.spec_hash:
        return _begin_anew(state, facts, now, "the knobs of the spec or its class have changed: they count")
    if facts.dropped:
        return _begin_anew(state, facts, now, f"it isn't allowed any more: {facts.dropped}")
    if state.since > now + facts.interval:
        return _put_clock_right(state, facts, now)
    if state.trial is None:
        return _idle(state, facts, now)
    if facts.mode != "Auto":
        return revert(state, facts, now, Reason.MODE_CHANGED, f"tuning.mode is {facts.mode} now")
    state = _heard(state, state.trial, facts, now)
    assert state.trial is not None, "listening ends no trial"
    if state.trial.unheard and now - state.trial.unheard >= _UNHEARD * facts.interval:
        return revert(state, facts, now, Reason.NO_METRICS, "no pod's figures can be used any more, see MetricsAvailable")
    if state.phase in (Phase.VERIFYING, Phase.COMPARING):
        return verify(state, state.trial, facts, now)
    if facts.busy:
        return revert(state, facts, now, Reason.ROLLOUT, facts.busy)
    return _try(state, state.trial, facts, now)


def _heard(state: State, trial: Trial, facts: Facts, now: float) -> State:
    """Return the state that knows since when nobody tells anything that counts."""
    unheard = 0.0 if any(pod.fresh for pod in facts.pods) else trial.unheard or now
    return state if unheard == trial.unheard else replace(state, trial=replace(trial, unheard=unheard))


def _put_clock_right(state: State, facts: Facts, now: float) -> tuple[State, Effects]:
    """The operator's clock went back (or this one's is behind the last one's): what was noted lies in the future, and would
    be waited for. Nothing measured so far can be told from what comes, so a trial goes back.
    """
    effects: Effects = ()
    if state.trial is not None:
        state, effects = revert(state, facts, now, Reason.NO_METRICS, "the operator's clock was put back while it ran")
    begun, blocked = (min(at, now) for at in state.begun), (replace(b, until=now) for b in state.blocked)
    state = replace(
        state, since=now, cooldown=now, next_search=now, shifted=min(state.shifted, now), shifting=0.0,
        begun=tuple(begun), blocked=tuple(blocked),
    )  # fmt: skip
    return state, effects


def _begin_anew(state: State, facts: Facts, now: float, why: str) -> tuple[State, Effects]:
    """Drop overrides and trials: somebody has stated other knobs or bounds, and those count."""
    fresh = State(spec_hash=facts.spec_hash, since=now, history=state.history)
    if state.trial is None and not state.override:
        return fresh, ()
    text = f"{why}, what tuning had found is dropped"
    if state.trial is not None:
        fresh = fresh.with_change(change(state.trial, now, f"Reverted({Reason.SPEC_CHANGED})", text))
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
    view, stretch = facts.view, facts.stretch
    if view is None or stretch is None or not view.fresh:
        return state.told("NoMetrics", "no pod's figures can be used, see MetricsAvailable"), ()
    state = follow(state, stretch, now, facts.interval)
    early = now - state.since < facts.interval  # a few seconds say nothing about traffic
    lost = is_lost(state, facts.lately, facts.percentile)
    calm = now < state.cooldown or not is_due(state, stretch, now, facts.percentile)
    if early or facts.searching or (calm and not lost):
        return state, ()
    return looked(state, stretch, now, facts.percentile), (Ask(),)


def _decided(state: State, facts: Facts, decision: Decision, now: float) -> tuple[State, Effects]:
    text = decision.message
    if decision.kind != "Change":
        frozen = decision.kind == "Freeze"
        news = frozen and state.reason != decision.reason
        later = _thawing(state, facts) if frozen else _later(state, facts)
        return later.told(decision.reason, text), (Tell("TuningFrozen", text, warning=True),) * news
    if facts.mode != "Auto":
        news = state.message != text
        return _later(state, facts).told("Recommended", text), (Tell("TuningRecommended", text),) * news
    if facts.busy:
        return replace(state, next_search=now + facts.interval).told("Frozen", facts.busy), ()
    if not budget_left(state, now, facts.interval):
        text = f"{MOST_CHANGES} changes were made since the traffic shifted: no more until it shifts again"
        return _later(state, facts).told("EnoughChanges", text), ()
    if text := _cannot_be_shown(facts, decision):
        return _later(state, facts).told("TooLittleTraffic", text), ()
    return _start(state, facts, decision, now)


def _thawing(state: State, facts: Facts) -> State:
    """Return the state that looks soon whether a freeze has thawed by itself, and ever more rarely if it lasts: a pod that
    tells lies would be asked for ever.
    """
    waits = min(_FROZEN_MOST, _FROZEN * 2 ** max(0, state.freezes + 1 - _FROZEN_SOON))
    return replace(state, next_search=state.next_search + waits * facts.interval, freezes=state.freezes + 1)


def _later(state: State, facts: Facts) -> State:
    """Return the state that asks again ever more rarely while nothing is to be done and the traffic stays what it is.

    It counts from when the twin was asked (`looked`): counted from its answer, an interval would end just after a look.
    """
    waits = min(_DRAINS if facts.lately.starved else _LATEST, 2**state.idle_searches)
    return replace(
        state,
        next_search=state.next_search + waits * facts.interval,
        idle_searches=state.idle_searches + 1,
        doubt=_FORGIVEN * state.doubt,
        freezes=0,
    )


def _start(state: State, facts: Facts, decision: Decision, now: float) -> tuple[State, Effects]:
    candidates = [pod for pod in facts.pods if pod.fresh and pod.applied]
    assert facts.stretch is not None and decision.best is not None, "a decision is about what was observed"
    if not candidates:
        return state.told("NoMetrics", "no pod can be tried on"), ()
    first, starved = min(candidates, key=lambda pod: pod.name), facts.lately.starved
    trial = Trial(
        before={name: facts.knobs[name] for name in decision.target},
        after=dict(decision.target),
        why=decision.message,
        started=now,
        pods=(first.name,),
        process=first.process,
        # where a queue has grown until nobody is served in time, what was served before it grew is no measure
        baseline=facts.lately.share if starved else facts.stretch.attainment,
        score=facts.lately.score if starved else facts.score,
        predicted=decision.best.attainment,
        promised=decision.best.attainment - (decision.current.attainment if decision.current is not None else 0.0),
        gain=decision.gain,
        single=len(facts.pods) == 1,
        override=dict(state.override),
        starved=starved,
        rate=facts.lately.rate,
    )
    text = f"tried on {first.name}: {decision.message}"
    state = replace(
        state, phase=Phase.CANARY, since=now, trial=trial, begun=(*state.begun, now)[-MOST_CHANGES:],
        next_search=now + facts.interval, idle_searches=0, freezes=0,
    )  # fmt: skip
    return state.told("Trying", text), (Tell("TuningCanary", text),)


def _cannot_be_shown(facts: Facts, decision: Decision) -> str:
    """Return why one pod can't prove a change with the traffic there is, '' if it can: a trial would take it back anyway.

    The gain is promised for the load to come as well as for that of now, of which a canary sees half. A queue that keeps
    everybody waiting is told by tokens, which there are enough of.
    """
    assert facts.stretch is not None and decision.best is not None and decision.current is not None, "as in _start"
    pods = len(facts.pods)
    if pods < 2 or facts.lately.starved:
        return ""
    rate = facts.stretch.rate / pods
    gain = (decision.best.attainment - decision.current.attainment) / 2
    had, per_batch = batches_had(rate, pods, _CANARY_LONGEST * facts.interval, batch_seconds(facts.interval))
    needed = batches_needed(gain, facts.stretch.attainment, per_batch, pods)
    if needed <= had:
        return ""
    takes = f"it would take {needed:.0f} batches" if math.isfinite(needed) else "no number of batches would do"
    return (
        f"{decision.message}; with {rate * facts.interval:.1f} requests per pod and interval a canary couldn't show it: "
        f"{takes}, and there are {had:.0f} in {_CANARY_LONGEST} intervals"
    )


def _try(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """Canary and promotion: the guard watches the pods that run the change against those that don't."""
    if reason := _broken(trial, facts):
        return revert(state, facts, now, *reason)
    running = [pod for name in trial.pods if (pod := facts.pod(name)) is not None]
    if not trial.applied:
        if all(pod.applied for pod in running):
            return replace(state, trial=replace(trial, applied=now, stepped=now)), ()
        if now - trial.started > _APPLY_MOST * facts.interval:
            return revert(state, facts, now, Reason.NOT_APPLIED, f"{running[0].name} didn't take the change over")
        return state, ()
    evidence = facts.evidence
    if evidence is not None and evidence.harmful:
        return revert(state, facts, now, Reason.HARM, f"worse than before: {evidence.text}")
    if state.phase is Phase.PROMOTING:
        return _promote(state, trial, facts, now)
    if evidence is not None and enough(trial, facts, now) and evidence.difference >= -HARM_MARGIN:
        text = f"no worse on {trial.pods[0]}, it goes on to the others: {evidence.text}"
        state = replace(state, phase=Phase.PROMOTING, since=now).told("Passed", text)
        state, effects = _promote(state, trial, facts, now)
        return state, (Tell("TuningPromoting", text), *effects)
    waited = (now - trial.applied) / facts.interval
    if waited > _CANARY_MOST and not _is_promising(trial, evidence, waited):
        seen = evidence.text if evidence is not None else "nothing could be judged"
        text = f"it isn't clear after {waited:.0f} intervals whether it is worse: {seen}"
        return revert(state, facts, now, Reason.LOW_TRAFFIC, text)
    return state, ()


def _is_promising(trial: Trial, evidence: Evidence | None, waited: float) -> bool:
    """Return whether a trial that isn't clear yet is worth waiting for: no worse, and its evidence grows fast enough.

    With one pod, the longer it takes the more of what is seen is the traffic.
    """
    if evidence is None or trial.single or evidence.difference < -HARM_MARGIN:
        return False
    return math.log(evidence.passed) * _CANARY_LONGEST >= math.log(1 / ALPHA) * waited


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
    """Double the pods that run it, half an interval a step; the last (of three pods the first) makes it the service's."""
    if len(trial.pods) > 1 and now - trial.stepped < facts.interval / 2:
        return state, ()
    if 2 * len(trial.pods) + 1 < len(facts.pods):
        others = sorted(pod.name for pod in facts.pods if pod.name not in trial.pods)
        return replace(state, trial=replace(trial, pods=(*trial.pods, *others[: len(trial.pods)]), stepped=now)), ()
    text = f"put in force on all {len(facts.pods)} pods, verified next: {arrow(trial)}"
    queued = facts.view.waiting if facts.view is not None else 0
    promoted = replace(trial, pods=(), queued=queued, applied=0.0)  # until the last pod has taken it over
    state = replace(
        state, phase=Phase.VERIFYING, since=now, override={**state.override, **trial.after}, trial=promoted
    )  # fmt: skip
    return state.told("Promoted", text), (Tell("TuningPromoted", text),)
