"""Everything that a decision depends on, as data: so that it can be made in another process, logged, and made again.

`Question` holds what some pods really saw (who came when, how long, how it fared), the knobs in force and how far they may
change, the objective, the step-time model and the load to prepare for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline_core.errors import FormatError
from paceline_core.step_time import StepModel
from paceline_core.wire import StepModelDocument, from_json, to_json
from paceline_operator.tuning.objective import Objective
from paceline_sim.bent import BentModel
from paceline_sim.calibrated import CalibratedModel
from paceline_sim.trace import TraceRequest

__all__ = ["Question", "Sample", "SeenRequest"]

_BEND = ("knee", "beyond", "batch_tile", "prefill_tile")


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request that a pod saw: arrival (seconds from the sample's first), lengths in tokens, and how it fared.

    `ttft` and `tpot` (seconds) are None where they aren't known. `counted`: it came in the window that is judged, under the
    knobs in force; the others are what was there already. `met` says whether it kept the objective, None: not known yet.
    """

    arrival: float
    prompt: int
    output: int
    priority: int = 0
    hashes: tuple[int, ...] = ()
    hash_tokens: int = 0
    ttft: float | None = None
    tpot: float | None = None
    counted: bool = True
    met: bool | None = None

    def to_trace(self) -> TraceRequest:
        """Return what the twin replays."""
        return TraceRequest(self.arrival, self.prompt, self.output, self.priority, self.hashes, self.hash_tokens)


Sample = tuple[SeenRequest, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One decision to make.

    `knobs` are those in force, all in wire form; `bounds` gives lowest and highest value per knob that may be applied, in
    Python form. `num_blocks` is the KV pool of a pod. The twin is checked with `samples`; settings are compared on `traffic`
    (without it on who came in the samples). `load` is the rate to prepare for, as a multiple of the recorded one; `pods` how
    many share the traffic. `step_error` is how far the model was off on the last steps. `only`, if given, are the settings
    (changes to `knobs`) to compare with: no search. `blocked` are settings that were tried and taken back, `doubt` is the
    share of requests that such a setting had been promised to gain.
    """

    at: float
    service: str
    knobs: Mapping[str, Any]
    bounds: Mapping[str, tuple[Any, Any]]
    objective: Objective
    model: CalibratedModel
    num_blocks: int
    samples: tuple[Sample, ...]
    traffic: tuple[Sample, ...] = ()
    load: float = 1.0
    pods: int = 1
    step_error: float = 0.0
    kv_usage: float = 0.0
    only: tuple[Mapping[str, Any], ...] | None = None
    blocked: tuple[Mapping[str, Any], ...] = field(default=())
    doubt: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data, rows of requests without their names to keep the log small."""
        return {
            "at": self.at,
            "service": self.service,
            "knobs": dict(self.knobs),
            "bounds": {name: list(ends) for name, ends in self.bounds.items()},
            "objective": self.objective.to_json(),
            "model": to_json(self.model.base.to_document()),
            "bend": [getattr(base, name) for name in _BEND] if isinstance(base := self.model.base, BentModel) else None,
            "factors": self.model.to_json(),
            "numBlocks": self.num_blocks,
            "samples": [[_row(request) for request in sample] for sample in self.samples],
            "traffic": [[_row(request) for request in sample] for sample in self.traffic],
            "load": self.load,
            "pods": self.pods,
            "stepError": self.step_error,
            "kvUsage": self.kv_usage,
            "only": None if self.only is None else [dict(changes) for changes in self.only],
            "blocked": [dict(changes) for changes in self.blocked],
            "doubt": self.doubt,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Question:
        """Read what `to_json` wrote. Raises `FormatError` for anything else."""
        try:
            return cls(
                at=data["at"],
                service=data["service"],
                knobs=data["knobs"],
                bounds={name: (low, high) for name, (low, high) in data["bounds"].items()},
                objective=Objective(**data["objective"]),
                model=_model(data),
                num_blocks=data["numBlocks"],
                samples=tuple(tuple(map(_seen, rows)) for rows in data["samples"]),
                traffic=tuple(tuple(map(_seen, rows)) for rows in data.get("traffic", ())),
                load=data["load"],
                pods=data["pods"],
                step_error=data["stepError"],
                kv_usage=data["kvUsage"],
                only=None if data["only"] is None else tuple(data["only"]),
                blocked=tuple(data["blocked"]),
                doubt=data.get("doubt", 0.0),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"not a decision's inputs: {type(error).__name__}: {error}") from None


def _model(data: Mapping[str, Any]) -> CalibratedModel:
    base = StepModel.from_document(from_json(StepModelDocument, data["model"]))
    if (bent := data.get("bend")) is not None:
        own = {name: getattr(base, name) for name in StepModel.__dataclass_fields__}
        base = BentModel(**own, **dict(zip(_BEND, bent, strict=True)))
    return CalibratedModel(base, {(a, b, c): factor for a, b, c, factor in data["factors"]})


def _row(request: SeenRequest) -> list[Any]:
    times = [request.ttft, request.tpot]
    row = [request.arrival, request.prompt, request.output, *times, request.counted, request.met]
    return row + (
        [request.priority, list(request.hashes), request.hash_tokens] if request.hashes or request.priority else []
    )


def _seen(row: list[Any]) -> SeenRequest:
    arrival, prompt, output, ttft, tpot, counted, met, *rest = row
    priority, hashes, hash_tokens = rest or (0, (), 0)
    return SeenRequest(arrival, prompt, output, priority, tuple(hashes), hash_tokens, ttft, tpot, counted, met)
