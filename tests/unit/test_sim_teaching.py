"""The textbook examples, to the digit, and the replay that gives them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_core.errors import FormatError, KnobError, RequestRefused
from paceline_core.knobs import Knobs, Strategy
from paceline_core.step_time import StepModel
from paceline_sim import Result, Trace, TraceRequest, simulate, teach

STREAM = (120, 30, 60, 300, 40, 90, 25, 150, 50, 70, 35, 80)
BURST = (8, 2, 2, 2, 6, 4, 4, 4)


def run(lengths, strategy: str, *, every: float = 0, slots: int = 4, max_wait: float = 15) -> Result:
    return teach(lengths, every=every, slots=slots, strategy=Strategy(strategy), max_wait=max_wait)


@pytest.mark.parametrize(
    ("strategy", "steps", "percent", "mean", "first_two"),
    [
        ("static", 560, 47, 402, (330, 320)),
        ("dynamic", 665, 39, 418, (135, 125)),
        ("continuous", 330, 80, 118, (120, 30)),
        ("iteration", 330, 80, 118, (120, 30)),
    ],
)
def test_twelve_requests_every_ten_steps(strategy, steps, percent, mean, first_two):
    result = run(STREAM, strategy, every=10)
    assert result.duration == steps
    assert round(100 * result.slot_utilisation) == percent
    assert round(result.mean_latency) == mean
    assert result.latencies[:2] == first_two


@pytest.mark.parametrize(("strategy", "steps", "percent"), [("static", 14, 57), ("dynamic", 14, 57), ("continuous", 10, 80)])
def test_eight_requests_at_once(strategy, steps, percent):
    result = run(BURST, strategy)
    assert (result.duration, round(100 * result.slot_utilisation)) == (steps, percent)


def test_one_long_request_holds_three_short_ones():
    result = run((20, 50, 100, 500), "static")
    assert result.slot_utilisation == pytest.approx(0.335)
    assert result.latencies == (500, 500, 500, 500)


def test_dynamic_waits_no_longer_than_it_may():
    assert run((5,), "dynamic", max_wait=7).latencies == (12,)
    assert run((5, 5, 5, 5), "dynamic", max_wait=7).latencies == (5, 5, 5, 5)  # a full batch doesn't wait
    assert run((5, 5), "dynamic", every=7, max_wait=7).latencies == (12, 5)  # who comes at that very moment is taken along


def test_static_flushes_when_the_source_has_ended():
    assert run((5, 5, 3), "static", every=2, slots=2).latencies == (7, 5, 6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    every=st.integers(0, 12),
    slots=st.integers(1, 6),
    strategy=st.sampled_from(Strategy),
)
def test_every_length_takes_its_steps_and_no_slot_serves_two(lengths, every, slots, strategy):
    result = teach(lengths, every=every, slots=slots, strategy=strategy, max_wait=9)
    assert [o.output_len for o in result.outcomes] == lengths
    for outcome in result.outcomes:
        assert outcome.arrival <= outcome.started
        assert outcome.last_token - outcome.started == outcome.output_len
        assert outcome.released >= outcome.last_token
        if strategy in (Strategy.CONTINUOUS, Strategy.ITERATION):
            assert outcome.released == outcome.last_token
    starts = sorted(o.started for o in result.outcomes)
    for moment in starts:
        assert sum(o.started <= moment < o.released for o in result.outcomes) <= slots
    assert result.busy == sum(lengths)
    assert result.slot_utilisation <= 1


def test_continuous_equals_a_plain_queue_simulation():
    """An independent model of `continuous`: each request takes the slot that frees first."""
    free = [0.0] * 3
    expected = []
    for index, length in enumerate(STREAM):
        start = max(index * 7, min(free))
        free[free.index(min(free))] = start + length
        expected.append(start + length - index * 7)
    assert list(run(STREAM, "continuous", every=7, slots=3).latencies) == expected


def test_bad_input_names_what_is_wrong():
    with pytest.raises(FormatError, match="no request"):
        run((), "static")
    with pytest.raises(FormatError, match="request 2 has 1 prompt and 0 output tokens"):
        run((3, 0), "static")
    with pytest.raises(KnobError, match="maxQueueDelay"):
        run((3,), "dynamic", max_wait=-1)
    with pytest.raises(FormatError, match="request 2 arrives at 1, earlier than 2"):
        Trace((TraceRequest(2, 1, 1), TraceRequest(1, 1, 1)))


def test_prefill_costs_what_the_model_says_and_the_pipeline_only_hides_the_planning():
    model = StepModel(constant=0.01, decode_tokens=0.001, prefill_tokens=0.0001)
    trace = Trace.regular([4] * 6, every=0.05, prompt_len=100)
    knobs = Knobs(max_num_seqs=4, max_num_batched_tokens=64)
    one, two = (simulate(trace, knobs, model, num_blocks=100, max_model_len=512, pipeline_depth=depth) for depth in (1, 2))
    first = one.outcomes[0]
    # 100 prompt tokens in chunks of 64 and 36, while nobody else is there
    assert first.first_token == pytest.approx(2 * 0.01 + 100 * 0.0001)
    assert [o.output_len for o in two.outcomes] == [4] * 6
    # the work is the same; at depth 2 a request may join one step later
    assert two.duration == pytest.approx(one.duration, rel=0.5)
    assert two.busy > 0


def test_a_request_that_can_never_fit_is_refused_with_its_reason():
    trace = Trace.regular([4], every=0, prompt_len=100)
    with pytest.raises(RequestRefused, match="model's length is 64") as caught:
        simulate(trace, Knobs(), StepModel(1.0), num_blocks=100, max_model_len=64)
    assert caught.value.reason == "too_long"


def test_shared_prefixes_are_reused_in_the_replay():
    request = TraceRequest(0.0, 65, 2, prefix_hashes=(1, 2, 3, 4))
    later = TraceRequest(100.0, 65, 2, prefix_hashes=(1, 2, 3, 9))
    model = StepModel(constant=0.0, prefill_tokens=1.0)
    result = simulate(Trace((request, later)), Knobs(), model, num_blocks=20, max_model_len=128)
    assert result.outcomes[0].first_token == 65
    assert result.outcomes[1].first_token == 100 + 65 - 48  # three blocks of 16 were there already
