"""Properties of the scheduler under anything that may happen to it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from core_oracle import VOCAB, Driver, expected_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_core.knobs import Knobs, Strategy
from paceline_core.request import BATCH_PRIORITY, FinishReason, Request
from paceline_core.step_time import StepModel
from paceline_core.waiting import PATIENCE

BLOCK = 4
MAX_LEN = 96
LIMIT = 8
MODEL = StepModel(constant=0.1, decode_tokens=0.05, prefill_tokens=0.02, context_tokens=0.001, prefill_attention=0.0005)

knob_sets = st.builds(
    lambda strategy, seqs, extra, delay, preferred, flush, long, caching, tpot, ttft, drafts: Knobs(
        strategy=strategy,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + extra,
        max_queue_delay=delay,
        preferred_batch_sizes=preferred,
        static_flush=flush,
        long_prefill_threshold=long,
        prefix_caching=caching,
        speculative=drafts,
        slo_tpot=tpot,
        slo_ttft=ttft,
        max_num_seqs_limit=LIMIT,
        block_size=BLOCK,
    ),
    strategy=st.sampled_from(Strategy),
    seqs=st.integers(1, LIMIT),
    extra=st.sampled_from([0, 1, 3, 16, 200]),
    delay=st.sampled_from([0.0, 3.0, 15.0]),
    preferred=st.sampled_from([(), (2,), (2, 4)]),
    flush=st.sampled_from([1.0, 10.0, math.inf]),
    long=st.sampled_from([1, 5, 64]),
    caching=st.booleans(),
    tpot=st.sampled_from([None, 0.01, 0.5]),
    ttft=st.sampled_from([None, 5.0]),
    drafts=st.sampled_from([0, 1, 4, 16]),
)


@st.composite
def new_requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request without its id and arrival: prompts share prefixes often, and some are as long as may be."""
    family, shared, own = draw(st.integers(0, 1)), draw(st.sampled_from([0, 3, 8, 17])), draw(st.integers(1, 40))
    tokens = [(family * 7 + i * 3) % VOCAB for i in range(shared)] + [draw(st.integers(0, 3))] * own
    return {
        "tokens": tokens,
        "prompt_len": len(tokens),
        "max_tokens": draw(st.sampled_from([1, 2, 7, 25, 500])),
        "priority": draw(st.sampled_from([-1, 0, 1, BATCH_PRIORITY, BATCH_PRIORITY, BATCH_PRIORITY + 1])),
        "deadline": draw(st.sampled_from([None, None, 2.0, 60.0])),
        "salt": draw(st.sampled_from([0, 0, 9])),
        "stop_token_ids": draw(st.sampled_from([frozenset(), frozenset({3, 11})])),
        "min_tokens": draw(st.sampled_from([0, 4])),
        "draftable": draw(st.sampled_from([True, True, False])),
        "read_cache": draw(st.sampled_from([True, True, True, False])),
    }


events = st.one_of(
    st.tuples(st.just("add"), new_requests()),
    st.tuples(st.just("add"), new_requests()),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("steps"), st.sampled_from(["plan", "result"])),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("knobs"), knob_sets),
    st.tuples(st.just("rollback"), st.none()),
    st.tuples(st.just("resize"), st.sampled_from([3, 6, 24, 40, 80])),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 20.0, PATIENCE + 1])),
    st.tuples(st.just("model"), st.sampled_from([None, MODEL])),
)


def take_steps(driver: Driver, value: Any) -> None:
    """Take some steps, or half of one: what happens next finds a plan in flight, or none."""
    if value == "plan":
        if len(driver.flights) < driver.depth:
            driver.schedule()
    elif value == "result":
        if driver.flights:
            driver.complete()
    else:
        for _ in range(value):
            driver.step()


def apply(driver: Driver, kind: str, value: Any, seq_id: int) -> None:
    """Let one event of the script happen."""
    scheduler = driver.scheduler
    match kind:
        case "add":
            deadline = None if value["deadline"] is None else driver.now + value["deadline"]
            driver.add(Request(seq_id=seq_id, arrival=driver.now, **{**value, "deadline": deadline}))
        case "steps":
            take_steps(driver, value)
        case "abort":
            driver.abort(value)
        case "knobs":
            driver.set_knobs(value)
        case "rollback":
            driver.rollback()
        case "resize":
            scheduler.resize_pool(value)
        case "wait":
            driver.now += value
        case "model":
            scheduler.step_model = value


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    knobs=knob_sets,
    blocks=st.sampled_from([4, 10, 24, 60]),
    depth=st.sampled_from([1, 2]),
    burst=st.sampled_from([1, 3]),
    skill=st.sampled_from([None, 0.0, 0.7, 1.0]),
    script=st.lists(events, min_size=12, max_size=60),
)
def test_any_history_ends_well(
    knobs: Knobs, blocks: int, depth: int, burst: int, skill: float | None, script: list[tuple[str, Any]]
) -> None:
    """Blocks are conserved, limits hold, KV is right when read, and every request ends once, with the right tokens."""
    driver = Driver(knobs, blocks, max_model_len=MAX_LEN, depth=depth, burst=burst, skill=skill, step_model=MODEL)
    resized = False
    for seq_id, (kind, value) in enumerate(script):
        apply(driver, kind, value, seq_id)
        resized = resized or kind == "resize"
    driver.drain()
    for seq_id, ended in driver.ended.items():
        request = driver.requests[seq_id]
        out, reason = expected_output(request, min(request.max_tokens, MAX_LEN - request.prompt_len))
        assert driver.outputs[seq_id] == out[: ended.output_len], "a schedule changed what was generated"
        if ended.reason is FinishReason.STOP or (ended.reason is FinishReason.LENGTH and not resized):
            assert (ended.output_len, ended.reason) == (len(out), reason)
        if ended.reason is FinishReason.REFUSED:
            assert ended.first_token is None
            assert resized or request.deadline is not None
        assert ended.released >= (ended.last_token or 0.0) >= (ended.first_token or 0.0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    knobs=knob_sets,
    depth=st.sampled_from([1, 2]),
    skill=st.sampled_from([None, 0.5, 1.0]),
    requests=st.lists(new_requests(), min_size=1, max_size=14),
    gap=st.sampled_from([0, 1, 4]),
)
def test_nothing_is_lost_where_one_sequence_fills_the_pool(
    knobs: Knobs, depth: int, skill: float | None, requests: list[dict[str, Any]], gap: int
) -> None:
    """The tightest pool: 24 blocks of 4 hold just one sequence of the full length. Work must go on, one by one."""
    settings = replace(knobs, strategy=Strategy.CONTINUOUS)
    driver = Driver(settings, MAX_LEN // BLOCK, max_model_len=MAX_LEN, depth=depth, skill=skill)
    for seq_id, fields in enumerate(requests):
        assert driver.add(Request(seq_id=seq_id, arrival=driver.now, **{**fields, "deadline": None}))
        for _ in range(gap):
            driver.step()
    driver.drain()
    for seq_id, ended in driver.ended.items():
        request = driver.requests[seq_id]
        out, reason = expected_output(request, min(request.max_tokens, MAX_LEN - request.prompt_len))
        assert (driver.outputs[seq_id], ended.reason) == (out, reason)


@pytest.mark.parametrize("strategy", Strategy)
@settings(max_examples=15, deadline=None)
@given(depth=st.sampled_from([1, 2]), seed=st.integers(0, 1000))
def test_urgent_traffic_starves_nobody(strategy: Strategy, depth: int, seed: int) -> None:
    """Under a stream of urgent requests that alone fills the slots, the patient one still gets its turn."""
    driver = Driver(Knobs(strategy=strategy, max_num_seqs=2, block_size=BLOCK, static_flush=5.0), 40, depth=depth)
    for seq_id in range(400):
        tokens, priority = ([1, 2, 3, 4, 5], 9) if seq_id == 3 else ([seed % VOCAB, 2], 0)
        fields = {"prompt_len": len(tokens), "tokens": tokens, "priority": priority, "max_tokens": 4 + (seq_id * seed) % 3}
        driver.add(Request(seq_id=seq_id, arrival=driver.now, **fields))
        driver.step()
        driver.step()
        if 3 in driver.ended:
            return
    pytest.fail("the patient request starved")
