"""Does the twin know this service? It must reproduce what the pods measured, under the knobs that they have. Pure.

Request by request, the same requests in the same order: only times can differ. What is compared are medians and tails of
TTFT and TPOT, the token rate, and the share within the objective, whose error is the twin's own: a gain has to exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from paceline_core.knobs import Knobs
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.question import SeenRequest
from paceline_operator.tuning.twin import Twin
from paceline_operator.tuning.view import percentile
from paceline_sim.result import Outcome

__all__ = ["Fidelity", "check"]

# Errors up to which a twin is of use, chosen on services 0 to 4 of an earlier, slower fleet of `bench.tuner_fleet` and not
# touched since. Wide on purpose: the direction of a change survives such errors, a gain must exceed the error of attainment
# anyway, and one pod proves the change first. What they are there for is a twin of another service than this one: a model
# that is twice the truth is off by 50 to 100 % in all of them.
_TPOT_ERROR = 0.25
_TTFT_ERROR = 0.40
_TAIL_ERROR = 0.60  # the 90th percentile of a few hundred requests is itself known to within about a third
_RATE_ERROR = 0.25  # same requests, same order: beyond it the service rate is another
_ATTAINMENT_ERROR = 0.45  # beyond it hardly any gain (of at most 1) could exceed it
_STEP_ERROR = 0.35
# seconds that HTTP, tokenising and scraping add to a time that the twin doesn't know of
_TTFT_FLOOR, _TPOT_FLOOR = 0.03, 0.002
_LEAST_GAP = 0.02  # of the time per token: less changes nobody's verdict
_LOST = 2.0
_OF_OBJECTIVE = 0.15  # an error in TTFT below this share of its objective can't turn a verdict


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How the twin did: `errors` by figure (relative; attainment: a difference of shares), and what is too far off.

    `worst`: the largest error as a multiple of its limit. `gap`: seconds by which the pods' median time per token is longer
    than the twin's, 0 where that doesn't matter or is too much to be told apart from a wrong model.
    """

    errors: dict[str, float]
    complaint: str = ""
    worst: float = 0.0
    gap: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it may be asked."""
        return not self.complaint

    @property
    def attainment_error(self) -> float:
        """By how much it misjudges the share within the objective."""
        return self.errors.get("attainment", 0.0)


def check(twin: Twin, knobs: Knobs, objective: Objective, step_error: float) -> Fidelity:
    """Replay what was seen under `knobs` and compare."""
    if step_error > _STEP_ERROR:
        text = f"the step-time model is off by {step_error:.0%} in most sizes of steps (most: {_STEP_ERROR:.0%})"
        return Fidelity({"step": step_error}, text)
    pairs = [
        (sample[o.index], o) for sample, result in twin.outcomes(knobs) for o in result.outcomes if sample[o.index].counted
    ]
    errors, gap = _errors(pairs, objective), _gap(pairs)
    limits = {
        "tpot p50": _TPOT_ERROR, "ttft p50": _TTFT_ERROR, "ttft p90": _TAIL_ERROR, "token rate": _RATE_ERROR,
        "attainment": _ATTAINMENT_ERROR,
    }  # fmt: skip
    shares = {name: error / limits[name] for name, error in errors.items()}
    worst = max(shares, key=lambda name: shares[name], default=None)
    if worst is None or shares[worst] <= 1:
        return Fidelity(errors, worst=max(shares.values(), default=0.0), gap=gap)
    text = f"the twin's {worst} is off by {errors[worst]:.0%} under the current knobs (most: {limits[worst]:.0%})"
    return Fidelity(errors, text, shares[worst], gap)


def _gap(pairs: Sequence[tuple[SeenRequest, Outcome]]) -> float:
    both = [(seen.tpot, o.tpot) for seen, o in pairs if seen.tpot is not None and o.tpot is not None]
    if not both:
        return 0.0
    measured, twin = (median(pair[i] for pair in both) for i in (0, 1))
    return measured - twin if _LEAST_GAP < 1 - twin / max(measured, 1e-9) <= _TPOT_ERROR else 0.0


def _errors(pairs: Sequence[tuple[SeenRequest, Outcome]], objective: Objective) -> dict[str, float]:
    errors: dict[str, float] = {}
    ttfts = [(seen.ttft, o.ttft) for seen, o in pairs if seen.ttft is not None and o.ttft is not None]
    tpots = [(seen.tpot, o.tpot) for seen, o in pairs if seen.tpot is not None and o.tpot is not None]
    floor = max(_TTFT_FLOOR, _OF_OBJECTIVE * (objective.ttft or 0.0))
    if ttfts:
        for name, percent in (("ttft p50", 50), ("ttft p90", 90)):
            measured, twin = (percentile([pair[i] for pair in ttfts], percent) for i in (0, 1))
            errors[name] = _error(measured, twin, floor, objective.ttft)
    if tpots:
        measured, twin = (median(pair[i] for pair in tpots) for i in (0, 1))
        errors["tpot p50"] = _error(measured, twin, _TPOT_FLOOR, objective.tpot)
    errors |= _rate_error(pairs)
    slo, judged = objective.slo(), [(seen.met, o) for seen, o in pairs if seen.met is not None]
    if judged:
        errors["attainment"] = abs(sum(bool(met) - slo.met(o) for met, o in judged)) / len(judged)
    return errors


def _error(measured: float, twin: float, floor: float, objective: float | None) -> float:
    """Return the relative error beyond `floor` seconds. How far beyond twice the objective a time is matters to nobody."""
    if objective is not None:
        measured, twin = min(measured, _LOST * objective), min(twin, _LOST * objective)
    return max(0.0, abs(twin - measured) - floor) / max(measured, 1e-6)


def _rate_error(pairs: Sequence[tuple[SeenRequest, Outcome]]) -> dict[str, float]:
    """Compare tokens per second over the requests that both have finished."""
    both = [(s, o) for s, o in pairs if s.ttft is not None and s.tpot is not None and o.last_token is not None]
    if len(both) < 2:
        return {}
    first, tokens = min(s.arrival for s, _ in both), sum(s.output for s, _ in both)
    measured = max(s.arrival + (s.ttft or 0.0) + (s.tpot or 0.0) * (s.output - 1) for s, _ in both) - first
    twin = max(o.last_token or 0.0 for _, o in both) - first
    if min(measured, twin, tokens) <= 0:  # all at one instant, by a clock that is coarse or lies: no time, no rate
        return {}
    return {"token rate": abs(tokens / twin - tokens / measured) * measured / tokens}
