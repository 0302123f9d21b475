"""The whole way of a change, on pods in virtual time: better knobs come, worse ones go back, and doubts change nothing."""

import json
from dataclasses import replace

import pytest
from tuning_kit import DEVICE, INTERVAL, Service, bad_start

from paceline_core.knobs import Knobs
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.machine import Ask, Facts, PodFact, advance
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.state import Phase, State, Trial
from paceline_operator.tuning.twin import Forecast

HARMFUL = {"maxNumSeqs": 1}


def forecast(attainment=1.0):
    return Forecast(100, attainment, attainment, 1.0, 1.0, 0.1, 0.2, 0.01, 0.02, 0, 0.5)


def claim(**target):
    """A decision that promises much, right or wrong."""
    return Decision(
        "Change", "Better", "it would be better", target=target, current=forecast(0.1), best=forecast(), gain=1.0
    )


@pytest.fixture(scope="module")
def tuned():
    return bad_start(rate=4.0).run(120)


def test_one_slot_becomes_enough_through_canary_promotion_and_verification(tuned):
    assert tuned.reasons[:4] == ["TuningCanary", "TuningPromoting", "TuningPromoted", "TuningSettled"]
    assert tuned.brain.state.history[0].outcome == "Settled(Verified)"
    assert tuned.brain.state.override["maxNumSeqs"] >= 4
    assert tuned.brain.view.attainment > 0.9
    assert tuned.reasons.count("TuningCanary") <= 3  # no oscillation


def test_the_decision_is_the_same_when_it_is_made_again(tuned):
    again = Question.from_json(json.loads(json.dumps(tuned.questions[0].to_json())))
    assert decide(again).to_json() == decide(tuned.questions[0]).to_json()


def healthy(**options):
    service = Service(Knobs(max_num_seqs=32), **options)
    service.run(40)
    assert not service.told
    return service


def test_a_harmful_change_is_seen_on_one_pod_and_taken_back():
    service = healthy()
    service.look(claim(**HARMFUL))
    assert service.brain.state.phase is Phase.CANARY
    service.run(60)
    state = service.brain.state
    assert state.phase is Phase.REVERTED and state.history[-1].outcome == "Reverted(Harm)"
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {32}
    assert state.override == {} and [b.changes for b in state.blocked] == [HARMFUL]
    assert state.cooldown > service.now - 60 + 4 * INTERVAL


def test_no_traffic_to_tell_by_means_back():
    service = healthy(seconds=45)
    service.look(claim(maxNumSeqs=64))
    service.run(12 * INTERVAL)
    assert service.brain.state.history[-1].outcome == "Reverted(LowTraffic)"
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {32}


def promoted(share, decision, *, baseline=0.5):
    """What becomes of 32 → 24 slots, promised 90 %, once `share` keep the objective and the twin has decided."""
    trial = Trial(
        {"maxNumSeqs": 32}, {"maxNumSeqs": 24}, "it would be better", 0.0, (), "pod-0", baseline, 0.5, 0.9, 0.8
    )  # fmt: skip
    state = State(spec_hash="h1", phase=Phase.VERIFYING, trial=trial, override={"maxNumSeqs": 24})
    pods = (PodFact("pod-0", "pod-0"), PodFact("pod-1", "pod-1"))
    facts = Facts("Auto", "h1", {"maxNumSeqs": 24}, pods, None, INTERVAL, decision=decision, after=(300, share))
    return advance(state, facts, 5 * INTERVAL)


@pytest.mark.parametrize(
    ("share", "kind", "reason", "outcome"),
    [
        (0.50, "Change", "Better", "Reverted(NoGain)"),  # the old knobs would do better on what came since
        (0.40, "Hold", "WithinError", "Reverted(NoGain)"),  # worse than before, and the twin can't tell why
        (0.50, "Freeze", "TwinOff", "Reverted(NoGain)"),  # nobody can say what it is good for
        (0.48, "Hold", "WithinError", "Settled(Kept)"),
        (0.30, "Hold", "NoBetter", "Settled(TrafficChanged)"),  # the old knobs would do no better: it is the traffic
    ],
)
def test_a_gain_that_does_not_come_is_taken_back_unless_the_traffic_is_to_blame(share, kind, reason, outcome):
    state, effects = promoted(share, Decision(kind, reason, "", target={"maxNumSeqs": 32}))
    assert state.history[-1].outcome == outcome and state.trial is None and effects
    back = outcome.startswith("Reverted")
    assert dict(state.override) == ({} if back else {"maxNumSeqs": 24})
    assert [b.changes for b in state.blocked] == ([{"maxNumSeqs": 24}] if back else [])


@pytest.mark.parametrize(("share", "asks"), [(0.55, True), (0.60, False), (0.96, False)])
def test_a_quarter_of_the_gain_or_the_objective_verifies_it_without_the_twin(share, asks):
    state, effects = promoted(share, None)
    assert any(isinstance(effect, Ask) for effect in effects) == asks
    assert (state.history[-1:] == ()) == asks


def test_an_operator_that_died_in_a_canary_resumes_it():
    service = healthy()
    service.look(claim(**HARMFUL))
    service.run(4)
    kept = State.from_json(json.loads(json.dumps(service.brain.state.to_json())))
    assert kept == service.brain.state
    service.brain = Brain(kept)  # what it had seen is gone, the pods still have it
    service.run(60)
    assert service.brain.state.history[-1].outcome == "Reverted(Harm)"
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {32}


def test_a_spec_that_changes_in_a_canary_wins():
    service = healthy()
    service.look(claim(maxNumSeqs=64))
    service.hash = "h2"
    service.run(8)
    state = service.brain.state
    assert state.trial is None and state.override == {} and state.spec_hash == "h2"
    assert state.history[-1].outcome == "Reverted(SpecChanged)"
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {32}


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [
        (lambda s: s.refuse.update({"pod-0": "422: no"}), "Reverted(Refused)"),
        (lambda s: s.process.update({"pod-0": "another"}), "Reverted(PodGone)"),
        (lambda s: setattr(s, "busy", "a rollout is under way"), "Reverted(Rollout)"),
        (lambda s: setattr(s, "mode", "Recommend"), "Reverted(ModeChanged)"),
    ],
)
def test_whatever_comes_between_means_back(happens, outcome):
    service = healthy()
    happening = service.look
    happening(claim(maxNumSeqs=64))
    happens(service)
    service.run(4)
    assert service.brain.state.history[-1].outcome == outcome
    assert service.brain.state.trial is None and service.brain.state.override == {}


def test_a_change_that_is_never_taken_over_is_given_up():
    service = healthy()
    service.refuse["pod-0"] = ""  # says nothing, does nothing: half-applied
    service.look(claim(maxNumSeqs=64))
    service.run(3 * INTERVAL)
    assert service.brain.state.history[-1].outcome == "Reverted(NotApplied)"


def test_one_pod_is_judged_before_and_after():
    service = bad_start(pods=1).run(120)
    assert service.brain.state.history[0].outcome == "Settled(Verified)"
    harmed = Service(Knobs(max_num_seqs=32), pods=1).run(40)
    harmed.look(claim(**HARMFUL))
    harmed.run(60)
    assert harmed.brain.state.history[-1].outcome == "Reverted(Harm)"


def test_recommend_only_says_so():
    service = bad_start(rate=4.0)
    service.mode = "Recommend"
    service.run(22)
    assert set(service.reasons) == {"TuningRecommended"} and service.brain.decision.kind == "Change"
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {1}


@pytest.mark.parametrize("lie", ["doubled", "frozen"])
def test_figures_that_are_wrong_change_nothing(lie):
    service = bad_start()
    for pod in service.pods.values():
        pod.scale = 2.0 if lie == "doubled" else 1.0
        pod.frozen = lie == "frozen"
    service.run(92)
    assert "TuningCanary" not in service.reasons
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {1}
    if lie == "doubled":
        assert service.reasons[:1] == ["TuningFrozen"] and "step-time model is off" in service.told[0].message
    else:
        assert {note.health for note in service.brain.view.notes} == {"Stale"}


def test_a_setting_that_did_harm_is_not_tried_again():
    service = bad_start(rate=4.0)
    service.run(14)
    first = service.brain.decision
    assert first.kind == "Change"
    again = decide(replace(service.questions[-1], blocked=(dict(first.target),)))
    assert again.target != first.target


def test_a_trace_without_requests_is_waited_for(tuned):
    for samples in ((), ((),)):
        decision = decide(replace(tuned.questions[0], samples=samples))
        assert (decision.kind, decision.reason) == ("Hold", "TooFewRequests")
    idle = Service(Knobs(max_num_seqs=8), seconds=1.0).run(60)  # a few requests, then none
    assert not idle.questions and not idle.told and idle.brain.state.trial is None


def test_bounds_that_exclude_everything_change_nothing():
    service = bad_start(
        bounds={"maxNumSeqs": (1, 1), "maxNumBatchedTokens": (8192, 8192), "longPrefillThreshold": (2048, 2048)}
    )
    service.run(40)
    assert not service.told and service.brain.decision.reason == "NoBetter"


def test_an_objective_that_nothing_keeps_names_the_best_and_what_would():
    service = Service(Knobs(max_num_seqs=4), rate=4.0, ttft=1.0, tpot=0.008, device=DEVICE)
    service.mode = "Recommend"
    service.run(16)
    assert "no setting keeps the objective" in service.brain.decision.hardware
    assert "steps" in service.brain.decision.hardware or "pods" in service.brain.decision.hardware


def test_without_an_objective_tokens_per_second_count_under_a_guard():
    service = bad_start(rate=4.0, ttft=None, tpot=None)
    service.mode = "Recommend"
    service.run(16)
    (question,), decision = service.questions, service.brain.decision
    assert not question.objective.stated and question.objective.ttft > 1.0
    assert decision.kind == "Change" and decision.best.token_rate > 1.2 * decision.current.token_rate, decision
    assert decision.best.attainment > 0.5  # the guard holds
