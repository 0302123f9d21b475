"""The scheduler: requests in, step plans out, tokens back. Pure Python on ints, time is an argument.

```
 add ─▶ waiting ──admit──▶ running ──────────────▶ ended ─▶ take_ended
           ▲                  │ schedule ▸ plan ▸ complete
           └────preempt───────┘
```

How a step is filled is in `planner.py`; here is what surrounds it: requests, knobs, plans in flight, results.
"""

from __future__ import annotations

from paceline_core.admission import output_limit
from paceline_core.deadlines import DeadlineWatch
from paceline_core.gate import ResultGate
from paceline_core.knob_board import KnobBoard
from paceline_core.knobs import Knobs
from paceline_core.kv import KvCache
from paceline_core.pipeline import Pipeline
from paceline_core.plan import StepPlan, StepResult
from paceline_core.planner import Planner
from paceline_core.policies import Policy, make_policy
from paceline_core.request import Ended, FinishReason, Request, WaitReason
from paceline_core.sequence import SequenceState, Stage
from paceline_core.speculation import Proposer, Speculation
from paceline_core.step_builder import StepBuilder
from paceline_core.step_time import StepPredictor
from paceline_core.stride import Stride, find_stride
from paceline_core.wire import Gauges

__all__ = ["Scheduler"]


class Scheduler:
    """Decides who computes what in each step.

    `num_blocks` sizes the KV pool, `max_model_len` bounds prompt plus output (tokens), `pipeline_depth` is how many plans
    may be in flight (1 or 2). `step_model` lets `iteration` keep time objectives; without one it keeps priorities only.
    `proposer` makes the drafts that the knob `speculative` asks for; give none if the runner can't check them.
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
        step_model: StepPredictor | None = None,
        first_epoch: int = 0,
        proposer: Proposer | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self._pipeline = Pipeline(pipeline_depth)
        self._board = KnobBoard(knobs, first_epoch)
        self._model = step_model
        self._kv = KvCache(num_blocks, knobs.block_size, caching=knobs.prefix_caching)
        self._speculation = Speculation(proposer, self._kv)
        self._gate = ResultGate()
        policy = make_policy(knobs, step_model)
        self._planner = Planner(knobs, policy, self._kv, self._gate)
        self._watch = DeadlineWatch(policy.best_case)
        self._sequences: dict[int, SequenceState] = {}
        self._removed: list[int] = []  # news for the next plan
        self._resize: int | None = None
        self._output_tokens = 0

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""
        return self._board.knobs

    @property
    def epoch(self) -> int:
        """The epoch of the knobs in force: `first_epoch` at the start, one more per change."""
        return self._board.epoch

    @property
    def num_running(self) -> int:
        """Sequences that hold KV blocks."""
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission, preempted ones included."""
        return len(self._planner.waiting)

    @property
    def kv_blocks_used(self) -> int:
        """Blocks of the KV pool in use, as in `gauges`: a replay reads it each step."""
        return self._kv.pool.num_used

    @property
    def waits_for(self) -> WaitReason | None:
        """What the first of the queue waited for when the last step was planned; None: nobody waited."""
        return self._planner.waits_for

    @property
    def has_work(self) -> bool:
        """True while `schedule` or `complete` has something to do: sequences, plans, a change of knobs or of the pool."""
        return bool(self._sequences or self._pipeline) or self._board.is_pending or self._resize is not None

    @property
    def step_model(self) -> StepPredictor | None:
        """The step-time model that `iteration` predicts with."""
        return self._model

    @step_model.setter
    def step_model(self, model: StepPredictor | None) -> None:
        self._model = model
        self._use_policy(make_policy(self.knobs, model))

    def add(self, request: Request, now: float) -> None:
        """Take a request. Raises `RequestRefused` (`invalid`, `too_long`, `kv_capacity`) if it can never run here."""
        assert request.seq_id not in self._sequences, f"sequence {request.seq_id} is already here"
        num_blocks = self._kv.pool.num_blocks if self._resize is None else self._resize
        limit = output_limit(request, self.max_model_len, num_blocks, self.knobs.block_size)
        self._sequences[request.seq_id] = seq = SequenceState(request, limit, self._board.epoch)
        self._kv.hash_known(seq)  # a long prompt's hashes take milliseconds: not while a step is planned
        self._planner.waiting.push(seq)
        if self._planner.policy.deadlines:
            self._watch.watch((seq,))

    def abort(self, seq_id: int, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request from outside (also with STOP, when a stop text was seen). False if it isn't here any more."""
        if (seq := self._sequences.get(seq_id)) is None:
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
        self._planner.source_closed = True

    def reopen_source(self) -> None:
        """Say that requests may come again."""
        self._planner.source_closed = False

    def next_event(self, now: float) -> float | None:
        """Return when `schedule`, which just returned None, may decide otherwise without any new input; None: never."""
        times = []
        if self._planner.policy.gang and self._planner.waiting:
            times.append(self._planner.policy.flush_at(self._planner.queue_view(now)))
        if self._planner.policy.deadlines:
            times.append(self._watch.next_time() or 0.0)
        return min((t for t in times if now < t < float("inf")), default=None)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if nothing can run now or `pipeline_depth` plans are in flight."""
        if self._pipeline.is_full:
            return None
        self._apply_knobs(now)
        resized = None
        if self._resize is not None:
            if self._pipeline:
                return None  # the runner rebuilds its pool when no block is in use
            resized = self._rebuild_pool(now)
        for seq in self._watch.hopeless(now) if self._planner.policy.deadlines else ():
            self._end(seq, FinishReason.REFUSED, now)
        builder = StepBuilder(self._pipeline.next_step, self.knobs.max_num_batched_tokens, self.knobs.max_num_seqs)
        self._planner.fill(builder, now)
        self._speculation.fill(builder, self._planner)
        if not builder.entries and resized is None:
            return None
        return self._launch(builder, resized)

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, tuple[int, ...]]:
        """Take the result of the oldest plan in flight; return the tokens accepted per sequence.

        What came after a stop, an abort or a limit is dropped, as is a sample that a plan in flight took at a place that
        was passed meanwhile (the step before it gave several tokens).
        """
        sequences = self._pipeline.land(plan)
        self._kv.step_completed(plan.step_id)
        accepted: dict[int, tuple[int, ...]] = {}
        finished: list[tuple[SequenceState, FinishReason]] = []
        useful = 0
        for entry, seq in zip(plan.scheduled, sequences, strict=True):
            if seq.stage is Stage.ENDED:
                continue
            useful += 1
            end = entry.start + entry.num_tokens - len(entry.drafts)
            if entry.samples and end == seq.request.prompt_len + seq.output_len:  # `num_tokens`, without a call
                accepted[entry.seq_id] = tokens = seq.accept(result.tokens[entry.seq_id], now)
                if entry.drafts:
                    end = self._speculation.judge(entry, seq, plan, result, self._model)
                self._output_tokens += len(tokens)
                if seq.reason is not None:
                    finished.append((seq, seq.reason))
            if end >= seq.next_full and entry.block_table is seq.block_table:  # else it was admitted again since
                self._kv.register(seq, end)
        for seq, reason in finished:
            self._end(seq, reason, now)
        self._pipeline.slot_steps_busy += useful
        assert self._sequences or self._pipeline or not self._kv.pool.num_used, "blocks leaked: some are in use by nobody"
        return accepted

    def find_stride(self, now: float) -> Stride | None:
        """Return the steps from `now` on that can only repeat each other while nothing comes from outside, if any."""
        timed = self._planner.policy.deadlines and self._watch.next_time() is not None
        if timed or self._board.is_pending or self._resize is not None or self._speculation.may_draft(self.knobs):
            return None
        return find_stride(self._planner, self._kv, self._pipeline, now)

    def skip(self, stride: Stride, steps: int, now: float) -> StepPlan | None:
        """Be `steps` of `stride` further, at `now`; return the plan then in flight. Only a stateless runner can follow."""
        self._removed.clear()
        self._output_tokens += steps * len(stride.sequences)
        return stride.take(steps, now)

    def gauges(self) -> Gauges:
        """Return the counts of now; step counts are sums over completed steps."""
        counts = {**self._pipeline.gauges(), **self._speculation.gauges()}
        return self._planner.gauges(output_tokens=self._output_tokens, **counts)

    def check(self) -> None:
        """Assert the invariants of blocks and queues. O(blocks), for tests."""
        self._kv.check(self._planner.running)
        self._planner.check()
        assert len(self._sequences) == self.num_running + self.num_waiting, "a sequence is nowhere"

    def _apply_knobs(self, now: float) -> None:
        before = self._board.apply()
        if before is None or before == self.knobs:
            return
        self._kv.set_caching(self.knobs.prefix_caching)
        policy = make_policy(self.knobs, self._model)
        if self._planner.policy.gang and not policy.gang:
            self._gate.dissolve(now)
        self._use_policy(policy)

    def _use_policy(self, policy: Policy) -> None:
        self._planner.use(self.knobs, policy)
        self._watch = DeadlineWatch(policy.best_case)
        if policy.deadlines:
            self._watch.watch(self._sequences.values())

    def _rebuild_pool(self, now: float) -> int:
        """Preempt everything and replace the pool; return its size for the runner."""
        assert self._resize is not None and not self._pipeline
        num_blocks, self._resize = self._resize, None
        self._planner.preempt_all()
        self._kv.resize(num_blocks)
        for seq in list(self._sequences.values()):
            seq.cap(min(seq.limit, num_blocks * self.knobs.block_size - seq.request.prompt_len + 1))
            if seq.output_len >= seq.limit:
                self._end(seq, FinishReason.LENGTH if seq.output_len else FinishReason.REFUSED, now)
        return num_blocks

    def _launch(self, builder: StepBuilder, resized: int | None) -> StepPlan:
        plan = builder.build(self.epoch, self._planner.preempted, self._removed, resized)
        # what made way for urgent work, or for a pool that was resized, is no sign of too much load
        self._kv.guard.after_step(0 if resized else len(plan.preempted) - self._planner.yielded)
        self._planner.preempted.clear()
        self._planner.yielded = 0
        self._removed.clear()
        self._pipeline.launch(plan, builder.sequences, self.knobs.max_num_seqs)
        return plan

    def _end(self, seq: SequenceState, reason: FinishReason, now: float) -> None:
        """End a sequence wherever it is; its blocks go when no plan in flight reads them."""
        self._planner.remove(seq)
        seq.stage, seq.reason, seq.end_epoch = Stage.ENDED, reason, self.epoch
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._kv.guard.history.observe(seq.output_len)
        del self._sequences[seq.request.seq_id]
        self._removed.append(seq.request.seq_id)
        self._speculation.forget(seq.request.seq_id)
        self._gate.end(seq, now)
