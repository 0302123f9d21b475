"""The service as its pods tell of it together. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.ledger import Health, PodLedger
from paceline_operator.tuning.lengths import read
from paceline_operator.tuning.objective import Objective

__all__ = ["PodNote", "ServiceView", "merge", "percentile"]

_TREND_SPAN = 3  # the last third of the window against the two before


@dataclass(frozen=True, slots=True)
class PodNote:
    """One pod's health and, if it isn't plainly fresh, why."""

    name: str
    health: Health
    why: str


@dataclass(frozen=True, slots=True)
class ServiceView:
    """What was observed in the last `window` seconds up to `now`, over all pods whose word counts.

    Rates are per second and of the whole service, lengths are tokens, times seconds, `attainment` and `kv_usage` shares.
    `trend` is the arrival rate of the last third of the window over that of the rest. `step_error` is the median relative
    error of the pods' step-time models on the sizes of steps that they take, `residual` what the models say of themselves.
    """

    now: float
    window: float
    pods: int
    notes: tuple[PodNote, ...]
    requests: int
    arrival_rate: float
    trend: float
    prompt_p50: float
    prompt_p95: float
    output_p50: float
    output_p95: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    attainment: float
    goodput: float
    token_rate: float
    refused: int
    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    residual: float
    step_error: float

    @property
    def fresh(self) -> int:
        """How many pods told something that counts."""
        return sum(note.health is Health.FRESH for note in self.notes)


def merge(ledgers: Iterable[PodLedger], objective: Objective, now: float, window: float) -> ServiceView:
    """Return the view of `window` seconds. A rate of pods that didn't answer is made up for by those that did."""
    pods = list(ledgers)
    fresh = [pod for pod in pods if pod.fresh]
    records = [r for pod in fresh for r in pod.records if now - window <= r.arrival]
    judged = [(r, m) for r in records if (m := objective.margin(r, now)) is not None]
    met = sum(m >= 0 and r.outcome in ("finished", "unfinished") for r, m in judged)
    tokens = sum(r.output_tokens for r in records)
    share = len(pods) / len(fresh) if fresh else 0.0
    ratios = [ratio for pod in fresh for ratio in pod.step_ratios()]
    total = sum(pod.gauges.kv_blocks_total for pod in fresh)
    seen = min(window, now - min((r.arrival for r in records), default=now)) or window
    rate = share * len(records) / seen
    attainment = met / len(judged) if judged else 1.0
    return ServiceView(
        now=now,
        window=window,
        pods=len(pods),
        notes=tuple(PodNote(pod.name, pod.health, pod.why) for pod in pods),
        requests=len(records),
        arrival_rate=rate,
        trend=_trend(records, now, seen),
        **_lengths(records),
        **_times(records),
        attainment=attainment,
        goodput=attainment * rate,
        token_rate=share * tokens / seen,
        refused=sum(r.outcome == "refused" for r in records),
        running=sum(pod.gauges.running for pod in pods),
        waiting=sum(pod.gauges.waiting for pod in pods),
        kv_usage=sum(pod.gauges.kv_blocks_used for pod in fresh) / total if total else 0.0,
        preemptions=sum(pod.preempted for pod in fresh),
        residual=max((pod.model.residual for pod in fresh if pod.model), default=0.0),
        step_error=abs(median(ratios) - 1.0) if ratios else 0.0,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile, 0 if there are no values."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else 0.0


def _trend(records: Sequence[RequestRecord], now: float, seen: float) -> float:
    """Return how much faster requests come lately; 1 where too few came to tell."""
    recent = sum(r.arrival > now - seen / _TREND_SPAN for r in records)
    before = (len(records) - recent) / (_TREND_SPAN - 1)
    return recent / before if before >= 10 else 1.0


def _lengths(records: Sequence[RequestRecord]) -> dict[str, float]:
    prompts = [r.prompt_tokens for r in read(records)]
    outputs = [r.output_tokens for r in records if r.outcome == "finished"]
    return {
        f"{name}_p{percent}": float(percentile(values, percent))
        for name, values in (("prompt", prompts), ("output", outputs))
        for percent in (50, 95)
    }


def _times(records: Sequence[RequestRecord]) -> dict[str, float]:
    ttfts = [r.first_token - r.arrival for r in records if r.first_token is not None]
    tpots = [t for r in records if (t := tpot(r)) is not None]
    return {
        f"{name}_p{percent}": percentile(values, percent)
        for name, values in (("ttft", ttfts), ("tpot", tpots))
        for percent in (50, 95)
    }


def tpot(record: RequestRecord) -> float | None:
    """Return a finished request's seconds per output token after the first, None where there is none."""
    if record.end is None or record.first_token is None or record.output_tokens < 2 or record.outcome != "finished":
        return None
    return (record.end - record.first_token) / (record.output_tokens - 1)
