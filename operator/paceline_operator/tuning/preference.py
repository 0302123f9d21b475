"""Which of two forecasts is to be preferred, and whether by more than chance. Pure."""

from __future__ import annotations

import math
from statistics import fmean, stdev

from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.twin import Forecast

__all__ = ["DRAIN_TIE", "better", "certain_gain", "clearly_better", "drain_gain", "worth"]

_TIE = 0.01  # relative: goodputs closer than this are equal, and latency decides
_LATENCY_TIE = 0.10
# Of what the better one is worth: so much is luck where one of two settings was picked as the best of some twenty (480
# requests tell a share to within 0.02, and the best of many is flattered by about as much again). Less is no reason to turn
# one more knob. Relative, since where two requests in five can be served, two in a hundred are a twentieth of all that are.
_INDISTINCT = 0.04
# Relative: of settings that work a queue off about as fast, that under which most are served in time meanwhile. Beyond the
# twin's usual error in tokens/s, and so that the ever smaller gains of ever more slots don't count.
DRAIN_TIE = 0.10
_FAILED = 0.02  # of requests: less goodput is none to rank by
# Blocks of requests in a row, of some requests each: those of one moment share their luck, and are one observation
_BLOCKS, _FEWEST_BLOCKS, _LEAST_BLOCK = 16, 5, 8
# Standard errors: chance alone looks as good once in eight times with five blocks, once in nine with sixteen. That is enough
# to try it: a canary and the look back at what was promised come after, and a better setting that is passed over costs more.
_ERRORS = 1.3


def better(objective: Objective, a: Forecast, b: Forecast) -> bool:
    """Return whether `a` is preferred to `b`: goodput, then latency, then fewer preemptions.

    While a queue keeps everybody beyond the objective, tokens per second come before all of that.
    """
    if objective.draining and abs(drain_gain(b, a)) > DRAIN_TIE:
        return a.token_rate > b.token_rate
    first, second = worth(objective, a), worth(objective, b)
    if max(first, second) < _FAILED:  # nobody is served in time: what drains the queue fastest
        return a.token_rate > (1 + _TIE) * b.token_rate
    scale = max(first, second, _FAILED)
    if abs(first - second) > _TIE * scale:
        return first > second
    slow, fast = _slowness(objective, a), _slowness(objective, b)
    if abs(slow - fast) > _LATENCY_TIE * max(slow, fast):
        return slow < fast
    return a.preemptions < b.preemptions


def clearly_better(objective: Objective, a: Forecast, b: Forecast, by: float = _INDISTINCT) -> bool:
    """Return whether `a` is better in what counts first by more than `by` (a share of it); latency is no reason."""
    if objective.draining:
        return drain_gain(b, a) > DRAIN_TIE
    return (1 - by) * worth(objective, a) > worth(objective, b)


def drain_gain(old: Forecast, new: Forecast) -> float:
    """Return how much faster `new` works a queue off, relative to `old`."""
    return (new.token_rate - old.token_rate) / max(old.token_rate, 0.05 * new.token_rate, 1e-9)


def certain_gain(old: Forecast, new: Forecast) -> float:
    """Return what `new` gains at least, per request, if these requests are a sample of what will come.

    Both are of the same requests, so each is compared with itself; who came at the same time counts together.
    """
    differences = [b - a for a, b in zip(old.worths, new.worths, strict=True)]
    size = max(_LEAST_BLOCK, math.ceil(len(differences) / _BLOCKS))
    blocks = [fmean(differences[i : i + size]) for i in range(0, len(differences) - size + 1, size)]
    if len(blocks) < _FEWEST_BLOCKS:
        return 0.0
    return fmean(blocks) - _ERRORS * stdev(blocks) / math.sqrt(len(blocks))


def worth(objective: Objective, forecast: Forecast) -> float:
    """Return what is to be maximised: the share within the objective, half of it with room for error; or tokens/s."""
    if objective.stated:
        return (forecast.attainment + forecast.soft) / 2
    return forecast.token_rate * forecast.attainment


def _slowness(objective: Objective, forecast: Forecast) -> float:
    """Return the tails as multiples of the objectives (of a second and a tenth where there are none)."""
    return forecast.ttft_p95 / (objective.ttft or 1.0) + forecast.tpot_p95 / (objective.tpot or 0.1)
