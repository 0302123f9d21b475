"""A runner that checks what it is told to do, and a driver that ends what it starts.

The oracle keeps a KV pool whose slots hold a fingerprint of the whole prefix up to their position. A position that is read
must hold the fingerprint of the very tokens before it, so a block that was reused too early, shared wrongly or never
computed is caught where it is read. Tokens are a function of the prefix, so that no schedule may change them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline_core.errors import PacelineError, RequestRefused
from paceline_core.knobs import Knobs
from paceline_core.plan import ScheduledSequence, StepPlan, StepResult
from paceline_core.request import Ended, FinishReason, Request
from paceline_core.scheduler import Scheduler

VOCAB = 29


def next_token(fingerprint: int) -> int:
    return (fingerprint * 2654435761 >> 7) % VOCAB


def extend(fingerprint: int, token: int) -> int:
    return hash((fingerprint, token))


@dataclass
class RunnerSequence:
    tokens: list[int]
    salt: int = 0
    marks: list[int] = field(default_factory=list)  # fingerprint after each position
    computed: int = 0
    fresh: bool = True  # it may start anywhere that the cache covers

    def mark(self, position: int) -> int:
        while len(self.marks) <= position:
            before = self.marks[-1] if self.marks else self.salt
            self.marks.append(extend(before, self.tokens[len(self.marks)]))
        return self.marks[position]


class OracleRunner:
    def __init__(self, num_blocks: int, block_size: int, burst: int = 1) -> None:
        self.block_size = block_size
        self.burst = burst  # most tokens per sample
        self.num_blocks = num_blocks
        self.pool: dict[tuple[int, int], int] = {}
        self.sequences: dict[int, RunnerSequence] = {}
        self.computed_tokens = 0
        self.drafted = self.accepted = 0

    def add(self, request: Request) -> None:
        assert request.tokens is not None
        self.sequences[request.seq_id] = RunnerSequence(list(request.tokens), request.salt)

    def run(self, plan: StepPlan) -> StepResult:
        if plan.resize_blocks is not None:
            self.num_blocks = plan.resize_blocks
            self.pool.clear()
        for seq_id in plan.preempted:
            if seq_id in self.sequences:
                self.sequences[seq_id].fresh = True
        for seq_id in plan.removed:
            self.sequences.pop(seq_id, None)
        return StepResult({e.seq_id: made for e in plan.scheduled if (made := self._compute(e))}, 1.0)

    def _compute(self, entry: ScheduledSequence) -> tuple[int, ...]:
        made = self._compute_known(entry)
        return self._check_drafts(entry, *made) if entry.drafts else made

    def _check_drafts(self, entry: ScheduledSequence, first: int) -> tuple[int, ...]:
        """Compute the KV of all drafts, and give tokens up to the first that differs from the draft at its place."""
        seq, made = self.sequences[entry.seq_id], [first]
        end = entry.start + entry.num_tokens
        assert len(entry.block_table) * self.block_size >= end, "the block table is too short for the drafts"
        mark = seq.mark(end - len(entry.drafts) - 1)
        for position, draft in zip(range(end - len(entry.drafts), end), entry.drafts, strict=True):
            mark = extend(mark, draft)
            self.pool[entry.block_table[position // self.block_size], position % self.block_size] = mark
            if made[-1] == draft and len(made) == position - entry.start:
                made.append(next_token(mark))
                seq.tokens.append(made[-1])
        self.computed_tokens += len(entry.drafts)
        self.drafted += len(entry.drafts)
        self.accepted += len(made) - 1
        seq.computed = entry.start + len(made)
        return tuple(made)

    def _compute_known(self, entry: ScheduledSequence) -> tuple[int, ...]:
        seq = self.sequences[entry.seq_id]
        count = entry.num_tokens - len(entry.drafts)
        end = entry.start + count
        assert count > 0
        assert not entry.drafts or (count == 1 and entry.samples), "drafts come after the one token that is wanted"
        assert end <= len(seq.tokens), "a token is computed before it is known"
        assert seq.fresh or entry.start == seq.computed, "a position is skipped or computed twice"
        seq.fresh, seq.computed = False, end
        assert len(entry.block_table) * self.block_size >= end, "the block table is too short"
        assert len(set(entry.block_table)) == len(entry.block_table)
        for position in range(end):
            slot = (entry.block_table[position // self.block_size], position % self.block_size)
            assert slot[0] < self.num_blocks
            if position < entry.start:
                assert self.pool.get(slot) == seq.mark(position), f"position {position} was lost or never computed"
            else:
                self.pool[slot] = seq.mark(position)
        self.computed_tokens += count
        if end < len(seq.tokens):
            assert not entry.samples or self.burst > 1 or self.drafted, "it samples before the end of what is known"
            return ()
        assert entry.samples, "the end of what is known is reached and nothing is sampled"
        made = []
        for _ in range(1 if entry.drafts else 1 + seq.mark(end - 1) % self.burst):
            made.append(next_token(seq.mark(len(seq.tokens) - 1)))
            seq.tokens.append(made[-1])
        return tuple(made)


class OracleProposer:
    """Guesses well: `skill` is the chance that a draft is the token that comes; there are fewer at times unless `lavish`."""

    def __init__(self, requests: dict[int, Request], skill: float, *, lavish: bool = False) -> None:
        self.requests = requests
        self.skill = skill
        self.lavish = lavish
        self.random = random.Random(0)
        self.known: set[int] = set()

    def propose(self, seq_id: int, prompt: Sequence[int], generated: Sequence[int], most: int) -> tuple[int, ...]:
        self.known.add(seq_id)
        seq = RunnerSequence([*prompt, *generated], self.requests[seq_id].salt)
        for _ in range(most if self.lavish else self.random.randint(0, most)):
            token = next_token(seq.mark(len(seq.tokens) - 1))
            seq.tokens.append(token if self.random.random() < self.skill else self.random.randrange(VOCAB))
        return tuple(seq.tokens[len(prompt) + len(generated) :])

    def forget(self, seq_id: int) -> None:
        self.known.discard(seq_id)


def expected_output(request: Request, limit: int) -> tuple[list[int], FinishReason]:
    """What the request must give under any schedule, if nobody interferes."""
    seq = RunnerSequence(list(request.tokens or ()), request.salt)
    out: list[int] = []
    while len(out) < limit:
        out.append(next_token(seq.mark(len(seq.tokens) - 1)))
        seq.tokens.append(out[-1])
        if out[-1] in request.stop_token_ids and len(out) > request.min_tokens:
            return out, FinishReason.STOP
    return out, FinishReason.LENGTH


class Driver:
    """Scheduler and oracle together, with every promise of the scheduler checked at every call."""

    def __init__(
        self,
        knobs: Knobs,
        num_blocks: int,
        *,
        max_model_len: int = 256,
        depth: int = 1,
        burst: int = 1,
        skill: float | None = None,
        lavish: bool = False,
        **kwargs,
    ):
        self.requests: dict[int, Request] = {}
        self.proposer = None if skill is None else OracleProposer(self.requests, skill, lavish=lavish)
        self.scheduler = Scheduler(
            knobs,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            pipeline_depth=depth,
            proposer=self.proposer,
            **kwargs,
        )
        self.runner = OracleRunner(num_blocks, knobs.block_size, burst)
        self.depth = depth
        self.now = 0.0
        self.ended: dict[int, Ended] = {}
        self.outputs: dict[int, list[int]] = {}
        self.flights: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.applied = [0]  # epochs that were in force, in order
        self.epochs: dict[int, Knobs] = {0: knobs}

    def add(self, request: Request) -> bool:
        try:
            self.scheduler.add(request, self.now)
        except RequestRefused:
            return False
        self.requests[request.seq_id] = request
        self.outputs[request.seq_id] = []
        self.runner.add(request)
        return True

    def set_knobs(self, knobs: Knobs) -> None:
        self.epochs[self.scheduler.set_knobs(knobs)] = knobs

    def rollback(self) -> None:
        """Undo the last change of knobs, if there was one."""
        expected = self._knobs_before()
        try:
            epoch = self.scheduler.rollback_knobs()
        except PacelineError:
            return
        self.epochs[epoch] = expected

    def _knobs_before(self) -> Knobs:
        """What a rollback must bring back: a change that waits is dropped, else the newest earlier setting that differs."""
        in_force = [self.epochs[epoch] for epoch in self.applied]
        if max(self.epochs) > self.applied[-1]:
            return in_force[-1]
        return next((knobs for knobs in reversed(in_force) if knobs != in_force[-1]), in_force[-1])

    def abort(self, seq_id: int) -> bool:
        done = self.scheduler.abort(seq_id, self.now)
        self.collect()
        return done

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        if self.scheduler.epoch != self.applied[-1]:
            self.applied.append(self.scheduler.epoch)
        if plan is not None:
            assert len(self.flights) < self.depth
            self._check_plan(plan)
            self.flights.append(plan)
            self.plans.append(plan)
        self.collect()
        return plan

    def complete(self) -> dict[int, tuple[int, ...]]:
        plan = self.flights.popleft()
        result = self.runner.run(plan)
        live = {i for i in self.requests if i not in self.ended}
        accepted = self.scheduler.complete(plan, result, self.now)
        for seq_id, tokens in accepted.items():
            assert seq_id in live, "an ended sequence got tokens"
            assert tokens == result.tokens[seq_id][: len(tokens)] and tokens
            self.outputs[seq_id].extend(tokens)
        self.collect()
        return accepted

    def step(self, seconds: float = 1.0) -> StepPlan | None:
        plan = self.schedule()
        self.now += seconds
        if self.flights and (plan is None or len(self.flights) == self.depth):
            self.complete()
        return plan

    def drain(self, max_steps: int = 20_000) -> None:
        """Run until nothing is left; fails if that takes for ever."""
        self.scheduler.close_source()
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            if self.step() is None and not self.flights:
                event = self.scheduler.next_event(self.now)
                if event is not None:
                    assert event > self.now
                    self.now = event
        assert not self.scheduler.has_work, "a finite load must drain"
        assert set(self.ended) == set(self.requests), "every request ends exactly once"
        self.scheduler.check()
        gauges = self.scheduler.gauges()
        assert gauges.kv_blocks_used == 0
        assert gauges.draft_tokens <= self.runner.drafted  # those of sequences that ended meanwhile aren't counted
        assert gauges.accepted_drafts <= min(gauges.draft_tokens, self.runner.accepted)
        assert self.proposer is None or not self.proposer.known, "something is kept of a sequence that has ended"

    def collect(self) -> None:
        for ended in self.scheduler.take_ended():
            seq_id = ended.request.seq_id
            assert seq_id not in self.ended, "a request ended twice"
            assert ended.output_len == len(self.outputs[seq_id])
            self.ended[seq_id] = ended
        self.scheduler.check()

    def _check_plan(self, plan: StepPlan) -> None:
        knobs = self.scheduler.knobs
        assert plan.epoch == self.scheduler.epoch
        assert knobs == self.epochs[plan.epoch]
        assert len(plan.scheduled) <= knobs.max_num_seqs
        assert plan.num_drafts == sum(len(e.drafts) for e in plan.scheduled)
        assert plan.num_tokens == sum(e.num_tokens for e in plan.scheduled) <= knobs.max_num_batched_tokens
        assert len({e.seq_id for e in plan.scheduled}) == len(plan.scheduled)
        assert plan.scheduled or plan.resize_blocks is not None or plan.removed
        for entry in plan.scheduled:
            assert len(entry.drafts) <= knobs.speculative
            assert not entry.drafts or self.requests[entry.seq_id].draftable
            assert entry.seq_id not in plan.removed
            assert self.requests[entry.seq_id]
