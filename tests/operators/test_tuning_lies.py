"""Figures that are odd but true count, and those that can't be true cost neither the tuner nor the operator's memory."""

from dataclasses import replace

import pytest
from tuning_kit import DEVICE, Service, bad_start, traffic

from paceline_core.knobs import Knobs, knobs_from_wire, knobs_to_wire
from paceline_core.wire import RequestRecord
from paceline_operator.tuning import twin
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.decide import decide
from paceline_operator.tuning.fidelity import check
from paceline_operator.tuning.ledger import Health, PodLedger
from paceline_operator.tuning.luck import Luck
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.sampling import samples_of, traffic_of
from paceline_operator.tuning.state import State, Trial
from paceline_operator.tuning.stretch import stretch_of
from paceline_operator.tuning.twin import Twin
from paceline_operator.tuning.view import merge
from paceline_sim.calibrated import CalibratedModel
from paceline_sim.live import VirtualPod

OBJECTIVE = Objective(1.0, 0.06)
END = 60.0


def document(**options):
    """What a pod tells after a minute that it had no trouble with."""
    pod = VirtualPod(Knobs(), DEVICE, num_blocks=8000, max_model_len=1 << 20)
    for request in traffic(2.0, END - 10.0, **options).requests:
        pod.send(request)
    pod.run(END)
    return pod.observe()


def turned_away(count, reason="queue_full", *, every=0.5, prompt=0):
    """Records of requests that were refused, as the runtime writes them: most before anybody has read their prompt."""
    return tuple(
        RequestRecord(f"x{i}", i * every, prompt, 0, "refused", 0, 0, end=i * every + 0.001, reason=reason)
        for i in range(count)
    )


def told(answer, now=END):
    ledger = PodLedger("pod")
    ledger.absorb(answer, now)
    return ledger


def with_refused(refused, answer=None):
    answer = answer or document()
    return told(replace(answer, requests=(*answer.requests, *refused)))


# refused before they were read


def test_requests_that_were_refused_unread_are_demand_that_was_not_served():
    plain, busy = told(document()), with_refused(turned_away(100))
    assert busy.fresh and busy.dropped == 0
    before, after = (merge([pod], OBJECTIVE, END, END) for pod in (plain, busy))
    assert after.refused == 100 and after.requests == before.requests + 100
    assert after.arrival_rate == pytest.approx(before.arrival_rate + 100 / END, rel=0.03)
    assert after.attainment == pytest.approx(before.attainment * before.requests / after.requests)
    assert (after.prompt_p50, after.prompt_p95) == (before.prompt_p50, before.prompt_p95)


@pytest.mark.parametrize("change", [{"outcome": "finished"}, {"prompt_tokens": -5}])
def test_only_what_was_refused_may_have_no_prompt_and_nothing_less_than_none(change):
    ledger = with_refused([replace(record, **change) for record in turned_away(100)])
    assert ledger.health is Health.LYING and ledger.dropped == 100


@pytest.mark.parametrize("reason", ["model_not_found", "invalid", "too_long"])
def test_a_request_that_is_wrong_itself_is_no_failure_of_the_service(reason):
    plain, asked = told(document()), with_refused(turned_away(100, reason, prompt=5 * (reason != "model_not_found")))
    assert asked.fresh and asked.dropped == 0
    assert merge([asked], OBJECTIVE, END, END) == merge([plain], OBJECTIVE, END, END)


def test_refusals_make_no_other_traffic_of_what_came_before_them():
    rows = [RequestRecord(f"r{i}", float(i), 100 + 17 * i % 40, 10, "finished", 0, 0, end=i + 1.0) for i in range(300)]
    refused = [replace(r, arrival=150.25 + r.arrival, end=150.25 + r.arrival) for r in turned_away(150, every=1.0)]
    plain, busy = (stretch_of(records, 300.0, 960.0, 30.0) for records in (rows, [*rows, *refused]))
    assert (busy.began, busy.requests) == (0.0, 450) and plain.requests == 300
    assert busy.rate == pytest.approx(plain.rate + 0.5, rel=0.01)
    lengths = [(s.prompt_p50, s.prompt_p95, s.output_p50) for s in (plain, busy)]
    assert lengths[0] == lengths[1]


def test_a_shift_is_seen_at_its_place_among_refusals():
    kinds = [(0.0, 100), (200.0, 900)]
    rows = [
        RequestRecord(f"{begin}-{i}", begin + i, size + 17 * i % 40, 10, "finished", 0, 0, end=begin + i + 1)
        for begin, size in kinds for i in range(200)
    ]  # fmt: skip
    found = stretch_of([*rows, *turned_away(800)], 400.0, 960.0, 30.0)
    assert (found.began, found.requests) == (200.0, 200 + 400)


def test_the_twin_replays_nothing_that_nobody_knows_the_length_of():
    refused, knobs = turned_away(100), knobs_to_wire(Knobs())
    plain, busy = told(document()), with_refused(refused)
    for pods in ([plain], [busy]):
        assert len(traffic_of(pods, since=0.0, lately=0.0, block_size=16)) == 1
    options = {"since": 10.0, "now": END, "epochs": {"pod": 0}, "block_size": 16}
    assert samples_of([busy], OBJECTIVE, **options) == samples_of([plain], OBJECTIVE, **options)
    assert traffic_of([busy], since=0.0, lately=0.0, block_size=16) == traffic_of(
        [plain], since=0.0, lately=0.0, block_size=16
    )
    luck = Luck(knobs, OBJECTIVE, CalibratedModel(DEVICE.base), 8000)
    scores = [(r.arrival, 1.0) for r in plain.records]
    (alone, _), (among, _) = (luck.of(scores, (), [pod], 0.0, END) for pod in (plain, busy))
    assert among == alone and len({score for _, score in alone}) >= 1
    (left, _) = luck.of([(refused[3].arrival, 0.0)], (), [busy], 0.0, END)
    assert left[0][1] == pytest.approx(sum(score for _, score in alone) / len(alone))


class Overloaded(Service):
    """Pods that turn away more than every second request before they read it."""

    def answer(self, pod, ledger):
        answer = super().answer(pod, ledger)
        came = sum(r.arrival > self.now - 5.0 for r in answer.requests)
        refused = (
            replace(record, request_id=f"{self.now}-{i}", arrival=self.now - 1.0, end=self.now - 0.9, epoch=answer.epoch)
            for i, record in enumerate(turned_away(came * 3 // 2))
        )
        return replace(answer, requests=(*answer.requests, *refused))


def test_a_service_that_refuses_most_of_its_requests_is_believed_and_tuned():
    service, healths = Overloaded(Knobs(max_num_seqs=1), rate=4.0), set()
    for _ in range(20):
        service.run(5.0, every=5.0)
        healths |= {ledger.health for ledger in service.brain.ledgers.values()}
    assert healths == {Health.FRESH} and "TuningPromoted" in service.reasons
    assert service.brain.view.refused > 100 and service.brain.view.attainment < 0.7


# figures that can't be


@pytest.mark.parametrize(
    "gauges", [{"kv_blocks_total": 2**32}, {"running": 10**400}, {"output_tokens": 10**400}, {"waiting": -(10**400)}]
)
def test_gauges_that_no_pod_can_have_are_lies(gauges):
    answer = document()
    ledger = told(replace(answer, gauges=replace(answer.gauges, **gauges)))
    assert ledger.health is Health.LYING and next(iter(gauges)) in ledger.why and len(ledger.why) < 100


@pytest.mark.parametrize("change", [{"cursor": 10**400}, {"cursor": -5}, {"epoch": 10**400}, {"now": 1e300}])
def test_counters_and_clocks_that_no_pod_can_have_are_lies(change):
    assert told(replace(document(), **change)).health is Health.LYING


def test_a_model_of_more_steps_than_there_can_be_is_a_lie():
    answer = document()
    ledger = told(replace(answer, step_model=replace(answer.step_model, steps=10**400)))
    assert ledger.health is Health.LYING and ledger.model is None


def test_steps_of_impossible_sizes_are_left_out():
    answer = document()
    names = ("decode_tokens", "prefill_tokens", "context_tokens", "prefill_attention")
    odd = [replace(answer.steps[0], **{name: size}) for name in names for size in (-1, 10**320)]
    ledger, plain = told(replace(answer, steps=(*answer.steps, *odd))), told(answer)
    assert ledger.fresh and list(ledger.measured_steps()) == list(plain.measured_steps())
    assert list(ledger.step_ratios()) == list(plain.step_ratios())


def test_the_longest_prompts_and_answers_are_believed_and_what_no_model_gives_is_not():
    sizes = {"book": (10_000_000, 1), "novel": (100, 200_000), "prompt": (10_000_001, 1), "answer": (100, 300_000)}
    rows = [RequestRecord(name, 1.0, *size, "finished", 0, 0, end=50.0) for name, size in sizes.items()]
    ledger = with_refused(rows)
    assert ledger.fresh and ledger.dropped == 2
    assert {r.request_id for r in ledger.records} & set(sizes) == {"book", "novel"}


# what the twin makes of it


@pytest.fixture(scope="module")
def question():
    service = bad_start(rate=4.0)
    service.run(12)
    return service.questions[0]


def test_requests_that_all_came_and_ended_at_one_instant_tell_no_rate(question):
    (first, *_) = question.samples
    at_once = tuple(replace(r, arrival=0.0, ttft=0.0, tpot=0.0, counted=True) for r in first)
    found = check(Twin(replace(question, samples=(at_once,))), knobs_from_wire(question.knobs), question.objective, 0.0)
    assert "token rate" not in found.errors and "ttft p50" in found.errors


@pytest.mark.parametrize("changes", [{"max_num_seqs": 1}, {"max_num_seqs": 64}, {"max_num_seqs": 64, "block_size": 32}])
def test_a_pool_larger_than_all_requests_need_gives_the_same_forecast(question, changes, monkeypatch):
    large, knobs = replace(question, num_blocks=10_000), replace(knobs_from_wire(question.knobs), **changes)
    built, plain = [], twin.simulate

    def simulate(*trace, num_blocks, **options):
        built.append(num_blocks)
        return plain(*trace, num_blocks=num_blocks, **options)

    monkeypatch.setattr(twin, "simulate", simulate)
    capped = Twin(large).forecast(knobs)
    monkeypatch.setattr(twin, "_needed", lambda *_: 10_000)
    whole = Twin(large).forecast(knobs)
    assert capped == whole and 0 < capped.kv_peak < 0.5
    half = len(built) // 2
    assert max(built[:half]) < 10_000 and set(built[half:]) == {10_000}


def test_a_pool_that_is_short_is_as_short_as_before(question):
    for blocks in (60, 100):
        assert Twin(replace(question, num_blocks=blocks)).forecast(Knobs(max_num_seqs=64)).kv_peak > 0.8


def test_a_decision_takes_no_more_memory_for_a_pool_that_cannot_be(question):
    large, giant = (decide(replace(question, num_blocks=blocks)) for blocks in (10**6, 10**9))
    assert giant.kind == large.kind == "Change" and giant.target == large.target


# pods that are gone


class Gone(Service):
    """A service whose deaf pods are marked, as whoever asks them in vain does."""

    def look(self, answer=None):
        for name in self.deaf:
            self.brain.ledger(name).fail(Health.SILENT, "it doesn't answer in time")
        super().look(answer)

    def until_canary(self):
        while not (self.brain.state.trial is not None and self.brain.state.trial.applied):
            self.run(2.0)
        return self.brain.state.trial.pods[0]


def test_a_change_is_not_passed_on_from_a_pod_that_is_gone():
    service = Gone(Knobs(max_num_seqs=1), rate=4.0)
    canary = service.until_canary()
    service.deaf.add(canary)
    while service.brain.state.trial is not None and service.now < 300.0:
        service.run(2.0)
    assert service.brain.state.history[-1].outcome == "Reverted(LowTraffic)" and service.brain.view.fresh == 2
    assert "TuningPromoting" not in service.reasons
    assert all(pod.knobs == service.base for name, pod in service.pods.items() if name != canary)


def test_one_of_the_others_that_is_gone_leaves_enough_to_compare_with():
    service = Gone(Knobs(max_num_seqs=1), rate=4.0)
    canary = service.until_canary()
    service.deaf.add(next(name for name in service.pods if name != canary))
    service.run(120.0)
    assert "TuningPromoted" in service.reasons and "TuningReverted" not in service.reasons


def test_a_trial_of_which_nobody_tells_anything_is_taken_back():
    service = Gone(Knobs(max_num_seqs=1), rate=4.0)
    service.until_canary()
    service.deaf.update(service.pods)
    service.run(200.0)
    assert "TuningReverted" in service.reasons and service.brain.state.history[-1].outcome == "Reverted(NoMetrics)"


# how much of each pod is kept


def test_of_the_pods_of_a_trial_all_is_kept_and_the_others_share_what_is_left():
    names = [f"pod-{number:03}" for number in range(200)]
    brain = Brain(State(trial=Trial({"maxNumSeqs": 1}, {"maxNumSeqs": 8}, "w", 0.0, ("pod-150",), "c", 0.0, 0.0, 0.9, 1.0)))
    for name in names:
        brain.ledger(name)
    brain.keep_only(names)
    kept = {name: ledger.most for name, ledger in brain.ledgers.items()}
    assert kept.pop("pod-150") == 1500 and sorted(kept.values()) == [60] * 193 + [1500] * 6
    brain.state = replace(brain.state, trial=None)
    brain.keep_only(names[:4])
    assert {ledger.most for ledger in brain.ledgers.values()} == {1000} and len(brain.ledgers) == 4
