"""After a promotion: did the gain come? Pure.

A change settles if it is seen to do good: the share within the objective rises by a part of what was promised, or the
objective is kept. If not, traffic may be to blame, and only a comparison at the same time can tell: one pod goes back to the
knobs from before, and the guard compares the others with it. Whatever isn't clearly no worse is taken back.

Where nobody was served in time before, a queue stands between the change and its gain: there it settles, too, if pods serve
clearly more tokens per second than before; no traffic makes a pod that always has work faster. And while a queue that was
there at the promotion gets shorter, and soon enough will be gone, nothing is judged: who waits in it says nothing of the
knobs that let it shrink, and to send a pod back to those that let it grow would lengthen it.
"""

from __future__ import annotations

from dataclasses import replace

from paceline_operator.tuning.facts import Ask, Effects, Facts, Tell
from paceline_operator.tuning.guard import ALPHA, HARM_MARGIN, Verdict
from paceline_operator.tuning.outcome import revert, settle
from paceline_operator.tuning.state import Phase, Reason, State, Trial

__all__ = ["enough", "verify"]

_LEAST, _PATIENCE, _MOST = 2, 4, 12  # intervals: the first word; a backlog from before is gone; enough is enough
_BEHIND_QUEUE = 0.2  # of the last interval's requests waited too long
_REQUESTS = 40  # that are judged
_GAIN_SHARE = 0.25  # of the expected gain that has to come
_FASTER = 1.25  # times the tokens/s from before, with a queue on both sides: which requests came makes some of it
_COMPARE_MOST = 10  # intervals
_APPLY_MOST = 2  # intervals for a pod to take its knobs over
# Of the score: equal pods differ by a little always. By rates they differ more, and there it is the guard's margin
_SEEN = 0.01
_PAIRED = 20  # requests on the changed pods, in an interval at least: before that queues from before are what is compared
# Fewer do where the evidence is what two passes one after the other would give: nothing but the change itself can be what is
# seen there, and for a service that begins with one slot every minute of waiting is one of failing
_PAIRED_CLEAR, _CLEAR = 8, (1 / ALPHA) ** 2


def verify(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """Look at a change that is in force on all pods, or on all but the one that it is compared with."""
    if refusing := next((pod for pod in facts.pods if pod.refused), None):
        return revert(state, facts, now, Reason.REFUSED, f"{refusing.name} refused it: {refusing.refused}")
    if trial.control:
        return _compare(state, trial, facts, now)
    if not trial.applied:
        return _await(state, trial, facts, now)
    if facts.decision is not None:
        return _judged_by_twin(state, trial, facts, now)
    if facts.searching:
        return state, ()
    return _judged_by_gain(state, trial, facts, now)


def _await(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """Wait until all pods run what was promoted: what some of them give under the knobs from before proves nothing."""
    late = [pod.name for pod in facts.pods if not pod.applied]
    if not late:
        return replace(state, since=now, trial=replace(trial, applied=now)), ()
    if now - state.since <= _APPLY_MOST * facts.interval:
        return state, ()
    return revert(state, facts, now, Reason.NOT_APPLIED, f"{late[0]} didn't take the change over")


def _judged_by_gain(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """Has what was promised come, or may it still come?"""
    requests, share = facts.after
    if trial.queued and facts.lately.requests >= _REQUESTS:
        share = facts.lately.share  # those before have waited in that queue
    waited = now - state.since
    if waited < _LEAST * facts.interval or requests < _REQUESTS:
        if waited > _MOST * facts.interval:
            return revert(state, facts, now, Reason.LOW_TRAFFIC, f"only {requests} requests to verify the gain by")
        return state, ()
    came = share >= trial.baseline + _GAIN_SHARE * max(0.0, trial.predicted - trial.baseline)
    kept = 100 * share >= facts.percentile and share >= trial.baseline - HARM_MARGIN
    if came or kept:
        return settle(state, trial, facts, now, "Verified", _effect(trial, share))
    if trial.starved and facts.rate_after >= _FASTER * trial.rate:
        return settle(state, trial, facts, now, "Served", _served(trial, facts))
    if _is_worked_off(trial, facts, waited) or (waited < _PATIENCE * facts.interval and share >= trial.baseline):
        return state, ()
    return _doubt(state, trial, facts, now, share)


def _is_worked_off(trial: Trial, facts: Facts, waited: float) -> bool:
    """Return whether requests still wait behind the queue of the promotion, and it will be gone in time if it goes on so."""
    queued, left = trial.queued, facts.view.waiting if facts.view is not None else 0
    if facts.lately.waited < _BEHIND_QUEUE or left >= queued:
        return False
    return waited * queued / (queued - left) <= _MOST * facts.interval


def _doubt(state: State, trial: Trial, facts: Facts, now: float, share: float) -> tuple[State, Effects]:
    """The gain hasn't come: compare with a pod under the knobs from before; with one pod, ask the twin."""
    pods = sorted((pod for pod in facts.pods if pod.fresh), key=lambda pod: pod.name)
    if len(pods) < 2:
        return state, (Ask(only=(dict(trial.before),)),)
    control = pods[-1]
    compared = replace(
        trial,
        pods=(control.name,),
        process=control.process,
        single=False,
        control=True,
        started=now,
        applied=0.0,
        stepped=0.0,
        starved=facts.lately.starved,
        rate=facts.lately.rate,
    )
    text = f"the gain isn't seen ({_effect(trial, share)}): {control.name} goes back to tell whether it is the traffic"
    state = replace(state, phase=Phase.COMPARING, since=now, trial=compared).told("Comparing", text)
    return state, (Tell("TuningComparing", text),)


def _compare(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """The others against the pod that went back; only what is seen to be no worse stays."""
    control, evidence = facts.pod(trial.pods[0]), facts.evidence
    if facts.busy or control is None or control.process != trial.process:
        return revert(state, facts, now, Reason.NO_GAIN, f"the gain didn't come, and {trial.pods[0]} can't be compared with")
    if not trial.applied:
        if control.applied:
            return replace(state, trial=replace(trial, applied=now)), ()
        late = now - trial.started > _APPLY_MOST * facts.interval
        return revert(state, facts, now, Reason.NOT_APPLIED, f"{control.name} didn't go back") if late else (state, ())
    if evidence is not None and evidence.harmful:
        return revert(state, facts, now, Reason.HARM, f"worse than the knobs from before: {evidence.text}")
    better = HARM_MARGIN if trial.starved else _SEEN
    if evidence is not None and enough(trial, facts, now) and evidence.difference > better:
        return settle(
            state, trial, facts, now, "Kept", f"no worse than the knobs from before, at the same time: {evidence.text}"
        )
    if now - trial.applied > _COMPARE_MOST * facts.interval:
        seen = evidence.text if evidence is not None else "nothing could be judged"
        return revert(state, facts, now, Reason.NO_GAIN, f"not seen to be better than the knobs from before: {seen}")
    return state, ()


def enough(trial: Trial, facts: Facts, now: float) -> bool:
    """Return whether a trial has passed: the guard says so, of an interval at least and some requests."""
    evidence = facts.evidence
    if evidence is None or evidence.verdict is not Verdict.PASS or now - trial.applied < facts.interval:
        return False
    return evidence.requests >= (_PAIRED_CLEAR if evidence.passed >= _CLEAR else _PAIRED)


def _judged_by_twin(state: State, trial: Trial, facts: Facts, now: float) -> tuple[State, Effects]:
    """One pod: the twin must say that the old knobs would do no better on what came since, and it mustn't be worse."""
    share = facts.after[1]
    assert facts.decision is not None
    if facts.decision.reason == "NoBetter" and share >= trial.baseline:
        return settle(state, trial, facts, now, "Kept", _effect(trial, share))
    return revert(state, facts, now, Reason.NO_GAIN, f"the gain didn't come: {_effect(trial, share)}")


def _effect(trial: Trial, share: float) -> str:
    return f"{share:.1%} of the requests keep the objective, {trial.baseline:.1%} did before"


def _served(trial: Trial, facts: Facts) -> str:
    rates = f"a pod serves {facts.rate_after:.0f} tokens/s, {trial.rate:.0f} before"
    return f"{rates}; of the requests that queue, {facts.after[1]:.1%} keep the objective, {trial.baseline:.1%} did before"
