"""Steps that can only repeat each other, taken in one stride: how the twin replays an hour in seconds.

While every running sequence decodes one token per step and nobody can join, `schedule` has nothing to decide: each step is
the one before, one position further. That holds until a sequence ends, memory runs out or something comes from outside. A
`Stride` says how many such steps lie ahead and `take` leaves the very state that `schedule` and `complete` would have left
after that many rounds, except for the numbers of the blocks in the tables, on which nothing depends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline_core.kv import KvCache
from paceline_core.pipeline import Pipeline
from paceline_core.plan import StepPlan, StepShape
from paceline_core.planner import Planner
from paceline_core.sequence import SequenceState

__all__ = ["Stride", "find_stride"]


@dataclass(frozen=True, slots=True)
class Stride:
    """Up to `most` steps in which each of `sequences` decodes one token.

    The first step reads `context` KV positions, each further one `len(sequences)` more. Step i takes
    `growth[i % len(growth)]` blocks of the `available` ones: before it would need more than there are, the stride is over.
    `slots` is maxNumSeqs.
    """

    sequences: Sequence[SequenceState]
    context: int
    most: int
    growth: Sequence[int]
    available: int
    slots: int
    _kv: KvCache
    _pipeline: Pipeline

    def take(self, steps: int, now: float) -> StepPlan | None:
        """Be `steps` steps further at time `now`, when the last one that completed did so; return the plan in flight."""
        assert 0 < steps <= self.most, "a stride is as long as it was found to be"
        flying = self._pipeline.skip(steps, len(self.sequences), self.slots)
        for seq in self.sequences:
            seq.known += steps
            seq.computed += steps
            seq.output_len += steps
            seq.last_token = now
            seq.last_step = self._pipeline.next_step - 1
            if seq.computed > seq.capacity:
                grown = self._kv.grow(seq, seq.computed)
                assert grown, "the stride went on after memory had run out"
        self._kv.guard.after_quiet_steps(steps)
        self._kv.step_completed(self._pipeline.next_step - 1 - len(self._pipeline))
        return flying


def find_stride(planner: Planner, kv: KvCache, pipeline: Pipeline, now: float) -> Stride | None:
    """Return the stride that begins at `now`, or None if the next step has something to decide."""
    sequences = planner.running
    if not sequences or planner.preempted or planner.mixes_tiers or len(sequences) > planner.knobs.max_num_seqs:
        return None
    if not pipeline.repeats(sequences, planner.knobs.max_num_seqs):
        return None
    assert not kv.has_deferred, "blocks wait for a plan in flight, which names only what runs"
    growth = [0] * kv.block_size
    most = _phases(sequences, growth, len(pipeline))
    if most < 1:
        return None
    context = sum(seq.computed for seq in sequences) + len(sequences)
    if planner.may_admit(StepShape(decode_tokens=len(sequences), context_tokens=context), now):
        return None
    return Stride(sequences, context, most, growth, kv.pool.num_available, planner.knobs.max_num_seqs, kv, pipeline)


def _phases(sequences: Sequence[SequenceState], growth: list[int], in_flight: int) -> int:
    """Count in `growth` who takes a block when, and return for how many steps nobody ends; 0 if not all just decode."""
    first_end: float = math.inf
    for seq in reversed(sequences):  # the newest are the likeliest to prefill still
        computed = seq.computed
        decodes = computed >= seq.prefill_until and seq.known - computed == 1 and computed - seq.num_tokens == in_flight - 1
        request = seq.request
        if not decodes or request.tokens is not None or request.stop_token_ids or seq.next_full != math.inf:
            return 0
        ends = seq.stop_at - computed
        if ends < first_end:
            first_end = ends
        growth[seq.capacity - computed] += 1
    return int(first_end) - 1 + in_flight
