"""Where tuning of one service stands, in a form that survives the operator (in the ConfigMap of overrides). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from paceline_core.errors import FormatError

__all__ = ["Blocked", "Change", "Phase", "Reason", "State", "Trial"]

_HISTORY = 10  # changes that are remembered
_SIGNATURE = 4  # figures that tell kinds of traffic apart (`stretch.Stretch.signature`)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "float": (int, float), "int": int, "bool": bool, "str": str, "Mapping[str, Any]": dict
}  # fmt: skip


class Phase(StrEnum):
    """What is going on."""

    OBSERVING = "Observing"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    VERIFYING = "Verifying"
    COMPARING = "Comparing"
    SETTLED = "Settled"
    REVERTED = "Reverted"


class Reason(StrEnum):
    """Why a change was taken back, or not pursued."""

    HARM = "Harm"
    NO_GAIN = "NoGain"
    LOW_TRAFFIC = "LowTraffic"
    POD_GONE = "PodGone"
    REFUSED = "Refused"
    NOT_APPLIED = "NotApplied"
    ROLLOUT = "Rollout"
    SPEC_CHANGED = "SpecChanged"
    MODE_CHANGED = "ModeChanged"
    NO_METRICS = "NoMetrics"


@dataclass(frozen=True, slots=True)
class Trial:
    """A change under way: the knobs that differ, before and after (wire form), who runs them and what is expected.

    `pods` run `after` while the others run `before`; after promotion it is empty and all do. With `control` it is the other
    way round: all run `after`, and `pods` went back to `before` to be compared with. `process` is the first pod's,
    so that a restart is noticed. `baseline` and `predicted` are shares of requests within the objective, before (measured)
    and after (the twin's), `promised` the gain in them that the twin foresaw, `score` the mean score before, `override` what
    was in force beyond the spec. `applied` is when the pods had taken it over (0: not yet). `starved`: nobody was served in
    time when it began, and a pod served `rate` output tokens/s. At its promotion `queued` requests waited. Since `unheard`
    (0: not so) no pod has told what counts.
    """

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    why: str
    started: float
    pods: tuple[str, ...]
    process: str
    baseline: float
    score: float
    predicted: float
    gain: float
    single: bool = False
    applied: float = 0.0
    stepped: float = 0.0
    override: Mapping[str, Any] = field(default_factory=dict)
    promised: float = 0.0
    control: bool = False
    starved: bool = False
    rate: float = 0.0
    queued: int = 0
    unheard: float = 0.0

    @property
    def tried(self) -> Mapping[str, Any]:
        """The knobs that `pods` run differently from the others."""
        return self.before if self.control else self.after


@dataclass(frozen=True, slots=True)
class Change:
    """A change as it is told: when, from what to what (wire form), why, what became of it and what was measured."""

    time: float
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    why: str
    outcome: str
    effect: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """A setting that did harm or brought nothing: not to be tried again until `until`; `times` is how often so far."""

    changes: Mapping[str, Any]
    until: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class State:
    """Tuning of one service. `override` are the knobs in force beyond the spec's (wire form), for the spec of `spec_hash`.

    `signature` is the traffic that the last search was about, `shift` that since the last shift, which was at `shifted`;
    from `shifting` on (0: not at all) it has been another. Since the last shift, changes were `begun` at these times, these
    settings were `left` for better ones, and the twin promised a share of requests that didn't come (`doubt`). At the last
    search `share` of the requests were within the objective, and it was `kept` or not. `freezes` is how often in a row the
    twin couldn't be used.
    """

    spec_hash: str = ""
    phase: Phase = Phase.OBSERVING
    since: float = 0.0
    reason: str = "Starting"
    message: str = "nothing was observed yet"
    override: Mapping[str, Any] = field(default_factory=dict)
    trial: Trial | None = None
    cooldown: float = 0.0
    next_search: float = 0.0
    idle_searches: int = 0
    freezes: int = 0
    signature: tuple[float, ...] = ()
    shift: tuple[float, ...] = ()
    shifted: float = 0.0
    shifting: float = 0.0
    begun: tuple[float, ...] = ()
    left: tuple[Mapping[str, Any], ...] = ()
    doubt: float = 0.0
    kept: bool = False
    share: float = 1.0
    blocked: tuple[Blocked, ...] = ()
    history: tuple[Change, ...] = ()

    def told(self, reason: str, message: str) -> State:
        """Return it with another word on what is going on."""
        return self if (reason, message) == (self.reason, self.message) else replace(self, reason=reason, message=message)

    def with_change(self, change: Change) -> State:
        """Return it with one more change in its history."""
        return replace(self, history=(*self.history, change)[-_HISTORY:])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> State:
        """Read what `to_json` wrote, also with fields of another version. Raises `FormatError` for what can't be read."""
        try:
            known = _known(cls, data)
            return cls(
                **known
                | {
                    "phase": Phase(known.get("phase", Phase.OBSERVING)),
                    "trial": _trial(known["trial"]) if known.get("trial") else None,
                    "signature": _figures(known.get("signature", ()), _SIGNATURE),
                    "shift": _figures(known.get("shift", ()), _SIGNATURE),
                    "begun": _figures(known.get("begun", ())),
                    "left": tuple(known.get("left", ())),
                    "blocked": tuple(Blocked(**_known(Blocked, b)) for b in known.get("blocked", ())),
                    "history": tuple(Change(**_known(Change, c)) for c in known.get("history", ())),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"not a tuning state: {type(error).__name__}: {error}") from None


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `data` says of the fields of `kind`. Raises TypeError if it isn't of the field's type, or no number."""
    kinds = {definition.name: _KINDS.get(str(definition.type)) for definition in fields(kind)}
    for name, value in data.items():
        expected = kinds.get(name)
        if expected and (not isinstance(value, expected) or (isinstance(value, float) and not math.isfinite(value))):
            raise TypeError(f"{name} is {value!r}")
    return {name: value for name, value in data.items() if name in kinds}


def _trial(data: Mapping[str, Any]) -> Trial:
    trial = Trial(**_known(Trial, data) | {"pods": tuple(map(str, data["pods"]))})
    if trial.before.keys() != trial.after.keys():
        raise ValueError("the trial's knobs before and after aren't the same")
    return trial


def _figures(values: Iterable[Any], count: int = 0) -> tuple[float, ...]:
    """Return numbers, `count` of them or none (0: any number of them)."""
    found = tuple(map(float, values))
    if not all(map(math.isfinite, found)) or (count and len(found) not in (0, count)):
        raise ValueError(f"{found} aren't {count or 'finite'} figures")
    return found
