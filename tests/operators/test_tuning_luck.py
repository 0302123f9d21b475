"""What pods' own traffic makes of their scores is left out of a comparison; what knobs make of them isn't."""

from statistics import fmean, pvariance

import pytest
from tuning_kit import BLOCKS, DEVICE, Service

from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_core.wire import RequestRecord
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.guard import margins, weigh
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.luck import Luck
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.state import Trial
from paceline_sim.calibrated import calibrate
from paceline_sim.generate import Lengths, bursty
from paceline_sim.live import VirtualPod

OBJECTIVE = Objective(1.0, 0.06)
KNOBS = Knobs(max_num_seqs=8)
BEGIN, END, BATCH = 60.0, 180.0, 1.5


def pod(seed, *, then=KNOBS, scale=1.0):
    """A ledger of three minutes of bursts that nearly fill a pod; it has other knobs from the second minute on."""
    made = VirtualPod(KNOBS, DEVICE, num_blocks=BLOCKS, max_model_len=1 << 20, name=f"pod-{seed}")
    made.scale = scale
    prompts, outputs = Lengths({50: 150, 90: 400, 100: 3000}), Lengths({50: 40, 100: 90})
    for request in bursty(5.0, END, prompts, outputs, burst=2.5, every=60.0, seed=seed).requests:
        made.send(request)
    made.run(BEGIN)
    made.set_knobs(then)
    made.run(END)
    ledger = PodLedger(made.name)
    ledger.absorb(made.observe(), END)
    return ledger


def scores(ledger):
    return [pair for pair in margins(ledger.records, OBJECTIVE, END, unknown=-1.0) if pair[0] >= BEGIN]


def luck(*ledgers):
    steps = (step for ledger in ledgers for step in ledger.measured_steps())
    return Luck(knobs_to_wire(KNOBS), OBJECTIVE, calibrate(ledgers[0].model, steps), BLOCKS)


def differences(changed, other):
    """The evidence of two pods' scores as they are, and without luck."""
    sides, options = (scores(changed), scores(other)), {"start": BEGIN, "end": END - OBJECTIVE.settle, "batch": BATCH}
    found = luck(changed, other).of(*sides, [changed, other], BEGIN, END)
    return weigh(*sides, **options), weigh(*sides, **options, luck=found)


@pytest.fixture(scope="module")
def equals():
    """Differences of ten pairs of pods that do the same."""
    return [differences(pod(2 * seed), pod(2 * seed + 1)) for seed in range(10)]


def test_equal_pods_look_equal_whatever_traffic_they_got(equals):
    plain, cleaned = ([pair[i].difference for pair in equals] for i in (0, 1))
    assert pvariance(cleaned) < 0.25 * pvariance(plain)
    assert not any(pair[1].harmful for pair in equals)


def test_a_twin_that_is_wrong_makes_no_difference_of_its_own():
    """Twice the time per step: what it expects is far too low, of both pods alike."""
    found = [differences(pod(2 * seed, scale=2.0), pod(2 * seed + 1, scale=2.0))[1].difference for seed in range(10)]
    assert fmean(found) == pytest.approx(0.0, abs=2 * (pvariance(found) / len(found)) ** 0.5 + 0.01)


@pytest.mark.parametrize(("slots", "least", "most"), [(2, -1.0, -0.5), (24, 0.01, 0.2)])
def test_what_knobs_do_is_seen_as_before(slots, least, most):
    for seed in range(3):
        _, cleaned = differences(pod(2 * seed, then=Knobs(max_num_seqs=slots)), pod(2 * seed + 1))
        assert least <= cleaned.difference <= most, cleaned.text
        assert cleaned.harmful is (most < 0)


def test_of_many_pods_luck_is_left_to_even_itself_out():
    ledgers = [pod(seed) for seed in range(5)]
    others = [pair for each in ledgers[1:] for pair in scores(each)]
    assert luck(*ledgers).of(scores(ledgers[0]), others, ledgers, BEGIN, END) == ((), ())


def test_of_what_the_twin_cannot_tell_both_sides_get_the_mean():
    empty, known = PodLedger("new"), pod(0)
    expected = luck(known)
    assert expected.of([(70.0, 0.5)], [(71.0, 1.0)], [empty], BEGIN, END) == ([(70.0, 0.0)], [(71.0, 0.0)])
    left, right = expected.of([(0.5, 0.2)], scores(known), [known], BEGIN, END)
    assert left[0][1] == pytest.approx(fmean(score for _, score in right), abs=0.02)


@pytest.mark.parametrize(("end", "begins"), [(58.0, 60.0), (64.0, 64.0), (200.0, 70.0), (None, 70.0)])
def test_what_a_pod_had_at_the_change_is_not_compared(end, begins):
    """Batches begin when that is done, an interval of ten seconds later at most."""
    outcome = "unfinished" if end is None else "finished"
    brain, trial = Brain(), Trial({}, {}, "", 60.0, ("pod-0",), "pod-0", 0.5, 0.5, 0.9, 0.1, applied=60.0)
    for name, arrival in (("pod-0", 50.0), ("pod-0", 61.0), ("pod-1", 50.0)):
        last = end if (name, arrival) == ("pod-0", 50.0) else 300.0
        row = RequestRecord(f"{arrival}", arrival, 10, 5, outcome, 0, 0, first_token=arrival, end=last)
        brain.ledger(name)._records[row.request_id] = row
    assert brain._left_over_gone(trial, 10.0, 300.0) == begins


def test_a_trial_between_two_pods_is_judged_without_luck(monkeypatch):
    asked = []
    plain = Luck.of
    monkeypatch.setattr(Luck, "of", lambda self, *rest: asked.append(1) or plain(self, *rest))
    service = Service(Knobs(max_num_seqs=4), pods=2, rate=4.0, ttft=2.0).run(120)
    assert "TuningSettled" in service.reasons and asked
