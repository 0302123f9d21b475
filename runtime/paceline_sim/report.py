"""The figures of a replay: rates, percentiles and shares, as tables, plots and JSON show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline_sim.result import Outcome, Result
from paceline_sim.slo import Slo

__all__ = ["Spread", "Summary", "summarise"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some times, in seconds. All 0 where there are none."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Return the spread of the `values` that are there. A percentile is the smallest value that so many don't exceed."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        ranks = (-(-len(ordered) * percent // 100) - 1 for percent in (50, 90, 95, 99))
        return cls(sum(ordered) / len(ordered), *(ordered[rank] for rank in ranks))


@dataclass(frozen=True, slots=True)
class Summary:
    """A replay in figures.

    `seconds` from the first arrival to the last result; `request_rate` and `goodput` in requests/s (goodput counts those
    that met the SLO), `token_rate` in generated tokens/s; `attainment` is the share of requests that met the SLO, and
    `meets_slo` whether that is enough; `slots_used` (of all slot time), `busy` (of the time), `kv_mean` and `kv_peak` (of
    the pool while steps ran) and `cached` (of prompt tokens) are shares; `mean_batch` is sequences per step, averaged
    over the time of steps; `causes` says where the mean latency comes from, in seconds (see `causes.py`).
    """

    requests: int
    refused: int
    seconds: float
    steps: int
    request_rate: float
    token_rate: float
    goodput: float
    attainment: float
    meets_slo: bool
    ttft: Spread
    tpot: Spread
    e2e: Spread
    queued: Spread
    slots_used: float
    busy: float
    mean_batch: float
    kv_mean: float
    kv_peak: float
    cached: float
    preemptions: int
    causes: Mapping[str, float]


def summarise(result: Result, slo: Slo) -> Summary:
    """Return the figures of `result` under `slo`."""
    outcomes, seconds = result.outcomes, result.duration or 1e-9
    good = sum(map(slo.met, outcomes))
    attainment = good / len(outcomes)
    return Summary(
        requests=len(outcomes),
        refused=sum(outcome.first_token is None for outcome in outcomes),
        seconds=result.duration,
        steps=result.steps,
        request_rate=len(outcomes) / seconds,
        token_rate=sum(outcome.output_len for outcome in outcomes) / seconds,
        goodput=good / seconds,
        attainment=attainment,
        meets_slo=100 * attainment >= slo.percentile,
        ttft=Spread.of(outcome.ttft for outcome in outcomes),
        tpot=Spread.of(outcome.tpot for outcome in outcomes),
        e2e=Spread.of(outcome.latency for outcome in outcomes),
        queued=Spread.of(outcome.queued for outcome in outcomes),
        slots_used=result.slot_utilisation,
        busy=result.computing / seconds,
        mean_batch=result.busy / (result.computing or 1.0),
        kv_mean=result.kv_time / (result.computing or 1.0) / result.kv_blocks,
        kv_peak=result.kv_peak / result.kv_blocks,
        cached=sum(o.cached_len for o in outcomes) / sum(o.prompt_len for o in outcomes),
        preemptions=result.preemptions,
        causes=_mean_causes(outcomes),
    )


def _mean_causes(outcomes: Sequence[Outcome]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for outcome in outcomes:
        for cause, seconds in outcome.parts.by_cause().items():
            sums[cause] = sums.get(cause, 0.0) + seconds
    return {cause: seconds / len(outcomes) for cause, seconds in sums.items()}
