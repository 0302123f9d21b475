"""The twin's answer to "what if": samples replayed through the production scheduler under some knobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

_SOFT = 0.8  # of the objective: who is within this has room for the twin's error
_ANY_LENGTH = 1 << 24  # tokens: what a pod took fits its model, so the twin needn't know the limit


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the twin expects: shares of requests within the objective, and within 0.8 of it (`soft`); requests/s within it
    per pod (`goodput`), generated tokens/s per pod, 95th percentiles in seconds, preemptions, the KV pool's peak share.

    `unknown` names the features in which steps would be of a size that the model never saw even half of.
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

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready data, rounded to what it is worth."""
        figures = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: round(v, 6) if isinstance(v, float) else list(v) if isinstance(v, tuple) else v
            for name, v in figures.items()
        }


class Twin:
    """Replays a question's samples; remembers nothing but them."""

    def __init__(self, question: Question) -> None:
        self._question = question
        capacity = question.num_blocks * question.knobs["blockSize"]
        # a request that the pool can't hold was refused there and would be here: it is no traffic
        kept = (tuple(r for r in sample if r.prompt + r.output <= capacity) for sample in question.samples)
        self._samples = tuple(sample for sample in kept if sample)
        arrivals = (tuple(r for r in sample if r.counted or r.arrival > 0) for sample in self._samples)
        self._arrivals = tuple(sample for sample in arrivals if sample)
        self._rate = sum(map(_rate, self._samples)) / max(1, len(self._samples))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What is replayed."""
        return self._samples

    def outcomes(self, knobs: Knobs) -> list[tuple[Sample, Result]]:
        """Return each sample with its replay under `knobs`: all of it, what was there at its beginning too."""
        return [(sample, self._replay(sample, knobs, 1.0, self._question.model)) for sample in self._samples]

    def forecast(
        self, knobs: Knobs, *, load: float = 1.0, model: StepPredictor | None = None, watch: bool = False
    ) -> Forecast:
        """Return what to expect of this traffic in the long run; with `watch` also whether the model knows such steps.

        A queue that was there already is left out: it is the current knobs' doing, and every setting drains it once.
        """
        widest = _Widest() if watch else None
        found = [
            (sample, self._replay(sample, knobs, load, model or self._question.model, widest)) for sample in self._arrivals
        ]
        slo, soft = self._question.objective.slo(), self._question.objective.slo(_SOFT)
        counted = [o for sample, result in found for o in result.outcomes if sample[o.index].counted]
        ttfts, tpots = ([t for t in map(key, counted) if t is not None] for key in (_ttft, _tpot))
        attainment = _share(counted, slo)
        return Forecast(
            requests=len(counted),
            attainment=attainment,
            soft=_share(counted, soft),
            goodput=attainment * self._rate * load,
            token_rate=sum(_token_rate(result) for _, result in found) / max(1, len(found)),
            ttft_p50=percentile(ttfts, 50),
            ttft_p95=percentile(ttfts, 95),
            tpot_p50=percentile(tpots, 50),
            tpot_p95=percentile(tpots, 95),
            preemptions=sum(result.preemptions for _, result in found),
            kv_peak=max((result.kv_peak / result.kv_blocks for _, result in found), default=0.0),
            unknown=widest.outside(self._question.model.base) if widest is not None else (),
        )

    def _replay(
        self, sample: Sample, knobs: Knobs, load: float, model: StepPredictor, widest: _Widest | None = None
    ) -> Result:
        trace = Trace(tuple(request.to_trace() for request in sample))
        now = self._question.knobs["kvMemoryFraction"]
        blocks = max(1, int(self._question.num_blocks * knobs.kv_memory_fraction / now))
        return simulate(
            trace if load == 1.0 else trace.scaled(load),
            knobs,
            model,
            num_blocks=blocks,
            max_model_len=_ANY_LENGTH,
            on_step=None if widest is None else widest.see,
        )


class _Widest:
    """The largest size of each feature over all steps."""

    def __init__(self) -> None:
        self._most = StepShape()

    def see(self, end: float, seconds: float, shape: StepShape, blocks: int) -> None:
        """Take one step."""
        a, b = self._most, shape
        self._most = StepShape(
            max(a.decode_tokens, b.decode_tokens),
            max(a.prefill_tokens, b.prefill_tokens),
            max(a.context_tokens, b.context_tokens),
            max(a.prefill_attention, b.prefill_attention),
        )

    def outside(self, model: StepModel) -> tuple[str, ...]:
        """Return the features in which `model` would be guessing; one without a cost can't be guessed wrong by much."""
        return tuple(name for name in model.outside(self._most) if name in ("decode_tokens", "prefill_tokens"))


def _share(outcomes: Sequence[Outcome], slo: Slo) -> float:
    return sum(map(slo.met, outcomes)) / len(outcomes) if outcomes else 1.0


def _rate(sample: Sample) -> float:
    counted = [r for r in sample if r.counted] or list(sample)
    span = counted[-1].arrival - counted[0].arrival
    return (len(counted) - 1) / span if span > 0 else 0.0


def _token_rate(result: Result) -> float:
    return sum(o.output_len for o in result.outcomes) / (result.duration or 1e-9)


def _ttft(outcome: Outcome) -> float | None:
    return outcome.ttft


def _tpot(outcome: Outcome) -> float | None:
    return outcome.tpot
