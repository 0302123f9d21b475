"""Where a request's time went: what is injected must show under its own name, and nothing may be left over."""

from __future__ import annotations

import pytest

from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_sim import Result, Slo, Trace, TraceRequest, simulate, summarise, teach
from paceline_sim.report import Spread
from paceline_sim.tally import Point

# a step of 10 ms, and 1 ms more per prompt token
MODEL = StepModel(0.01, prefill_tokens=0.001)


def run(*requests: TraceRequest, blocks: int = 1000, **knobs: object) -> Result:
    return simulate(Trace(requests), Knobs(**knobs), MODEL, num_blocks=blocks, max_model_len=2000)  # type: ignore[arg-type]


def causes(result: Result, index: int) -> dict[str, float]:
    outcome = result.outcomes[index]
    assert outcome.parts.total == pytest.approx(outcome.latency)
    return {name: seconds for name, seconds in outcome.parts.by_cause().items() if seconds > 1e-9}


def test_alone_there_is_prefill_and_decode():
    assert causes(run(TraceRequest(0, 100, 11)), 0) == pytest.approx({"prefill": 0.11, "decode": 0.10})


def test_anothers_chunk_delays_a_decode_by_what_it_costs():
    result = run(TraceRequest(0, 10, 50), TraceRequest(0.2, 300, 1))
    first = causes(result, 0)
    assert first["delayed"] == pytest.approx(0.3)  # 300 tokens of 1 ms
    assert first["decode"] == pytest.approx(49 * 0.01)
    second = causes(result, 1)
    assert second["prefill"] == pytest.approx(0.31)
    assert second.keys() <= {"prefill", "boundary"}


def test_two_prompts_in_one_step_delay_each_other():
    result = run(TraceRequest(0, 40, 1), TraceRequest(0, 60, 1))
    assert causes(result, 0) == pytest.approx({"prefill": 0.05, "delayed": 0.06})
    assert causes(result, 1) == pytest.approx({"prefill": 0.07, "delayed": 0.04})


def test_waiting_for_a_step_to_end_and_for_a_slot():
    result = run(TraceRequest(0, 90, 10), TraceRequest(0.05, 1, 1), max_num_seqs=1)
    # the prompt takes 100 ms; after it the slot is taken for 9 more steps
    assert causes(result, 1) == pytest.approx({"boundary": 0.05, "slot": 0.09, "prefill": 0.011})


def test_waiting_for_memory():
    result = run(TraceRequest(0, 100, 21), TraceRequest(0.115, 100, 21), blocks=8)
    second = causes(result, 1)
    assert second["kv"] == pytest.approx(0.19, abs=0.011)
    assert set(second) == {"kv", "boundary", "prefill", "decode"}


def test_waiting_for_the_token_budget():
    result = run(TraceRequest(0, 100, 1), TraceRequest(0, 100, 1), max_num_batched_tokens=50, max_num_seqs=8)
    second = causes(result, 1)
    assert second["budget"] == pytest.approx(0.12)  # two steps of 50 tokens go to the first


def test_waiting_to_protect_the_objective_of_others():
    model = StepModel(0.01, decode_tokens=0.01)
    knobs = Knobs(strategy=Strategy.ITERATION, slo_tpot=0.025)  # one decode fits, a second one doesn't
    trace = Trace((TraceRequest(0, 1, 20), TraceRequest(0.05, 1, 5)))
    result = simulate(trace, knobs, model, num_blocks=100, max_model_len=100)
    assert result.outcomes[1].parts.objective > 0.2


def test_preemption_shows_as_such():
    result = run(*(TraceRequest(0, 32, 300) for _ in range(4)), blocks=40)
    assert result.preemptions > 0
    for outcome in result.outcomes:
        assert (outcome.parts.preempted > 0) == (outcome.preemptions > 0)
        assert outcome.parts.total == pytest.approx(outcome.latency)


def test_batches_are_waited_for_and_hold_what_has_ended():
    result = teach((4, 1, 2), every=0, slots=2, strategy=Strategy.STATIC)
    assert causes(result, 0) == {"prefill": 1.0, "decode": 3.0}
    assert causes(result, 1) == {"prefill": 1.0, "held": 3.0}
    assert causes(result, 2) == {"batch": 4.0, "prefill": 1.0, "decode": 1.0}


def test_summary_figures():
    result = run(TraceRequest(0, 100, 11), TraceRequest(1.0, 100, 11))
    summary = summarise(result, Slo(ttft=0.2, tpot=0.05))
    assert summary.attainment == 1.0
    assert summary.meets_slo
    assert summary.seconds == pytest.approx(1.21)
    assert summary.token_rate == pytest.approx(22 / 1.21)
    assert summary.goodput == summary.request_rate == pytest.approx(2 / 1.21)
    assert summary.ttft.p50 == pytest.approx(0.11)
    assert summary.tpot.p99 == pytest.approx(0.01)
    assert summary.busy == pytest.approx(0.42 / 1.21)
    assert summary.mean_batch == 1
    assert summary.kv_peak == pytest.approx(7 / 1000)
    assert summary.causes["prefill"] == pytest.approx(0.11)
    strict = summarise(result, Slo(ttft=0.1))
    assert (strict.attainment, strict.goodput, strict.meets_slo) == (0, 0, False)


def test_percentiles_are_values_that_occurred():
    spread = Spread.of([*map(float, range(1, 101)), None])
    assert (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99) == (50.5, 50, 90, 95, 99)
    assert Spread.of([3.0]) == Spread(3, 3, 3, 3, 3)
    assert Spread.of([]) == Spread(0, 0, 0, 0, 0)


def test_the_time_series_adds_up_and_stays_short():
    steps: list[tuple[float, float, StepShape, int]] = []
    trace = Trace.regular([30] * 300, every=0.07, prompt_len=20)
    result = simulate(
        trace, Knobs(), MODEL, num_blocks=1000, max_model_len=100, on_step=lambda *step: steps.append(step)
    )  # fmt: skip
    series: tuple[Point, ...] = result.series
    assert 60 < len(series) <= 240
    assert sum(point.steps for point in series) == len(steps) == result.steps
    assert sum(point.tokens for point in series) == 300 * 30
    assert sum(point.prefill for point in series) == 300 * 20
    assert sum(point.seconds for point in series) == pytest.approx(result.computing)
    assert max(point.kv_blocks for point in series) == result.kv_peak == max(step[3] for step in steps)
    assert [point.start for point in series] == sorted(point.start for point in series)


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms,tpot=50ms", Slo(0.5, 0.05)),
        (" e2e=10s , percentile=99%", Slo(e2e=10, percentile=99)),
        ("tpot=1m,percentile=p50", Slo(tpot=60, percentile=50)),
    ],
)
def test_slo_texts(text, slo):
    assert Slo.parse(text) == slo


def test_an_slo_counts_what_was_never_served_as_missed():
    outcome = run(TraceRequest(0, 5, 1)).outcomes[0]
    assert Slo(ttft=1.0, tpot=1e-9).met(outcome)  # a single token has no time per further token
    assert not Slo(e2e=1e-9).met(outcome)
    assert str(Slo(0.5, None, 2.0)) == "ttft ≤ 500ms, e2e ≤ 2s for 95 % of the requests"
