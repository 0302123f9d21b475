"""One plan being made: what is scheduled so far, and what is left of the step's tokens and slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.request import BATCH_PRIORITY
from paceline_core.sequence import SequenceState

__all__ = ["StepBuilder"]


class StepBuilder:
    """Collects the entries of step `step_id` within `tokens` and `slots`."""

    __slots__ = (
        "_attention", "_context", "_decode", "_decoding", "_drafts", "_prefill", "_urgent", "_urgent_context", "entries",
        "sequences", "slots_left", "step_id", "tokens_left",
    )  # fmt: skip

    def __init__(self, step_id: int, tokens: int, slots: int) -> None:
        self.step_id = step_id
        self.tokens_left = tokens
        self.slots_left = slots
        self.entries: list[ScheduledSequence] = []
        self.sequences: list[SequenceState] = []
        self._decode = self._prefill = self._context = self._attention = 0
        self._urgent = self._urgent_context = 0
        self._decoding = 0  # entries that decode: they come first
        self._drafts = 0

    @property
    def shape(self) -> StepShape:
        """The size of the step so far."""
        return StepShape(self._decode, self._prefill, self._context, self._attention)

    @property
    def urgent(self) -> StepShape:
        """The decodes so far that a time objective is kept for."""
        return StepShape(self._urgent, 0, self._urgent_context, 0)

    @property
    def num_decoding(self) -> int:
        """How many of the entries, the first ones, are of sequences past their prompt."""
        return self._decoding

    def add(self, seq: SequenceState, count: int) -> None:
        """Schedule the next `count` tokens of `seq`; its block table covers them already."""
        start = seq.computed
        end = start + count
        samples = end == seq.known
        decodes = start >= seq.prefill_until
        entry = ScheduledSequence(seq.request.seq_id, start, count, seq.block_table, samples)
        if decodes and self._decoding < len(self.entries):
            self.entries.insert(self._decoding, entry)
            self.sequences.insert(self._decoding, seq)
        else:
            self.entries.append(entry)
            self.sequences.append(seq)
        seq.computed = end
        seq.last_step = self.step_id
        if samples:
            seq.known += 1  # the promise: the next plan may already compute the token that this one samples
        self.tokens_left -= count
        self.slots_left -= 1
        if decodes:
            self._decoding += 1
            self._decode += count
            self._context += end
            if seq.priority < BATCH_PRIORITY:  # `is_batch`, without a call for each decode
                self._urgent += count
                self._urgent_context += end
        else:
            self._prefill += count
            self._attention += count * end

    def add_drafts(self, index: int, drafts: tuple[int, ...]) -> None:
        """Let decoding entry `index`, which samples, check `drafts` too. They promise no token: all may be wrong."""
        entry, seq, count = self.entries[index], self.sequences[index], len(drafts)
        self.entries[index] = entry._replace(num_tokens=entry.num_tokens + count, drafts=drafts)
        seq.computed += count
        self.tokens_left -= count
        self._drafts += count
        self._decode += count
        self._context += count
        if not seq.is_batch:
            self._urgent += count
            self._urgent_context += count

    def build(self, epoch: int, preempted: Mapping[int, int], removed: Sequence[int], resize_blocks: int | None) -> StepPlan:
        """Return the plan, with the news that go with it; `preempted` says who lost its blocks to whom."""
        return StepPlan(
            step_id=self.step_id,
            epoch=epoch,
            scheduled=tuple(self.entries),
            shape=self.shape,
            preempted=tuple(preempted),
            preempted_for=tuple(preempted.values()),
            removed=tuple(removed),
            resize_blocks=resize_blocks,
            num_drafts=self._drafts,
        )
