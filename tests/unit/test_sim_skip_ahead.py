"""Skipping ahead changes nothing: every step, every request and every count equal the plain loop's to the last bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from paceline_core.causes import Breakdown
from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_sim import Result, Trace, TraceRequest, simulate

BLOCK = 4
MAX_LEN = 120
LIMIT = 8
# odd numbers on purpose: sums in another order would differ in the last bits
MODELS = (
    StepModel(1.0),
    StepModel(0.0107, 0.00131, 0.00017, 0.0000313, 0.00000711),
    StepModel(0.3, 0.07, seen={"decode_tokens": (1.0, 3.0), "prefill_tokens": (0.0, 9.0)}, residual=0.1),
)

knob_sets = st.builds(
    lambda strategy, seqs, extra, delay, preferred, flush, long, caching, tpot, ttft: Knobs(
        strategy=strategy,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + extra,
        max_queue_delay=delay,
        preferred_batch_sizes=preferred,
        static_flush=flush,
        long_prefill_threshold=long,
        prefix_caching=caching,
        slo_tpot=tpot,
        slo_ttft=ttft,
        max_num_seqs_limit=LIMIT,
        block_size=BLOCK,
    ),
    strategy=st.sampled_from(Strategy),
    seqs=st.integers(1, LIMIT),
    extra=st.sampled_from([0, 1, 7, 200]),
    delay=st.sampled_from([0.0, 0.05, 15.0]),
    preferred=st.sampled_from([(), (2,), (2, 4)]),
    flush=st.sampled_from([1.0, 10.0, math.inf]),
    long=st.sampled_from([1, 5, 64]),
    caching=st.booleans(),
    tpot=st.sampled_from([None, 0.02, 0.5]),
    ttft=st.sampled_from([None, 5.0]),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Few or many requests, together or far apart, short or as long as may be, often with a shared prefix."""
    scale = draw(st.sampled_from([0.0, 0.03, 1.0, 40.0]))
    requests, arrival = [], draw(st.sampled_from([0.0, 3.7]))
    for _ in range(draw(st.integers(1, 24))):
        arrival += scale * draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.9]))
        prompt = draw(st.integers(1, 60))
        family, shared = draw(st.integers(0, 1)), draw(st.integers(0, 15))
        hashes = [1000 * family + i if i < shared else len(requests) * 100 + 5000 + i for i in range(prompt // BLOCK)]
        requests.append(
            TraceRequest(
                arrival,
                prompt,
                draw(st.sampled_from([1, 2, 3, 9, 33, 60])),
                priority=draw(st.sampled_from([0, 0, 1, -1])),
                prefix_hashes=tuple(hashes) if draw(st.booleans()) else (),
            )
        )
    return Trace(tuple(requests))


def replay(trace: Trace, knobs: Knobs, model: StepModel, blocks: int, depth: int, *, skip: bool):
    steps: list[tuple[float, float, StepShape, int]] = []
    result = simulate(
        trace, knobs, model, num_blocks=blocks, max_model_len=MAX_LEN, pipeline_depth=depth, skip_ahead=skip,
        on_step=lambda *step: steps.append(step),
    )  # fmt: skip
    return result, steps


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    trace=traces(),
    knobs=knob_sets,
    model=st.sampled_from(MODELS),
    blocks=st.sampled_from([30, 34, 60, 200]),
    depth=st.sampled_from([1, 2]),
)
def test_skipping_ahead_equals_the_plain_loop_step_for_step(
    trace: Trace, knobs: Knobs, model: StepModel, blocks: int, depth: int
) -> None:
    plain, plain_steps = replay(trace, knobs, model, blocks, depth, skip=False)
    quick, quick_steps = replay(trace, knobs, model, blocks, depth, skip=True)
    event("preempts" if plain.preemptions else "no preemption")
    event("shares" if any(o.cached_len for o in plain.outcomes) else "shares nothing")
    assert quick_steps == plain_steps
    assert quick == plain
    untold = simulate(trace, knobs, model, num_blocks=blocks, max_model_len=MAX_LEN, pipeline_depth=depth, details=False)
    assert untold == replace(quick, outcomes=tuple(replace(o, parts=Breakdown()) for o in quick.outcomes), series=())
    for outcome in plain.outcomes:
        assert outcome.parts.total == pytest.approx(outcome.latency, abs=1e-9)
        assert min(outcome.parts.by_cause().values()) >= -1e-9


@dataclass
class Counting:
    """A model that counts how many steps were planned one by one and how many were skipped."""

    model: StepModel
    constant: float = 0.01
    residual: float = 0.0
    planned: int = 0
    skipped: int = 0

    def predict(self, shape: StepShape) -> float:
        self.planned += 1
        return self.model.predict(shape)

    def predict_decode(self, sequences: int, context_tokens: int) -> float:
        self.skipped += 1
        return self.model.predict_decode(sequences, context_tokens)

    def outside(self, shape: StepShape) -> tuple[str, ...]:
        return ()


def count(trace: Trace, knobs: Knobs, *, depth: int = 1, blocks: int = 2000) -> tuple[Result, Counting]:
    model = Counting(StepModel(0.01, 0.001))
    return simulate(trace, knobs, model, num_blocks=blocks, max_model_len=4096, pipeline_depth=depth), model


@pytest.mark.parametrize("depth", [1, 2])
def test_almost_all_steps_of_a_long_answer_are_skipped(depth):
    result, model = count(Trace.regular([1000, 990, 995], every=0, prompt_len=20), Knobs(), depth=depth)
    assert model.planned <= 10
    assert model.skipped >= result.steps - 10 >= 990


def test_a_queue_behind_full_slots_doesnt_stop_the_skipping():
    result, model = count(Trace.regular([500] * 8, every=0, prompt_len=20), Knobs(max_num_seqs=2))
    assert result.steps == 4 * 500
    assert model.planned <= 30


def test_a_queue_that_lacks_memory_doesnt_stop_the_skipping():
    result, model = count(Trace.regular([300] * 6, every=0, prompt_len=100), Knobs(), blocks=55)
    assert result.preemptions == 0
    assert max(o.queued for o in result.outcomes) > 0
    assert model.planned <= 40


def test_patience_that_runs_out_during_a_stride_is_seen():
    """An urgent prompt too large for the pool stands before an older one that would fit, and may after a minute."""
    trace = Trace((TraceRequest(0.0, 40, 75), TraceRequest(0.5, 4, 5, priority=5), TraceRequest(0.5, 60, 60)))
    knobs = Knobs(strategy=Strategy.ITERATION, max_num_seqs=LIMIT, max_num_seqs_limit=LIMIT, block_size=BLOCK)
    plain, plain_steps = replay(trace, knobs, MODELS[0], 31, 1, skip=False)
    quick, quick_steps = replay(trace, knobs, MODELS[0], 31, 1, skip=True)
    assert 60 < plain.outcomes[1].queued < 62
    assert (quick, quick_steps) == (plain, plain_steps)


def test_a_queue_that_would_break_the_objective_doesnt_stop_the_skipping():
    knobs = Knobs(strategy=Strategy.ITERATION, slo_tpot=0.0115)  # one decode takes 11 ms, two would take 12
    trace = Trace(tuple(TraceRequest(0.05 * i, 10, 300) for i in range(3)))
    result, model = count(trace, knobs)
    assert result.outcomes[2].parts.objective > 3
    assert model.skipped >= result.steps - 20


@pytest.mark.parametrize("depth", [1, 2])
def test_a_guard_that_recovers_during_a_stride_is_seen(depth):
    """After a preemption admission backs off; what waits is let in as soon as the guard has recovered far enough."""
    requests = ((0.0, 30, 200), (40.0, 4, 20), (40.0, 33, 200), (43.0, 37, 20))
    trace = Trace(tuple(TraceRequest(*request) for request in requests))
    knobs = Knobs(max_num_seqs=LIMIT, max_num_seqs_limit=LIMIT, block_size=BLOCK)
    results = []
    for skip in (False, True):
        steps: list[tuple[float, float, StepShape, int]] = []
        result = simulate(
            trace, knobs, MODELS[0], num_blocks=80, max_model_len=300, pipeline_depth=depth, skip_ahead=skip,
            on_step=lambda *step, log=steps: log.append(step),
        )  # fmt: skip
        results.append((result, steps))
    assert results[0] == results[1]
    assert results[0][0].preemptions == 1
