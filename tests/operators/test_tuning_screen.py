"""How many settings are compared on little traffic: pieces that stand for all of it, rungs, and what may be chance."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuning_kit import Service, bad_start

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.step_time import StepModel
from paceline_operator.tuning.candidates import between
from paceline_operator.tuning.decide import decide
from paceline_operator.tuning.decision_log import DecisionLog
from paceline_operator.tuning.lengths import LengthCurve
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.preference import better, certain_gain, clearly_better
from paceline_operator.tuning.question import Question, SeenRequest
from paceline_operator.tuning.replay import replay
from paceline_operator.tuning.screen import FINE, ROUGH, Rung, piece_of
from paceline_operator.tuning.search import search
from paceline_operator.tuning.twin import Forecast, Twin
from paceline_sim.bent import BentModel
from paceline_sim.calibrated import CalibratedModel
from paceline_sim.generate import Lengths, bursty


def forecast(attainment=1.0, **changes):
    found = Forecast(100, attainment, attainment, attainment, 1.0, 0.1, 0.2, 0.01, 0.02, 0, 0.5)
    return replace(found, **changes)


def rows(*, burst=3.0, seconds=600.0, rate=1.0, seed=0):
    """Ten minutes with two bursts."""
    lengths = Lengths({50: 150, 100: 400}), Lengths({50: 40, 100: 90})
    trace = bursty(rate, seconds, *lengths, burst=burst, every=300.0, seed=seed)
    return tuple(SeenRequest(r.arrival, r.prompt_len, r.output_len) for r in trace.requests)


# pieces


def test_a_piece_is_around_the_busiest_moment_and_its_end_does_not_count():
    sample = rows()
    (piece,) = piece_of([sample], ROUGH)
    begin = next(i for i in range(len(sample)) if sample[i].arrival == piece[0].arrival)
    assert [r.arrival for r in piece] == [r.arrival for r in sample[begin : begin + ROUGH]]
    middle = piece[ROUGH // 4 : 3 * ROUGH // 4]
    span, usual = middle[-1].arrival - middle[0].arrival, sample[-1].arrival / len(sample)
    assert span < 0.6 * usual * len(middle) and any(start <= middle[0].arrival < start + 31.0 for start in (0.0, 300.0))
    assert [r.counted for r in piece] == [True] * (3 * ROUGH // 4) + [False] * (ROUGH // 4)


def test_what_is_hardly_more_than_a_piece_is_taken_whole():
    assert piece_of([rows()[:100]], ROUGH) is None and piece_of([], ROUGH) is None
    assert sum(map(len, piece_of([rows()[:150]], ROUGH))) == ROUGH


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=3), st.sampled_from([ROUGH, FINE]))
def test_a_piece_of_any_traffic_is_requests_in_a_row_and_no_more_than_asked_for(counts, count):
    samples = [rows(seed=number)[:size] for number, size in enumerate(counts)]
    piece = piece_of(samples, count)
    if piece is None:
        assert sum(map(len, samples)) < 1.5 * count
        return
    assert 0 < sum(map(len, piece)) <= count
    for part in piece:
        arrivals = [r.arrival for r in part]
        assert any(arrivals == [r.arrival for r in s[i : i + len(part)]] for s in samples for i in range(len(s)))


# rungs


class Plain:
    """A twin that knows what each setting is worth, and counts how many requests it was asked about."""

    def __init__(self, worth, whole=480):
        self.worth, self.whole, self.asked = worth, whole, []

    def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
        count = self.whole if piece is None else sum(map(len, piece))
        self.asked.append((knobs, count, load))
        share = self.worth(knobs, load)
        return forecast(share, requests=count, worths=(share,) * count)


def question(**changes):
    plain = Question(
        at=0.0, service="team/chat", knobs=knobs_to_wire(Knobs()), bounds={}, objective=Objective(1.0, 0.05),
        model=CalibratedModel(StepModel(0.01)), num_blocks=4000, samples=(), load=1.25,
    )  # fmt: skip
    return replace(plain, **changes)


def slots(best):
    """Each doubling away from the best number of slots costs a tenth."""
    return lambda knobs, _load: max(0.0, 1.0 - 0.1 * abs(knobs.max_num_seqs.bit_length() - best.bit_length()))


def found_by(twin, base, asked=None):
    traffic = [rows(), rows(seed=1)]
    asked = asked or question()
    return search(twin, traffic, base, asked, twin.forecast(base, load=asked.load, watch=True))


@pytest.mark.parametrize("best", [2, 16, 64])
def test_the_best_setting_comes_through_all_rungs(best):
    twin = Plain(slots(best))
    found = found_by(twin, Knobs(max_num_seqs=256))
    assert found.knobs.max_num_seqs.bit_length() == best.bit_length() and found.best.attainment == 1.0


def test_all_traffic_is_replayed_under_few_settings_and_the_rest_screened_on_a_fraction_of_it():
    twin = Plain(slots(16))
    found_by(twin, Knobs(max_num_seqs=256))
    whole = {knobs for knobs, count, _ in twin.asked if count == twin.whole}
    tried = {knobs for knobs, _, _ in twin.asked}
    assert len(whole) <= 8 and Knobs(max_num_seqs=256) in whole and len(tried) > 12
    assert len(twin.asked) == len({(knobs, count, load) for knobs, count, load in twin.asked})  # nothing twice
    finalists = {knobs for knobs, count, load in twin.asked if count == twin.whole and load == 1.0}
    assert len(finalists) == 2  # the one in force, and what is chosen
    assert sum(count for _, count, _ in twin.asked) < 0.45 * 2 * len(tried) * twin.whole  # all of it, at both loads


def test_finalists_differ_in_slots():
    """Sixteen slots are the best on pieces, with any budget, and nothing on all traffic, where thirty-two are."""

    class Flattering(Plain):
        def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
            made = super().forecast(knobs, load=load, watch=watch, piece=piece)
            share = {16: 0.8, 32: 0.7}.get(knobs.max_num_seqs, 0.5) if piece is not None else made.attainment
            return replace(made, attainment=share, soft=share, worths=(share,) * made.requests)

    found = found_by(Flattering(lambda knobs, _load: 0.9 if knobs.max_num_seqs == 32 else 0.2), Knobs(max_num_seqs=256))
    assert found.changes == {"maxNumSeqs": 32}


def test_what_only_shines_on_a_piece_is_found_out_on_all_of_it():
    class Deceived(Plain):
        def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
            made = super().forecast(knobs, load=load, watch=watch, piece=piece)
            return replace(made, attainment=1.0, soft=1.0) if piece is not None and knobs.max_num_seqs < 8 else made

    found = found_by(Deceived(slots(256)), Knobs(max_num_seqs=256))
    assert found.knobs == Knobs(max_num_seqs=256) and not found.changes


def test_what_is_best_for_the_load_to_come_alone_must_not_cost_more_now():
    def worth(knobs, load):
        narrow = knobs.max_num_seqs <= 16
        return (0.5 if narrow else 0.9) if load == 1.0 else (0.7 if narrow else 0.6)

    found = found_by(Plain(worth), Knobs(max_num_seqs=256))
    assert not found.changes and found.current.attainment == pytest.approx(0.75)


def test_steps_that_the_model_never_saw_are_not_recommended():
    class Guessing(Plain):
        def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
            made = super().forecast(knobs, load=load, watch=watch, piece=piece)
            return replace(made, unknown=("decode_tokens",) if watch and knobs.max_num_seqs > 32 else ())

    found = found_by(Guessing(slots(128)), Knobs(max_num_seqs=16))
    assert found.knobs.max_num_seqs <= 32


def test_steps_as_the_knobs_in_force_may_bring_them_are_no_reason_against_a_setting():
    class Guessing(Plain):
        def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
            made = super().forecast(knobs, load=load, watch=watch, piece=piece)
            return replace(made, unknown=("prefill_tokens",) if watch and knobs.max_num_batched_tokens > 2000 else ())

    assert found_by(Guessing(slots(16)), Knobs(max_num_seqs=256)).changes == {"maxNumSeqs": 16}


def test_a_setting_whose_prompts_would_make_steps_too_large_to_know_comes_with_a_smaller_budget():
    class Guessing(Plain):
        def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
            made = super().forecast(knobs, load=load, watch=watch, piece=piece)
            wide = knobs.max_num_batched_tokens > 2000 and knobs.max_num_seqs > 1
            return replace(made, unknown=("prefill_tokens",) if watch and wide else ())

    seen = StepModel(0.01, seen={"prefill_tokens": (0.0, 900.0)})
    found = found_by(Guessing(slots(16)), Knobs(max_num_seqs=1), question(model=CalibratedModel(seen)))
    assert found.changes == {"maxNumSeqs": 16, "maxNumBatchedTokens": 1800}


def test_of_two_that_do_for_the_load_to_come_the_one_with_room_beyond_it_is_chosen():
    """Eight slots are a little better up to 1.25 times the load, and fall over beyond it."""

    def worth(knobs, load):
        if knobs.max_num_seqs == 8:
            return 0.96 if load <= 1.3 else 0.3
        return 0.95 if knobs.max_num_seqs == 16 else 0.5

    assert found_by(Plain(worth), Knobs(max_num_seqs=256)).changes == {"maxNumSeqs": 16}


def test_of_settings_that_work_a_queue_off_about_as_fast_the_one_with_most_in_time_is_chosen():
    class Draining(Plain):
        def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
            made = super().forecast(knobs, load=load, watch=watch, piece=piece)
            return replace(made, token_rate={1: 10.0, 8: 60.0, 16: 95.0, 32: 97.0, 64: 100.0}.get(knobs.max_num_seqs, 20.0))

    in_time = {1: 0.0, 8: 0.3, 16: 0.2, 32: 0.1, 64: 0.0}
    twin = Draining(lambda knobs, _load: in_time.get(knobs.max_num_seqs, 0.0))
    asked = question(objective=Objective(1.0, 0.05, draining=True))
    assert found_by(twin, Knobs(max_num_seqs=1), asked).changes == {"maxNumSeqs": 16}


@pytest.mark.parametrize(
    ("gain", "changes"), [(0.02, {"maxNumSeqs": 16}), (0.2, {"maxNumSeqs": 16, "longPrefillThreshold": 512})]
)
def test_a_knob_more_must_earn_its_place(gain, changes):
    def worth(knobs, _load):
        slots_worth = 0.7 if knobs.max_num_seqs == 16 else 0.4
        return slots_worth + gain * (knobs.long_prefill_threshold == 512)

    assert found_by(Plain(worth), Knobs(max_num_seqs=256)).changes == changes


@pytest.mark.parametrize("bounds", [{}, {"maxNumSeqs": (1, 12)}, {"maxNumBatchedTokens": (512, 8192)}])
def test_more_slots_with_a_small_budget_are_found_where_neither_alone_is_better(bounds):
    """A long prompt among short ones: eight slots under the budget in force, sixteen if prompts come in chunks."""

    def worth(knobs, _load):
        chunks, many = knobs.max_num_batched_tokens <= 256, knobs.max_num_seqs
        return 0.9 if chunks and 14 <= many <= 18 else 0.7 if not chunks and many == 8 else 0.5

    found = found_by(Plain(worth), Knobs(max_num_seqs=8), question(bounds=bounds))
    if bounds:
        assert not found.changes
    else:
        assert 14 <= found.changes["maxNumSeqs"] <= 18 and found.changes["maxNumBatchedTokens"] in (128, 256)


def test_slots_beside_a_small_budget_stay_within_what_the_model_knows():
    seen = StepModel(0.01, seen={"decode_tokens": (0.0, 6.0)})

    def worth(knobs, _load):
        return 0.9 if knobs.max_num_batched_tokens <= 256 and knobs.max_num_seqs > 12 else 0.5

    assert not found_by(Plain(worth), Knobs(max_num_seqs=8), question(model=CalibratedModel(seen))).changes


def test_of_equals_the_first_is_the_best():
    rung = Rung(Plain(lambda _knobs, _load: 0.5), Objective(1.0, 0.05), 1.0)
    settings_ = [Knobs(max_num_seqs=count) for count in (8, 4, 16)]
    assert rung.best(settings_, 2) == settings_[:2] and rung.best([], 1) == []


# chance


def drawn(chance, seed, count=480):
    rng = random.Random(seed)
    return tuple(float(rng.random() < chance) for _ in range(count))


def test_a_gain_that_may_be_chance_is_none():
    wrong = sum(certain_gain(forecast(worths=drawn(0.7, i)), forecast(worths=drawn(0.7, -i - 1))) > 0 for i in range(400))
    assert wrong <= 0.15 * 400  # once in nine times by the t distribution; counted over fixed seeds
    right = sum(certain_gain(forecast(worths=drawn(0.7, i)), forecast(worths=drawn(0.85, -i - 1))) > 0 for i in range(100))
    assert right >= 95


def test_too_few_requests_prove_nothing_and_requests_of_one_moment_are_one_observation():
    assert certain_gain(forecast(worths=(0.0,) * 39), forecast(worths=(1.0,) * 39)) == 0.0
    assert certain_gain(forecast(worths=(0.0,) * 40), forecast(worths=(1.0,) * 40)) == 1.0
    burst = (0.0,) * 450 + (1.0,) * 30  # two of sixteen blocks
    assert certain_gain(forecast(worths=(0.0,) * 480), forecast(worths=burst)) < 0  # one lucky minute


def test_better_is_more_in_time_then_faster_then_fewer_preemptions():
    objective = Objective(1.0, 0.05)
    assert better(objective, forecast(0.9), forecast(0.8)) and not better(objective, forecast(0.8), forecast(0.9))
    assert better(objective, forecast(0.9, ttft_p95=0.1), forecast(0.9, ttft_p95=0.9))
    assert better(objective, forecast(0.9), forecast(0.9, preemptions=3))
    assert better(objective, forecast(0.0, token_rate=2.0), forecast(0.01))  # nobody in time: what drains the queue


def test_a_lower_limit_on_the_slots_is_not_turned_back():
    """A small budget alone would do as well, by a model that has seen no large batch."""

    def worth(knobs, _load):
        return 0.4 + 0.3 * (knobs.max_num_batched_tokens == 256) + 0.02 * (knobs.max_num_seqs == 16)

    changes = found_by(Plain(worth), Knobs(max_num_seqs=256)).changes
    assert changes == {"maxNumSeqs": 16, "maxNumBatchedTokens": 256}
    more = found_by(
        Plain(lambda k, _: 0.4 + 0.3 * (k.max_num_batched_tokens == 256) + 0.02 * (k.max_num_seqs > 64)),
        Knobs(max_num_seqs=64),
    )
    assert more.changes == {"maxNumBatchedTokens": 256}  # more of them have to earn it


def test_latency_is_no_reason_to_call_a_setting_clearly_better():
    objective = Objective(1.0, 0.05)
    assert not clearly_better(objective, forecast(0.9, ttft_p95=0.1), forecast(0.9, ttft_p95=0.9))
    assert not clearly_better(objective, forecast(0.93), forecast(0.9)) and clearly_better(
        objective, forecast(0.95), forecast(0.9)
    )
    # two in a hundred are little where all are served, and a tenth of what is served where a fifth are
    assert clearly_better(objective, forecast(0.22), forecast(0.20)) and not clearly_better(
        objective, forecast(0.205), forecast(0.20)
    )
    drains = replace(objective, draining=True)
    assert clearly_better(drains, forecast(0.0, token_rate=1.2), forecast(0.5))
    assert not clearly_better(drains, forecast(0.5, token_rate=1.05), forecast(0.0))
    unstated = replace(objective, stated=False)
    assert clearly_better(unstated, forecast(token_rate=1.1), forecast()) and not clearly_better(
        unstated, forecast(), forecast()
    )


# lengths of what runs still


def test_whoever_runs_still_counts_as_longer_than_it_is():
    ended, running = [10] * 50 + [100] * 5, [90] * 45
    guesses = [LengthCurve(ended, running).guess(0, number) for number in range(200)]
    assert sum(guess > 90 for guess in guesses) / 200 == pytest.approx(0.5, abs=0.02)
    assert sum(guess > 90 for guess in (LengthCurve(ended, []).guess(0, n) for n in range(200))) < 40


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 50), max_size=30), st.lists(st.integers(0, 60), max_size=30), st.integers(0, 80),
    st.integers(0, 500),
)  # fmt: skip
def test_a_guess_is_longer_than_what_is_there(ended, running, so_far, number):
    assert LengthCurve(ended, running).guess(so_far, number) > so_far


def test_guesses_are_spread_as_lengths_are():
    ended = list(range(1, 101))
    guesses = sorted(LengthCurve(ended, []).guess(0, number) for number in range(100))
    assert all(abs(guess - length) <= 4 for guess, length in zip(guesses, ended, strict=True))


# decisions


@pytest.fixture(scope="module")
def busy():
    """A question about minutes of traffic: one slot, and twice the traffic that it can serve."""
    service = Service(Knobs(max_num_seqs=1), rate=3.0, seconds=300.0)
    service.mode = "Recommend"
    service.run(240, every=10.0)
    return service.questions[-1]


def test_a_question_holds_more_traffic_than_the_twin_is_checked_with(busy):
    assert sum(map(len, busy.traffic)) == 480 and sum(r.counted for s in busy.samples for r in s) <= 160
    assert all(r.ttft is None and r.met is None for sample in busy.traffic for r in sample)


def test_a_decision_costs_few_replays(busy, monkeypatch):
    replayed = []
    plain = Twin._replay

    def counted(self, sample, *rest):
        replayed.append(len(sample))
        return plain(self, sample, *rest)

    monkeypatch.setattr(Twin, "_replay", counted)
    decision = decide(busy)
    assert decision.kind == "Change" and decision.target["maxNumSeqs"] >= 4
    # 30 settings on all of it would be 14,400, and as much again at the other load
    assert sum(replayed) < 13_000


@pytest.mark.parametrize(
    ("tile", "slots", "tried"), [(1, 26, [18, 22, 31, 38]), (8, 26, [16, 24, 32, 40]), (16, 10, [7, 8, 12, 14])]
)
def test_slots_beside_the_best_fill_the_tiles_of_the_device(tile, slots, tried):
    model = BentModel(0.01, 1e-4, batch_tile=tile)
    assert between("maxNumSeqs", Knobs(max_num_seqs=slots), {}, model) == [{"maxNumSeqs": value} for value in tried]
    budgets = between("maxNumBatchedTokens", Knobs(max_num_seqs=8, max_num_batched_tokens=200), {}, model)
    assert budgets == [{"maxNumBatchedTokens": value} for value in (140, 170, 240, 290)]  # decodes share it: nothing to fill


def test_a_logged_decision_is_made_again_from_its_line_alone(busy, tmp_path):
    path = tmp_path / "decisions.jsonl"
    DecisionLog(path).add(busy, decide(busy), {"pod-0": 0})
    ((asked, logged, again),) = replay(path)
    assert again.to_json() == logged and asked.traffic == busy.traffic
    line = json.loads(path.read_text(encoding="utf-8"))
    del line["question"]["traffic"]  # as an operator of the last version wrote it
    assert Question.from_json(line["question"]).traffic == ()


def test_lengths_of_what_runs_are_guessed_with_the_rest_of_the_traffic():
    service = bad_start(rate=4.0).run(20)
    (first, *_) = service.questions
    outputs = [r.output for sample in first.traffic for r in sample]
    assert min(outputs) >= 1 and max(outputs) <= 90  # max_tokens caps what is guessed
