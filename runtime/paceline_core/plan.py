"""What one engine step does (`StepPlan`) and what came of it (`StepResult`): the contract of scheduler and runner.

The engine's runner is a model, the twin's is a clock; both take the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

__all__ = ["Runner", "ScheduledSequence", "StepPlan", "StepResult", "StepShape"]


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: compute tokens `[start, start + num_tokens)` of it.

    Position `i` of the sequence has its KV in block `block_table[i // block_size]`, slot `i % block_size`. The table covers
    at least `start + num_tokens` positions; it is shared with the scheduler, which only ever
    appends to it (a sequence that is preempted gets another list): don't change it.
    `samples` is true if the last computed token's logits give a new token (the step reaches the end of what is known).
    `drafts` are guesses of the tokens that follow what is known; they are the last of the `num_tokens`. The runner samples
    after each of them too, and gives the tokens up to the first that isn't the draft at its place.

    A tuple, because a step of a thousand makes a thousand: a frozen dataclass takes three times as long to make.
    """

    seq_id: int
    start: int
    num_tokens: int
    block_table: Sequence[int]
    samples: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step as the step-time model sees it.

    `decode_tokens`: tokens of sequences past their prompt, drafts included; `prefill_tokens`: tokens of prompts (and of
    recomputation); `context_tokens`: KV positions read by decodes; `prefill_attention`: sum of chunk length × context length
    over prefills.
    """

    decode_tokens: int = 0
    prefill_tokens: int = 0
    context_tokens: int = 0
    prefill_attention: int = 0

    def with_prefill(self, start: int, count: int) -> StepShape:
        """Return this shape with one more chunk: `count` prompt tokens from position `start`."""
        attention = self.prefill_attention + count * (start + count)
        return StepShape(self.decode_tokens, self.prefill_tokens + count, self.context_tokens, attention)

    def with_decode(self, start: int, count: int) -> StepShape:
        """Return this shape with one more decode: `count` tokens from position `start`."""
        context = self.context_tokens + start + count
        return StepShape(self.decode_tokens + count, self.prefill_tokens, context, self.prefill_attention)

    def with_drafts(self, count: int) -> StepShape:
        """Return this shape with `count` drafts behind its decodes, whose KV the drafts read with them."""
        decodes, context = self.decode_tokens + count, self.context_tokens + count
        return StepShape(decodes, self.prefill_tokens, context, self.prefill_attention)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: who computes how many tokens. `scheduled` is empty only if `resize_blocks` or `removed` carry news.

    `preempted` lost their blocks (they come back with `start` at 0 or at a cached prefix), each to the one at its place in
    `preempted_for` (-1: to a pool that is rebuilt); `removed` ended and won't come
    back: the runner drops their state. `resize_blocks`, if given, is the new number of KV blocks: the runner rebuilds its
    pool before this step, when no block is in use. `num_drafts` counts the drafts of all entries.
    """

    step_id: int
    epoch: int
    scheduled: tuple[ScheduledSequence, ...]
    shape: StepShape
    preempted: tuple[int, ...] = ()
    preempted_for: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    resize_blocks: int | None = None
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return self.shape.decode_tokens + self.shape.prefill_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """New tokens per sequence id (several with speculation), for those whose `samples` was true, and the step's seconds.

    With two plans in flight, several tokens from the first may leave the second short of the end of what is known: there
    the runner samples nothing, and the scheduler drops what it is given.
    """

    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    duration: float = 0.0


class Runner(Protocol):
    """Runs plans in order. At most two are in flight: one runs, one is prepared."""

    def submit(self, plan: StepPlan) -> None:
        """Take the next plan; return before it is computed."""

    def collect(self) -> StepResult:
        """Wait for the oldest plan that was submitted and return its result."""
