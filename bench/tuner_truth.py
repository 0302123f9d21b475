"""What fixed knobs would have given: the best of a sweep, and vLLM's defaults, for `bench.tuner_fleet`.

A replay of all settings on all traffic would take ten times as long as everything else: settings are compared on one pod's
first fifteen minutes of a half, and the best of them on all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.tuner_services import MAX_MODEL_LEN, PODS, VLLM, MadeUpService

from paceline_core.knobs import Knobs
from paceline_operator.tuning.objective import Objective
from paceline_sim import simulate
from paceline_sim.trace import Trace

__all__ = ["GRACE", "INTERVAL", "Outcomes", "Truth", "goodputs", "truth_of"]

INTERVAL = 30.0
GRACE = 5 * INTERVAL  # to converge in, after the start and after the shift
BUDGETS, SEQS = (128, 256, 512, 1024, 8192), (4, 8, 12, 16, 24, 32, 48)
_BUDGETS = 2  # with which all slots are tried
_SCREENED = 900.0  # seconds of a half on which all settings are compared: three of its bursts
_NEAR, _FINALISTS = 0.97, 3  # of the best there, and how many of them at most run on everything
Outcomes = list[tuple[float, bool]]  # arrival (seconds) and whether it was served within the objective


@dataclass(frozen=True, slots=True)
class Truth:
    """Goodput of vLLM's defaults (both halves, overall), of the best setting of each half alone, and of the best one that is
    fixed through both, with these settings.
    """

    vllm: tuple[float, float, float]
    best: tuple[float, float]
    knobs: tuple[Knobs, Knobs]
    fixed: tuple[float, float]
    fixed_knobs: Knobs
    outcomes: Outcomes


def goodputs(service: MadeUpService, outcomes: Sequence[tuple[float, bool]]) -> tuple[float, float, float]:
    """Return the goodput of the settled part of each half, and of everything (requests/s)."""
    spans = (_span(service, 0), _span(service, 1), (0.0, 2 * service.half - _tail(service)))
    return tuple(_goodput(outcomes, *span) for span in spans)  # type: ignore[return-value]


def truth_of(service: MadeUpService) -> Truth:
    """Return what fixed knobs give."""
    traffic = [service.traffic(number) for number in range(PODS)]
    outcomes = _fixed(service, traffic, VLLM)
    vllm = goodputs(service, outcomes)
    tried = _screen(service, traffic[0])
    found = [_best_of_half(service, traffic, half, tried[half], vllm[half]) for half in (0, 1)]
    both = {knobs: sum(screened[knobs] for screened in tried) for knobs in tried[0]}
    whole = {knobs: goodputs(service, _fixed(service, traffic, knobs))[:2] for knobs in _finalists(both)} | {VLLM: vllm[:2]}
    fixed = max(whole, key=lambda knobs: sum(whole[knobs]))
    return Truth(vllm, (found[0][1], found[1][1]), (found[0][0], found[1][0]), whole[fixed], fixed, outcomes)


def _best_of_half(
    service: MadeUpService, traffic: Sequence[Trace], half: int, tried: Mapping[Knobs, float], vllm: float
) -> tuple[Knobs, float]:
    """Return the best fixed setting of a half and its goodput there; the half begins with idle pods."""
    begin, end = _span(service, half)
    whole = [_between(trace, half * service.half, (half + 1) * service.half) for trace in traffic]
    found = {knobs: _goodput(_fixed(service, whole, knobs), begin, end) for knobs in _finalists(tried)} | {VLLM: vllm}
    best = max(found, key=lambda knobs: found[knobs])
    return best, found[best]


def _finalists(tried: Mapping[Knobs, float]) -> list[Knobs]:
    """Return the best settings, those that did the same as another left out: they are the same there."""
    best = max(tried.values())
    ordered = sorted((knobs for knobs in tried if tried[knobs] >= _NEAR * best), key=lambda knobs: -tried[knobs])
    apart = {tried[knobs]: knobs for knobs in reversed(ordered)}
    return [knobs for knobs in ordered if apart[tried[knobs]] is knobs][:_FINALISTS]


def _screen(service: MadeUpService, traffic: Trace) -> tuple[dict[Knobs, float], dict[Knobs, float]]:
    """Return the goodput of every setting tried, by half: all budgets, and all slots with the two best of each half."""
    settings = [replace(VLLM, max_num_seqs=min(256, budget), max_num_batched_tokens=budget) for budget in BUDGETS]
    tried = [{knobs: _screened(service, traffic, half, knobs) for knobs in settings} for half in (0, 1)]
    ranked = [sorted(screened, key=lambda knobs: -screened[knobs])[:_BUDGETS] for screened in tried]
    budgets = {knobs.max_num_batched_tokens: None for best in ranked for knobs in best}
    for seqs, budget in product(SEQS, budgets):
        knobs = replace(VLLM, max_num_seqs=seqs, max_num_batched_tokens=budget)
        for half in (0, 1):
            tried[half][knobs] = _screened(service, traffic, half, knobs)
    return tried[0], tried[1]


def _screened(service: MadeUpService, traffic: Trace, half: int, knobs: Knobs) -> float:
    begin, end = _span(service, half)
    end = min(end, half * service.half + _SCREENED)
    return _goodput(_fixed(service, [_between(traffic, half * service.half, end)], knobs), begin, end)


def _span(service: MadeUpService, half: int) -> tuple[float, float]:
    """Return the settled part of a half (seconds)."""
    end = 2 * service.half - _tail(service) if half else service.half
    return half * service.half + GRACE, end


def _fixed(service: MadeUpService, traffic: Sequence[Trace], knobs: Knobs) -> Outcomes:
    """Return what comes of every request of some pods under knobs that never change."""
    slo, end = Objective(service.ttft, service.tpot).slo(), 2 * service.half
    sizes = {"num_blocks": service.blocks, "max_model_len": MAX_MODEL_LEN}
    results = [simulate(trace, knobs, service.device, **sizes, details=False) for trace in traffic]
    return sorted((o.arrival, slo.met(o) and (o.last_token or end) <= end) for result in results for o in result.outcomes)


def _between(trace: Trace, begin: float, end: float) -> Trace:
    return Trace(tuple(r for r in trace.requests if begin <= r.arrival < end))


def _goodput(outcomes: Sequence[tuple[float, bool]], begin: float, end: float) -> float:
    return sum(met for arrival, met in outcomes if begin <= arrival < end) / (end - begin)


def _tail(service: MadeUpService) -> float:
    """Return the seconds at the end in which whoever comes can't have finished."""
    return service.ttft + 60.0
