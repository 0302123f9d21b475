"""What the state machine is told at a look, and what it answers. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_operator.tuning.decide import Decision
from paceline_operator.tuning.guard import Evidence
from paceline_operator.tuning.service_rate import Lately
from paceline_operator.tuning.stretch import Stretch
from paceline_operator.tuning.view import ServiceView

__all__ = ["Ask", "Effects", "Facts", "PodFact", "Situation", "Tell"]


@dataclass(frozen=True, slots=True)
class PodFact:
    """A pod: its process, whether what it tells counts, and whether it runs the knobs that it shall."""

    name: str
    process: str
    fresh: bool = True
    applied: bool = True
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the operator knows of a service at a look: mode, knobs in force (wire form), pods, objective, bounds, trouble.

    `busy`: nothing may be changed now, and why. `dropped`: why what tuning had put in force, or tries, isn't allowed any
    more.
    """

    service: str
    mode: str
    spec_hash: str
    knobs: Mapping[str, Any]
    bounds: Mapping[str, tuple[Any, Any]]
    pods: tuple[PodFact, ...]
    ttft: float | None
    tpot: float | None
    percentile: float
    interval: float
    busy: str = ""
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is the case. `busy`: nothing may be changed now, and why; `searching`: an answer of the twin is under way.

    `view` is of the last minutes, `stretch` of as long as the traffic has been what it is.
    `evidence` is that of the trial's guard; `after` (requests, share within the objective) is what came of a promotion,
    `rate_after` the output tokens/s of a pod since then, `lately` what the last interval was like.
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
    dropped: str = ""
    searching: bool = False
    decision: Decision | None = None
    evidence: Evidence | None = None
    after: tuple[int, float] = (0, 0.0)
    rate_after: float = 0.0
    lately: Lately = field(default_factory=Lately)
    score: float = 1.0
    stretch: Stretch | None = None

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
