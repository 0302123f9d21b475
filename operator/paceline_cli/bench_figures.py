"""The figures of `paceline bench`: what a server did under a load, as seen from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_cli.load import Outcome
from paceline_sim import Slo, Spread

__all__ = ["BenchFigures", "measure", "meets"]


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """A load in figures. Rates are per second of `duration` (first request sent to last answer), times are seconds.

    `goodput` counts the requests per second that were answered in full within the SLO; `itl` is the time between two
    tokens of a stream, over all streams. `errors` counts failures by what they said.
    """

    requests: int
    failed: int
    duration: float
    request_rate: float
    goodput: float
    attainment: float
    input_tokens: int
    output_tokens: int
    output_rate: float
    total_rate: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    most_in_flight: int
    errors: dict[str, int]


def measure(outcomes: Sequence[Outcome], slo: Slo) -> BenchFigures:
    """Return the figures of a load; `outcomes` isn't empty. Failed requests count in rates as not answered."""
    good = [outcome for outcome in outcomes if not outcome.error]
    duration = max(o.end for o in outcomes) - min(o.sent for o in outcomes) or 1e-9
    met = sum(meets(outcome, slo) for outcome in outcomes)
    inputs, outputs = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    return BenchFigures(
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        duration=duration,
        request_rate=len(good) / duration,
        goodput=met / duration,
        attainment=met / len(outcomes),
        input_tokens=inputs,
        output_tokens=outputs,
        output_rate=outputs / duration,
        total_rate=(inputs + outputs) / duration,
        ttft=Spread.of(o.ttft for o in good),
        tpot=Spread.of(o.tpot for o in good),
        itl=Spread.of(gap for o in good for gap in o.gaps),
        e2e=Spread.of(o.latency for o in good),
        most_in_flight=_most_in_flight(outcomes),
        errors=dict(Counter(o.error for o in outcomes if o.error).most_common(5)),
    )


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Return whether a request was answered in full and within the objectives."""
    if outcome.error or outcome.ttft is None:
        return False
    times = ((slo.ttft, outcome.ttft), (slo.tpot, outcome.tpot), (slo.e2e, outcome.latency))
    return all(bound is None or seconds is None or seconds <= bound for bound, seconds in times)


def _most_in_flight(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(o.sent, 1) for o in outcomes] + [(o.end, -1) for o in outcomes])
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most
