"""Drafts in the scheduler: where they come from, who gets how many, and what they may never do."""

from __future__ import annotations

from itertools import pairwise

from core_oracle import Driver, expected_output

from paceline_core.acceptance import Acceptance
from paceline_core.knobs import Knobs, Strategy
from paceline_core.plan import StepPlan
from paceline_core.prompt_lookup import PromptLookup
from paceline_core.request import FinishReason, Request
from paceline_core.step_time import StepModel

BLOCK = 4


def knobs(strategy: str = "continuous", **changes) -> Knobs:
    sizes = {"max_num_seqs": 4, "block_size": BLOCK, "max_num_seqs_limit": 64}
    return Knobs(**{"strategy": Strategy(strategy), "speculative": 4} | sizes | changes)


def request(seq_id: int, prompt: int = 3, output: int = 12, **fields) -> Request:
    tokens = [seq_id + 1, *range(1, prompt)]
    return Request(seq_id=seq_id, prompt_len=prompt, max_tokens=output, arrival=0.0, tokens=tokens, **fields)


def driver(strategy: str = "continuous", *, blocks: int = 200, skill: float = 1.0, depth: int = 1, model=None, **changes):
    return Driver(knobs(strategy, **changes), blocks, skill=skill, lavish=True, depth=depth, step_model=model)


def drafts(plan: StepPlan | None) -> dict[int, int]:
    return {} if plan is None else {entry.seq_id: len(entry.drafts) for entry in plan.scheduled if entry.drafts}


class TestPromptLookup:
    def test_what_followed_last_time_comes_again(self):
        assert PromptLookup().propose(0, [1, 2, 3, 4, 5, 9, 1, 2, 3], [], 2) == (4, 5)

    def test_the_last_occurrence_counts(self):
        assert PromptLookup().propose(0, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [], 1) == (5,)

    def test_a_longer_match_is_better_than_a_later_one(self):
        assert PromptLookup().propose(0, [7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], [], 1) == (5,)

    def test_two_tokens_are_enough_and_one_is_not(self):
        assert PromptLookup().propose(0, [1, 2, 8, 9, 1, 2], [], 1) == (8,)
        assert PromptLookup().propose(0, [2, 8, 9, 2], [], 1) == ()
        assert PromptLookup().propose(0, [2], [], 1) == ()

    def test_a_text_that_goes_in_circles_goes_on(self):
        assert PromptLookup().propose(0, [1, 2, 3, 1, 2, 3], [], 7) == (1, 2, 3, 1, 2, 3, 1)
        assert PromptLookup().propose(0, [5, 5, 5], [], 3) == (5, 5, 5)

    def test_generated_tokens_are_part_of_the_text(self):
        lookup = PromptLookup()
        assert lookup.propose(0, [1, 2, 3], [4, 1], 1) == ()
        assert lookup.propose(0, [1, 2, 3], [4, 1, 2], 2) == (3, 4)
        lookup.forget(0)
        assert lookup.propose(0, [8, 9, 8, 9], [], 1) == (8,)

    def test_bytes_of_two_tokens_are_no_token(self):
        shifted = [0x00000100, 0x00000200, 0x00000300]  # as bytes one place later: 1, 2
        assert PromptLookup().propose(0, [*shifted, 1, 2], [], 1) == ()

    def test_only_the_newest_part_of_a_long_text_is_searched(self):
        middle = list(range(100, 100 + 16_384))
        assert PromptLookup().propose(0, [1, 2, 3, *middle, 1, 2], [], 1) == ()


class TestAcceptance:
    def test_drafts_go_on_while_they_pay(self):
        assert Acceptance(chance=0.9).length(0, 16, cost=0.5) == 6  # 0.9^6 = 0.53
        assert Acceptance(chance=0.5).length(0, 16, cost=0.3) == 1
        assert Acceptance(chance=0.9).length(0, 3, cost=0.0) == 3

    def test_a_dear_step_has_no_drafts_and_says_nothing_of_the_sequence(self):
        record = Acceptance()
        assert record.length(0, 4, cost=0.8) == 0
        assert record.length(1, 4, cost=0.1) > 0

    def test_who_guesses_badly_rests_twice_as_long_each_time(self):
        record, tried = Acceptance(), []
        for output_len in range(400):
            if count := record.length(output_len, 4, cost=0.1):
                tried.append(output_len)
                record.learn(count, 0)
        gaps = [after - before for before, after in pairwise(tried) if after - before > 1]
        assert gaps[0] >= 32
        assert all(after >= 2 * before - 2 for before, after in pairwise(gaps))
        assert len(gaps) >= 3

    def test_luck_makes_drafts_longer(self):
        record = Acceptance()
        before = record.length(0, 16, cost=0.1)
        record.learn(before, before)
        assert record.length(4, 16, cost=0.1) > before


class TestSteps:
    def test_right_drafts_give_several_tokens_a_step(self):
        d = driver()
        d.add(request(0, output=20))
        d.drain()
        assert d.outputs[0] == expected_output(d.requests[0], 20)[0]
        assert len(d.plans) <= 7
        gauges = d.scheduler.gauges()
        assert gauges.accepted_drafts == gauges.draft_tokens == 20 - sum(len(p.scheduled) for p in d.plans)
        assert gauges.draft_checks == sum(bool(drafts(p)) for p in d.plans)

    def test_wrong_drafts_cost_a_little_and_change_nothing(self):
        d = driver(skill=0.0)
        d.add(request(0, output=40))
        d.drain()
        assert d.outputs[0] == expected_output(d.requests[0], 40)[0]
        assert 0 < sum(bool(drafts(plan)) for plan in d.plans) < 15, "it stops where it doesn't pay"

    def test_none_without_the_knob_and_none_for_who_wants_none(self):
        d = driver(speculative=0)
        d.add(request(0))
        d.drain()
        assert d.runner.drafted == 0
        d.set_knobs(knobs())
        d.add(request(1, draftable=False))
        d.add(request(2))
        d.drain()
        assert {seq_id for plan in d.plans for seq_id in drafts(plan)} == {2}

    def test_the_knob_acts_from_the_next_step(self):
        d = driver()
        d.add(request(0, output=60))
        d.step()
        d.step()
        assert drafts(d.plans[-1])
        d.set_knobs(knobs(speculative=0))
        assert not drafts(d.step())
        d.set_knobs(knobs(speculative=1))
        assert drafts(d.step()) == {0: 1}

    def test_drafts_take_what_the_budget_leaves(self):
        d = driver(max_num_batched_tokens=6)
        d.add(request(0, output=30))
        d.step()
        d.add(request(1, prompt=40, output=30))
        plan = d.step()
        assert plan.num_tokens == 6
        assert not drafts(plan), "a prompt's chunk goes first"
        while d.scheduler.has_work and not drafts(plan):
            plan = d.step()
        assert plan.num_tokens <= 6

    def test_the_last_token_is_no_draft(self):
        """A token that is the last needs no KV, so there is no use in more drafts than tokens less one."""
        d = driver(speculative=16)
        d.add(request(0, output=3))
        d.drain()
        assert [sum(drafts(plan).values()) for plan in d.plans] == [0, 1]
        assert d.ended[0].reason is FinishReason.LENGTH

    def test_a_draft_takes_no_block_that_another_may_need(self):
        """Three sequences fill eleven of twelve blocks: who needs a block for its next token gets the last one."""
        d = driver(blocks=12, max_num_seqs=3)
        for seq_id in range(3):
            d.add(request(seq_id, prompt=12, output=4))
        while d.scheduler.has_work:
            plan = d.step()
            pool = d.scheduler.gauges()
            if drafts(plan) and pool.kv_blocks_total - pool.kv_blocks_used < 3:
                assert all(e.num_tokens + e.start <= len(e.block_table) * BLOCK for e in plan.scheduled)
        d.drain()
        assert d.scheduler.gauges().preemptions == 0
        assert d.runner.drafted > 0

    def test_a_stop_token_among_right_drafts_ends_it(self):
        out, _ = expected_output(request(0, output=30), 30)
        place = next(i for i in range(4, 30) if out[i] not in out[:i])
        d = driver(speculative=16)
        d.add(request(0, output=30, stop_token_ids=frozenset({out[place]})))
        d.drain()
        assert d.outputs[0] == out[: place + 1]
        assert d.ended[0].reason is FinishReason.STOP

    def test_no_block_with_a_wrong_draft_is_shared(self):
        """The second request's prompt is the first one's text so far: what it finds cached must be that text's KV."""
        d = driver(skill=0.6)
        d.add(request(0, output=40))
        d.drain()
        text = [*d.requests[0].tokens, *d.outputs[0]]
        d.add(Request(seq_id=1, prompt_len=len(text), max_tokens=4, arrival=0.0, tokens=text))
        d.drain()
        assert d.ended[1].cached_len >= len(text) - 2 * BLOCK
        assert d.outputs[1] == expected_output(d.requests[1], 4)[0]

    def test_a_plan_in_flight_leaves_nothing_to_guess_from(self):
        """With two plans in flight a sequence is drafted for when its newest token is known, and then not planned twice."""
        d = driver(depth=2)
        d.add(request(0, output=30))
        d.drain()
        assert d.outputs[0] == expected_output(d.requests[0], 30)[0]
        d.now += 1
        d.add(request(1, output=30))
        first = d.schedule()
        second = d.schedule()
        assert not drafts(first) and not drafts(second)

    def test_a_step_that_keeps_an_objective_has_no_drafts_over_it(self):
        model = StepModel(constant=0.01, decode_tokens=0.004)
        d = driver("iteration", model=model, slo_tpot=0.02)
        d.add(request(0, output=40))
        d.drain()
        most = max(plan.shape.decode_tokens for plan in d.plans)
        assert 1 < most <= 2, "three tokens would take 22 ms"

    def test_a_full_batch_that_computes_has_none(self):
        """Where a token more takes as long as a token of the batch, only a certain draft would pay."""
        d = driver(model=StepModel(constant=1e-6, decode_tokens=0.01))
        for seq_id in range(4):
            d.add(request(seq_id, output=20))
        d.drain()
        assert d.runner.drafted == 0

    def test_steps_with_drafts_are_not_taken_in_one_stride(self):
        d = driver()
        assert d.scheduler.find_stride(0.0) is None
        d.add(request(0, output=100))
        d.step()
        assert d.scheduler.find_stride(d.now) is None

    def test_static_batches_have_them_too(self):
        d = driver("static", max_num_seqs=2)
        for seq_id in range(2):
            d.add(request(seq_id, output=20))
        d.drain()
        assert d.runner.accepted > 0
        assert all(d.outputs[i] == expected_output(d.requests[i], 20)[0] for i in range(2))
