"""Engines that do something between their steps: no step's time tells of it, requests' times do, and the twin learns it."""

from dataclasses import replace

import pytest
from tuning_kit import DEVICE, Service

from paceline_core.knobs import Knobs, knobs_from_wire
from paceline_operator.tuning.decide import decide
from paceline_operator.tuning.fidelity import check
from paceline_operator.tuning.twin import Twin


class Gappy(Service):
    """Pods that tell of their steps without the `gap` seconds that each of them takes beyond that."""

    def __init__(self, gap, knobs, **options):
        self.gap = gap
        super().__init__(
            knobs, device=replace(DEVICE, base=replace(DEVICE.base, constant=DEVICE.base.constant + gap)), **options
        )

    def answer(self, pod, ledger):
        document = super().answer(pod, ledger)
        steps = tuple(replace(step, duration=step.duration - self.gap) for step in document.steps)
        model = replace(document.step_model, constant=document.step_model.constant - self.gap)
        return replace(document, steps=steps, step_model=model)


def asked(gap, slots=1, rate=2.2):
    """Return a question about pods under a little more traffic than one slot each can serve, after half a minute."""
    service = Gappy(gap, Knobs(max_num_seqs=slots), rate=rate)
    service.busy = "until enough has been served"
    service.run(30.0)
    service.busy = ""
    while not service.questions:
        service.run(2.0)
    return service.questions[0]


def plain(question):
    return check(Twin(question), knobs_from_wire(question.knobs), question.objective, question.step_error)


def test_a_gap_between_steps_is_learned_from_the_time_per_token():
    question = asked(0.0025)
    before, decision = plain(question), decide(question)
    assert before.gap == pytest.approx(0.0025, rel=0.2)
    assert before.errors["token rate"] > 0.1 > 0.03 > decision.errors["token rate"]  # of a queue: the rate is what is off
    assert decision.kind == "Change" and decision.target["maxNumSeqs"] > 1


def test_the_gap_is_in_the_forecasts_too():
    told, true = (decide(asked(gap, slots=4, rate=2.0)) for gap in (0.003, 0.0))
    assert told.current.tpot_p50 - true.current.tpot_p50 == pytest.approx(0.003, rel=0.25)


def test_where_there_is_no_gap_nothing_is_made_up():
    assert plain(asked(0.0)).gap == 0.0


@pytest.mark.parametrize("gap", [0.008, 0.02])
def test_what_is_too_long_for_a_gap_still_freezes(gap):
    question = asked(gap)
    assert plain(question).gap == 0.0
    assert (decision := decide(question)).kind == "Freeze" and decision.reason == "TwinOff"
