"""Drafts in a step: who gets how many, and what becomes of the state when some were right.

They take what a planned step leaves: tokens of its budget, and blocks that nobody needs soon. A draft never preempts, never
keeps anybody out and never breaks an objective, and it is made only where it is likely to pay (`acceptance.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline_core.acceptance import Acceptance
from paceline_core.knobs import Knobs
from paceline_core.kv import KvCache
from paceline_core.plan import ScheduledSequence, StepPlan, StepResult
from paceline_core.planner import Planner
from paceline_core.policies import Policy
from paceline_core.sequence import SequenceState
from paceline_core.step_builder import StepBuilder
from paceline_core.step_time import StepPredictor

__all__ = ["Proposer", "Speculation"]

# What a draft costs while no step-time model says it, in tokens: on two CPU cores a step of one sequence takes about a
# tenth longer for each token more, and larger batches have a model by then.
_UNKNOWN_COST = 0.1
_PRICE_RATE = 0.05  # weight of one step: a step that was disturbed changes little


class Proposer(Protocol):
    """Guesses tokens. It may be wrong at any time; it must not be slow, as the next step waits for it."""

    def propose(self, seq_id: int, prompt: Sequence[int], generated: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow `prompt` and `generated`, both of which only ever grow."""

    def forget(self, seq_id: int) -> None:
        """Drop what is kept of a sequence that has ended."""


class DraftPrice:
    """What a draft costs, in tokens: those that the step would give in the time that the draft adds to it.

    The step-time model knows what one more decode adds. A draft may add more, as a sequence with drafts is computed apart
    from plain decodes, so what steps with drafts took beyond what they should without them is learnt, too.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # that a draft has added of late

    def cost(self, builder: StepBuilder, model: StepPredictor | None) -> float:
        """Return the price in a step as it is planned so far."""
        shape = builder.shape
        whole = 0.0 if model is None else model.predict(shape)
        if model is None or whole <= 0:
            return _UNKNOWN_COST
        added = max(self._seconds, model.predict(shape.with_drafts(1)) - whole)
        return builder.num_decoding * added / whole

    def learn(self, plan: StepPlan, seconds: float, model: StepPredictor) -> None:
        """Take the seconds of a step with drafts."""
        added = max(0.0, seconds - model.predict(plan.shape.with_drafts(-plan.num_drafts)))
        self._seconds += _PRICE_RATE * (added / plan.num_drafts - self._seconds)


class Speculation:
    """Adds drafts of `proposer` to steps (None: never) and keeps count of them."""

    def __init__(self, proposer: Proposer | None, kv: KvCache) -> None:
        self._proposer = proposer
        self._kv = kv
        self._records: dict[int, Acceptance] = {}
        self._checks = 0
        self._drafted = 0
        self._accepted = 0
        self._price = DraftPrice()
        self._judged = -1  # the last step whose drafts were looked at

    def may_draft(self, knobs: Knobs) -> bool:
        """Return whether steps may have drafts under `knobs`."""
        return self._proposer is not None and knobs.speculative > 0

    def fill(self, builder: StepBuilder, planner: Planner) -> None:
        """Give drafts to the decodes of a step that is full otherwise."""
        if self._proposer is None or not planner.knobs.speculative:
            return
        cost = self._price.cost(builder, planner.policy.model)
        for index in range(builder.num_decoding):
            entry, seq = builder.entries[index], builder.sequences[index]
            # its newest token must be known, not just promised by a plan in flight
            if entry.num_tokens == 1 and entry.start + 1 == seq.num_tokens and seq.request.draftable:
                self._draft(self._proposer, builder, index, cost, planner)

    def _draft(self, proposer: Proposer, builder: StepBuilder, index: int, cost: float, planner: Planner) -> None:
        seq, record = builder.sequences[index], self._record(builder.sequences[index])
        most = min(planner.knobs.speculative, builder.tokens_left, seq.stop_at - seq.computed)
        count = min(record.length(seq.output_len, most, cost), self._room(seq, len(planner.running)))
        if count <= 0 or seq.request.tokens is None or not _keeps_objective(builder, planner.policy, count):
            return
        drafts = proposer.propose(seq.request.seq_id, seq.request.tokens, seq.generated, count)
        assert len(drafts) <= count, "a proposer gives what it was asked for"
        if drafts:
            end = seq.computed + len(drafts)
            fits = end <= seq.capacity or self._kv.grow(seq, end)
            assert fits, "there was room"
            builder.add_drafts(index, drafts)

    def judge(
        self, entry: ScheduledSequence, seq: SequenceState, plan: StepPlan, result: StepResult, model: StepPredictor | None
    ) -> int:
        """Take what became of an entry's drafts, whose tokens `seq` has accepted.

        Return up to where the sequence's positions hold what belongs there; behind that the KV of wrong drafts is left.
        """
        made = len(result.tokens[entry.seq_id])
        assert 1 <= made <= 1 + len(entry.drafts), "a step gives a token for each draft that is right, and one more"
        if plan.step_id != self._judged and model is not None:
            self._price.learn(plan, result.duration, model)
        self._judged = plan.step_id
        self._checks += 1
        self._drafted += len(entry.drafts)
        self._accepted += made - 1
        self._record(seq).learn(len(entry.drafts), made - 1)
        if seq.last_step != plan.step_id or seq.computed != entry.start + entry.num_tokens:
            return 0  # it was preempted meanwhile
        seq.computed = seq.num_tokens - 1
        return seq.computed

    def forget(self, seq_id: int) -> None:
        """Drop what is kept of a sequence that has ended."""
        if self._proposer is not None:
            self._proposer.forget(seq_id)
            self._records.pop(seq_id, None)

    def gauges(self) -> dict[str, int]:
        """Return the counts of `wire.Gauges` that are kept here."""
        return {"draft_checks": self._checks, "draft_tokens": self._drafted, "accepted_drafts": self._accepted}

    def _record(self, seq: SequenceState) -> Acceptance:
        return self._records.setdefault(seq.request.seq_id, Acceptance())

    def _room(self, seq: SequenceState, running: int) -> int:
        """Return how many drafts have room: in the blocks it has, and in one more if everybody could have one, too."""
        spare = self._kv.block_size if self._kv.pool.num_available > running else 0
        return seq.capacity + spare - seq.computed


def _keeps_objective(builder: StepBuilder, policy: Policy, count: int) -> bool:
    return not policy.guards(builder.urgent) or policy.may_decode(builder.shape.with_drafts(count))
