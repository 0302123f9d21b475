"""Interactive work beside batch work under `iteration`: the one keeps its time per token, the other fills what is left."""

from __future__ import annotations

import pytest
from core_oracle import Driver

from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepResult
from paceline_core.request import BATCH_PRIORITY, FinishReason, Request
from paceline_core.scheduler import Scheduler
from paceline_core.step_time import StepModel
from paceline_core.waiting import PATIENCE
from paceline_sim import Result, Trace, TraceRequest, simulate

# 10 ms and 2 ms per decoding sequence: 15 decodes take 40 ms
MODEL = StepModel(0.01, decode_tokens=0.002, prefill_tokens=0.0002)
OBJECTIVE = 0.04


def run(*requests: TraceRequest, blocks: int = 4000, **knobs: object) -> Result:
    settings = Knobs(**{"strategy": Strategy.ITERATION, "slo_tpot": OBJECTIVE, "max_num_seqs": 32, **knobs})  # type: ignore[arg-type]
    ordered = sorted(requests, key=lambda request: request.arrival)
    return simulate(Trace(tuple(ordered)), settings, MODEL, num_blocks=blocks, max_model_len=4000)


def batch(count: int, at: float = 0.0, output: int = 200) -> list[TraceRequest]:
    return [TraceRequest(at, 40, output, BATCH_PRIORITY) for _ in range(count)]


def interactive(count: int, start: float = 1.0, every: float = 0.25, output: int = 60) -> list[TraceRequest]:
    return [TraceRequest(start + i * every, 100, output) for i in range(count)]


def tpots(result: Result, *, of_batch: bool, trace: list[TraceRequest]) -> list[float]:
    ordered = sorted(trace, key=lambda request: request.arrival)
    picked = [o for o, r in zip(result.outcomes, ordered, strict=True) if (r.priority >= BATCH_PRIORITY) == of_batch]
    return [o.tpot for o in picked if o.tpot is not None]


def test_interactive_keeps_its_objective_while_batch_fills_the_rest() -> None:
    trace = [*batch(60), *interactive(40)]
    result = run(*trace)
    assert all(o.reason is FinishReason.LENGTH for o in result.outcomes)
    urgent = tpots(result, of_batch=False, trace=trace)
    assert max(urgent) <= OBJECTIVE * 1.05
    # without tiers the same load breaks it: all 32 slots decode together in 74 ms
    flat = [TraceRequest(r.arrival, r.prompt_len, r.output_len) for r in trace]
    unguarded = run(*flat, slo_tpot=None)
    assert max(o.tpot for o in unguarded.outcomes if o.tpot is not None) > OBJECTIVE * 1.5
    # and batch work isn't kept out: while interactive work runs it has most of the step
    alone = run(*interactive(40))
    batch_ends = max(o.last_token for o, r in zip(result.outcomes, sorted(trace, key=lambda r: r.arrival), strict=True)
                     if r.priority >= BATCH_PRIORITY and o.last_token is not None)  # fmt: skip
    assert batch_ends < alone.duration + 60 * 200 * 0.03 / 10


def test_batch_work_alone_has_no_objective() -> None:
    trace = batch(32)
    result = run(*trace)
    assert min(tpots(result, of_batch=True, trace=trace)) > OBJECTIVE  # all 32 decode at once
    assert result.duration < 200 * (0.01 + 32 * 0.002) * 1.1


def test_urgent_work_gets_a_slot_from_batch_work_at_once() -> None:
    trace = [*batch(8, output=400), TraceRequest(1.0, 20, 10)]
    result = run(*trace, max_num_seqs=8)
    urgent = result.outcomes[8]
    assert urgent.queued < 0.1  # not until one of the eight has ended, which takes ten seconds
    assert result.preemptions == 1
    assert [o.output_len for o in result.outcomes] == [400] * 8 + [10]


def test_urgent_work_gets_memory_from_batch_work() -> None:
    trace = [*batch(4, output=300), TraceRequest(2.0, 300, 10)]
    result = run(*trace, blocks=90, max_num_seqs=16)
    assert result.outcomes[4].queued < 0.2
    assert all(o.reason is FinishReason.LENGTH for o in result.outcomes)


def test_urgent_work_does_not_take_from_its_like() -> None:
    trace = [TraceRequest(0.0, 40, 200) for _ in range(8)] + [TraceRequest(1.0, 20, 10)]
    result = run(*trace, max_num_seqs=8, slo_tpot=None)
    assert result.preemptions == 0


def test_batch_work_that_made_way_is_served_after_a_while() -> None:
    """A stream of urgent work that would fill every slot for ever must not keep what waits for a minute out for ever."""
    trace = [*batch(1, output=400), *(TraceRequest(0.5 + 0.05 * i, 10, 30) for i in range(2600))]
    result = run(*trace, max_num_seqs=2, slo_tpot=None)
    last = result.outcomes[0].last_token
    assert last is not None
    assert last < 120 < result.duration


def test_batch_work_that_has_lost_its_patience_and_batch_work_that_runs_do_not_swap_for_ever() -> None:
    """The patient one gets the priority of the urgent one that it goes before. That one leaves before there is memory: the
    patient one must then go before what made way for it, also without it."""
    knobs = Knobs(strategy=Strategy.ITERATION, max_num_seqs=1, max_num_batched_tokens=8, block_size=4, prefix_caching=False)
    driver = Driver(knobs, num_blocks=10, depth=2)

    def add(seq_id: int, prompt: int, priority: int, output: int) -> None:
        request = Request(seq_id, prompt, output, driver.now, priority, tokens=[seq_id] * prompt)
        assert driver.add(request)

    add(0, 16, BATCH_PRIORITY, 20)
    driver.step()
    add(1, 28, BATCH_PRIORITY, 4)
    add(2, 4, 0, 4)
    driver.now = PATIENCE + 1
    driver.schedule()  # 0 makes way for 1, whose blocks are still read by the plan in flight
    driver.abort(2)
    driver.drain(max_steps=200)
    assert [driver.ended[i].output_len for i in (0, 1)] == [20, 4]
    assert driver.scheduler.gauges().preemptions == 1


def test_batch_work_that_comes_back_while_its_last_step_is_in_flight_shares_no_block_before_it_is_computed() -> None:
    driver = Driver(
        Knobs(strategy=Strategy.ITERATION, max_num_seqs=1, max_num_batched_tokens=3, block_size=4),
        num_blocks=10, depth=2, step_model=MODEL,
    )  # fmt: skip

    def add(seq_id: int, tokens: list[int], priority: int) -> None:
        assert driver.add(Request(seq_id, len(tokens), 38 - len(tokens), driver.now, priority, tokens=tokens))

    add(0, [1, 2, 3, 4], BATCH_PRIORITY)
    while len(driver.outputs[0]) < 8:
        driver.schedule()
        driver.complete()
    driver.schedule()  # position 11, the last one of its third block
    add(1, [5] * 33, 0)
    assert driver.schedule() is None  # 0 makes way, but its blocks are in use
    driver.abort(1)
    plan = driver.schedule()
    assert plan is not None
    assert [(s.start, s.num_tokens) for s in plan.scheduled] == [(8, 3)]  # most of the third block, in other memory
    driver.complete()
    driver.abort(0)
    add(2, [1, 2, 3, 4, *driver.outputs[0]], 0)
    driver.drain()  # the oracle reads what it is told to share
    assert driver.ended[2].cached_len == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_skipping_ahead_changes_nothing_where_tiers_mix(depth: int) -> None:
    trace = Trace(tuple(sorted([*batch(12), *interactive(10)], key=lambda request: request.arrival)))
    knobs = Knobs(strategy=Strategy.ITERATION, slo_tpot=0.03, max_num_seqs=16)
    results = [
        simulate(trace, knobs, MODEL, num_blocks=300, max_model_len=1000, pipeline_depth=depth, skip_ahead=skip)
        for skip in (True, False)
    ]
    assert results[0].outcomes == results[1].outcomes


def test_decodes_come_first_in_a_step_also_where_batch_work_comes_last() -> None:
    scheduler = Scheduler(
        Knobs(strategy=Strategy.ITERATION, slo_tpot=0.5, max_num_seqs=8), num_blocks=100, max_model_len=500, step_model=MODEL
    )
    scheduler.add(Request(1, 20, 50, 0.0, priority=BATCH_PRIORITY), 0.0)
    scheduler.add(Request(2, 20, 50, 0.0), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.complete(plan, StepResult({s.seq_id: (0,) for s in plan.scheduled}, 0.1), 0.1)
    scheduler.add(Request(3, 20, 50, 0.1), 0.1)
    plan = scheduler.schedule(0.1)
    assert plan is not None
    assert [(s.seq_id, s.num_tokens) for s in plan.scheduled] == [(2, 1), (1, 1), (3, 20)]
    scheduler.check()
