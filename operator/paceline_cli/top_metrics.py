"""Reads a pod's metrics and says what happened between two readings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from paceline_core.errors import FormatError

__all__ = ["Activity", "Reading", "between", "quantile", "read"]

_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
_TOKENS = "vllm:generation_tokens_total"
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds_bucket": "ttft",
    "vllm:request_time_per_output_token_seconds_bucket": "tpot",
}

Buckets = Mapping[float, float]  # upper bound → cumulative count


@dataclass(frozen=True, slots=True)
class Reading:
    """What a pod's /metrics said at `time` (any monotonic seconds); `kv_usage` is a share."""

    time: float
    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    tokens: float = 0.0
    ttft: Buckets = field(default_factory=dict)
    tpot: Buckets = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Activity:
    """Some pods together: sequences now, mean KV use, tokens per second and latencies (seconds; None: no request)."""

    pods: int
    running: int
    waiting: int
    kv_usage: float
    token_rate: float
    ttft: float | None
    tpot: float | None


def read(text: str, time: float) -> Reading:
    """Return the reading that an exposition text gives. Raises `FormatError` if it is none."""
    values = dict.fromkeys((*_GAUGES.values(), "tokens"), 0.0)
    buckets: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS.values()}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue
                if (name := _GAUGES.get(sample.name)) is not None:
                    values[name] += sample.value
                elif sample.name == _TOKENS:
                    values["tokens"] += sample.value
                elif (name := _HISTOGRAMS.get(sample.name)) is not None:
                    bound = float(sample.labels["le"])
                    buckets[name][bound] = buckets[name].get(bound, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise FormatError(f"no metrics: {error}") from None
    return Reading(time, **values, ttft=buckets["ttft"], tpot=buckets["tpot"])


def between(pairs: Sequence[tuple[Reading, Reading | None]], percentile: float) -> Activity:
    """Return what some pods do: (now, before) each; a pod without a reading before, or restarted since, has no rates."""
    rates = 0.0
    ttft: dict[float, float] = {}
    tpot: dict[float, float] = {}
    for now, before in pairs:
        if before is None or now.time <= before.time or now.tokens < before.tokens:
            continue
        rates += (now.tokens - before.tokens) / (now.time - before.time)
        _add(ttft, now.ttft, before.ttft)
        _add(tpot, now.tpot, before.tpot)
    return Activity(
        pods=len(pairs),
        running=round(sum(now.running for now, _ in pairs)),
        waiting=round(sum(now.waiting for now, _ in pairs)),
        kv_usage=sum(now.kv_usage for now, _ in pairs) / len(pairs) if pairs else 0.0,
        token_rate=rates,
        ttft=quantile(ttft, percentile / 100),
        tpot=quantile(tpot, percentile / 100),
    )


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return a quantile of cumulative buckets, linear within one as PromQL's histogram_quantile; None if they are empty."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    low, below, rank = 0.0, 0.0, share * total
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = (low if math.isinf(bound) else bound), count
    return low


def _add(total: dict[float, float], now: Buckets, before: Buckets) -> None:
    for bound, count in now.items():
        total[bound] = total.get(bound, 0.0) + max(0.0, count - before.get(bound, 0.0))
