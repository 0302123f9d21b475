"""How many replicas a load needs: first by arithmetic, then by replaying it on so many, until the SLO is met.

Requests go to the replicas in turn, as a balancer that knows nothing deals them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline_core.errors import FormatError
from paceline_core.knobs import Knobs
from paceline_core.plan import StepShape
from paceline_sim.report import Summary
from paceline_sim.roofline import Roofline
from paceline_sim.search import Candidate, Engine, evaluate
from paceline_sim.slo import Slo
from paceline_sim.trace import Trace

__all__ = ["BatchPoint", "Fleet", "Sizing", "batch_points", "share_of_one", "size"]

_MOST_REPLICAS = 1_024
_APART = 1e5  # seconds: longer than any request takes
_BATCHES = (1, 8, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """A decode step of `sequences` with `context` tokens each, its seconds, and whether their KV fits the memory."""

    sequences: int
    context: int
    seconds: float
    fits: bool

    @property
    def token_rate(self) -> float:
        """Tokens per second of all sequences together."""
        return self.sequences / self.seconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """How `replicas` fared together: the share of requests within the SLO, mean busy share, the slowest one's tails (s)."""

    replicas: int
    attainment: float
    meets_slo: bool
    ttft_p95: float
    tpot_p95: float
    e2e_p95: float
    busy: float
    mean_batch: float
    kv_peak: float

    @classmethod
    def of(cls, summaries: Sequence[Summary], slo: Slo) -> Fleet:
        """Return what the replicas' summaries say of all."""
        good = sum(s.attainment * s.requests for s in summaries) / sum(s.requests for s in summaries)
        return cls(
            replicas=len(summaries),
            attainment=good,
            meets_slo=100 * good >= slo.percentile,
            ttft_p95=max(s.ttft.p95 for s in summaries),
            tpot_p95=max(s.tpot.p95 for s in summaries),
            e2e_p95=max(s.e2e.p95 for s in summaries),
            busy=sum(s.busy for s in summaries) / len(summaries),
            mean_batch=sum(s.mean_batch for s in summaries) / len(summaries),
            kv_peak=max(s.kv_peak for s in summaries),
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """The answer: `replicas` (None: no number meets the SLO), and the fleets that were replayed, the smallest first.

    `alone` is the share of requests that meets the SLO when each has an engine to itself; None if that was never in doubt.
    """

    replicas: int | None
    tried: tuple[Fleet, ...]
    alone: float | None = None


def batch_points(roofline: Roofline, context: int, kv_tokens: int) -> list[BatchPoint]:
    """Return decode steps of growing batches, up to what `kv_tokens` of memory hold."""
    return [
        BatchPoint(n, context, roofline.predict_decode(n, n * context), fits=n * context <= kv_tokens)
        for n in _BATCHES
    ]  # fmt: skip


def share_of_one(trace: Trace, roofline: Roofline, batch: int) -> tuple[float, float]:
    """Return (prefill, decode): the share of one replica's time that each takes at the trace's mean rate.

    Decodes are counted in steps of `batch` sequences at the mean context.
    """
    seconds = trace.span or math.inf
    requests = trace.requests
    prefill = sum(
        roofline.predict(StepShape(0, r.prompt_len, 0, r.prompt_len * r.prompt_len // 2)) - roofline.constant
        for r in requests
    )  # fmt: skip
    outputs = sum(r.output_len for r in requests)
    context = sum(r.output_len * (r.prompt_len + r.output_len // 2) for r in requests) // outputs
    decode = outputs * roofline.predict_decode(batch, batch * context) / batch
    return max(0.0, prefill) / seconds, decode / seconds


def size(
    engine: Engine, trace: Trace, knobs: Knobs, slo: Slo, *, workers: int | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Sizing:  # fmt: skip
    """Return the least number of replicas that meets `slo`, found by doubling and halving.

    `progress` is told what is replayed next. Raises `FormatError` without any objective.
    """
    if not slo.is_set:
        raise FormatError("without an objective any number of replicas will do: give an SLO, as in ttft=500ms,tpot=50ms")
    fleets = _Fleets(engine, trace, knobs, slo, workers, progress)
    if fleets.meets(1):
        return Sizing(1, fleets.smallest_first)
    alone = fleets.alone()
    most = min(_MOST_REPLICAS, len(trace.requests))
    high = min(2, most)
    while 100 * alone >= slo.percentile and not fleets.meets(high) and high < most:
        high = min(2 * high, most)
    if high not in fleets.tried or not fleets.meets(high):
        return Sizing(None, fleets.smallest_first, alone)
    low = max(n for n, fleet in fleets.tried.items() if not fleet.meets_slo)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fleets.meets(middle) else (middle, high)
    return Sizing(high, fleets.smallest_first, alone)


@dataclass(slots=True)
class _Fleets:
    """Fleets of one engine under one load, each replayed at most once."""

    engine: Engine
    trace: Trace
    knobs: Knobs
    slo: Slo
    workers: int | None
    progress: Callable[[str], object]
    tried: dict[int, Fleet] = field(default_factory=dict)

    def meets(self, replicas: int) -> bool:
        """Return whether so many replicas meet the SLO."""
        if replicas not in self.tried:
            self.progress(f"{replicas} replica{'s' if replicas > 1 else ''}")
            turns = [Candidate("", self.knobs, turn=(first, replicas)) for first in range(replicas)]
            summaries = evaluate(self.engine, self.trace, turns, self.slo, workers=self.workers)
            self.tried[replicas] = Fleet.of(summaries, self.slo)
        return self.tried[replicas].meets_slo

    def alone(self) -> float:
        """Return the share of requests that meets the SLO when each has an engine to itself."""
        self.progress("each request alone")
        apart = Trace(tuple(r.at(place * _APART) for place, r in enumerate(self.trace.requests)))
        return evaluate(self.engine, apart, [Candidate("", self.knobs)], self.slo, workers=1)[0].attainment

    @property
    def smallest_first(self) -> tuple[Fleet, ...]:
        """All fleets that were replayed."""
        return tuple(self.tried[replicas] for replicas in sorted(self.tried))
