"""Queues far beyond the objective: every score is 0 on both sides, and how fast pods serve is what tells knobs apart."""

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest
from tuning_kit import INTERVAL, Service

from paceline_core.knobs import Knobs
from paceline_core.wire import RequestRecord
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.facts import Facts, PodFact
from paceline_operator.tuning.guard import ALPHA, Verdict, weigh
from paceline_operator.tuning.machine import advance
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.preference import better
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.service_rate import Lately, ServiceRates, tokens_per_batch
from paceline_operator.tuning.state import Phase, State, Trial
from paceline_operator.tuning.twin import Forecast

RUNS, BATCHES = 200, 100
SLACK = 3 * (ALPHA * (1 - ALPHA) / RUNS) ** 0.5  # three standard errors of a share of so many runs


def record(first, end, tokens, *, arrival=0.0, **changes):
    return RequestRecord("a", arrival, 10, tokens, "finished", 0, 0, first_token=first, end=end, **changes)


def batches(*records, now=100.0):
    return tokens_per_batch(records, start=10.0, end=20.5, batch=2.0, now=now)


# what pods serve


def test_tokens_count_when_they_came_whenever_their_request_did():
    assert batches(record(10.0, 20.0, 50)) == pytest.approx([10.0] * 5)
    assert batches(record(5.0, 15.0, 50)) == pytest.approx([10.0, 10.0, 5.0, 0.0, 0.0])
    assert batches(record(19.0, 29.0, 50)) == pytest.approx([0.0, 0.0, 0.0, 0.0, 5.0])
    assert batches(record(3.0, 9.0, 50), record(None, None, 0), record(25.0, 30.0, 9)) == [0.0] * 5


def test_who_still_runs_has_had_its_tokens_up_to_now():
    running = replace(record(16.0, None, 20), outcome="unfinished")
    assert batches(running, now=20.0) == pytest.approx([0.0, 0.0, 0.0, 10.0, 10.0])
    assert batches(record(13.0, 13.0, 1)) == pytest.approx([0.0, 1.0, 0.0, 0.0, 0.0], abs=1e-6)  # one token, no time


def test_no_time_has_no_batches():
    assert tokens_per_batch([record(1.0, 5.0, 9)], start=5.0, end=4.0, batch=2.0, now=9.0) == []


def test_a_pod_that_serves_in_bursts_is_as_fast_as_one_that_serves_evenly():
    bursts = ServiceRates([10.0] * 40, [20.0, 0.0] * 20, 10.0)
    assert fmean(bursts.difference([number]) for number in range(40)) == pytest.approx(0.0, abs=0.02)


def test_differences_stay_within_one_and_nothing_served_is_no_difference():
    rates = ServiceRates([1e6, 0.0, 5.0], [0.0, 1e9, 5.0], 3.0)
    assert [rates.difference([number]) for number in range(3)] == [1.0, -1.0, 0.0]
    assert ServiceRates([0.0], [0.0], 0.0).difference([0]) == 0.0


@pytest.mark.parametrize(
    ("lately", "starved"),
    [
        (Lately(20, 0.01, 0.0, 30.0, 0.1, 1.0), True),
        (Lately(20, 0.06, 0.0, 30.0, 0.1, 1.0), False),  # some are served nearly in time
        (Lately(9, 0.0, 0.0, 30.0, 0.1, 1.0), False),  # too few to tell
        (Lately(20, 0.0, 0.0, 0.0, 0.1, 1.0), False),  # nothing is served at all: no rate to compare
        (Lately(20, 0.0, 0.0, 30.0, 0.35, 1.0), False),  # a burst: a third are served in time when it is over
        (Lately(20, 0.0, 0.0, 30.0, 0.0, 0.5), False),  # half have their first token in time: the pace is the trouble
        (Lately(), False),
    ],
)
def test_who_is_starved(lately, starved):
    assert lately.starved is starved


def test_who_gets_tokens_too_slowly_is_not_starved():
    """Batches that are too large, and no queue: serving more tokens per second is no help, smaller batches are."""
    slow = Service(Knobs(max_num_seqs=256), rate=2.0, ttft=4.0, tpot=0.005)
    slow.mode = "Off"
    slow.run(60)
    assert slow.brain.lately.score < 0.05 and slow.brain.lately.waited < 0.1 and not slow.brain.lately.starved
    assert slow.brain.lately.attainment == slow.brain.stretch.attainment < 0.01
    objective = Objective(1.0, 0.05)
    assert objective.waited(record(2.0, 3.0, 9), 5.0) and not objective.waited(record(0.9, 9.0, 9), 9.0)
    assert objective.waited(replace(record(None, None, 0), outcome="refused"), 0.1)
    assert not Objective(None, 0.05).waited(record(50.0, 60.0, 9), 60.0)


# the guard's error rates where only rates tell


def verdicts(ratio, spread, *, scores=(0.0, 0.0)):
    """Return the share of runs per verdict of a changed pod that serves `ratio` times as much, in noisy batches."""
    counts = dict.fromkeys(Verdict, 0)
    for seed in range(RUNS):
        rng = random.Random(seed)
        sides = [[max(0.0, mean * (1 + rng.gauss(0, spread))) for _ in range(BATCHES)] for mean in (100.0 * ratio, 100.0)]
        pairs = [[(number + 0.5, score) for number in range(BATCHES)] for score in scores]
        rates = ServiceRates(*sides, 100.0)
        counts[weigh(*pairs, start=0.0, end=float(BATCHES), batch=1.0, rates=rates).verdict] += 1
    return {verdict: count / RUNS for verdict, count in counts.items()}


@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_of_rates_too_false_alarms_and_misses_are_as_rare_as_promised(spread):
    assert verdicts(0.96, spread)[Verdict.HARM] <= ALPHA + SLACK  # a difference of −0.02
    assert verdicts(0.818, spread)[Verdict.PASS] <= ALPHA + SLACK  # and of −0.10


def test_faster_passes_and_slower_is_stopped():
    assert verdicts(3.0, 0.3)[Verdict.PASS] > 0.97
    assert verdicts(0.4, 0.3)[Verdict.HARM] > 0.97


def test_where_somebody_is_served_in_time_rates_count_for_nothing():
    assert verdicts(5.0, 0.3, scores=(0.2, 0.7))[Verdict.HARM] == 1.0  # five times the tokens, and half the score
    assert verdicts(0.2, 0.3, scores=(0.7, 0.2))[Verdict.PASS] == 1.0


def test_without_rates_no_score_is_no_difference():
    pairs = [(number + 0.5, 0.0) for number in range(40)]
    assert weigh(pairs, pairs, start=0.0, end=40.0, batch=1.0).difference == 0.0


# the state machine


OLD, NEW = {"maxNumSeqs": 1}, {"maxNumSeqs": 16}
TRIAL = Trial(OLD, NEW, "faster", 0.0, (), "pod-0", 0.0, 0.0, 0.9, 5.0, promised=0.4, starved=True, rate=10.0, applied=1.0)


def promoted(rate, *, pods=2, waited=3, share=0.0, **trial):
    facts = Facts(
        "Auto", "h1", NEW, tuple(PodFact(f"pod-{i}", f"pod-{i}") for i in range(pods)), None, INTERVAL, after=(300, share),
        rate_after=rate,
    )  # fmt: skip
    state = State(spec_hash="h1", phase=Phase.VERIFYING, trial=replace(TRIAL, **trial), override=NEW)
    return advance(state, facts, waited * INTERVAL)[0]


@pytest.mark.parametrize("pods", [1, 2])
def test_pods_that_serve_clearly_more_verify_a_change_while_the_queue_lasts(pods):
    state = promoted(30.0, pods=pods)
    assert state.history[-1].outcome == "Settled(Served)" and state.override == NEW
    assert "30 tokens/s, 10 before" in state.history[-1].effect


def test_a_little_more_is_looked_at_longer_and_then_compared():
    assert promoted(11.0).phase is Phase.VERIFYING
    assert promoted(11.0, waited=5).phase is Phase.COMPARING


def test_tokens_are_no_excuse_where_requests_were_served_in_time_before():
    assert promoted(30.0, waited=5, starved=False, baseline=0.3).phase is Phase.COMPARING


# whole services


def queued(seconds, *, slots=1, every=2.0, **options):
    """A service whose queue has grown for so long before anybody looks after it."""
    service = Service(Knobs(max_num_seqs=slots), seconds=900.0, **options)
    service.mode = "Off"
    service.run(seconds, every=every)
    service.mode = "Auto"
    assert service.brain.lately.starved
    return service


def test_a_queue_of_minutes_is_got_rid_of():
    service = queued(240, every=10.0, pods=2, rate=3.5).run(300)
    outcomes = [change.outcome for change in service.brain.state.history]
    assert outcomes[0].startswith("Settled") and not any("Reverted" in outcome for outcome in outcomes), outcomes
    assert len(outcomes) <= 3 and service.brain.view.attainment > 0.9
    assert service.brain.state.override["maxNumSeqs"] >= 4


def test_a_single_pod_gets_rid_of_its_queue_too():
    service = queued(240, every=10.0, pods=1, rate=3.5).run(300)
    assert service.brain.state.history[0].outcome.startswith("Settled") and service.brain.view.attainment > 0.9


def claim(**target):
    forecast = Forecast(100, 1.0, 1.0, 1.0, 1.0, 0.1, 0.2, 0.01, 0.02, 0, 0.5)
    return Decision("Change", "Better", "", target=target, current=forecast, best=forecast, gain=1.0)


@pytest.mark.parametrize("pods", [1, 3])
def test_a_setting_that_serves_even_less_is_taken_back(pods):
    service = queued(60, slots=3, pods=pods, rate=9.0)
    service.look(claim(maxNumSeqs=1))
    assert service.brain.state.trial.starved
    service.run(80)
    assert service.brain.state.history[0].outcome == "Reverted(Harm)"


def test_an_operator_that_restarts_goes_on_with_the_rates():
    service = queued(40, pods=2)
    service.look(claim(maxNumSeqs=8))
    service.run(8)
    kept = State.from_json(json.loads(json.dumps(service.brain.state.to_json())))
    assert kept.trial.starved and kept.trial.rate > 0
    service.brain = Brain(kept)
    service.run(60)
    assert service.brain.state.history[0].outcome.startswith("Settled")


def test_the_queue_from_before_does_not_speak_against_a_change_on_the_only_pod():
    service = Service(Knobs(max_num_seqs=4), pods=1, rate=5.0, ttft=4.0, tpot=0.2, seconds=400.0).run(60)
    service.look(claim(maxNumSeqs=32))
    assert not service.brain.state.trial.starved
    service.run(2)
    trial, objective = replace(service.brain.state.trial, applied=service.now), service.brain.objective(service.situation())
    service.run(60)
    (pod,) = service.brain.ledgers.values()
    left = [r.first_token for r in pod.records if r.arrival < trial.applied and r.first_token]
    assert service.brain._backlog_gone(trial, INTERVAL, service.now) == max(62.0, *left)
    assert objective.stated and service.brain.state.history[0].outcome.startswith("Settled")


# the twin's question


def forecast(attainment, rate):
    return Forecast(100, attainment, attainment, 1.0, rate, 0.1, 0.2, 0.01, 0.02, 0, 0.5)


def test_while_a_queue_lasts_the_faster_setting_is_preferred_and_of_equals_the_better_one():
    queue, calm = Objective(1.0, 0.05, draining=True), Objective(1.0, 0.05)
    few, many = forecast(0.3, 100.0), forecast(0.1, 150.0)
    assert better(queue, many, few) and not better(queue, few, many)
    assert better(calm, few, many)
    assert better(queue, forecast(0.3, 100.0), forecast(0.2, 108.0))


def test_a_starved_service_asks_for_what_serves_the_load_to_come_and_the_log_says_so():
    service = queued(40).run(2)
    (question,) = service.questions
    assert question.objective.draining and question.load == pytest.approx(1.5)
    again = Question.from_json(json.loads(json.dumps(question.to_json())))
    decision = decide(question)
    assert decide(again).to_json() == decision.to_json()
    assert decision.kind == "Change" and decision.best.attainment >= 0.5
    assert decision.best.token_rate > 1.1 * decision.current.token_rate  # which also works the queue off


@pytest.mark.parametrize(
    ("served", "fastest", "wanted"),
    [
        ((0.08, 0.34), "Hold", 8),  # no setting is faster, and one serves four times as many
        ((0.0, 0.12), "Hold", 8),
        ((0.28, 0.36), "Hold", None),  # the luck of a burst
        ((0.08, 0.34), "Change", 16),
        ((0.08, 0.34), "Freeze", None),
        ((0.3, 0.9), "Change", 8),
    ],
)
def test_where_no_setting_is_faster_it_is_who_is_served_in_time_that_counts(served, fastest, wanted, monkeypatch):
    current, best = (forecast(share, 100.0) for share in served)

    def answer(question):
        if not question.objective.draining:
            return Decision("Change", "Better", "", {"maxNumSeqs": 8}, current, best)
        return Decision(fastest, "", "", {"maxNumSeqs": 16} if fastest == "Change" else {}, current, current)

    monkeypatch.setattr("paceline_operator.tuning.decide._decide", answer)
    (question,) = queued(40).run(2).questions
    assert decide(question).target.get("maxNumSeqs") == wanted


def test_where_nothing_serves_the_load_to_come_the_fastest_works_the_queue_off():
    (question,) = queued(40).run(2).questions
    decision = decide(replace(question, objective=replace(question.objective, tpot=0.005)))  # nobody keeps that
    assert decision.kind == "Change" and "to work off the queue" in decision.message
    assert decision.best.token_rate > 1.1 * decision.current.token_rate
    held = decide(replace(question, bounds={"maxNumSeqs": (1, 1)}))
    assert held.kind == "Hold"
