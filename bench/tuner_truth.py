"""What fixed knobs would have given: the best of a sweep, and vLLM's defaults, for `bench.tuner_fleet`.

A replay of all settings on all traffic would take ten times as long as everything else: settings are compared on one pod's
first fifteen minutes of a half, and the best of them on all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Goodput of vLLM's defaults (both halves, overall) and of the best fixed setting of each half, with that setting."""

    vllm: tuple[float, float, float]
    best: tuple[float, float]
    knobs: tuple[Knobs, Knobs]
    outcomes: Outcomes


def goodputs(service: MadeUpService, outcomes: Sequence[tuple[float, bool]]) -> tuple[float, float, float]:
    """Return the goodput of the settled part of each half, and of everything (requests/s)."""
    half, tail = service.half, _tail(service)
    spans = ((GRACE, half), (half + GRACE, 2 * half - tail), (0.0, 2 * half - tail))
    return tuple(_goodput(outcomes, *span) for span in spans)  # type: ignore[return-value]


def truth_of(service: MadeUpService) -> Truth:
    """Return what fixed knobs give."""
    traffic = [service.traffic(number) for number in range(PODS)]
    outcomes = _fixed(service, traffic, VLLM)
    vllm = goodputs(service, outcomes)
    found = [_best_of_half(service, traffic, half, vllm[half]) for half in (0, 1)]
    return Truth(vllm, (found[0][1], found[1][1]), (found[0][0], found[1][0]), outcomes)


def _best_of_half(service: MadeUpService, traffic: Sequence[Trace], half: int, vllm: float) -> tuple[Knobs, float]:
    """Return the best fixed setting of a half and its goodput there; the half begins with idle pods."""
    begin, settled = half * service.half, half * service.half + GRACE
    until = 2 * service.half - _tail(service) if half else service.half
    short = [_between(traffic[0], begin, min(until, begin + _SCREENED))]
    tried = _screen(service, short, settled, min(until, begin + _SCREENED))
    best, found = max(tried.values()), (VLLM, vllm)
    near = sorted((knobs for knobs in tried if tried[knobs] >= _NEAR * best), key=lambda knobs: -tried[knobs])
    whole = [_between(trace, begin, begin + service.half) for trace in traffic]
    apart = {tried[knobs]: knobs for knobs in reversed(near)}  # the same there is the same setting
    for knobs in [knobs for knobs in near if apart[tried[knobs]] is knobs][:_FINALISTS]:
        goodput = _goodput(_fixed(service, whole, knobs), settled, until)
        found = max(found, (knobs, goodput), key=lambda entry: entry[1])
    return found


def _screen(service: MadeUpService, traffic: Sequence[Trace], begin: float, end: float) -> dict[Knobs, float]:
    """Return the goodput of every setting tried: all budgets, and all slots with the two best of them."""
    settings = [replace(VLLM, max_num_seqs=min(256, budget), max_num_batched_tokens=budget) for budget in BUDGETS]
    tried = {knobs: _goodput(_fixed(service, traffic, knobs), begin, end) for knobs in settings}
    budgets = [knobs.max_num_batched_tokens for knobs in sorted(tried, key=lambda knobs: -tried[knobs])[:_BUDGETS]]
    for seqs, budget in product(SEQS, budgets):
        knobs = replace(VLLM, max_num_seqs=seqs, max_num_batched_tokens=budget)
        tried[knobs] = _goodput(_fixed(service, traffic, knobs), begin, end)
    return tried


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
