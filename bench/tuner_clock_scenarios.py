"""Scenarios of `bench.tuner_clock`, and the best fixed setting of each by a sweep of the twin on the true device."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_cli.clock_service import SLO_TPOT, SLO_TTFT
from paceline_core.knobs import Knobs
from paceline_core.uneven import UnevenDevice
from paceline_core.wire import StepModelDocument, from_json
from paceline_sim import Slo, Trace, TraceRequest, read_trace, simulate

__all__ = ["INTERVAL", "LIES", "PODS", "VLLM", "Scenario", "best_fixed", "scenarios"]

INTERVAL = 10.0
PODS = 3
CONVERGE = 5 * INTERVAL  # from the start, or from a shift, after which goodput is compared
VLLM = {"maxNumSeqs": 256, "maxNumBatchedTokens": 8192}
LIES = ("doubled", "frozen")
_SEQS, _BUDGETS = (4, 8, 16, 32, 64, 128), (128, 256, 512, 1024, 2048, 8192)
_TOKENS_PER_WORD = 1  # the prompts repeat a word that is one token
_OUTPUTS = (40, 80)

Rate = Callable[[float], float]
Lengths = Callable[[float], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Traffic by the second, knobs at the start, and how long it runs; goodput counts from `judged` on.

    `lie` is what the pods tell wrongly of themselves: then there is nothing to compare with, and nothing may change.
    """

    name: str
    text: str
    start: Mapping[str, int]
    seconds: float
    judged: float
    rate: Rate
    prompts: Lengths
    lie: str = ""


def scenarios(trace: Path | None) -> list[Scenario]:
    """Return them all; the day's shape is that of `trace`, or a sine."""
    short: Lengths = lambda _: (40, 200)  # noqa: E731
    burst: Rate = lambda t: 24.0 if 80 < t < 110 else 8.0  # noqa: E731
    one, huge = {"maxNumSeqs": 1}, {"maxNumSeqs": 512, "maxNumBatchedTokens": 32_768}
    return [
        Scenario("day", "(a) a day's shape, compressed", VLLM, 160, CONVERGE, _day(trace, 160), lambda _: (100, 600)),
        Scenario(
            "shift", "(b) short chat, then long prompts", VLLM, 180, 70 + CONVERGE, lambda t: 15.0 if t < 70 else 6.0,
            lambda t: (40, 200) if t < 70 else (1500, 3000),
        ),
        Scenario("burst", "(c) a burst to three times the rate", VLLM, 150, CONVERGE, burst, short),
        Scenario("slots", "(d) maxNumSeqs 1 at the start", one, 120, CONVERGE, lambda _: 9.0, short),
        Scenario(
            "large", "(d) maxNumSeqs 512 and a large budget at the start", huge, 120, CONVERGE, lambda _: 20.0,
            lambda _: (400, 1200),
        ),
        *(
            Scenario(lie, f"falsified: {lie} step statistics", one, 90, CONVERGE, lambda _: 9.0, short, lie)
            for lie in LIES
        ),
    ]  # fmt: skip


def _day(trace: Path | None, seconds: float) -> Rate:
    """Return a rate of 12/s on average over `seconds`: that of a recorded trace in 20 pieces, or a sine."""
    if trace is None:
        return lambda t: 12.0 * (1 + 0.6 * math.sin(2 * math.pi * t / seconds))
    requests, pieces = read_trace(trace).requests, 20
    width, counts = requests[-1].arrival / pieces, [0] * (pieces + 1)
    for request in requests:
        counts[int(request.arrival / width)] += 1
    mean = len(requests) / pieces
    return lambda t: 12.0 * max(0.1, counts[min(pieces - 1, int(t * pieces / seconds))] / mean)


def best_fixed(scenario: Scenario, device: Path) -> dict[str, int]:
    """Return the setting that serves the most of the judged part within the objective, on one pod's share of it."""
    true = UnevenDevice.from_document(from_json(StepModelDocument, json.loads(device.read_text(encoding="utf-8"))))
    trace, slo = _share(scenario), Slo(ttft=SLO_TTFT, tpot=SLO_TPOT)

    def worth(knobs: Knobs) -> tuple[float, float]:
        result = simulate(trace, knobs, true, num_blocks=8000, max_model_len=8192)
        judged = [o for o in result.outcomes if o.arrival >= scenario.judged]
        latency = sum(o.ttft or 0.0 for o in judged)
        return sum(map(slo.met, judged)) / max(1, len(judged)), -latency

    settings = [Knobs(max_num_seqs=min(256, budget), max_num_batched_tokens=budget) for budget in _BUDGETS]
    first = max(settings, key=worth)
    budget = first.max_num_batched_tokens
    settings = [first, *(Knobs(max_num_seqs=n, max_num_batched_tokens=budget) for n in _SEQS if n <= budget)]
    best = max(settings, key=worth)
    return {"maxNumSeqs": best.max_num_seqs, "maxNumBatchedTokens": best.max_num_batched_tokens}


def _share(scenario: Scenario) -> Trace:
    rng, now, requests = random.Random(1), 0.0, []
    while now < scenario.seconds:
        now += rng.expovariate(scenario.rate(now) / PODS)
        requests.append(TraceRequest(now, rng.randint(*scenario.prompts(now)) * _TOKENS_PER_WORD, rng.randint(*_OUTPUTS)))
    return Trace(tuple(requests))
