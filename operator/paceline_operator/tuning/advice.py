"""What the tuner only says: knobs that people decide about, and hardware where no setting is enough. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline_core.knobs import Knobs, Strategy
from paceline_operator.tuning.preference import better
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.screen import ROUGH, Rung, piece_of
from paceline_operator.tuning.search import Found
from paceline_operator.tuning.twin import Forecast, Twin

__all__ = ["advise", "hardware"]

_FULL = 0.95  # of the KV pool: from here on more of it would help
_MOST_KV = 0.95  # kvMemoryFraction: the rest is for fragmentation
_REPLICAS = (2, 3, 4, 6, 8, 12, 16)  # times the pods that are tried
_SPEEDS = (0.75, 0.5, 0.35, 0.25, 0.125)  # of the step time


def advise(question: Question, twin: Twin, knobs: Knobs, found: Found) -> tuple[str, ...]:
    """Return advice about the strategy and the KV cache's share, as far as the twin finds a gain."""
    texts, both = [], Rung(twin, question.objective, question.load, both=True)
    if _objective_kept(question, found.best):
        return ()
    if knobs.strategy in (Strategy.STATIC, Strategy.DYNAMIC):
        other = replace(found.knobs, strategy=Strategy.CONTINUOUS)
        forecast = both.forecast(other)
        if better(question.objective, forecast, found.best):
            texts.append(f"strategy continuous: {forecast.attainment:.1%} of the requests would keep the objective")
    if found.best.kv_peak >= _FULL and found.best.preemptions and knobs.kv_memory_fraction < _MOST_KV:
        more = both.forecast(replace(found.knobs, kv_memory_fraction=_MOST_KV))
        if better(question.objective, more, found.best):
            texts.append(f"kvMemoryFraction {_MOST_KV:g}: {more.attainment:.1%} of the requests would keep the objective")
    return tuple(texts)


def hardware(question: Question, twin: Twin, found: Found) -> str:
    """Return what hardware would keep an objective that no setting keeps; '' where one does or none is stated."""
    if not question.objective.stated or question.only is not None or _objective_kept(question, found.best):
        return ""
    best = f"no setting keeps the objective: the best keeps {found.best.attainment:.1%} of the requests within it"
    piece = piece_of(twin.traffic, ROUGH // 2)  # a word to people: it needn't be exact
    load = 1.0 if question.objective.draining else question.load  # what empties a queue fastest is no rate to build for
    replicas = _first(_REPLICAS, lambda times: twin.forecast(found.knobs, load=load / times, piece=piece), question)
    if replicas < len(_REPLICAS):
        times = _REPLICAS[replicas]
        return f"{best}; {times} times the pods ({times * question.pods}) would"
    speed = _first(
        _SPEEDS,
        lambda share: twin.forecast(found.knobs, load=load, model=question.model.scaled(share), piece=piece),
        question,
    )
    if speed < len(_SPEEDS):
        return f"{best}; more pods wouldn't, a device with steps {1 / _SPEEDS[speed]:.1f} times as fast would"
    return f"{best}; neither {_REPLICAS[-1]} times the pods nor a device 8 times as fast would: the objective is too tight"


def _first(steps: Sequence[float], forecast: Callable[[float], Forecast], question: Question) -> int:
    """Return the place of the first of `steps`, each of more hardware, that keeps the objective; found by halving."""
    return bisect_left(steps, True, key=lambda step: _objective_kept(question, forecast(step)))


def _objective_kept(question: Question, forecast: Forecast) -> bool:
    return 100 * forecast.attainment >= question.objective.percentile
