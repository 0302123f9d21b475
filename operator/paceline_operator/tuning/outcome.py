"""How a change ends: settled or taken back, remembered, and with what follows for the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline_operator.tuning.facts import Effects, Facts, Tell
from paceline_operator.tuning.state import Blocked, Change, Phase, Reason, State, Trial

__all__ = ["arrow", "change", "revert", "settle"]

_CALM = {Reason.HARM: 5, Reason.NO_GAIN: 5, Reason.LOW_TRAFFIC: 10}  # intervals until the next search
_CALM_ELSE, _CALM_SETTLED = 2, 3
_BLOCKED = 60  # intervals that a harmful setting isn't tried again; doubles each time


def settle(state: State, trial: Trial, facts: Facts, now: float, how: str, effect: str) -> tuple[State, Effects]:
    """Keep the change. What was in force before isn't gone back to until the traffic shifts: that would be oscillation."""
    calm, left = now + _CALM_SETTLED * facts.interval, (*state.left, dict(trial.before))
    share = facts.after[1] if facts.after[0] else facts.lately.share
    state = replace(
        state, phase=Phase.SETTLED, since=now, trial=None, cooldown=calm, left=left,
        kept=100 * share >= facts.percentile, share=share,
    )  # fmt: skip
    state = state.with_change(change(trial, now, f"Settled({how})", effect)).told(how, f"{arrow(trial)}: {effect}")
    return state, (Tell("TuningSettled", state.message),)


def revert(state: State, facts: Facts, now: float, reason: Reason, text: str) -> tuple[State, Effects]:
    """Back to the knobs from before; what did harm or nothing isn't tried again soon, and the twin's word weighs less."""
    trial = state.trial
    assert trial is not None, "there is something to take back"
    in_force = state.phase in (Phase.VERIFYING, Phase.COMPARING)
    blocked, doubt = state.blocked, state.doubt
    if reason in (Reason.HARM, Reason.NO_GAIN, Reason.REFUSED):
        blocked = _block(blocked, trial.after, now, facts.interval)
    if reason in (Reason.HARM, Reason.NO_GAIN):
        doubt = max(doubt, trial.promised)
    state = replace(
        state, phase=Phase.REVERTED, since=now, trial=None, override=dict(trial.override if in_force else state.override),
        blocked=blocked, doubt=doubt, cooldown=now + _CALM.get(reason, _CALM_ELSE) * facts.interval,
    )  # fmt: skip
    state = state.with_change(change(trial, now, f"Reverted({reason})", text)).told(reason, text)
    return state, (Tell("TuningReverted", f"{arrow(trial)} taken back: {text}", reason is not Reason.LOW_TRAFFIC),)


def _block(blocked: tuple[Blocked, ...], changes: Mapping[str, Any], now: float, interval: float) -> tuple[Blocked, ...]:
    known = next((b for b in blocked if b.changes == changes), None)
    times = known.times + 1 if known else 1
    others = tuple(b for b in blocked if b is not known and b.until > now)
    return (*others, Blocked(dict(changes), now + _BLOCKED * 2 ** (times - 1) * interval, times))


def change(trial: Trial, now: float, outcome: str, effect: str) -> Change:
    """Return a trial as it is remembered."""
    return Change(now, dict(trial.before), dict(trial.after), trial.why, outcome, effect)


def arrow(trial: Trial) -> str:
    """Return what a trial changes, in words."""
    return ", ".join(f"{name} {trial.before[name]} → {trial.after[name]}" for name in sorted(trial.after))
