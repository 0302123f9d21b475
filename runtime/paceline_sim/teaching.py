"""The textbook setting: every step takes one unit of time and gives each sequence one token; prompts cost nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline_core.knobs import Knobs, Strategy
from paceline_core.step_time import StepModel
from paceline_sim.replay import simulate
from paceline_sim.result import Result
from paceline_sim.trace import Trace

__all__ = ["teach"]

_UNIT_STEPS = StepModel(constant=1.0)
_BLOCK_SIZE = 16


def teach(lengths: Sequence[int], *, every: float, slots: int, strategy: Strategy, max_wait: float = 15.0) -> Result:
    """Return what becomes of requests with these output lengths (tokens = steps), one each `every` steps.

    `max_wait` (steps) is the longest that strategy dynamic lets the oldest request wait for a batch; static waits for a full
    one, or for the end of the source. Raises `KnobError` for slots or a wait out of bounds and `FormatError` for lengths
    below 1.
    """
    knobs = Knobs(
        strategy=strategy,
        max_num_seqs=slots,
        max_num_seqs_limit=slots,
        max_num_batched_tokens=max(slots, Knobs().max_num_batched_tokens),
        max_queue_delay=max_wait,
        static_flush=math.inf,
        block_size=_BLOCK_SIZE,
        prefix_caching=False,
    )
    trace = Trace.regular(lengths, every=every)
    longest = 1 + max(lengths)
    # memory is not what this setting is about: every slot can hold the longest request
    blocks = slots * -(-longest // _BLOCK_SIZE)
    return simulate(trace, knobs, _UNIT_STEPS, num_blocks=blocks, max_model_len=longest)
