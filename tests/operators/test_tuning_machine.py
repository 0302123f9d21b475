"""The whole way of a change, on pods in virtual time: better knobs come, worse ones go back, and doubts change nothing."""

import json
import re
from dataclasses import replace

import pytest
from tuning_kit import DEVICE, INTERVAL, Service, bad_start

from paceline_core.knobs import Knobs
from paceline_core.step_time import StepModel
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.candidates import merge_changes
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.question import Question
from paceline_operator.tuning.search import search
from paceline_operator.tuning.state import Phase, State
from paceline_operator.tuning.twin import Forecast, Twin
from paceline_sim.bent import BentModel

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


def test_knee_and_tiles_of_the_step_model_are_in_the_decision_log(tuned):
    model = tuned.questions[0].model
    own = {name: getattr(model.base, name) for name in StepModel.__dataclass_fields__}
    bent = replace(tuned.questions[0], model=replace(model, base=BentModel(**own, knee=100.0, beyond=1e-4, batch_tile=8)))
    again = Question.from_json(json.loads(json.dumps(bent.to_json())))
    assert again.model == bent.model and again.model != model
    assert decide(again).to_json() == decide(bent).to_json() != decide(tuned.questions[0]).to_json()


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


def test_a_trial_that_nobody_can_watch_any_more_is_taken_back():
    """Statistics that freeze in the middle of a canary: as stale as those of pods that never told anything."""
    service = healthy()
    service.look(claim(maxNumSeqs=64))
    service.run(2)
    for pod in service.pods.values():
        pod.frozen = True
    service.run(6)
    assert service.brain.state.trial is not None and service.brain.state.trial.unheard  # a moment proves nothing
    service.run(2 * INTERVAL)
    assert service.brain.state.history[-1].outcome == "Reverted(NoMetrics)"
    assert {pod.knobs.max_num_seqs for pod in service.pods.values()} == {32}


def test_pods_that_are_heard_again_are_watched_on():
    service = healthy()
    service.look(claim(maxNumSeqs=64))
    service.run(2)
    for frozen in (True, False):
        for pod in service.pods.values():
            pod.frozen = frozen
        service.run(6)
    assert service.brain.state.trial is None or not service.brain.state.trial.unheard
    assert not any("NoMetrics" in change.outcome for change in service.brain.state.history)


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


class Knee:
    """A twin of a device that serves half as many in time once a knob is above a value; above that nothing changes."""

    def __init__(self, name, most):
        self.name, self.most = name, most

    def forecast(self, knobs, *, load=1.0, watch=False, piece=None):
        return forecast(1.0 if getattr(knobs, self.name) <= self.most else 0.5)


@pytest.mark.parametrize(("name", "most"), [("max_num_seqs", 5), ("max_num_seqs", 12), ("max_num_batched_tokens", 300)])
def test_the_search_goes_down_past_values_that_do_not_bind(tuned, name, most):
    twin, knobs = Knee(name, most), Knobs(max_num_seqs=256)
    question = replace(tuned.questions[0], bounds={})
    found = search(twin, question.traffic, knobs, question, twin.forecast(knobs))
    assert found.best.attainment == 1.0 and getattr(found.knobs, name) <= most


def test_bounds_that_exclude_everything_change_nothing():
    service = bad_start(
        bounds={"maxNumSeqs": (1, 1), "maxNumBatchedTokens": (8192, 8192), "longPrefillThreshold": (2048, 2048)}
    )
    service.run(40)
    assert not service.told and service.brain.decision.reason == "NoBetter"


def test_bounds_that_exclude_the_knobs_in_force_are_kept_by_what_is_recommended():
    service = bad_start(rate=4.0, bounds={"maxNumSeqs": (8, 12)})
    service.mode = "Recommend"
    service.run(16)
    assert 8 <= service.brain.decision.target["maxNumSeqs"] <= 12


def test_a_knob_that_follows_another_stays_within_its_bounds():
    service = Service(Knobs(max_num_seqs=64), rate=4.0, ttft=1.0, tpot=0.008, bounds={"maxNumSeqs": (64, 64)})
    service.mode = "Recommend"
    service.run(16)
    tried = [changes for changes, _ in service.brain.decision.tried]
    assert any("maxNumBatchedTokens" in changes for changes in tried)
    assert all("maxNumSeqs" not in changes and changes.get("maxNumBatchedTokens", 64) >= 64 for changes in tried)


def test_a_budget_below_the_slots_takes_them_with_it():
    knobs = Knobs(max_num_seqs=256, max_num_seqs_limit=512)
    assert merge_changes(knobs, {"maxNumBatchedTokens": 128}).max_num_seqs == 128
    assert merge_changes(replace(knobs, max_num_batched_tokens=256), {"maxNumSeqs": 300}).max_num_batched_tokens == 300
    assert merge_changes(knobs, {"maxNumSeqs": 300, "maxNumBatchedTokens": 128}).max_num_seqs == 128


def test_one_giant_request_spoils_no_decision(tuned):
    question = tuned.questions[0]
    assert decide(question).kind == "Change"
    first, *others = question.samples
    giant = replace(first[-1], prompt=100_000, output=20, ttft=None, tpot=None, counted=False, met=None)
    for prompt in (100_000, 10**9):  # that fits the pool, and that none holds
        samples = ((*first, replace(giant, prompt=prompt)), *others)
        assert decide(replace(question, samples=samples)).kind in ("Change", "Hold", "Freeze")
    without = decide(replace(question, samples=((*first, replace(giant, prompt=10**9)), *others)))
    assert without.to_json() == decide(question).to_json()


@pytest.mark.parametrize(
    ("rate", "tpot", "words"),
    [
        (4.0, 0.008, r"more pods wouldn't, a device with steps ([\d.]+) times as fast would"),
        (4.0, 0.0005, r"nor a device 8 times as fast would: the objective is too tight()"),
        (30.0, 0.06, r"([\d.]+) times the pods \(\d+\) would"),
    ],
)
def test_an_objective_that_nothing_keeps_names_the_best_and_what_would(rate, tpot, words):
    service = Service(Knobs(max_num_seqs=4), rate=rate, ttft=1.0, tpot=tpot, device=DEVICE)
    service.mode = "Recommend"
    service.run(16)
    (question, *_), decision = service.questions, service.brain.decision
    found = re.search(words, decision.hardware)
    assert found and "no setting keeps the objective: the best keeps" in decision.hardware, decision.hardware
    # it is true: with as much hardware as it says, it says so no more
    if "a device with" in decision.hardware:
        model = question.model.scaled(1 / float(found[1]))
        assert Twin(replace(question, model=model)).forecast(Knobs(max_num_seqs=4)).attainment > 0.95
    elif found[1]:
        best = merge_changes(Knobs(max_num_seqs=4), decision.target)
        few, enough = (
            Twin(question).forecast(best, load=question.load / times).attainment for times in (1.0, float(found[1]))
        )
        assert few < 0.9 < enough


def test_without_an_objective_tokens_per_second_count_under_a_guard():
    service = bad_start(rate=4.0, ttft=None, tpot=None)
    service.mode = "Recommend"
    service.run(16)
    (question,), decision = service.questions, service.brain.decision
    assert not question.objective.stated and question.objective.ttft > 1.0
    assert decision.kind == "Change" and decision.best.token_rate > 1.2 * decision.current.token_rate, decision
    assert decision.best.attainment > 0.5  # the guard holds
