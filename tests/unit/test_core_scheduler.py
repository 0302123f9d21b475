"""What each part of the scheduler promises, one small story each."""

from __future__ import annotations

import math

import pytest
from core_oracle import Driver, expected_output

from paceline_core import kv
from paceline_core.errors import PacelineError, RequestRefused
from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepResult
from paceline_core.request import FinishReason, Request
from paceline_core.scheduler import Scheduler
from paceline_core.sequence import SequenceState, Stage
from paceline_core.step_time import StepModel
from paceline_core.waiting import WaitingQueue

BLOCK = 4


def knobs(strategy: str = "continuous", **changes) -> Knobs:
    return Knobs(
        **{"strategy": Strategy(strategy), "max_num_seqs": 4, "block_size": BLOCK, "max_num_seqs_limit": 64} | changes
    )


def request(seq_id: int, prompt: int = 3, output: int = 4, *, arrival: float = 0.0, first: int = 1, **fields) -> Request:
    tokens = fields.pop("tokens", [first, *range(1, prompt)])
    return Request(seq_id=seq_id, prompt_len=len(tokens), max_tokens=output, arrival=arrival, tokens=tokens, **fields)


def driver(
    strategy: str = "continuous", *, blocks: int = 200, depth: int = 1, burst: int = 1, model=None, **changes
) -> Driver:
    return Driver(knobs(strategy, **changes), blocks, depth=depth, burst=burst, step_model=model)


def ids(plan) -> list[int]:
    return [] if plan is None else [entry.seq_id for entry in plan.scheduled]


def tokens(plan) -> dict[int, int]:
    return {entry.seq_id: entry.num_tokens for entry in plan.scheduled}


class TestStatic:
    def test_waits_for_a_full_batch_and_gives_it_back_at_once(self):
        d = driver("static", max_num_seqs=2, static_flush=math.inf)
        d.add(request(0, output=2))
        assert d.step() is None
        assert d.scheduler.next_event(d.now) is None
        d.add(request(1, output=5))
        d.add(request(2, output=1))
        for _ in range(4):
            assert 2 not in ids(d.step())
            assert not d.ended
        assert d.outputs[0], "tokens are told as they come, although the result is held"
        d.step()
        assert set(d.ended) == {0, 1}
        assert d.ended[0].released == d.ended[1].released == d.ended[1].last_token
        assert d.ended[0].last_token < d.ended[0].released

    def test_a_held_slot_is_not_busy(self):
        d = driver("static", max_num_seqs=2)
        d.add(request(0, output=1))
        d.add(request(1, output=4))
        d.drain()
        gauges = d.scheduler.gauges()
        assert (gauges.slot_steps, gauges.slot_steps_busy) == (8, 5)

    def test_flushes_by_time(self):
        d = driver("static", static_flush=10.0)
        d.add(request(0, arrival=0.0))
        assert d.schedule() is None
        assert d.scheduler.next_event(0.0) == 10.0
        d.now = 10.0
        assert ids(d.schedule()) == [0]

    def test_the_end_of_the_source_flushes(self):
        d = driver("static", static_flush=math.inf)
        d.add(request(0))
        assert d.schedule() is None
        d.scheduler.close_source()
        assert ids(d.schedule()) == [0]
        d.complete()
        d.drain()
        d.scheduler.reopen_source()
        d.add(request(1))
        assert d.schedule() is None

    def test_a_preempted_member_comes_back_into_its_batch(self):
        d = driver("static", max_num_seqs=3, blocks=12, static_flush=1.0)
        d.scheduler._kv.guard.history.observe(1)  # expect short answers, so that both are admitted
        d.now = 1000.0  # long enough for anybody to lose patience, which changes nothing here
        d.add(request(0, prompt=8, output=30, first=1))
        d.add(request(1, prompt=8, output=30, first=2))
        assert ids(d.step()) == [0, 1]
        d.add(request(2, prompt=1, output=1))
        for _ in range(200):
            if len(d.ended) == 2:
                break
            assert 2 not in ids(d.step())
        assert d.ended[1].preemptions > 0
        assert d.ended[0].released == d.ended[1].released
        d.drain()

    def test_an_aborted_member_is_told_at_once(self):
        d = driver("static", max_num_seqs=2)
        d.add(request(0, output=9))
        d.add(request(1, output=9))
        d.step()
        d.abort(0)
        assert d.ended[0].reason is FinishReason.ABORT
        d.drain()


class TestDynamic:
    def test_a_full_batch_starts_at_once_and_the_rest_after_the_delay(self):
        d = driver("dynamic", max_num_seqs=2, max_queue_delay=5.0)
        d.add(request(0, output=1))
        d.add(request(1, output=1))
        d.add(request(2, output=1, arrival=0.0))
        assert ids(d.step()) == [0, 1]
        assert d.schedule() is None
        assert d.scheduler.next_event(d.now) == 5.0
        d.now = 5.0
        assert ids(d.schedule()) == [2]

    def test_a_preferred_size_starts_at_once_and_takes_just_that_many(self):
        d = driver("dynamic", max_num_seqs=4, max_queue_delay=100.0, preferred_batch_sizes=(2, 3))
        d.add(request(0))
        assert d.schedule() is None
        d.add(request(1))
        assert ids(d.schedule()) == [0, 1]

    def test_results_are_held_until_the_batch_ends(self):
        d = driver("dynamic", max_queue_delay=0.0)
        d.add(request(0, output=1))
        d.add(request(1, output=3))
        d.step()
        d.add(request(2))
        assert ids(d.step()) == [1]
        assert not d.ended
        d.step()
        assert set(d.ended) == {0, 1}
        assert ids(d.step()) == [2]


class TestContinuous:
    def test_a_slot_is_refilled_on_the_next_step(self):
        d = driver(max_num_seqs=2)
        for seq_id, output in enumerate((1, 3, 2)):
            d.add(request(seq_id, output=output))
        assert ids(d.step()) == [0, 1]
        assert set(d.ended) == {0}
        assert ids(d.step()) == [1, 2]

    def test_first_come_first_served_whatever_the_priority(self):
        d = driver(max_num_seqs=1)
        d.add(request(0, output=1, priority=5))
        d.add(request(1, output=1, priority=-5))
        assert ids(d.step()) == [0]

    def test_decodes_come_before_chunks_within_the_budget(self):
        d = driver(max_num_batched_tokens=10, long_prefill_threshold=64)
        d.add(request(0, prompt=3))
        d.step()
        d.add(request(1, prompt=30))
        assert tokens(d.step()) == {0: 1, 1: 9}
        assert tokens(d.step()) == {0: 1, 1: 9}

    def test_a_long_prompt_leaves_tokens_to_others_only_while_there_are_others(self):
        d = driver(max_num_batched_tokens=40, long_prefill_threshold=8, max_num_seqs=2)
        d.add(request(0, prompt=100, output=1))
        assert tokens(d.step()) == {0: 40}, "alone it takes the whole step"
        d.add(request(1, prompt=100, output=1))
        assert tokens(d.step()) == {0: 8, 1: 8}
        d.add(request(2, prompt=2))
        d.abort(1)
        assert tokens(d.step()) == {0: 8, 2: 2}
        d.abort(2)
        assert tokens(d.step()) == {0: 40}

    def test_a_request_that_waits_for_a_slot_wants_no_tokens(self):
        d = driver(max_num_batched_tokens=40, long_prefill_threshold=8, max_num_seqs=1)
        d.add(request(0, prompt=100))
        d.add(request(1))
        assert tokens(d.step()) == {0: 40}

    def test_lowering_the_slots_pauses_the_newest_and_loses_nobody(self):
        d = driver(max_num_seqs=4)
        for seq_id in range(4):
            d.add(request(seq_id, output=6, first=seq_id))
        d.step()
        d.set_knobs(knobs(max_num_seqs=2))
        assert ids(d.step()) == [0, 1]
        d.add(request(4))
        d.drain()
        assert all(e.reason is FinishReason.LENGTH for e in d.ended.values())

    def test_several_tokens_per_sample_are_caught_up_with_in_one_chunk(self):
        d = driver()
        d.add(request(0, prompt=2, output=9))
        d.scheduler.schedule(0.0)
        plan = d.scheduler._pipeline._flights[0][0]
        assert d.scheduler.complete(plan, StepResult({0: (7, 8, 9)}), 1.0) == {0: (7, 8, 9)}
        plan = d.scheduler.schedule(1.0)
        (entry,) = plan.scheduled
        assert (entry.start, entry.num_tokens, entry.samples) == (2, 3, True)
        assert plan.shape.decode_tokens == 3
        assert d.scheduler.complete(plan, StepResult({0: tuple(range(20))}), 2.0) == {0: tuple(range(6))}, (
            "cut at max_tokens"
        )
        assert d.scheduler.take_ended()[0].output_len == 9


class TestIteration:
    def test_without_objectives_it_is_continuous_with_priorities(self):
        d = driver("iteration", max_num_seqs=1)
        d.add(request(0, output=1, priority=1))
        d.add(request(1, output=1, priority=0))
        d.add(request(2, output=1, priority=0))
        assert [ids(d.step()) for _ in range(3)] == [[1], [2], [0]]

    def test_the_earliest_deadline_goes_first_within_a_priority(self):
        d = driver("iteration", max_num_seqs=1)
        d.add(request(0, output=1, deadline=90.0))
        d.add(request(1, output=1, deadline=30.0))
        d.add(request(2, output=1))
        d.add(request(3, output=1, deadline=99.0, priority=-1))
        assert [ids(d.step()) for _ in range(4)] == [[3], [1], [0], [2]]

    def test_the_ttft_objective_stands_in_for_a_deadline(self):
        d = driver("iteration", max_num_seqs=1, slo_ttft=20.0)
        d.add(request(0, output=1, arrival=0.0))
        d.add(request(1, output=1, arrival=0.0, deadline=10.0))
        assert [ids(d.step()) for _ in range(2)] == [[1], [0]]

    def test_chunks_are_cut_so_that_the_predicted_step_keeps_the_tpot_objective(self):
        model = StepModel(constant=0.010, decode_tokens=0.001, prefill_tokens=0.001)
        d = driver("iteration", model=model, slo_tpot=0.032, max_num_batched_tokens=64)
        d.add(request(0, prompt=3, output=20))
        d.step()
        d.add(request(1, prompt=60, output=2))
        plan = d.step()
        assert tokens(plan) == {0: 1, 1: 21}
        assert model.predict(plan.shape) <= 0.032
        d.abort(0)
        assert tokens(d.step()) == {1: 39}, "no decode, no objective at stake"

    def test_a_prompt_gets_on_even_if_decodes_alone_miss_the_objective(self):
        model = StepModel(constant=0.010, decode_tokens=0.001, prefill_tokens=0.001)
        d = driver("iteration", model=model, slo_tpot=0.032)
        d.add(request(0, output=50))
        d.step()
        d.add(request(1, prompt=40, output=50))
        d.step()
        d.set_knobs(knobs("iteration", slo_tpot=0.001))
        assert tokens(d.step()) == {0: 1, 1: BLOCK}
        d.add(request(2))
        d.step()
        assert d.scheduler.num_waiting == 1, "but nobody new joins"
        d.drain()

    def test_only_the_first_prompt_of_a_step_may_overstep_the_objective(self):
        d = driver("iteration", model=StepModel(constant=0.010, prefill_tokens=0.001))
        d.add(request(0, output=50))
        d.step()
        d.set_knobs(knobs("iteration", long_prefill_threshold=1))
        d.add(request(1, prompt=40))
        d.add(request(2, prompt=40))
        assert tokens(d.step()) == {0: 1, 1: 1, 2: 1}
        d.set_knobs(knobs("iteration", slo_tpot=0.001))
        assert tokens(d.step()) == {0: 1, 1: BLOCK}

    def test_prompts_that_run_get_their_chunks_by_deadline_too(self):
        d = driver("iteration", max_num_batched_tokens=8, long_prefill_threshold=4)
        d.add(request(0, prompt=40))
        d.add(request(1, prompt=40, deadline=50.0))
        assert tokens(d.step()) == {0: 4, 1: 4}
        d.set_knobs(knobs("iteration", max_num_batched_tokens=8))
        assert tokens(d.step()) == {1: 8}

    def test_who_has_waited_too_long_goes_out_of_turn_but_not_all_the_time(self):
        d = driver("iteration", max_num_seqs=1)
        for seq_id in range(3):
            d.add(request(seq_id, output=1, priority=5))
        for seq_id in range(3, 20):
            d.add(request(seq_id, output=1))
        d.now = 100.0
        order = [ids(d.step())[0] for _ in range(19)]
        assert order == [0, *range(3, 11), 1, *range(11, 19), 2]

    def test_beyond_what_the_model_has_seen_it_is_not_believed(self):
        seen = {"decode_tokens": (0.0, 4.0), "prefill_tokens": (0.0, 8.0)}
        d = driver("iteration", model=StepModel(constant=0.001, seen=seen), slo_tpot=1.0)
        d.add(request(0, output=20))
        d.step()
        d.add(request(1, prompt=60))
        assert tokens(d.step()) == {0: 1, 1: 16}

    def test_hopeless_work_is_refused_before_it_costs_a_step(self):
        model = StepModel(constant=1.0, prefill_tokens=0.1)
        d = driver("iteration", model=model, max_num_seqs=1)
        d.add(request(0, prompt=3, output=30))
        d.step()
        d.add(request(1, prompt=40, deadline=20.0))  # takes 5 s at best
        d.now = 14.0
        d.step()
        assert 1 not in d.ended
        d.now = 15.5
        d.step()
        assert d.ended[1].reason is FinishReason.REFUSED
        assert d.ended[1].first_scheduled is None

    def test_waiting_for_a_deadline_has_an_end(self):
        d = driver("iteration", max_num_seqs=1, depth=2)
        d.add(request(0, output=1, deadline=5.0))
        d.add(request(1, output=1, deadline=5.0))
        d.schedule()
        assert d.schedule() is None
        event = d.scheduler.next_event(0.0)
        assert event == pytest.approx(5.0)
        d.now = event
        d.schedule()
        assert d.ended[1].reason is FinishReason.REFUSED
        d.complete()
        assert d.ended[0].reason is FinishReason.LENGTH, "its first token was already under way"

    def test_other_strategies_ignore_deadlines(self):
        d = driver(max_num_seqs=1)
        d.add(request(0, output=9))
        d.add(request(1, output=1, deadline=2.0))
        d.drain()
        assert d.ended[1].reason is FinishReason.LENGTH

    def test_deadlines_count_from_the_moment_the_strategy_is_switched_on(self):
        d = driver(max_num_seqs=1)
        d.add(request(0, output=9))
        d.add(request(1, output=1, deadline=2.0))
        for _ in range(4):
            d.step()
        d.set_knobs(knobs("iteration", max_num_seqs=1))
        d.step()
        assert d.ended[1].reason is FinishReason.REFUSED

    def test_who_has_left_is_not_kept_for_one_that_waits_long(self):
        queue = WaitingQueue(lambda seq: (seq.priority, seq.request.seq_id))
        patient = SequenceState(request(0, priority=9), limit=4, epoch=0)
        queue.push(patient)
        for seq_id in range(1, 1000):
            queue.push(SequenceState(request(seq_id, priority=1), limit=4, epoch=0))
            seq = queue.first(0.0)
            seq.stage = Stage.RUNNING
            queue.admitted(seq)
        assert queue.oldest() is patient
        assert len(queue._arrivals) < 100


class TestPreemption:
    def test_the_newest_of_the_lowest_priority_goes_and_is_recomputed_to_the_same_tokens(self):
        d = driver(blocks=12, prefix_caching=False)
        d.scheduler._kv.guard.history.observe(1)  # expect short answers: all three are admitted
        for seq_id, priority in enumerate((1, 0, 0)):
            d.add(request(seq_id, prompt=8, output=24, first=seq_id, priority=priority))
        while not any(plan.preempted for plan in d.plans):
            d.step()
        assert next(plan.preempted for plan in d.plans if plan.preempted) == (0,)
        d.drain()
        for seq_id, ended in d.ended.items():
            assert d.outputs[seq_id] == expected_output(d.requests[seq_id], 24)[0]
            assert (ended.preemptions > 0) == (seq_id in {i for plan in d.plans for i in plan.preempted})

    def test_what_was_computed_may_come_back_from_the_cache(self):
        d = driver(blocks=12)
        d.scheduler._kv.guard.history.observe(1)
        d.add(request(0, prompt=8, output=20, first=1))
        d.add(request(1, prompt=8, output=20, first=2))
        while not any(plan.preempted for plan in d.plans):
            d.step()
        d.drain()
        computed = d.runner.computed_tokens
        assert computed < sum(e.request.prompt_len + e.output_len - 1 for e in d.ended.values()) + 8 + 20

    def test_admission_backs_off_after_preemptions_and_recovers(self):
        d = driver(blocks=12)
        guard = d.scheduler._kv.guard
        guard.history.observe(1)
        for seq_id in range(6):
            d.add(request(seq_id, prompt=8, output=24, first=seq_id))
        while guard.share == 1.0:
            d.step()
        assert guard.share == pytest.approx(guard.CUT)
        d.drain()
        for _ in range(200):
            guard.after_step(0)
        assert guard.share == 1.0

    def test_predicted_growth_is_reserved_so_that_nothing_thrashes(self):
        """Answers of known length 40 on a pool for three of them: three run at a time, and nobody is preempted."""
        d = driver(blocks=3 * 12, max_num_seqs=8, prefix_caching=False)
        for _ in range(40):
            d.scheduler._kv.guard.history.observe(40)
        for seq_id in range(9):
            d.add(request(seq_id, prompt=8, output=100, stop_token_ids=frozenset({3}), first=seq_id, min_tokens=36))
        d.step()
        assert d.scheduler.num_running == 3
        d.drain()
        assert d.scheduler.gauges().preemptions <= 3

    def test_nobody_is_admitted_in_the_step_that_preempts(self):
        d = driver("iteration", blocks=12, max_num_seqs=2, prefix_caching=False)
        d.scheduler._kv.guard.history.observe(1)
        d.add(request(0, prompt=8, output=24))
        d.add(request(1, prompt=8, output=24, priority=5))
        d.step()
        d.add(request(2, prompt=1, output=1, priority=1))  # goes before the one that is preempted, and would fit
        while not any(plan.preempted for plan in d.plans):
            last = d.step()
        assert ids(last) == [0]
        assert ids(d.step()) == [0, 2]
        d.drain()

    def test_recomputation_counts_as_prefill(self):
        d = driver(max_num_batched_tokens=4)
        d.add(request(0, prompt=3, output=20))
        for _ in range(8):
            d.step()
        d.scheduler.resize_pool(100)
        shapes = [d.step().shape for _ in range(3)]
        assert [(s.prefill_tokens, s.decode_tokens) for s in shapes] == [(4, 0), (4, 0), (3, 0)]
        assert [s.prefill_attention for s in shapes] == [4 * 4, 4 * 8, 3 * 11]
        assert d.step().shape.context_tokens == 12
        d.drain()

    def test_at_depth_two_blocks_on_their_way_back_are_waited_for(self):
        d = driver(blocks=6, depth=2, prefix_caching=False)
        d.scheduler._kv.guard.history.observe(1)
        for seq_id in range(3):
            d.add(request(seq_id, prompt=8, output=5, first=seq_id))
        assert ids(d.schedule()) == [0, 1, 2]
        d.abort(2)
        assert d.schedule() is None, "no block is free, but two come back with the plan in flight"
        d.complete()
        assert ids(d.schedule()) == [0, 1]
        d.drain()
        assert d.scheduler.gauges().preemptions == 0

    def test_at_depth_two_blocks_are_free_only_after_the_last_plan_that_names_them(self):
        d = driver(blocks=8, depth=2, prefix_caching=False, max_num_seqs=2)
        d.add(request(0, prompt=8, output=20))
        d.schedule()
        d.schedule()
        assert d.abort(0)
        assert d.scheduler.gauges().kv_blocks_used > 0
        d.complete()
        assert d.scheduler.gauges().kv_blocks_used > 0
        d.complete()
        assert d.scheduler.gauges().kv_blocks_used == 0
        assert d.ended[0].reason is FinishReason.ABORT


class TestPrefixCache:
    def test_a_repeated_prompt_is_computed_but_for_its_last_token(self):
        d = driver()
        prompt = list(range(16))
        d.add(request(0, tokens=prompt, output=1))
        d.drain()
        d.add(request(1, tokens=prompt, output=1))
        plan = d.step()
        (entry,) = plan.scheduled
        # the fourth block is full and cached too, but the last token's logits are needed
        assert (entry.start, entry.num_tokens, entry.samples) == (12, 4, True)
        assert d.ended[1].cached_len == 12
        assert d.outputs[1] == d.outputs[0]

    def test_generated_tokens_are_shared_too(self):
        d = driver()
        d.add(request(0, tokens=list(range(6)), output=10))
        d.drain()
        follow_up = [*range(6), *d.outputs[0], 1, 2]
        d.add(request(1, tokens=follow_up, output=1))
        d.drain()
        assert d.ended[1].cached_len == 12  # 15 of 18 positions were computed: three full blocks

    def test_salt_keeps_tenants_apart(self):
        d = driver()
        for seq_id, salt in enumerate((1, 2, 1)):
            d.add(request(seq_id, tokens=list(range(16)), output=1, salt=salt))
            d.drain()
        assert [d.ended[i].cached_len for i in range(3)] == [0, 0, 12]

    def test_it_can_be_switched_off_and_on(self):
        d = driver()
        d.add(request(0, tokens=list(range(16)), output=1))
        d.drain()
        assert d.scheduler.gauges().kv_blocks_cached > 0
        d.set_knobs(knobs(prefix_caching=False))
        assert d.scheduler.has_work, "a change that waits is work, also for an idle engine"
        d.step()
        assert d.scheduler.gauges().kv_blocks_cached == 0
        for seq_id, caching in ((1, False), (2, True), (3, True)):
            d.set_knobs(knobs(prefix_caching=caching))
            d.add(request(seq_id, tokens=list(range(16)), output=1))
            d.drain()
        assert [d.ended[i].cached_len for i in (1, 2, 3)] == [0, 0, 12]

    def test_without_token_ids_the_given_hashes_count(self):
        scheduler = Scheduler(knobs(), num_blocks=50, max_model_len=100)
        for seq_id, hashes in enumerate(((5, 6, 7), (5, 6, 8), (5, 6, 7))):
            given = Request(
                seq_id=seq_id, prompt_len=14, max_tokens=9, arrival=0.0, prefix_hashes=(*hashes, 99, 99), salt=seq_id // 2
            )
            scheduler.add(given, 0.0)
            while scheduler.has_work:
                plan = scheduler.schedule(0.0)
                scheduler.complete(plan, StepResult({seq_id: (0,)} if plan.scheduled[0].samples else {}), 1.0)
        assert [ended.cached_len for ended in scheduler.take_ended()] == [0, 8, 0]

    def test_prompts_are_hashed_when_they_come_not_in_a_step(self, monkeypatch):
        d = driver()
        for seq_id in range(3):
            d.add(request(seq_id, prompt=9, output=2, first=seq_id))

        def in_a_step(*_):
            raise AssertionError("a prompt is hashed while a step is planned")

        monkeypatch.setattr(kv, "hash_block", in_a_step)
        d.drain()
        assert set(d.ended) == {0, 1, 2}


class TestEnds:
    def test_a_stop_token_ends_after_min_tokens_and_counts(self):
        prompt = request(0, output=12)
        out, _ = expected_output(prompt, 12)
        for least in (0, 1, 3):
            d = driver()
            d.add(request(0, output=12, stop_token_ids=frozenset(out), min_tokens=least))
            d.drain()
            assert (d.ended[0].reason, d.ended[0].output_len) == (FinishReason.STOP, least + 1)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_one_token_is_enough(self, depth):
        d = driver(depth=depth)
        d.add(request(0, prompt=1, output=1))
        d.drain()
        assert (d.ended[0].output_len, len(d.plans)) == (1, 1)

    def test_the_models_length_ends_it(self):
        d = driver()
        d.add(request(0, prompt=250, output=100))
        d.drain()
        assert (d.ended[0].output_len, d.ended[0].reason) == (6, FinishReason.LENGTH)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_abort_in_flight_drops_the_tokens_and_tells_the_runner(self, depth):
        d = driver(depth=depth)
        d.add(request(0))
        d.add(request(1))
        d.schedule()
        assert d.abort(0)
        assert not d.abort(0), "it is gone"
        assert not d.abort(77)
        assert set(d.complete()) == {1}
        assert d.schedule().removed == (0,)
        d.drain()
        assert d.ended[0].output_len == 0

    def test_a_stop_text_ends_it_with_stop(self):
        d = driver()
        d.add(request(0, output=50))
        d.step()
        assert d.scheduler.abort(0, d.now, FinishReason.STOP)
        d.collect()
        assert (d.ended[0].reason, d.ended[0].output_len) == (FinishReason.STOP, 1)

    @pytest.mark.parametrize(
        ("fields", "reason", "says"),
        [
            ({"prompt_len": 0, "max_tokens": 1}, "invalid", "at least 1"),
            ({"prompt_len": 1, "max_tokens": 0}, "invalid", "at least 1"),
            ({"prompt_len": 256, "max_tokens": 1}, "too_long", "255 is the most"),
            ({"prompt_len": 100, "max_tokens": 100}, "kv_capacity", "may grow to 200 tokens, but the KV pool holds 80"),
        ],
    )
    def test_what_can_never_run_is_refused_at_once(self, fields, reason, says):
        scheduler = Scheduler(knobs(), num_blocks=20, max_model_len=256)
        with pytest.raises(RequestRefused, match=says) as caught:
            scheduler.add(Request(seq_id=0, arrival=0.0, **fields), 0.0)
        assert caught.value.reason == reason
        assert not scheduler.has_work
        assert scheduler.take_ended() == []

    def test_what_just_fits_runs(self):
        d = Driver(knobs(), 20, max_model_len=256)
        assert d.add(request(0, prompt=31, output=50))  # 80 positions: the last token needs none
        d.drain()
        assert d.ended[0].output_len == 50


class TestKnobsInForce:
    def test_a_change_is_in_force_from_the_next_step_and_records_carry_its_epoch(self):
        d = driver()
        d.add(request(0, output=3))
        d.schedule()
        assert d.scheduler.set_knobs(knobs(max_num_seqs=1)) == 1
        d.epochs[1] = knobs(max_num_seqs=1)
        assert (d.scheduler.epoch, d.scheduler.knobs.max_num_seqs) == (0, 4)
        d.complete()
        assert d.step().epoch == 1
        d.add(request(1, output=1))
        d.drain()
        assert [plan.epoch for plan in d.plans] == [0, 1, 1, 1]
        assert (d.ended[0].epoch, d.ended[0].end_epoch, d.ended[1].epoch) == (0, 1, 1)
        assert d.scheduler.gauges().slot_steps == 4 + 3 * 1

    def test_rollback(self):
        d = driver()
        with pytest.raises(PacelineError, match="never changed"):
            d.scheduler.rollback_knobs()
        d.set_knobs(knobs(max_num_seqs=1))
        d.schedule()
        d.rollback()
        d.schedule()
        assert (d.scheduler.knobs.max_num_seqs, d.scheduler.epoch) == (4, 2)

    def test_leaving_static_gives_held_results_back_and_fills_the_slots(self):
        d = driver("static", max_num_seqs=2)
        d.add(request(0, output=1))
        d.add(request(1, output=9))
        d.add(request(2, output=2))
        d.step()
        d.step()
        assert not d.ended
        d.set_knobs(knobs("continuous", max_num_seqs=2))
        assert ids(d.step()) == [1, 2]
        assert set(d.ended) == {0}

    def test_a_batch_that_was_dissolved_holds_nobody_later(self):
        d = driver("static", max_num_seqs=2)
        d.add(request(0, output=1))
        d.add(request(1, output=4))
        d.step()
        for strategy in ("continuous", "static"):
            d.set_knobs(knobs(strategy, max_num_seqs=2))
            d.step()
        d.step()
        assert d.ended[1].released == d.ended[1].last_token

    def test_static_starts_its_first_batch_when_what_runs_has_ended(self):
        d = driver(max_num_seqs=2)
        d.add(request(0, output=3))
        d.step()
        d.set_knobs(knobs("static", max_num_seqs=2, static_flush=0.0))
        d.add(request(1, output=1))
        assert ids(d.step()) == [0]
        assert ids(d.step()) == [0]
        assert d.ended[0].released == d.ended[0].last_token, "it belongs to no batch"
        assert ids(d.step()) == [1]

    def test_static_to_dynamic_keeps_the_batch(self):
        d = driver("static", max_num_seqs=2)
        d.add(request(0, output=1))
        d.add(request(1, output=3))
        d.step()
        d.set_knobs(knobs("dynamic", max_num_seqs=2, max_queue_delay=0.0))
        d.add(request(2, output=1))
        assert ids(d.step()) == [1]
        assert not d.ended
        d.drain()
        assert d.ended[0].released == d.ended[1].released


class TestPoolResize:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_everything_is_recomputed_and_nobody_notices(self, depth):
        d = driver(depth=depth, blocks=40)
        for seq_id in range(3):
            d.add(request(seq_id, prompt=9, output=12, first=seq_id))
        for _ in range(4):
            d.step()
        d.scheduler.resize_pool(25)
        d.drain()
        (resized,) = [plan for plan in d.plans if plan.resize_blocks is not None]
        assert resized.resize_blocks == 25
        assert set(resized.preempted) == {0, 1, 2}
        assert d.scheduler.gauges().kv_blocks_total == 25
        for seq_id in range(3):
            assert d.outputs[seq_id] == expected_output(d.requests[seq_id], 12)[0]
        assert d.scheduler._kv.guard.share == 1.0, "it isn't the load's fault"

    def test_an_idle_engine_resizes_too(self):
        d = driver()
        d.scheduler.resize_pool(7)
        assert d.scheduler.has_work
        plan = d.step()
        assert (plan.resize_blocks, plan.scheduled) == (7, ())
        assert not d.scheduler.has_work
        assert d.scheduler.gauges().slot_steps == 0, "a plan of news is no step of a batch"

    def test_what_no_longer_fits_ends_at_what_does(self):
        d = driver(blocks=40)
        d.add(request(0, prompt=9, output=100))
        d.add(request(1, prompt=40, output=2))
        d.step()
        d.scheduler.resize_pool(5)
        d.drain()
        assert (d.ended[0].reason, d.ended[0].output_len) == (FinishReason.LENGTH, 5 * BLOCK - 9 + 1)
        assert d.ended[1].reason is FinishReason.LENGTH
        assert d.ended[1].output_len == 1

    def test_a_prompt_that_no_longer_fits_is_refused(self):
        d = driver(blocks=40, max_num_seqs=1)
        d.add(request(0, output=4))
        d.add(request(1, prompt=40, output=2))
        d.step()
        d.scheduler.resize_pool(5)
        assert not d.add(request(2, prompt=40, output=2)), "the new size counts at once"
        d.drain()
        assert d.ended[1].reason is FinishReason.REFUSED


class TestPipeline:
    def test_the_next_step_is_planned_before_the_token_it_needs_is_known(self):
        d = driver(depth=2)
        d.add(request(0, prompt=3, output=3))
        first, second, third = d.schedule(), d.schedule(), d.schedule()
        assert third is None, "two plans are in flight"
        assert [(e.start, e.num_tokens, e.samples) for e in (*first.scheduled, *second.scheduled)] == [
            (0, 3, True),
            (3, 1, True),
        ]
        d.complete()
        third = d.schedule()
        assert third.scheduled[0].start == 4
        assert d.schedule() is None
        d.complete()
        assert d.schedule() is None, "its last token is under way"
        d.complete()
        assert d.ended[0].output_len == 3

    def test_a_sample_taken_after_a_stop_is_dropped(self):
        out, _ = expected_output(request(0, output=9), 9)
        d = driver(depth=2)
        d.add(request(0, output=9, stop_token_ids=frozenset({out[0]})))
        d.schedule()
        d.schedule()
        assert d.complete() == {0: (out[0],)}
        assert d.ended[0].reason is FinishReason.STOP
        assert d.complete() == {}
        assert d.scheduler.gauges().slot_steps_busy == 1, "the second step did nothing useful"

    def test_plans_complete_in_order(self):
        scheduler = Scheduler(knobs(), num_blocks=20, max_model_len=64, pipeline_depth=2)
        scheduler.add(request(0), 0.0)
        scheduler.schedule(0.0)
        second = scheduler.schedule(0.0)
        with pytest.raises(AssertionError, match="out of order"):
            scheduler.complete(second, StepResult({0: (1,)}), 1.0)


def test_gauges_tell_what_is_there():
    d = driver(max_num_seqs=2, blocks=50)
    for seq_id in range(3):
        d.add(request(seq_id, prompt=8, output=3, first=seq_id))
    d.step()
    gauges = d.scheduler.gauges()
    assert (gauges.running, gauges.waiting, gauges.kv_blocks_total, gauges.kv_blocks_used) == (2, 1, 50, 4)
    assert (gauges.prompt_tokens, gauges.output_tokens) == (16, 2)
    d.drain()
    gauges = d.scheduler.gauges()
    assert (gauges.prompt_tokens, gauges.output_tokens, gauges.kv_blocks_used) == (24, 9, 0)
    assert gauges.slot_steps_busy == sum(len(plan.scheduled) for plan in d.plans)


def test_many_running_decodes_share_a_step_fairly():
    """Multi-token catch-up never takes another sequence's token of the step."""
    d = driver(burst=3, max_num_seqs=8, max_num_batched_tokens=8)
    for seq_id in range(8):
        d.add(request(seq_id, prompt=1, output=30, first=seq_id))
    for _ in range(6):
        plan = d.step()
    assert len(plan.scheduled) == 8
    d.drain()
