"""How long a newcomer would wait, from the step-time model and what requests have been like: no simulation, a few products.

With all slots busy, a slot turns over once per `cycle`: the decode steps of an answer plus its share of prefill. So a queue
moves by `slots / cycle` requests a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepShape
from paceline_core.step_time import StepPredictor

__all__ = ["Traffic", "predict_wait"]

_GANGS = (Strategy.STATIC, Strategy.DYNAMIC)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests have been like, in tokens: means, and the output that only one in ten exceeds."""

    prompt: float
    output: float
    long_output: float


def predict_wait(
    model: StepPredictor, knobs: Knobs, traffic: Traffic, *, num_blocks: int, running: int, ahead: int
) -> float:
    """Return the seconds until a newcomer with `ahead` requests before it in the queue gets a slot; 0 if one is free.

    `running` sequences have one, the KV pool has `num_blocks`.
    """
    slots = _slots(knobs, traffic, num_blocks)
    if knobs.strategy in _GANGS:
        # half of the batch that runs lies ahead on average, then whole batches
        cycle = _cycle(model, traffic, slots, traffic.long_output)
        return cycle * ((0.5 if running else 0.0) + ahead // slots)
    before = ahead + running - slots + 1
    return max(0, before) * _cycle(model, traffic, slots, traffic.output) / slots


def _slots(knobs: Knobs, traffic: Traffic, num_blocks: int) -> int:
    """Return how many requests run at once: as many as maxNumSeqs and the memory allow."""
    blocks = math.ceil((traffic.prompt + traffic.output) / knobs.block_size)
    return max(1, min(knobs.max_num_seqs, num_blocks // max(1, blocks)))


def _cycle(model: StepPredictor, traffic: Traffic, slots: int, output: float) -> float:
    """Return the seconds in which `slots` requests of `output` tokens come and go."""
    context = int(slots * (traffic.prompt + output / 2))
    prompts = StepShape(prefill_tokens=int(slots * traffic.prompt), prefill_attention=int(slots * traffic.prompt**2 / 2))
    # chunks ride along with decodes, so their step's constant is paid already
    return output * model.predict_decode(slots, context) + model.predict(prompts) - model.constant
