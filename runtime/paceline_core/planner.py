"""The loop that fills a step: decodes first, then the chunks of prompts that run, then admissions.

It is the same for all strategies; the `Policy` in force says who may be admitted, in which order and how fast.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from functools import reduce

from paceline_core.gate import ResultGate
from paceline_core.knobs import Knobs
from paceline_core.kv import KvCache
from paceline_core.plan import StepShape
from paceline_core.policies import Policy, QueueView
from paceline_core.request import BATCH_PRIORITY, WaitReason
from paceline_core.sequence import SequenceState, Stage
from paceline_core.step_builder import StepBuilder
from paceline_core.waiting import WaitingQueue
from paceline_core.wire import Gauges

__all__ = ["NOBODY", "Planner"]

NOBODY = -1  # lost its blocks to no other sequence: the pool was rebuilt


class Planner:
    """Who waits, who runs, and how a step is filled from them.

    `running` is kept in the order of priority and age: memory is taken from its end.
    """

    def __init__(self, knobs: Knobs, policy: Policy, kv: KvCache, gate: ResultGate) -> None:
        self.knobs = knobs
        self.policy = policy
        self.waiting = WaitingQueue(policy.key)
        self.running: list[SequenceState] = []
        self.source_closed = False
        self.waits_for: WaitReason | None = None  # what the first of the queue waited for; None: nobody waits
        self.preempted: dict[int, int] = {}  # since the last plan: who lost its blocks, and to whom
        self.preemptions = 0
        self.yielded = 0  # of the preempted since the last plan: those that made way for more urgent work
        self.prompt_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._kv = kv
        self._gate = gate

    def use(self, knobs: Knobs, policy: Policy) -> None:
        """Work under other knobs from now on."""
        self.knobs, self.policy = knobs, policy
        self.waiting.reorder(policy.key)

    def queue_view(self, now: float) -> QueueView:
        """Return what the policy may know of the queue."""
        first = self.waiting.first(now)
        return QueueView(
            now=now,
            waiting=len(self.waiting),
            oldest_arrival=now if first is None else first.request.arrival,
            idle=not self.running and not self._gate.is_open,
            source_closed=self.source_closed,
        )

    def fill(self, builder: StepBuilder, now: float) -> None:
        """Put into `builder` what the step computes."""
        if self.policy.deadlines:
            self._make_way(now)
        before = self.preemptions
        prefills, held = self._plan_decodes(builder)
        # a step that had to preempt admits nobody: the memory it made would go round in circles
        room = self.knobs.max_num_seqs - len(self.running) if self.preemptions == before else 0
        quota = self._quota(room, now)
        self._plan_prefills(builder, prefills, contended=quota > 0)
        self._admit(builder, room, quota, now, held)
        for seq in held:
            self._add_spare(builder, seq)

    def may_admit(self, shape: StepShape, now: float) -> bool:
        """Return whether a sequence may join now, or later, if all that happens are decodes that begin with `shape`.

        Decodes only take memory and lengthen the step, so who can't join now can't then, but for two things that change by
        themselves: the guard that recovers, and the patience of the oldest.
        """
        self.waits_for, may = self._foresee(shape, now)
        return may

    def _foresee(self, shape: StepShape, now: float) -> tuple[WaitReason | None, bool]:
        """Return what the first of the queue waits for, and whether that may change."""
        gang = self.policy.gang
        if len(self.running) >= self.knobs.max_num_seqs and self.waiting:
            return (WaitReason.BATCH if gang else WaitReason.SLOT), False
        seq = self.waiting.first(now)
        if seq is None:
            return None, False
        if gang and not self._gate.is_member(seq):
            return WaitReason.BATCH, False
        if self._kv.guard.share < 1.0 or self.waiting.first_may_change():
            return self.waits_for, True
        # all that run are of one tier here; batch work alone has no objective
        if not self.running[0].is_batch and not self.policy.may_join(shape, seq):
            return WaitReason.OBJECTIVE, False
        # while steps get longer the objective may come before the memory as what it waits for
        return WaitReason.KV, self._kv.fits(seq) or (self.policy.deadlines and self.knobs.slo_tpot is not None)

    @property
    def mixes_tiers(self) -> bool:
        """True while batch work runs beside work with an objective: then steps differ also if nobody comes or goes."""
        objective = self.policy.deadlines and self.knobs.slo_tpot is not None
        return objective and bool(self.running) and self.running[-1].is_batch and not self.running[0].is_batch

    def preempt_last(self, favoured: int = NOBODY, *, yields: bool = False) -> SequenceState:
        """Take the blocks of the newest sequence of the lowest priority, for `favoured`; it will be recomputed.

        `yields`: it makes way for more urgent work, and isn't a sign of memory that was promised too often.
        """
        victim = self.running.pop()
        self._kv.release(victim)
        victim.preemptions += 1
        self.yielded += yields
        self.waiting.push(victim, patient=yields)
        self.preempted[victim.request.seq_id] = favoured
        self.preemptions += 1
        return victim

    def preempt_all(self) -> None:
        """Take the blocks of everybody that runs."""
        while self.running:
            self.preempt_last()

    def remove(self, seq: SequenceState) -> None:
        """Take a sequence that ends out of where it is."""
        if seq.stage is Stage.WAITING:
            self.waiting.dropped()
        else:
            self.running.remove(seq)
            self._kv.release(seq)

    def gauges(self, **others: int) -> Gauges:
        """Return the counts of queues, prompts and blocks, with those that are kept elsewhere."""
        pool = self._kv.pool
        return Gauges(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            **others,
        )

    def check(self) -> None:
        """Assert the invariants of the queues, for tests."""
        assert all(seq.stage is Stage.RUNNING for seq in self.running), "a sequence runs and doesn't"
        assert sorted(self.running, key=lambda seq: seq.order) == self.running, "the running order is broken"
        assert len(list(self.waiting)) == len(self.waiting), "the queue and its count differ"

    def _make_way(self, now: float) -> None:
        """Let the newest batch work go if the first of the queue is more urgent and has no slot or no memory."""
        seq = self.waiting.first(now)
        if seq is None or seq.is_batch:
            return
        while self.running and self.running[-1].is_batch and not self._kv.has_deferred:
            if len(self.running) < self.knobs.max_num_seqs and self._kv.fits(seq):
                return
            self.preempt_last(seq.request.seq_id, yields=True)

    def _plan_decodes(self, builder: StepBuilder) -> tuple[list[SequenceState], list[SequenceState]]:
        """Give every running sequence past its prompt its tokens.

        Return those that still prefill, and batch work that gets what the objective of the others leaves, at the end.
        """
        prefills: list[SequenceState] = []
        held: list[SequenceState] = []
        for seq in self.running:
            computed = seq.computed
            wanted = min(seq.known, seq.stop_at) - computed  # `seq.wanted`, without a call for each of a thousand
            if wanted <= 0:
                continue
            if computed < seq.prefill_until:
                prefills.append(seq)
                continue
            if seq.priority >= BATCH_PRIORITY and self.policy.guards(builder.urgent):
                held.append(seq)
                continue
            if not builder.slots_left:
                continue
            if wanted > 1:  # several tokens came at once: catch up, but leave the others theirs
                others = min(builder.slots_left, len(self.running)) - 1
                wanted = max(1, min(wanted, builder.tokens_left - others))
            if computed + wanted <= seq.capacity or self._make_room(seq, computed + wanted):
                builder.add(seq, wanted)
        return prefills, held

    def _add_spare(self, builder: StepBuilder, seq: SequenceState) -> None:
        """Let batch work decode if the step keeps its objective with it, and without taking anybody's memory."""
        end = seq.computed + seq.wanted
        fits = seq.wanted <= builder.tokens_left and builder.slots_left
        if not fits or not self.policy.may_decode(builder.shape.with_decode(seq.computed, seq.wanted)):
            return
        if end <= seq.capacity or self._kv.grow(seq, end):
            builder.add(seq, seq.wanted)

    def _make_room(self, seq: SequenceState, positions: int) -> bool:
        """Grow the table of `seq`, preempting from the end of the running order; False if it can't run in this step."""
        while not self._kv.grow(seq, positions):
            if self._kv.has_deferred:
                return False  # blocks come back when the plan in flight completes: no reason to evict anybody
            if self.preempt_last(seq.request.seq_id) is seq:
                return False
        return True

    def _plan_prefills(self, builder: StepBuilder, prefills: list[SequenceState], *, contended: bool) -> None:
        """Give the prompts that run their chunks, in the order of the strategy."""
        contended = contended or len(prefills) > 1 or bool(builder.entries)
        if len(prefills) > 1:
            prefills.sort(key=self.policy.key)
        for seq in prefills:
            self._add_chunk(builder, seq, contended=contended)

    def _add_chunk(self, builder: StepBuilder, seq: SequenceState, *, contended: bool) -> None:
        """Schedule the next chunk of a prompt; a long one leaves tokens to the others that want some."""
        count = min(seq.wanted, builder.tokens_left)
        if contended:
            count = min(count, self.knobs.long_prefill_threshold)
        if count <= 0 or not builder.slots_left:
            return
        if self.policy.guards(builder.urgent):
            count = self.policy.prefill_tokens(builder.shape, seq.computed, count, batch=seq.is_batch)
        if count:
            builder.add(seq, count)

    def _quota(self, room: int, now: float) -> int:
        """Return how many new sequences this step may admit into `room` slots."""
        if not self.waiting or room <= 0:
            return 0
        return min(room, self.policy.admissible(self.queue_view(now)))

    def _admit(self, builder: StepBuilder, room: int, quota: int, now: float, held: Sequence[SequenceState] = ()) -> None:
        """Let waiting sequences in while slots, memory and budget last. Nobody overtakes the first of the queue."""
        while room > 0 and (self.policy.gang or builder.tokens_left > 0):
            seq = self.waiting.first(now)
            self.waits_for = None if seq is None else self._take_in(self._company(builder, seq, held), seq, quota)
            if seq is None or self.waits_for is not None:
                return
            self._start(seq, now)
            room -= 1
            quota -= 1
            self._add_chunk(builder, seq, contended=bool(builder.entries) or quota > 0)
        self.waits_for = self._scarcity(builder) if self.waiting else None

    def _company(self, builder: StepBuilder, seq: SequenceState, held: Sequence[SequenceState]) -> StepShape:
        """Return the step beside which `seq` must keep the objective: nothing, if there is nobody to keep it for."""
        if not self.policy.guards(builder.urgent):
            return StepShape()
        if not seq.is_batch:
            return builder.shape  # batch work makes way for it
        return reduce(lambda shape, other: shape.with_decode(other.computed, 1), held, builder.shape)

    def _take_in(self, shape: StepShape, seq: SequenceState, quota: int) -> WaitReason | None:
        """Give the first of the queue its blocks, or say what it waits for."""
        if quota <= 0 and not self._gate.is_member(seq):
            return WaitReason.BATCH
        if not self.policy.may_join(shape, seq):
            return WaitReason.OBJECTIVE
        return None if self._kv.admit(seq, alone=not self.running) else WaitReason.KV

    def _scarcity(self, builder: StepBuilder) -> WaitReason:
        """Say what a step that looked at nobody (any more) ran out of; one that had to preempt is out of blocks."""
        if self.policy.gang:
            return WaitReason.BATCH
        if len(self.running) >= self.knobs.max_num_seqs:
            return WaitReason.SLOT
        return WaitReason.BUDGET if builder.tokens_left <= 0 else WaitReason.KV

    def _start(self, seq: SequenceState, now: float) -> None:
        """Move an admitted sequence from the queue to those that run."""
        seq.stage = Stage.RUNNING
        seq.prefill_until = seq.known
        self.waiting.admitted(seq)
        insort(self.running, seq, key=lambda s: s.order)
        if self.policy.gang and not self._gate.is_member(seq):
            self._gate.join(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.cached_len = seq.computed
            self.prompt_tokens += seq.request.prompt_len
            self.prefix_queries += seq.request.prompt_len if self.knobs.prefix_caching else 0
            self.prefix_hits += seq.cached_len
