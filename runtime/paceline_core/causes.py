"""Why a request took as long as it did: its time from arrival to result, split by cause, nothing left over.

| part | the request… |
|---|---|
| `intake` | was read, turned into tokens and handed to the engine |
| `boundary` | waited for the step that ran when it came to end |
| `batch`, `slot`, `kv`, `budget`, `objective` | waited in the queue, for what `WaitReason` says |
| `prefill` | had its prompt computed, together with the decodes of others |
| `delayed` | waited while steps computed chunks of other prompts, before its first token or between two |
| `preempted` | had lost its memory and was being recomputed |
| `gap` | was ready while the engine computed nothing: planning, pauses, the time between two steps |
| `decode` | generated |
| `held` | had ended, and waited for its batch (static and dynamic) |

The engine and the twin follow the same rules. What a chunk costs the others is what the step-time model says that it adds,
as a share of what the step really took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from paceline_core.cause_clocks import QUEUE_PARTS, QueueClocks, StepHistory, StepShare, WaitSnapshot
from paceline_core.plan import ScheduledSequence, StepPlan, StepShape
from paceline_core.request import Ended, WaitReason
from paceline_core.step_time import StepPredictor

__all__ = ["PARTS", "Breakdown", "Causes", "Story", "largest"]


@dataclass(slots=True)
class Breakdown:
    """Seconds by cause; they sum up to the request's latency."""

    intake: float = 0.0
    boundary: float = 0.0
    batch: float = 0.0
    slot: float = 0.0
    kv: float = 0.0
    budget: float = 0.0
    objective: float = 0.0
    prefill: float = 0.0
    delayed: float = 0.0
    preempted: float = 0.0
    gap: float = 0.0
    decode: float = 0.0
    held: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.by_cause().values())

    def by_cause(self) -> dict[str, float]:
        """Return seconds by the name of the part."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = tuple(part.name for part in fields(Breakdown))


@dataclass(slots=True)
class Story:
    """A request's parts and their culprits: seconds by the sequence whose chunks delayed it, or to which it lost its memory.

    Sequence -1 stands for nobody: a pool that was rebuilt. Without `culprits` asked for, both stay empty.
    """

    parts: Breakdown
    delayed_by: dict[int, float] = field(default_factory=dict)
    preempted_by: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Chapter:
    """One request so far: `mark` is up to when its time is accounted for, and `phase` what goes on since."""

    story: Story
    mark: float
    queued: WaitSnapshot
    phase: str = "queue"  # queue, starting, prefill, decode or preempted
    preemptor: int = -1

    @property
    def parts(self) -> Breakdown:
        return self.story.parts


class Causes:
    """Follows an engine or a replay: tell it of arrivals, plans, steps and ends in the order of their times.

    `model` says what a step would have taken without a chunk; None: tokens count alike. `culprits` also keeps who was to
    blame, which costs some memory per step with chunks.
    """

    def __init__(self, model: StepPredictor | None, *, culprits: bool = False) -> None:
        self.model = model
        self._culprits = culprits
        self._chapters: dict[int, _Chapter] = {}
        self._queue = QueueClocks()
        self._history = StepHistory()
        self._launched: deque[float] = deque()  # when the plans in flight were made
        self._last_end = 0.0
        self._still_since: float | None = None  # the last step has ended and nobody has looked for another one yet

    def queue_waits(self, reason: WaitReason | None, now: float) -> None:
        """Note what the first of the queue waits for from `now` on (None: nobody waits). Follows every look for a plan."""
        self._looked(now)
        self._queue.switch(reason, now)

    def arrived(self, seq_id: int, at: float, intake: float = 0.0) -> None:
        """Begin the story of a request that came at `at` and took `intake` seconds to reach the queue."""
        came = at + intake
        self._chapters[seq_id] = _Chapter(Story(Breakdown(intake=intake)), came, self._queue.arrive(came))

    def planned(self, plan: StepPlan, now: float) -> None:
        """Take a plan made at `now`: who lost its blocks, who gets its first chunk."""
        self._looked(now)
        self._launched.append(now)
        preemptors = plan.preempted_for or (-1,) * len(plan.preempted)
        for seq_id, preemptor in zip(plan.preempted, preemptors, strict=True):
            if (chapter := self._chapters.get(seq_id)) is not None:
                self._close(chapter, now)
                chapter.phase, chapter.preemptor = "preempted", preemptor
        for entry in _chunks(plan):
            chapter = self._chapters[entry.seq_id]
            if chapter.phase == "queue":
                self._leave_queue(chapter, now)
                chapter.phase = "starting"

    def completed(self, plan: StepPlan, end: float, duration: float) -> None:
        """Take a step that ended at `end` after `duration` seconds."""
        ready = max(self._launched.popleft(), self._last_end)  # it could have begun then
        chunks = _chunks(plan)
        self._queue.gap(ready, end - duration)
        self._note_step(plan, chunks, end, duration, ready)
        for entry in chunks:
            chapter = self._chapters.get(entry.seq_id)
            if chapter is None:
                continue
            if chapter.phase in ("starting", "prefill"):
                self._account_chunk(chapter, entry, plan.shape, end, duration, ready)
            if entry.samples:
                self._close(chapter, end)
                chapter.phase = "decode"
        self._last_end = self._still_since = end
        if self._history.is_long:
            self._history.trim(min((c.mark for c in self._chapters.values() if c.phase != "queue"), default=end))

    def skipped(self, now: float) -> None:
        """Note that steps without any news went by, the last one ending at `now`."""
        self._last_end = now

    def ended(self, ended: Ended) -> Story:
        """End the story of a request and return it."""
        chapter = self._chapters.pop(ended.request.seq_id)
        if chapter.phase == "queue":
            self._leave_queue(chapter, ended.released)
            return chapter.story
        computed = ended.released if ended.last_token is None else max(ended.last_token, chapter.mark)
        self._close(chapter, computed)
        chapter.parts.held += ended.released - computed
        return chapter.story

    # -- steps ------------------------------------------------------------------------------------------------------

    def _looked(self, now: float) -> None:
        """Note a look for a plan: until then the engine stood still, from then on it runs or has nothing to do."""
        if self._still_since is not None:
            start, self._still_since = self._still_since, None
            self._queue.gap(start, now)
            self._history.add(now, 0.0, now - start)

    def _note_step(
        self, plan: StepPlan, chunks: Sequence[ScheduledSequence], end: float, duration: float, ready: float
    ) -> None:
        """Enter a step into the history."""
        shape = plan.shape
        delay = 0.0
        if shape.prefill_tokens and shape.decode_tokens:
            delay = duration * (1.0 - self._part_of(shape, _decodes(shape)))
        self._history.add(end, delay, end - duration - ready)
        if self._culprits and chunks:
            self._history.add_share(StepShare(end, duration, delay, self._owners(chunks)))

    def _part_of(self, shape: StepShape, part: StepShape) -> float:
        """Return which share of the step `shape` a step that is only `part` of it takes."""
        whole = 0.0 if self.model is None else self.model.predict(shape)
        if self.model is None or whole <= 0:
            return (part.decode_tokens + part.prefill_tokens) / (shape.decode_tokens + shape.prefill_tokens)
        return self.model.predict(part) / whole

    def _owners(self, chunks: Sequence[ScheduledSequence]) -> tuple[tuple[int, float], ...]:
        """Return whose chunks a step has, and each one's share of what they cost together."""
        if len(chunks) == 1:
            return ((chunks[0].seq_id, 1.0),)
        costs = [self._cost(StepShape().with_prefill(chunk.start, chunk.num_tokens)) for chunk in chunks]
        total = sum(costs)
        if total <= 0:
            costs, total = [float(chunk.num_tokens) for chunk in chunks], float(sum(c.num_tokens for c in chunks))
        return tuple((chunk.seq_id, cost / total) for chunk, cost in zip(chunks, costs, strict=True))

    def _cost(self, shape: StepShape) -> float:
        return 0.0 if self.model is None else self.model.predict(shape) - self.model.constant

    # -- requests ---------------------------------------------------------------------------------------------------

    def _account_chunk(
        self, chapter: _Chapter, entry: ScheduledSequence, shape: StepShape, end: float, duration: float, ready: float
    ) -> None:
        """Account for the time up to a step that computed a chunk of a prompt which hasn't got its first token."""
        own = duration
        if entry.num_tokens != shape.prefill_tokens:
            own = duration * self._part_of(shape, _decodes(shape).with_prefill(entry.start, entry.num_tokens))
        if chapter.phase == "starting":  # with two plans in flight it was planned while another step ran
            chapter.parts.boundary += ready - chapter.mark
            chapter.mark, chapter.phase = ready, "prefill"
        gap = min(max(0.0, end - chapter.mark - own), self._history.cost(chapter.mark, end)[1])
        chapter.parts.prefill += own
        chapter.parts.gap += gap
        chapter.parts.delayed += end - chapter.mark - own - gap
        if self._culprits:
            self._blame(chapter, end, duration - own, entry.seq_id)
        chapter.mark = end

    def _leave_queue(self, chapter: _Chapter, now: float) -> None:
        waited, still = self._queue.since(chapter.queued, now)
        for name in QUEUE_PARTS:
            setattr(chapter.parts, name, getattr(chapter.parts, name) + waited[name])
        chapter.parts.gap += still
        chapter.mark = now

    def _close(self, chapter: _Chapter, now: float) -> None:
        """Account for the time until `now` by what went on."""
        if chapter.phase == "queue":
            self._leave_queue(chapter, now)
            return
        span = now - chapter.mark
        delay, gap = self._history.cost(chapter.mark, now)
        gap = min(span, gap)
        span -= gap
        chapter.parts.gap += gap
        if chapter.phase == "decode":
            delayed = min(span, delay)
            chapter.parts.delayed += delayed
            chapter.parts.decode += span - delayed
            if self._culprits and delayed:
                self._blame_delays(chapter, now)
        elif chapter.phase == "preempted":
            chapter.parts.preempted += span
            blamed = chapter.story.preempted_by
            blamed[chapter.preemptor] = blamed.get(chapter.preemptor, 0.0) + span
        elif chapter.phase == "starting":
            chapter.parts.boundary += span
        else:
            chapter.parts.delayed += span
        chapter.mark = now

    def _blame(self, chapter: _Chapter, end: float, others: float, own: int) -> None:
        """Share out what a prompt waited for: whole steps without a chunk of `own`, and `others` seconds of the last one."""
        for share in self._history.shares(chapter.mark, end):
            mine = sum(part for owner, part in share.owners if owner == own)
            seconds = others if share.end == end else share.duration
            if mine < 1.0:
                _add(chapter.story.delayed_by, [o for o in share.owners if o[0] != own], seconds / (1.0 - mine))

    def _blame_delays(self, chapter: _Chapter, now: float) -> None:
        for share in self._history.shares(chapter.mark, now):
            _add(chapter.story.delayed_by, share.owners, share.delay)


def _add(blamed: dict[int, float], owners: Sequence[tuple[int, float]], seconds: float) -> None:
    if seconds > 0:
        for owner, part in owners:
            blamed[owner] = blamed.get(owner, 0.0) + part * seconds


def _decodes(shape: StepShape) -> StepShape:
    return StepShape(shape.decode_tokens, 0, shape.context_tokens, 0)


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


def largest(blamed: Mapping[int, float], count: int) -> dict[int, float]:
    """Return the `count` largest of some culprits."""
    return dict(sorted(blamed.items(), key=lambda item: -item[1])[:count])
