"""The twin's answer to "what if": samples replayed through the production scheduler under some knobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline_core.knobs import Knobs
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel, StepPredictor
from paceline_operator.tuning.question import Question, Sample
from paceline_operator.tuning.view import percentile
from paceline_sim.replay import simulate
from paceline_sim.result import Outcome, Result
from paceline_sim.slo import Slo
from paceline_sim.trace import Trace

__all__ = ["Forecast", "Twin"]

# Of the objective: who is within this has room for the twin's error. In the benchmarks its TPOT is off by up to 4 %; at 0.8
# a setting that is right lost against one with fewer slots that breaks at a little more load
_SOFT = 0.9
_ANY_LENGTH = 1 << 24  # tokens: what a pod took fits its model, so the twin needn't know the limit


_AVERAGED = ("attainment", "soft", "goodput", "token_rate", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the twin expects: shares of requests within the objective, and within 0.9 of it (`soft`); requests/s within it
    per pod (`goodput`), generated tokens/s per pod, 95th percentiles in seconds, preemptions, the KV pool's peak share.

    `unknown` names the features in which steps would be of a size that the model never saw even half of. `worths` gives per
    request 1 if it is within 0.9 of the objective, a half if only within all of it, else 0.
    """

    requests: int
    attainment: float
    soft: float
    goodput: float
    token_rate: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    preemptions: int
    kv_peak: float
    unknown: tuple[str, ...] = ()
    worths: tuple[float, ...] = ()

    def mean(self, other: Forecast) -> Forecast:
        """Return what to expect of the same requests if it is as likely to be this as `other`."""
        assert self.requests == other.requests, "both are of the same requests"
        means = {name: (getattr(self, name) + getattr(other, name)) / 2 for name in _AVERAGED}
        return replace(
            self,
            **means,
            preemptions=self.preemptions + other.preemptions,
            kv_peak=max(self.kv_peak, other.kv_peak),
            unknown=tuple(sorted({*self.unknown, *other.unknown})),
            worths=tuple((a + b) / 2 for a, b in zip(self.worths, other.worths, strict=True)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data, rounded to what it is worth; without the single requests."""
        figures = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "worths"}
        return {
            name: round(v, 6) if isinstance(v, float) else list(v) if isinstance(v, tuple) else v
            for name, v in figures.items()
        }


class Twin:
    """Replays a question's samples and traffic; remembers nothing but them."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._samples = self._that_fit(question.samples)
        # a queue that was there already is left out: it is the current knobs' doing, and every setting drains it once
        came = (tuple(replace(r, counted=True) for r in s if r.counted or r.arrival > 0) for s in self._samples)
        self._traffic = self._that_fit(question.traffic) or tuple(sample for sample in came if sample)
        self._rate = sum(map(_rate, self._traffic)) / max(1, len(self._traffic))

    def _that_fit(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Leave out requests that the pool can't hold: they were refused there and would be here, and are no traffic."""
        capacity = self._question.num_blocks * self._question.knobs["blockSize"]
        kept = (tuple(r for r in sample if r.prompt + r.output <= capacity) for sample in samples)
        return tuple(sample for sample in kept if sample)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What the twin is checked with."""
        return self._samples

    @property
    def traffic(self) -> tuple[Sample, ...]:
        """What settings are compared on."""
        return self._traffic

    def outcomes(self, knobs: Knobs) -> list[tuple[Sample, Result]]:
        """Return each sample with its replay under `knobs`: all of it, what was there at its beginning too."""
        return [(sample, self._replay(sample, knobs, 1.0, self._question.model)) for sample in self._samples]

    def forecast(
        self, knobs: Knobs, *, load: float = 1.0, model: StepPredictor | None = None, watch: bool = False,
        piece: Sequence[Sample] | None = None,
    ) -> Forecast:  # fmt: skip
        """Return what to expect of this traffic in the long run, told by a `piece` of it or all;
        with `watch` also whether the model knows such steps.
        """
        widest = _Widest() if watch else None
        samples = self._traffic if piece is None else piece
        results = [self._replay(sample, knobs, load, model or self._question.model, widest) for sample in samples]
        slo, soft = self._question.objective.slo(), self._question.objective.slo(_SOFT)
        outcomes = [o for s, result in zip(samples, results, strict=True) for o in result.outcomes if s[o.index].counted]
        ttfts, tpots = ([t for t in map(key, outcomes) if t is not None] for key in (_ttft, _tpot))
        attainment, comfort = _share(outcomes, slo), _share(outcomes, soft)
        return Forecast(
            requests=len(outcomes),
            attainment=attainment,
            soft=comfort,
            goodput=attainment * self._rate * load,
            token_rate=sum(map(_token_rate, results)) / max(1, len(results)),
            ttft_p50=percentile(ttfts, 50),
            ttft_p95=percentile(ttfts, 95),
            tpot_p50=percentile(tpots, 50),
            tpot_p95=percentile(tpots, 95),
            preemptions=sum(result.preemptions for result in results),
            kv_peak=max((result.kv_peak / result.kv_blocks for result in results), default=0.0),
            unknown=widest.outside(self._question.model.base) if widest is not None else (),
            worths=tuple((slo.met(o) + soft.met(o)) / 2 for o in outcomes),
        )

    def _replay(
        self, sample: Sample, knobs: Knobs, load: float, model: StepPredictor, widest: _Widest | None = None
    ) -> Result:
        trace = Trace(tuple(request.to_trace() for request in sample))
        now = self._question.knobs["kvMemoryFraction"]
        blocks = max(1, int(self._question.num_blocks * knobs.kv_memory_fraction / now))
        result = simulate(
            trace if load == 1.0 else trace.scaled(load),
            knobs,
            model,
            num_blocks=min(blocks, _needed(sample, knobs.block_size)),
            max_model_len=_ANY_LENGTH,
            on_step=None if widest is None else widest.see,
            details=False,
        )
        return replace(result, kv_blocks=blocks)


class _Widest:
    """The most decodes and prompt tokens of any step: what else there is to a step has no cost that can be guessed wrong."""

    def __init__(self) -> None:
        self._decodes = self._prefills = 0

    def see(self, end: float, seconds: float, shape: StepShape, blocks: int) -> None:
        """Take one step."""
        if shape.decode_tokens > self._decodes:
            self._decodes = shape.decode_tokens
        if shape.prefill_tokens > self._prefills:
            self._prefills = shape.prefill_tokens

    def outside(self, model: StepModel) -> tuple[str, ...]:
        """Return the features in which `model` would be guessing."""
        return model.outside(StepShape(self._decodes, self._prefills))


def _share(outcomes: Sequence[Outcome], slo: Slo) -> float:
    return sum(map(slo.met, outcomes)) / len(outcomes) if outcomes else 1.0


def _rate(sample: Sample) -> float:
    span = sample[-1].arrival - sample[0].arrival
    return (len(sample) - 1) / span if span > 0 else 0.0


def _needed(sample: Sample, block_size: int) -> int:
    """Return how many blocks are as good as any larger pool: all requests at once, and all that they leave in the cache.

    A pool costs memory and time for each of its blocks, and how many there are only the pod knows.
    """
    return sum(-(-(r.prompt + r.output) // block_size) + 1 for r in sample)


def _token_rate(result: Result) -> float:
    return sum(o.output_len for o in result.outcomes) / (result.duration or 1e-9)


def _ttft(outcome: Outcome) -> float | None:
    return outcome.ttft


def _tpot(outcome: Outcome) -> float | None:
    return outcome.tpot
