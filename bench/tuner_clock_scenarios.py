"""Scenarios of `bench.tuner_clock`, the device they run on, and what fixed settings are worth there, by the twin.

The device is one on which a batch can be too large: beyond 12,000 tokens of context a token costs six times as much, so more
than some sixteen sequences of this traffic serve no more, only later. Traffic comes in waves: vLLM's defaults take all of a
wave into one batch and miss the objective for each token, the right number of slots lets some of it wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paceline_core.knobs import Knobs
from paceline_core.uneven import UnevenDevice
from paceline_core.wire import StepModelDocument, from_json
from paceline_sim import Slo, Trace, TraceRequest, read_trace, simulate

__all__ = [
    "CONVERGE",
    "DEVICE",
    "INTERVAL",
    "LIES",
    "PODS",
    "SLO",
    "VLLM",
    "Scenario",
    "best_of",
    "scenarios",
    "skipped_of",
    "start_of",
    "sweep",
    "worth",
]

INTERVAL = 20.0
PODS = 3
CONVERGE = 5 * INTERVAL  # from the start, or from a shift, after which goodput is compared
SLO = (2.5, 0.07)  # TTFT and TPOT, seconds
VLLM = {"maxNumSeqs": 256, "maxNumBatchedTokens": 8192}
LIES = ("doubled", "frozen")
DEVICE: Mapping[str, Any] = {
    "constant": 0.03, "decodeTokens": 5e-4, "prefillTokens": 5e-5, "contextTokens": 8e-7, "prefillAttention": 1e-9,
    "uneven": {"batchTile": 8, "prefillTile": 64, "contextKnee": 12_000, "contextFactor": 6.0},
}  # fmt: skip
_SEQS, _BUDGETS = (1, 4, 8, 12, 14, 16, 20, 24, 32, 64, 256), (256, 512, 1024, 8192)
_OUTPUTS = (40, 80)  # tokens, as `Traffic` has them unless told otherwise
_SHORT, _LONG = (40, 200), (400, 1200)  # prompts in words of one token
# Waves: a quarter of the time at 2.2 times the mean rate, the rest at 0.6 times
_WAVE, _CREST, _HIGH, _LOW = 8.0, 2.0, 2.2, 0.6
_WARM_UP = 30.0  # seconds: four waves
_PIECES = 10  # of a day
_DAY_MEAN = 7.8  # requests/s

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
    """Return them all; the day's shape is that of `trace`, or a made-up one."""
    short: Lengths = lambda _: _SHORT  # noqa: E731
    long: Lengths = lambda _: _LONG  # noqa: E731
    calm: Rate = lambda _: 4.0  # noqa: E731
    one, huge = {"maxNumSeqs": 1}, {"maxNumSeqs": 512, "maxNumBatchedTokens": 32_768}
    return [
        Scenario("day", "(a) a day's shape, from its busiest hour on", VLLM, 170, CONVERGE, _day(trace, 170), long),
        Scenario(
            "shift", "(b) short chat, then long prompts", VLLM, 175, 30 + CONVERGE, _waves(lambda t: 11 if t < 30 else 9.5),
            lambda t: _SHORT if t < 30 else _LONG,
        ),
        Scenario(
            "burst", "(c) bursts to three times the rate", VLLM, 150, CONVERGE, lambda t: 16.2 if t % 12 < 3.5 else 5.4, long
        ),
        Scenario("slots", "(d) maxNumSeqs 1 at the start", one, 130, CONVERGE, calm, short),
        Scenario(
            "large", "(d) maxNumSeqs 512 and a large budget at the start", huge, 150, CONVERGE, _waves(lambda _: 9.3), long
        ),
        *(Scenario(lie, f"falsified: {lie} step statistics", one, 110, CONVERGE, calm, short, lie) for lie in LIES),
    ]  # fmt: skip


def _waves(mean: Rate) -> Rate:
    return lambda t: mean(t) * (_HIGH if t % _WAVE < _CREST else _LOW)


def _day(trace: Path | None, seconds: float) -> Rate:
    """Return a day and a fifth in `seconds`, in waves: of a trace or made up, turned so that the busiest part leads."""
    shape = [1.3, 1.2, 1.1, 1.0, 0.8, 0.7, 0.8, 0.9, 1.0, 1.2] if trace is None else _shape(trace)
    busiest = max(range(_PIECES), key=lambda i: shape[i] + shape[(i + 1) % _PIECES])
    turned = [shape[(busiest + i) % _PIECES] for i in range(_PIECES + _PIECES // 5)]
    return _waves(lambda t: _DAY_MEAN * turned[min(len(turned) - 1, int(t * len(turned) / seconds))])


def _shape(trace: Path) -> list[float]:
    """Return the rate of each piece of a trace over the mean."""
    requests = read_trace(trace).requests
    counts = [0] * _PIECES
    for request in requests:
        counts[min(_PIECES - 1, int(request.arrival * _PIECES / requests[-1].arrival))] += 1
    return [max(0.1, count * _PIECES / len(requests)) for count in counts]


def sweep(scenario: Scenario) -> dict[tuple[int, int], tuple[float, float]]:
    """Return per setting (slots, budget) what share of the judged part it serves in time, on one pod's part of the traffic
    and the true device, and how soon (the mean TTFT times −1). Budgets are tried with the best number of slots; the setting
    at the start is among them.
    """
    settings = dict.fromkeys([start_of(scenario), *((seqs, _BUDGETS[-1]) for seqs in _SEQS)])
    found = {setting: worth(scenario, *setting) for setting in settings}
    seqs = best_of(found)[0]
    return found | {(seqs, budget): worth(scenario, seqs, budget) for budget in _BUDGETS[:-1]}


def skipped_of(scenario: Scenario, setting: str) -> int:
    """Return the seconds of a scenario that a setting is spared: the best fixed one runs for what counts, warmed up."""
    return max(0, round(scenario.judged - _WARM_UP)) if setting == "best" else 0


def start_of(scenario: Scenario) -> tuple[int, int]:
    """Return slots and budget at the start."""
    return scenario.start["maxNumSeqs"], scenario.start.get("maxNumBatchedTokens", _BUDGETS[-1])


def best_of(found: Mapping[tuple[int, int], tuple[float, float]]) -> tuple[int, int]:
    """Return the setting that serves most in time; of equals that which answers soonest."""
    return max(found, key=lambda setting: found[setting])


def worth(scenario: Scenario, seqs: int, budget: int) -> tuple[float, float]:
    """Return what a setting is worth, as `sweep` does."""
    knobs = Knobs(max_num_seqs=seqs, max_num_seqs_limit=512, max_num_batched_tokens=budget)
    result = simulate(_part(scenario), knobs, _device(), num_blocks=8000, max_model_len=8192)
    judged = [o for o in result.outcomes if o.arrival >= scenario.judged]
    slo = Slo(ttft=SLO[0], tpot=SLO[1])
    return sum(map(slo.met, judged)) / max(1, len(judged)), -sum(o.ttft or 0.0 for o in judged) / max(1, len(judged))


@cache
def _device() -> UnevenDevice:
    return UnevenDevice.from_document(from_json(StepModelDocument, dict(DEVICE)))


def _part(scenario: Scenario) -> Trace:
    """Return what one pod gets."""
    rng, now, requests = random.Random(1), 0.0, []
    while now < scenario.seconds:
        now += rng.expovariate(scenario.rate(now) / PODS)
        requests.append(TraceRequest(now, rng.randint(*scenario.prompts(now)), rng.randint(*_OUTPUTS)))
    return Trace(tuple(requests))
