"""The ConfigMap `<name>-tuned`: the knobs that tuning put in force, the trial under way, and the state to resume from.

| key | what |
|---|---|
| `knobs.json` | overrides, as pods read them at start (`effective.Override`); absent where there are none |
| `trial.json` | which pods shall run which other knobs for now (`Trying`); absent where there is no trial |
| `state.json` | where the state machine stands (`state.State`) |

Only the tuner writes it, under its own field manager, so that a reconcile never fights it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline_core.errors import FormatError
from paceline_operator.children import owner_reference
from paceline_operator.effective import KNOBS_FILE, Override, effective, override_text, read_override, tuned_name
from paceline_operator.names import labels
from paceline_operator.spec import InferenceService
from paceline_operator.tuning.state import State

__all__ = ["FIELD_MANAGER", "IN_FORCE", "Trying", "config_map", "out_of_force", "read_state", "read_trying"]

FIELD_MANAGER = "paceline-tuner"
_TRIAL, _STATE = "trial.json", "state.json"
IN_FORCE = (KNOBS_FILE, _TRIAL)  # the keys that pods are run by; without them tuning has a past, but no say


@dataclass(frozen=True, slots=True)
class Trying:
    """Which pods run which knobs (wire form) beside those in force."""

    pods: frozenset[str] = frozenset()
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def of(self, pod: str) -> Mapping[str, Any]:
        """Return what that pod shall run differently."""
        return self.knobs if pod in self.pods else {}


def config_map(service: InferenceService, state: State) -> dict[str, Any]:
    """Return the apply configuration of the ConfigMap for `state`; a key that isn't in it is given up."""
    data = {_STATE: json.dumps(_durable(state).to_json(), sort_keys=True)}
    if state.override:
        data[KNOBS_FILE] = override_text(Override(state.spec_hash, state.override))
    if state.trial is not None and state.trial.pods:
        trial = {"specHash": state.spec_hash, "pods": sorted(state.trial.pods), "knobs": dict(state.trial.tried)}
        data[_TRIAL] = json.dumps(trial, sort_keys=True)
    metadata = {
        "name": tuned_name(service.name),
        "namespace": service.namespace,
        "labels": labels(service.name),
        "ownerReferences": [owner_reference(service)],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def read_state(live: Mapping[str, Any] | None) -> State | None:
    """Return the state in a ConfigMap, None if there is none that can be read.

    Where the override was taken out meanwhile (`IN_FORCE`), only what is remembered of the past is left. Of a state that
    can't be read (another version's, or edited) the override stays in force: pods run it.
    """
    data = _data(live)
    try:
        state = State.from_json(json.loads(data[_STATE]))
    except (KeyError, ValueError, FormatError, RecursionError):
        found = read_override(live)
        return State(spec_hash=found.spec_hash, override=found.knobs) if found is not None and found.knobs else None
    if state.override and KNOBS_FILE not in data:
        return State(spec_hash=state.spec_hash, blocked=state.blocked, history=state.history)
    return state


def out_of_force(service: InferenceService, state: State) -> str:
    """Return why what tuning put in force, or tries, isn't allowed any more (bounds were narrowed, say); '' if it is."""
    knobs = {**state.override, **(state.trial.after if state.trial is not None else {})}
    if not knobs or service.tuning.mode != "Auto":
        return ""
    return effective(service, Override(state.spec_hash, knobs)).dropped


def read_trying(live: Mapping[str, Any] | None, spec_hash: str) -> Trying:
    """Return the trial in a ConfigMap, if it is about the knobs that spec and class state now."""
    try:
        data = json.loads(_data(live)[_TRIAL])
        if data["specHash"] != spec_hash:
            return Trying()
        return Trying(frozenset(data["pods"]), dict(data["knobs"]))
    except (KeyError, ValueError, TypeError):
        return Trying()


def _durable(state: State) -> State:
    """Return what has to survive the operator: not when it looked last and what it saw, or each look would be a write."""
    shift, at = (tuple(float(f"{x:.2g}") for x in state.shift), state.shifted) if state.begun else ((), 0.0)
    kept = replace(
        state, next_search=0.0, idle_searches=0, freezes=0, signature=(), kept=False, share=1.0, shift=shift, shifted=at,
        shifting=0.0,
    )  # fmt: skip
    return kept if state.trial is not None else kept.told("Resumed", "nothing was observed since the operator started")


def _data(live: Mapping[str, Any] | None) -> Mapping[str, str]:
    return (live or {}).get("data") or {}
