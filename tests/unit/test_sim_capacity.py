"""The roofline's arithmetic, the search over settings, and how many replicas a load needs."""

from __future__ import annotations

import pytest

from paceline_core.errors import FormatError, RequestRefused
from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepShape
from paceline_core.step_time import StepModel
from paceline_sim import Candidate, Engine, Roofline, Slo, Trace, candidates, evaluate, sweep_values
from paceline_sim.capacity import batch_points, share_of_one, size
from paceline_sim.generate import Lengths, poisson
from paceline_sim.hardware import ACCELERATORS, DTYPES, MODELS, find_accelerator, find_model

LLAMA = Roofline(find_model("llama-3.1-8b"), find_accelerator("h200"))


def pool(block_size: int, fraction: float) -> int:
    return 400


ENGINE = Engine(StepModel(0.02, decode_tokens=0.001, prefill_tokens=0.0001), pool, 2000)


def test_one_sequence_reads_the_weights_once_per_token():
    assert 1 / LLAMA.constant == pytest.approx(299, abs=0.5)  # 16.06 GB at 4.8 TB/s
    assert LLAMA.predict_decode(1, 0) == LLAMA.constant


def test_the_memory_wall_of_a_7b_model():
    llama2 = Roofline(find_model("llama-2-7b"), find_accelerator("h100"))
    assert llama2.constant == pytest.approx(0.004, rel=0.01)
    one, many = llama2.predict_decode(1, 100), llama2.predict_decode(32, 3200)
    assert many < 1.15 * one  # 32 times the tokens in nearly the same step


def test_prefill_is_bound_by_arithmetic_and_efficiency_scales_both():
    shape = StepShape(prefill_tokens=8192)
    assert LLAMA.predict(shape) == pytest.approx(8192 * 2 * 8.03e9 / 989e12)
    half = Roofline(LLAMA.model, LLAMA.accelerator, efficiency=0.5)
    assert half.predict(shape) == pytest.approx(2 * LLAMA.predict(shape))
    assert half.predict_decode(4, 4000) == pytest.approx(2 * LLAMA.predict_decode(4, 4000))
    for decodes, context in ((1, 5), (64, 64_000), (512, 512), (512, 1_000_000)):
        assert LLAMA.predict_decode(decodes, context) == LLAMA.predict(StepShape(decodes, 0, context, 0))
    with pytest.raises(FormatError, match="efficiency is 0"):
        Roofline(LLAMA.model, LLAMA.accelerator, efficiency=0)


def test_memory_and_what_doesnt_fit():
    blocks = LLAMA.num_blocks(16, 0.9)
    assert blocks * 16 * 131072 == pytest.approx((0.95 * 141e9 - 16.06e9) * 0.9, rel=1e-4)
    big = Roofline(find_model("llama-3.1-70b"), find_accelerator("h100"))
    with pytest.raises(FormatError, match=r"llama-3.1-70b doesn't fit one h100: its weights are 141.1 GB"):
        big.num_blocks(16, 0.9)
    assert Roofline(big.model, find_accelerator("h100"), DTYPES["int4"]).num_blocks(16, 0.9) > 0


def test_the_tables_hold_what_they_should():
    for model in MODELS.values():
        assert model.heads % model.kv_heads == 0
        hidden = model.heads * model.head_dim
        # weights are within a factor of what attention and a feed-forward of 2.5 to 5.5 times the width hold
        assert 0.4 < model.parameters / (model.layers * hidden * hidden * 12) < 2.5, model.name
    assert all(device.memory > 1e10 < device.bandwidth * 1e2 for device in ACCELERATORS.values())
    with pytest.raises(FormatError, match="'gpt-9' is not a built-in model: use one of smollm2-135m"):
        find_model("gpt-9")
    with pytest.raises(FormatError, match="not a built-in accelerator"):
        find_accelerator("abacus")


def test_batches_share_the_reading_of_the_weights():
    points = batch_points(LLAMA, 1000, 100_000)
    assert [p.sequences for p in points if not p.fits] == [128, 256, 512]
    rates = [p.token_rate for p in points]
    assert rates == sorted(rates)
    assert rates[2] > 25 * rates[0]


def test_sweeps_double_and_lists_are_listed():
    assert sweep_values("maxNumSeqs", "8:100") == [8, 16, 32, 64, 100]
    assert sweep_values("maxNumSeqs", "5,7") == [5, 7]
    assert sweep_values("maxNumSeqs", "1:1") == [1]
    assert sweep_values("strategy", "static,iteration") == ["static", "iteration"]
    assert sweep_values("prefixCaching", "true,false") == [True, False]
    assert sweep_values("maxQueueDelay", "50ms,2h,1s") == ["50ms", "1s"]  # two hours is out of bounds
    assert sweep_values("preferredBatchSizes", "4,8") == [[4], [8]]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("maxNumSeqs", "100000:200000", "maxNumSeqs=100000:200000: no candidate is inside the bounds, 1 ≤ value ≤ 65536"),
        ("maxNumSeqs", "0", "no candidate"),
        ("maxNumSeqs", "many", "no candidate"),
        ("maxNumSeqs", "8:4", "at least 1 and rising"),
        ("maxNumSeqs", "0:4", "at least 1 and rising"),
        ("maxQueueDelay", "1:4", "only whole numbers have a range"),
        ("strategy", "magic", "no candidate is inside the bounds, one of static"),
        ("colour", "red", "colour: there is no such knob"),
    ],
)
def test_sweeps_that_cant_be(name, values, says):
    with pytest.raises(FormatError) as caught:
        sweep_values(name, values)
    assert says in str(caught.value)


def test_candidates_are_all_combinations_that_can_run():
    found = candidates(Knobs(), {"maxNumSeqs": [64, 512], "maxNumBatchedTokens": [256, 1024]}, (1.0, 2.0))
    assert [(c.knobs.max_num_seqs, c.knobs.max_num_batched_tokens, c.load) for c in found] == [
        (64, 256, 1.0), (64, 256, 2.0), (64, 1024, 1.0), (64, 1024, 2.0), (512, 1024, 1.0), (512, 1024, 2.0),
    ]  # fmt: skip
    assert found[0].label == "maxNumSeqs=64 maxNumBatchedTokens=256"
    assert found[4].knobs.max_num_seqs_limit == 512
    with pytest.raises(FormatError, match="no combination of the sweeps can run: maxNumBatchedTokens=256 breaks"):
        candidates(Knobs(), {"maxNumSeqs": [512], "maxNumBatchedTokens": [256]}, (1.0,))
    with pytest.raises(FormatError, match="2001 candidates are too many"):
        candidates(Knobs(), {"maxNumSeqs": list(range(1, 2002))}, (1.0,))


def traffic(rate: float, seconds: float = 40.0) -> Trace:
    return poisson(rate, seconds, Lengths({100: 200}, least=20), Lengths({100: 60}, least=5), seed=2)


def test_many_processes_give_what_one_gives_in_the_same_order():
    todo = [Candidate(s.value, Knobs(strategy=s), load) for s in Strategy for load in (1.0, 3.0)]
    seen: list[int] = []
    one = evaluate(ENGINE, traffic(2.0), todo, Slo(ttft=0.5), workers=1, progress=lambda: seen.append(1))
    two = evaluate(ENGINE, traffic(2.0), todo, Slo(ttft=0.5), workers=2, progress=lambda: seen.append(2))
    assert one == two
    assert len({summary.e2e.mean for summary in one}) > 4
    assert (seen.count(1), seen.count(2)) == (8, 8)


def test_a_replay_that_fails_in_a_process_fails_the_search():
    too_long = Trace.regular([4, 4], every=1, prompt_len=3000)
    with pytest.raises(RequestRefused, match="request 1 of the trace: the prompt has 3000 tokens"):
        evaluate(ENGINE, too_long, [Candidate("", Knobs()), Candidate("", Knobs())], Slo(), workers=2)


def test_the_smallest_fleet_that_meets_the_slo():
    trace, slo = traffic(60.0, 12.0), Slo(ttft=0.5, tpot=0.04)
    told: list[str] = []
    sizing = size(ENGINE, trace, Knobs(), slo, workers=1, progress=told.append)
    assert sizing.replicas is not None and sizing.replicas > 1
    fleets = {fleet.replicas: fleet for fleet in sizing.tried}
    assert fleets[sizing.replicas].meets_slo
    assert not fleets[sizing.replicas - 1].meets_slo
    assert told[:2] == ["1 replica", "each request alone"]
    assert sizing.alone == 1.0
    # in turn, so that every request is replayed exactly once
    turns = [Candidate("", Knobs(), turn=(first, 3)) for first in range(3)]
    assert sum(s.requests for s in evaluate(ENGINE, trace, turns, slo, workers=1)) == len(trace.requests)


def test_one_replica_may_be_enough_and_none_may_do():
    assert size(ENGINE, traffic(0.5), Knobs(), Slo(ttft=5.0), workers=1).replicas == 1
    hopeless = size(ENGINE, traffic(0.5), Knobs(), Slo(tpot=0.001), workers=1)
    assert hopeless.replicas is None
    assert hopeless.alone == 0.0
    with pytest.raises(FormatError, match="give an SLO"):
        size(ENGINE, traffic(0.5), Knobs(), Slo(), workers=1)


def test_the_share_of_one_replica_is_what_its_steps_take():
    trace = Trace.regular([100] * 11, every=1.0, prompt_len=1000)
    prefill, decode = share_of_one(trace, LLAMA, batch=1)
    assert decode == pytest.approx(11 * 100 * LLAMA.predict_decode(1, 1050) / 10)
    one = LLAMA.predict(StepShape(prefill_tokens=1000, prefill_attention=500_000)) - LLAMA.constant
    assert prefill == pytest.approx(11 * one / 10)
