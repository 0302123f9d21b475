"""Why a request took as long as it did: its time from arrival to result, split by cause, nothing left over.

| part | the request… |
|---|---|
| `boundary` | waited for the step that ran when it arrived to end |
| `batch`, `slot`, `kv`, `budget`, `objective` | waited in the queue, for what `WaitReason` says |
| `prefill` | had its prompt computed, together with the decodes of others |
| `delayed` | waited while steps computed chunks of other prompts, before its first token or between two |
| `preempted` | had lost its memory and was being recomputed |
| `decode` | generated |
| `held` | had ended, and waited for its batch (static and dynamic) |
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields

from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.request import Ended, WaitReason
from paceline_core.step_time import StepPredictor

__all__ = ["Breakdown", "Causes"]


@dataclass(slots=True)
class Breakdown:
    """Seconds by cause; they sum up to the request's latency."""

    boundary: float = 0.0
    batch: float = 0.0
    slot: float = 0.0
    kv: float = 0.0
    budget: float = 0.0
    objective: float = 0.0
    prefill: float = 0.0
    delayed: float = 0.0
    preempted: float = 0.0
    decode: float = 0.0
    held: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[str, float]:
        """Return seconds by the name of the part."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


_QUEUE = ("boundary", *(reason.value for reason in WaitReason))  # parts of the time in the queue


@dataclass(slots=True)
class _Story:
    """One request so far: `mark` is up to when its time is accounted for, and `phase` what goes on since."""

    parts: Breakdown
    mark: float
    waited: dict[str, float]  # the queue's clocks at arrival
    phase: str = "queue"  # queue, prefill, decode or preempted


class Causes:
    """Follows a replay: tell it of arrivals, plans, steps and ends in the order of their times."""

    def __init__(self, model: StepPredictor) -> None:
        self._model = model
        self._stories: dict[int, _Story] = {}
        self._clocks = dict.fromkeys(_QUEUE, 0.0)  # how long the queue has waited for each reason, ever
        self._reason = "boundary"
        self._since = 0.0
        # when a step ended that did decodes and chunks, and by how much chunks have delayed decodes until then, ever
        self._mixed_ends: list[float] = []
        self._delays: list[float] = []

    def queue_waits(self, reason: WaitReason | None, now: float) -> None:
        """Note what the first of the queue waits for from `now` on; None: nobody was waiting."""
        name = "boundary" if reason is None else reason.value
        if name != self._reason:
            self._clocks[self._reason] += now - self._since
            self._reason, self._since = name, now

    def arrived(self, seq_id: int, at: float) -> None:
        """Begin the story of a request."""
        self._stories[seq_id] = _Story(Breakdown(), at, self._clocks_at(at))

    def planned(self, plan: StepPlan, now: float) -> None:
        """Take a plan made at `now`: who lost its blocks, who gets its first chunk."""
        for seq_id in plan.preempted:
            if (story := self._stories.get(seq_id)) is not None:
                self._close(story, now)
                story.phase = "preempted"
        for entry in _chunks(plan):
            story = self._stories[entry.seq_id]
            if story.phase == "queue":
                self._leave_queue(story, now)
                story.phase = "prefill"

    def completed(self, plan: StepPlan, end: float, duration: float) -> None:
        """Take a step that ended at `end` after `duration` seconds."""
        shape = plan.shape
        if shape.prefill_tokens and shape.decode_tokens:
            alone = self._model.predict_decode(shape.decode_tokens, shape.context_tokens)
            self._mixed_ends.append(end)
            self._delays.append((self._delays[-1] if self._delays else 0.0) + duration - alone)
        for entry in _chunks(plan):
            story = self._stories.get(entry.seq_id)
            if story is None:
                continue
            if story.phase == "prefill":
                own = duration if entry.num_tokens == shape.prefill_tokens else self._own(entry, shape)
                story.parts.prefill += own
                story.parts.delayed += end - story.mark - own
                story.mark = end
            if entry.samples:
                self._close(story, end)
                story.phase = "decode"

    def ended(self, ended: Ended) -> Breakdown:
        """End the story of a request and return its parts."""
        story = self._stories.pop(ended.request.seq_id)
        if story.phase == "queue":
            self._leave_queue(story, ended.released)
            return story.parts
        computed = ended.released if ended.last_token is None else max(ended.last_token, story.mark)
        self._close(story, computed)
        story.parts.held += ended.released - computed
        return story.parts

    def _own(self, entry: ScheduledSequence, shape: StepShape) -> float:
        """Return the seconds of the step if this chunk had been the only one."""
        decodes = StepShape(shape.decode_tokens, 0, shape.context_tokens, 0)
        return self._model.predict(decodes.with_prefill(entry.start, entry.num_tokens))

    def _leave_queue(self, story: _Story, now: float) -> None:
        for name, clock in self._clocks_at(now).items():
            setattr(story.parts, name, getattr(story.parts, name) + clock - story.waited[name])
        story.mark = now

    def _close(self, story: _Story, now: float) -> None:
        """Account for the time until `now` by what went on."""
        span = now - story.mark
        if story.phase == "decode":
            delayed = min(span, self._delay_until(now) - self._delay_until(story.mark))
            story.parts.delayed += delayed
            story.parts.decode += span - delayed
        elif story.phase == "prefill":
            story.parts.delayed += span
        elif story.phase == "preempted":
            story.parts.preempted += span
        else:
            self._leave_queue(story, now)
        story.mark = now

    def _clocks_at(self, at: float) -> dict[str, float]:
        clocks = dict(self._clocks)
        clocks[self._reason] += at - self._since
        return clocks

    def _delay_until(self, at: float) -> float:
        steps = bisect_right(self._mixed_ends, at)
        return self._delays[steps - 1] if steps else 0.0


def _chunks(plan: StepPlan) -> list[ScheduledSequence]:
    """Return the entries that compute prompts (or recompute): they come after the decodes."""
    left, found = plan.shape.prefill_tokens, []
    for entry in reversed(plan.scheduled):
        if left <= 0:
            break
        found.append(entry)
        left -= entry.num_tokens
    assert left == 0, "the prompts of a step come last"
    return found
