"""Which settings are worth asking the twin about: around the current one, within bounds, and where its model knows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_core.errors import KnobError
from paceline_core.knobs import KNOBS, CostClass, Knobs, Strategy, knob, knobs_to_wire
from paceline_core.step_time import TRUSTED, StepModel
from paceline_sim.bent import BentModel

__all__ = [
    "FEATURES",
    "TUNED",
    "allowed",
    "between",
    "changes_between",
    "in_tiles",
    "ladder",
    "merge_changes",
    "trusted_most",
]

# what is searched, in this order: each is swept with the best of those before it
TUNED = ("maxNumSeqs", "maxNumBatchedTokens", "longPrefillThreshold", "maxQueueDelay")
FEATURES = {"maxNumSeqs": "decode_tokens", "maxNumBatchedTokens": "prefill_tokens"}
_SMALLEST = {"maxNumSeqs": 1, "maxNumBatchedTokens": 32, "longPrefillThreshold": 128}  # smaller chunks: a step for each
_LARGEST = {"maxNumSeqs": 4096, "maxNumBatchedTokens": 32_768, "longPrefillThreshold": 8192}
_DELAYS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)  # seconds


def ladder(name: str, knobs: Knobs, bounds: Mapping[str, tuple[Any, Any]], model: StepModel) -> list[dict[str, Any]]:
    """Return the changes of one knob to try, as wire values: doublings within the bounds and what the model knows."""
    if name == "maxQueueDelay":
        if knobs.strategy is not Strategy.DYNAMIC:
            return []
        spec = knob(name)
        return [{name: spec.to_wire(delay)} for delay in _DELAYS if _inside(delay, bounds.get(name))]
    if knobs.strategy in (Strategy.STATIC, Strategy.DYNAMIC) and name == "longPrefillThreshold":
        return []
    most = min(_LARGEST[name], trusted_most(name, model), _limit(name, knobs))
    values, value = [], _SMALLEST[name]
    while value <= most:
        values.append(value)
        value *= 2
    values += [end for end in bounds.get(name, ()) if isinstance(end, int) and end <= most]
    return [{name: value} for value in sorted({*values, most}) if _inside(value, bounds.get(name))]


def between(name: str, knobs: Knobs, bounds: Mapping[str, tuple[Any, Any]], model: StepModel) -> list[dict[str, Any]]:
    """Return the steps between the doublings around the value in `knobs`."""
    value = getattr(knobs, knob(name).attribute)
    most = min(trusted_most(name, model), _limit(name, knobs))
    found = {in_tiles(name, value * factor, model) for factor in (0.7, 0.85, 1.2, 1.45)} - {value}
    return [{name: v} for v in sorted(found) if _SMALLEST[name] <= v <= most and _inside(v, bounds.get(name))]


def in_tiles(name: str, value: float, model: StepModel) -> int:
    """Return the whole number near `value` that fills the tiles in which the device computes: others cost the same time."""
    tile = model.batch_tile if name == "maxNumSeqs" and isinstance(model, BentModel) else 1
    return round(value / tile) * tile if value > tile else round(value)


def trusted_most(name: str, model: StepModel) -> int:
    """Return the highest value at which no step is of more than twice the size that the model has seen.

    What is in force stays allowed: it is known by running, whatever the model saw.
    """
    feature = FEATURES.get(name)
    if feature is None or feature not in model.seen:
        return _LARGEST[name]
    known = int(TRUSTED * model.seen[feature][1])
    return max(known, _SMALLEST[name])


def merge_changes(knobs: Knobs, *changes: Mapping[str, Any]) -> Knobs | None:
    """Return `knobs` with the changes, None if they break a rule between knobs.

    A step gives each sequence a token at least: where the budget is below the number of sequences, the one of them that
    isn't in `changes` follows the other.
    """
    values: dict[str, Any] = {}
    for change in changes:
        values.update(change)
    seqs = values.get("maxNumSeqs", knobs.max_num_seqs)
    budget = values.get("maxNumBatchedTokens", knobs.max_num_batched_tokens)
    if budget < seqs:
        values |= {"maxNumSeqs": budget} if "maxNumBatchedTokens" in values else {"maxNumBatchedTokens": seqs}
    try:
        return knobs.updated(values)
    except KnobError:
        return None


def allowed(changes: Mapping[str, Any], bounds: Mapping[str, tuple[Any, Any]]) -> bool:
    """Return whether `changes` may be applied: within bounds, no restart, no knob that only people decide about."""
    for name, value in changes.items():
        spec = knob(name)
        if spec.cost is CostClass.RESTART or name not in (*TUNED, "kvMemoryFraction"):
            return False
        if (spec.cost is CostClass.PAUSE and name not in bounds) or not _inside(spec.parse(value), bounds.get(name)):
            return False
    return True


def _limit(name: str, knobs: Knobs) -> int:
    return knobs.max_num_seqs_limit if name == "maxNumSeqs" else _LARGEST[name]


def _inside(value: Any, ends: tuple[Any, Any] | None) -> bool:
    if ends is None:
        return True
    low, high = ends
    return (low is None or low <= value) and (high is None or value <= high)


def changes_between(old: Knobs, new: Knobs) -> dict[str, Any]:
    """Return what differs in `new`, in wire form."""
    before, after = knobs_to_wire(old), knobs_to_wire(new)
    return {spec.name: after[spec.name] for spec in KNOBS if before[spec.name] != after[spec.name]}
