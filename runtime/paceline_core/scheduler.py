"""The scheduler: requests in, step plans out, tokens back. Pure Python on ints, time is an argument.

```
 add ─▶ waiting ──admit──▶ running ──────────────▶ ended ─▶ take_ended
           ▲                  │ schedule ▸ plan ▸ complete
           └────preempt───────┘
```

A step serves decodes first, then the chunks of prompts that run, then admissions, within the token budget and the slots.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from paceline_core.deadlines import DeadlineWatch
from paceline_core.errors import RequestRefused
from paceline_core.gate import ResultGate
from paceline_core.knob_board import KnobBoard
from paceline_core.knobs import Knobs
from paceline_core.kv import KvCache
from paceline_core.plan import StepPlan, StepResult
from paceline_core.policies import Policy, QueueView, make_policy
from paceline_core.request import Ended, FinishReason, Request
from paceline_core.sequence import SequenceState, Stage
from paceline_core.step_builder import StepBuilder
from paceline_core.step_time import StepModel
from paceline_core.waiting import WaitingQueue
from paceline_core.wire import Gauges

__all__ = ["Scheduler"]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan that runs, with the states behind its entries and the slots there were."""

    plan: StepPlan
    sequences: list[SequenceState]
    slots: int


class Scheduler:
    """Decides who computes what in each step.

    `num_blocks` sizes the KV pool, `max_model_len` bounds prompt plus output (tokens), `pipeline_depth` is how many plans
    may be in flight (1 or 2). `step_model` lets `iteration` keep time objectives; without one it keeps priorities only.
    Drive it as: `add`/`abort`, then `schedule` until it returns None, run the plans in order, `complete` each in order,
    and `take_ended` after every call.
    """

    def __init__(
        self,
        knobs: Knobs,
        *,
        num_blocks: int,
        max_model_len: int,
        pipeline_depth: int = 1,
        step_model: StepModel | None = None,
    ) -> None:
        assert pipeline_depth in (1, 2), "at most two plans are in flight"
        self.max_model_len = max_model_len
        self._depth = pipeline_depth
        self._board = KnobBoard(knobs)
        self._model = step_model
        self._policy: Policy = make_policy(knobs, step_model)
        self._kv = KvCache(num_blocks, knobs.block_size, caching=knobs.prefix_caching)
        self._sequences: dict[int, SequenceState] = {}
        self._waiting = WaitingQueue(self._policy.key)
        self._running: list[SequenceState] = []  # by (priority, age): the last one is preempted first
        self._gate = ResultGate()
        self._watch = DeadlineWatch(self._policy.best_case)
        self._flights: deque[_Flight] = deque()
        self._next_step = 0
        self._completed = -1
        self._preempted: list[int] = []  # news for the next plan
        self._removed: list[int] = []
        self._resize: int | None = None
        self._source_closed = False
        self._preempted_since_step = 0
        self._preemptions = self._slot_steps = self._busy = self._prompt_tokens = self._output_tokens = 0

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""
        return self._board.knobs

    @property
    def epoch(self) -> int:
        """The epoch of the knobs in force: 0 at the start, one more per change."""
        return self._board.epoch

    @property
    def num_running(self) -> int:
        """Sequences that hold KV blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission, preempted ones included."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans that were made and haven't completed."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """True while something waits, runs or must still be told to the runner."""
        return bool(self._waiting or self._running or self._flights) or self._resize is not None

    @property
    def step_model(self) -> StepModel | None:
        """The step-time model that `iteration` predicts with."""
        return self._model

    @step_model.setter
    def step_model(self, model: StepModel | None) -> None:
        self._model = model
        self._use_policy(make_policy(self.knobs, model))

    def add(self, request: Request, now: float) -> None:
        """Take a request. Raises `RequestRefused` (`invalid`, `too_long`, `kv_capacity`) if it can never run here."""
        assert request.seq_id not in self._sequences, f"sequence {request.seq_id} is already here"
        limit = self._checked_limit(request)
        seq = SequenceState(request, limit, self._board.epoch)
        self._sequences[request.seq_id] = seq
        self._waiting.push(seq)
        if self._policy.deadlines:
            self._watch.watch((seq,))

    def abort(self, seq_id: int, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request from outside (also with STOP, when a stop text was seen). False if it isn't here any more."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return False
        self._end(seq, reason, now)
        return True

    def take_ended(self) -> list[Ended]:
        """Return the requests that ended since the last call, exactly one `Ended` for each one added."""
        return self._gate.take()

    def set_knobs(self, knobs: Knobs) -> int:
        """Change the knobs from the next `schedule` on; return the new epoch. Raises `KnobError`.

        Restart-class knobs keep the values that the scheduler was built with. A batch that runs under static or dynamic
        goes on when the strategy stays one of them; otherwise its held results are given back at the switch. The first
        batch of static or dynamic starts once what runs has ended.
        """
        return self._board.propose(knobs)

    def rollback_knobs(self) -> int:
        """Undo the last change from the next `schedule` on; return the new epoch. Raises `PacelineError` without one."""
        return self._board.rollback()

    def resize_pool(self, num_blocks: int) -> None:
        """Give the pool another size once the plans in flight have completed; everything is recomputed, nothing fails.

        A request that can't grow to its limit any more ends with LENGTH at what fits, and REFUSED if it has no token yet.
        """
        assert num_blocks >= 1, "a pool has at least one block"
        self._resize = num_blocks

    def close_source(self) -> None:
        """Say that no more requests will come: static starts what waits."""
        self._source_closed = True

    def reopen_source(self) -> None:
        """Say that requests may come again."""
        self._source_closed = False

    def next_event(self, now: float) -> float | None:
        """Return when `schedule`, which just returned None, may decide otherwise without any new input; None: never."""
        times = []
        if self._policy.gang and self._waiting:
            times.append(self._policy.flush_at(self._queue_view(now)))
        if self._policy.deadlines:
            times.append(self._watch.next_time() or 0.0)
        return min((t for t in times if now < t < float("inf")), default=None)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if nothing can run now or `pipeline_depth` plans are in flight."""
        if len(self._flights) >= self._depth:
            return None
        self._apply_knobs(now)
        resized = None
        if self._resize is not None:
            if self._flights:
                return None  # the runner rebuilds its pool when no block is in use
            resized = self._rebuild_pool(now)
        if self._policy.deadlines:
            for seq in self._watch.hopeless(now):
                self._end(seq, FinishReason.REFUSED, now)
        builder = StepBuilder(self._next_step, self.knobs.max_num_batched_tokens, self.knobs.max_num_seqs)
        before = self._preemptions
        prefills = self._plan_decodes(builder)
        room = self.knobs.max_num_seqs - len(self._running) if self._preemptions == before else 0
        quota = self._quota(room, now)
        self._plan_prefills(builder, prefills, contended=quota > 0)
        self._admit(builder, room, quota, now)
        if not builder.entries and resized is None:
            return None
        return self._launch(builder, resized)

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, tuple[int, ...]]:
        """Take the result of the oldest plan in flight; return the tokens accepted per sequence.

        What came after a stop, an abort or a limit is dropped, as is a sample that a plan in flight took at a place that
        was passed meanwhile (the step before it gave several tokens).
        """
        flight = self._flights.popleft()
        assert flight.plan is plan, f"step {plan.step_id} completes out of order"
        self._completed = plan.step_id
        accepted: dict[int, tuple[int, ...]] = {}
        finished: list[SequenceState] = []
        useful = 0
        for entry, seq in zip(plan.scheduled, flight.sequences, strict=True):
            if seq.stage is Stage.ENDED:
                continue
            useful += 1
            end = entry.start + entry.num_tokens
            if entry.samples and end == seq.num_tokens:
                tokens = seq.accept(result.tokens[entry.seq_id], now)
                accepted[entry.seq_id] = tokens
                self._output_tokens += len(tokens)
                if seq.reason is not None:
                    finished.append(seq)
            if end >= seq.next_full and seq.stage is Stage.RUNNING:
                self._kv.register(seq, end)
        for seq in finished:
            assert seq.reason is not None
            self._end(seq, seq.reason, now)
        self._account(flight, useful)
        return accepted

    def gauges(self) -> Gauges:
        """Return the counts of now; step counts are sums over completed steps."""
        pool = self._kv.pool
        return Gauges(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            kv_blocks_cached=pool.num_cached,
            preemptions=self._preemptions,
            slot_steps=self._slot_steps,
            slot_steps_busy=self._busy,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )

    def check(self) -> None:
        """Assert the invariants of blocks and queues. O(blocks), for tests."""
        self._kv.check(self._running)
        assert all(seq.stage is Stage.RUNNING for seq in self._running), "a sequence runs in two places"
        assert sorted(self._running, key=lambda seq: seq.order) == self._running, "the running order is broken"
        assert len(list(self._waiting)) == len(self._waiting), "the queue and its count differ"
        assert len(self._sequences) == len(self._running) + len(self._waiting), "a sequence is nowhere"

    def _checked_limit(self, request: Request) -> int:
        """Return how many tokens the request may generate. Raises `RequestRefused` if it can never run."""
        if request.prompt_len < 1 or request.max_tokens < 1:
            raise RequestRefused("invalid", f"a request needs at least 1 prompt token and 1 new token, got {request}")
        if request.prompt_len >= self.max_model_len:
            raise RequestRefused(
                "too_long", f"the prompt has {request.prompt_len} tokens, the model takes {self.max_model_len - 1} at most"
            )
        limit = min(request.max_tokens, self.max_model_len - request.prompt_len)
        needed = self._kv.blocks_for(request.prompt_len + limit - 1)
        blocks = self._kv.pool.num_blocks if self._resize is None else self._resize
        if needed > blocks:
            raise RequestRefused(
                "kv_capacity",
                f"the request may grow to {request.prompt_len + limit} tokens, which is {needed} KV blocks, but the pool "
                f"has {blocks}: lower max_tokens, shorten the prompt or raise kvMemoryFraction",
            )
        return limit

    def _apply_knobs(self, now: float) -> None:
        before = self._board.apply()
        if before is None or before == self.knobs:
            return
        self._kv.set_caching(self.knobs.prefix_caching)
        policy = make_policy(self.knobs, self._model)
        if self._policy.gang and not policy.gang:
            self._gate.dissolve(now)
        self._use_policy(policy)

    def _use_policy(self, policy: Policy) -> None:
        self._policy = policy
        self._waiting.reorder(policy.key)
        self._watch = DeadlineWatch(policy.best_case)
        if policy.deadlines:
            self._watch.watch(self._sequences.values())

    def _rebuild_pool(self, now: float) -> int:
        """Preempt everything and replace the pool; return its size for the runner."""
        assert self._resize is not None and not self._flights
        num_blocks, self._resize = self._resize, None
        while self._running:
            self._preempt_last()
        self._preempted_since_step = 0  # not the load's fault: nothing to back off from
        self._kv.resize(num_blocks)
        capacity = num_blocks * self.knobs.block_size
        for seq in list(self._sequences.values()):
            seq.cap(min(seq.limit, capacity - seq.request.prompt_len + 1))
            if seq.output_len >= seq.limit:
                self._end(seq, FinishReason.LENGTH if seq.output_len else FinishReason.REFUSED, now)
        return num_blocks

    def _plan_decodes(self, builder: StepBuilder) -> list[SequenceState]:
        """Give every running sequence past its prompt its tokens; return those that still prefill."""
        prefills: list[SequenceState] = []
        for seq in self._running:
            wanted = seq.wanted
            if wanted <= 0:
                continue
            if seq.computed < seq.prefill_until:
                prefills.append(seq)
                continue
            if not builder.slots_left:
                break
            if wanted > 1:  # several tokens came at once: catch up, but leave the others theirs
                others = min(builder.slots_left, len(self._running)) - 1
                wanted = max(1, min(wanted, builder.tokens_left - others))
            if seq.computed + wanted <= seq.capacity or self._make_room(seq, seq.computed + wanted):
                builder.add(seq, wanted)
        return prefills

    def _plan_prefills(self, builder: StepBuilder, prefills: list[SequenceState], *, contended: bool) -> None:
        """Give the prompts that run their chunks, in the order of the strategy."""
        contended = contended or len(prefills) > 1 or bool(builder.entries)
        if len(prefills) > 1:
            prefills.sort(key=self._policy.key)
        for seq in prefills:
            self._add_chunk(builder, seq, contended=contended)

    def _add_chunk(self, builder: StepBuilder, seq: SequenceState, *, contended: bool) -> None:
        count = min(seq.wanted, builder.tokens_left)
        if contended:
            count = min(count, self.knobs.long_prefill_threshold)
        if count > 0 and builder.slots_left:
            count = self._policy.prefill_tokens(builder.shape, seq.computed, count)
            if count:
                builder.add(seq, count)

    def _queue_view(self, now: float) -> QueueView:
        first = self._waiting.first(now)
        return QueueView(
            now=now,
            waiting=len(self._waiting),
            oldest_arrival=now if first is None else first.request.arrival,
            idle=not self._running and not self._gate.is_open,
            source_closed=self._source_closed,
        )

    def _quota(self, room: int, now: float) -> int:
        """Return how many new sequences this step may admit into `room` slots."""
        if not self._waiting or room <= 0:
            return 0
        return min(room, self._policy.admissible(self._queue_view(now)))

    def _admit(self, builder: StepBuilder, room: int, quota: int, now: float) -> None:
        """Let waiting sequences in while slots, memory and budget last. Nobody overtakes the first of the queue."""
        while room > 0 and (self._policy.gang or builder.tokens_left > 0):
            seq = self._waiting.first(now)
            if seq is None or (quota <= 0 and not self._gate.is_member(seq)):
                break
            if not self._policy.may_join(builder.shape, seq) or not self._kv.admit(seq, alone=not self._running):
                break
            self._start(seq, now)
            room -= 1
            quota -= 1
            self._add_chunk(builder, seq, contended=bool(builder.entries) or quota > 0)

    def _start(self, seq: SequenceState, now: float) -> None:
        """Move an admitted sequence from the queue to those that run."""
        seq.stage = Stage.RUNNING
        seq.prefill_until = seq.known
        self._waiting.left()
        insort(self._running, seq, key=lambda s: s.order)
        if self._policy.gang and not self._gate.is_member(seq):
            self._gate.join(seq)
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.cached_len = seq.computed
            self._prompt_tokens += seq.request.prompt_len

    def _make_room(self, seq: SequenceState, positions: int) -> bool:
        """Grow the table of `seq`, preempting from the tail of the running order; False if it can't run in this step."""
        while not self._kv.grow(seq, positions):
            if self._kv.has_deferred:
                return False  # blocks come back when the plan in flight completes: no reason to evict anybody
            if self._preempt_last() is seq:
                return False
        return True

    def _preempt_last(self) -> SequenceState:
        victim = self._running.pop()
        self._kv.release(victim, self._completed)
        victim.preemptions += 1
        self._waiting.push(victim)
        self._preempted.append(victim.request.seq_id)
        self._preempted_since_step += 1
        self._preemptions += 1
        return victim

    def _launch(self, builder: StepBuilder, resized: int | None) -> StepPlan:
        plan = StepPlan(
            step_id=builder.step_id,
            epoch=self.epoch,
            scheduled=tuple(builder.entries),
            shape=builder.shape,
            preempted=tuple(self._preempted),
            removed=tuple(self._removed),
            resize_blocks=resized,
        )
        self._preempted.clear()
        self._removed.clear()
        self._next_step += 1
        self._kv.guard.after_step(self._preempted_since_step)
        self._preempted_since_step = 0
        self._flights.append(_Flight(plan, builder.sequences, self.knobs.max_num_seqs))
        return plan

    def _account(self, flight: _Flight, useful: int) -> None:
        self._kv.step_completed(self._completed)
        if flight.sequences:
            self._slot_steps += flight.slots
            self._busy += useful
        if not self.has_work:
            assert self._kv.pool.num_used == 0, "blocks leaked: the engine is idle and some are still in use"

    def _end(self, seq: SequenceState, reason: FinishReason, now: float) -> None:
        """End a sequence wherever it is; its blocks go when no plan in flight reads them."""
        if seq.stage is Stage.WAITING:
            self._waiting.left()
        else:
            self._running.remove(seq)
            self._kv.release(seq, self._completed)
        seq.stage, seq.reason, seq.end_epoch = Stage.ENDED, reason, self.epoch
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._kv.guard.history.observe(seq.output_len)
        del self._sequences[seq.request.seq_id]
        self._removed.append(seq.request.seq_id)
        self._gate.end(seq, now)
