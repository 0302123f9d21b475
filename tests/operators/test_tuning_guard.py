"""The guard's error rates, by simulation, against what it promises; and which requests it counts."""

import random

import pytest

from paceline_core.wire import RequestRecord
from paceline_operator.tuning.guard import ALPHA, Verdict, batch_seconds, batches_had, batches_needed, judge, margins, weigh
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.service_rate import ServiceRates

RUNS, BATCHES = 200, 100


def verdicts(mean, spread, *, stickiness=0.0):
    """Return the share of runs per verdict; with stickiness each batch is partly the one before, as queues make it."""
    counts = dict.fromkeys(Verdict, 0)
    for seed in range(RUNS):
        rng, last, differences = random.Random(seed), 0.0, []
        for _ in range(BATCHES):
            last = stickiness * last + rng.gauss(0.0, spread)
            differences.append(max(-1.0, min(1.0, mean + last)))
        counts[judge(differences).verdict] += 1
    return {verdict: count / RUNS for verdict, count in counts.items()}


# three standard errors of a share of 200 runs beside what is promised
SLACK = 3 * (ALPHA * (1 - ALPHA) / RUNS) ** 0.5


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_false_alarms_are_as_rare_as_promised(spread):
    assert verdicts(-0.02, spread)[Verdict.HARM] <= ALPHA + SLACK


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_harm_passes_as_rarely_as_promised(spread):
    assert verdicts(-0.10, spread)[Verdict.PASS] <= ALPHA + SLACK


def test_real_harm_is_seen_soon_and_no_harm_passes():
    assert verdicts(-0.3, 0.2)[Verdict.HARM] > 0.97
    assert verdicts(0.0, 0.1)[Verdict.PASS] > 0.97
    assert judge([-0.5] * 12).verdict is Verdict.HARM
    assert judge([0.0] * 31).verdict is Verdict.PASS
    assert judge([0.5] * 12).verdict is Verdict.PASS


def test_little_evidence_stays_open():
    assert judge([]).verdict is Verdict.OPEN
    assert judge([0.0] * 10).verdict is Verdict.OPEN
    assert verdicts(0.0, 0.4)[Verdict.HARM] <= ALPHA + SLACK


def test_harm_after_a_pass_is_harm():
    passed, then = judge([0.5] * 10), judge([0.5] * 10 + [-1.0] * 50)
    assert (passed.verdict, passed.harmful) == (Verdict.PASS, False)
    assert (then.verdict, then.harmful) == (Verdict.HARM, True) and then.passed >= passed.passed


def test_harm_is_not_forgotten_by_what_goes_well_later():
    assert judge([-0.5] * 12 + [1.0] * 100).verdict is Verdict.HARM


def test_a_batch_needs_both_sides():
    changed = [(t + 0.5, 1.0) for t in range(10)]
    assert weigh(changed, [], start=0.0, end=10.0, batch=1.0).batches == 0
    others = [(t + 0.2, 0.5) for t in range(0, 10, 2)]
    evidence = weigh(changed, others, start=0.0, end=10.0, batch=1.0)
    assert evidence.batches == 5 and evidence.requests == 9 and evidence.difference == pytest.approx(0.5)


def record(outcome="finished", **times):
    base = {"request_id": "a", "arrival": 100.0, "prompt_tokens": 10, "output_tokens": 11, "epoch": 0, "end_epoch": 0}
    return RequestRecord(outcome=outcome, **{**base, **times})


@pytest.mark.parametrize(
    ("given", "margin"),
    [
        (record(first_token=100.5, end=101.0), 0.0),  # 50 ms per token, just kept; TTFT has half to spare
        (record(first_token=102.0, end=102.1), -1.0),
        (record("refused", output_tokens=0), -1.0),
        (record("unfinished", output_tokens=0), None),  # waits, and still may
        (record("unfinished", output_tokens=11, first_token=100.1), -0.8),  # 90 ms per token so far
    ],
)
def test_margins_of_requests(given, margin):
    found = Objective(1.0, 0.05).margin(given, 101.0)
    assert found is None if margin is None else found == pytest.approx(margin, abs=1e-6)


def test_whoever_still_waits_counts_once_waiting_is_too_long():
    objective, waiting = Objective(1.0, 0.05), record("unfinished", output_tokens=0)
    assert margins([waiting], objective, 101.5, unknown=-1.0) == []  # not settled yet
    assert margins([waiting], objective, 103.0, unknown=-1.0) == [(100.0, 0.0)]


# can it be shown?


def simulated(gain, share, rate, pods, batch, seed):
    """Batches until "no worse" passes, of pods of which one serves `gain` more of its requests in time."""
    rng, differences, sides = random.Random(seed), [], ([], [])
    for _ in range(5000):
        for side, count, chance in ((0, 1, share + gain), (1, pods - 1, share)):
            for _ in range(
                int(rng.random() < batch * rate * count) if batch * rate * count < 1 else round(batch * rate * count)
            ):
                # half as much variance as zeros and ones have
                sides[side].append(chance + 0.5**0.5 * ((rng.random() < chance) - chance))
        if all(sides):
            differences.append(sum(sides[0]) / len(sides[0]) - sum(sides[1]) / len(sides[1]))
            sides = ([], [])
        if len(differences) > 10 and judge(differences).verdict is not Verdict.OPEN:
            break
    return len(differences)


@pytest.mark.parametrize(("gain", "share", "rate", "pods"), [(0.0, 0.9, 0.4, 2), (0.1, 0.6, 0.2, 2), (0.0, 0.98, 2.0, 3)])
def test_how_many_batches_a_pass_takes_is_known_before(gain, share, rate, pods):
    per_batch = batches_had(rate, pods, 720.0, 1.5)[1]
    needed = batches_needed(gain, share, per_batch, pods)
    counts = sorted(simulated(gain, share, rate, pods, 1.5, seed) for seed in range(60))
    assert 0.5 * needed < counts[len(counts) // 2] < 2.0 * needed


def test_a_small_gain_on_little_traffic_cannot_be_shown_and_a_large_one_can():
    had, per_batch = batches_had(0.05, 2, 720.0, 1.5)
    assert batches_needed(0.03, 0.6, per_batch, 2) > had > batches_needed(0.4, 0.3, per_batch, 2)
    assert batches_had(0.0, 2, 720.0, 1.5) == (0.0, 0.0) and batches_needed(0.5, 0.5, 0.0, 2) == float("inf")
    assert batches_had(50.0, 3, 720.0, 1.5)[0] == pytest.approx(480.0)  # no more than there are batches
    assert [batch_seconds(interval) for interval in (10.0, 30.0, 600.0)] == [1.0, 1.5, 10.0]


def test_a_batch_in_which_nobody_is_served_in_time_tells_nothing_by_scores():
    """A change that passed because everybody failed would be in force when somebody could be served again."""
    failing = [(t / 2, 0.0) for t in range(200)]
    assert weigh(failing, failing, start=0.0, end=100.0, batch=1.0).batches == 0
    later = [(100.0 + t / 2, 1.0) for t in range(60)]
    evidence = weigh([*failing, *((at, 0.2) for at, _ in later)], [*failing, *later], start=0.0, end=130.0, batch=1.0)
    assert evidence.batches == 30 and evidence.harmful


def test_luck_is_left_out_and_no_difference_is_more_than_all():
    ones, zeros = [(t + 0.5, 1.0) for t in range(40)], [(t + 0.5, 0.0) for t in range(40)]
    fair = weigh(ones, zeros, start=0.0, end=40.0, batch=1.0, luck=(ones, zeros))
    assert fair.difference == 0.0 and fair.batches == 40
    assert weigh(ones, zeros, start=0.0, end=40.0, batch=1.0, luck=(zeros, ones)).difference == 1.0


def test_where_both_sides_queue_service_rates_tell_what_scores_cannot():
    failing = [(t / 2, 0.0) for t in range(200)]
    waits, none = [(at, 1.0) for at, _ in failing], [(at, 0.0) for at, _ in failing]
    for left, right, batches in ((waits, waits, 100), (waits, none, 0), (none, none, 0)):
        rates = ServiceRates([5.0] * 100, [10.0] * 100, 10.0)
        found = weigh(failing, failing, start=0.0, end=100.0, batch=1.0, rates=rates, queued=(left, right))
        assert found.batches == batches and found.harmful is (batches > 0)
