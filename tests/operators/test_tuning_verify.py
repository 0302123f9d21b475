"""How changes end: nothing settles that isn't seen to be good or at least no worse, and there are few of them."""

import json
from dataclasses import replace

import pytest
from tuning_kit import INTERVAL, Service, bad_start

from paceline_core.knobs import Knobs
from paceline_core.wire import Gauges
from paceline_operator.tuning.brain import Brain
from paceline_operator.tuning.decide import Decision, decide
from paceline_operator.tuning.facts import Ask, Facts, PodFact
from paceline_operator.tuning.guard import Evidence, Verdict, judge
from paceline_operator.tuning.ledger import PodLedger
from paceline_operator.tuning.machine import advance
from paceline_operator.tuning.objective import Objective
from paceline_operator.tuning.outcome import revert, settle
from paceline_operator.tuning.service_rate import Lately
from paceline_operator.tuning.state import Phase, Reason, State, Trial
from paceline_operator.tuning.stretch import Stretch
from paceline_operator.tuning.traffic import MOST_CHANGES, budget_left, follow
from paceline_operator.tuning.twin import Forecast
from paceline_operator.tuning.view import merge

OLD, NEW = {"maxNumSeqs": 32}, {"maxNumSeqs": 24}
TRIAL = Trial(OLD, NEW, "it would be better", 0.0, (), "pod-0", 0.5, 0.5, 0.9, 0.8, promised=0.4, applied=1.0)
BETTER, SAME, WORSE = (judge([d] * 40, requests=200) for d in (0.3, 0.0, -0.3))


def promoted(
    share, *, waited=5, count=2, decision=None, evidence=None, busy="", waiting=0, behind=0.0, lately=1.0, last=50, **trial
):
    """What becomes of 32 → 24 slots, in force everywhere, promised 90 % after 50 %, if `share` keep the objective.

    `waiting` requests are in the pods' queues now; of the `last` ones, of an interval, a share `behind` waited too long, and
    `lately` kept the objective.
    """
    phase = Phase.COMPARING if trial.get("control") else Phase.VERIFYING
    state = State(spec_hash="h1", phase=phase, trial=replace(TRIAL, **trial), override=NEW)
    ledger = PodLedger("pod-0", gauges=Gauges(waiting=waiting))
    facts = Facts(
        "Auto", "h1", NEW, tuple(PodFact(f"pod-{i}", f"pod-{i}") for i in range(count)),
        merge([ledger], Objective(8.0, 0.1), 0.0, INTERVAL), INTERVAL, decision=decision, evidence=evidence,
        after=(300, share), busy=busy, lately=Lately(requests=last, share=lately, waited=behind),
    )  # fmt: skip
    return advance(state, facts, waited * INTERVAL)


def compared(evidence, *, waited=5, **options):
    trial = {"control": True, "pods": ("pod-1",), "process": "pod-1", "applied": 1.0}
    return promoted(0.3, waited=waited, evidence=evidence, **trial | options)


@pytest.mark.parametrize("share", [0.60, 0.96])
def test_a_quarter_of_the_gain_or_the_objective_verifies_it(share):
    state, _ = promoted(share)
    assert state.history[-1].outcome == "Settled(Verified)" and state.trial is None and state.override == NEW


def test_an_objective_that_is_kept_is_no_excuse_for_keeping_it_worse():
    assert promoted(0.97, baseline=0.98, predicted=1.0)[0].history[-1].outcome == "Settled(Verified)"
    assert promoted(0.955, baseline=0.99, predicted=1.0)[0].phase is Phase.COMPARING


def test_a_gain_that_may_still_come_is_waited_for():
    assert promoted(0.55, waited=3)[0].phase is Phase.VERIFYING
    assert promoted(0.55, waited=5)[0].phase is Phase.COMPARING


@pytest.mark.parametrize(("share", "waited"), [(0.59, 5), (0.40, 3), (0.0, 3)])
def test_a_gain_that_does_not_come_is_compared_with_a_pod_that_goes_back(share, waited):
    state, (tell,) = promoted(share, waited=waited)
    assert state.phase is Phase.COMPARING and tell.reason == "TuningComparing"
    assert state.trial.pods == ("pod-1",) and state.trial.tried == OLD and not state.trial.applied
    assert state.override == NEW  # the others keep it meanwhile


@pytest.mark.parametrize(
    ("waited", "waiting", "behind", "waits"),
    [
        (3, 80, 1.0, False),  # a fifth is gone after three intervals, the rest will be after fifteen: not soon enough,
        (3, 70, 1.0, True),  # and ten are
        (10, 0, 1.0, True),  # the last of those who waited have just been served
        (5, 100, 1.0, False),  # it doesn't get shorter
        (5, 120, 1.0, False),
        (5, 30, 0.1, False),  # and what isn't made of waiting is no queue's fault
        (13, 2, 1.0, False),
    ],
)
def test_a_queue_from_before_is_let_out_before_anything_is_judged(waited, waiting, behind, waits):
    state, _ = promoted(0.0, waited=waited, waiting=waiting, behind=behind, lately=0.0, queued=100)
    assert (state.phase is Phase.VERIFYING) is waits and state.override == NEW
    # a pod alone isn't judged by the twin either
    effects = promoted(0.0, waited=waited, waiting=waiting, behind=behind, lately=0.0, queued=100, count=1)[1]
    assert (effects == ()) is waits and (waits or isinstance(effects[0], Ask))


def test_who_came_after_the_queue_tells_whether_the_gain_came():
    """All that waited in it have failed, under any knobs; without one the last interval alone proves nothing."""
    assert promoted(0.0, lately=0.9, queued=100)[0].history[-1].outcome == "Settled(Verified)"
    assert promoted(0.0, lately=0.9, queued=100, last=20)[0].phase is Phase.COMPARING  # too few of them
    state, (tell,) = promoted(0.0, lately=0.5, queued=100)  # no better than before, and that is what is said
    assert state.phase is Phase.COMPARING and "50.0% of the requests keep the objective, 50.0% did before" in tell.message
    assert promoted(0.0, lately=0.9)[0].phase is Phase.COMPARING


def test_a_promotion_notes_the_queue():
    ledger = PodLedger("pod-0", gauges=Gauges(waiting=7))
    facts = Facts(
        "Auto", "h1", OLD, (PodFact("pod-0", "pod-0"), PodFact("pod-1", "pod-1")),
        merge([ledger], Objective(8.0, 0.1), 0.0, INTERVAL), INTERVAL, evidence=BETTER,
    )  # fmt: skip
    state, _ = advance(State(spec_hash="h1", phase=Phase.CANARY, trial=CANARY), facts, 3 * INTERVAL)
    assert state.phase is Phase.VERIFYING and state.trial.queued == 7


def test_what_is_better_at_the_same_time_stays_although_the_traffic_is_worse():
    state, _ = compared(BETTER)
    assert state.history[-1].outcome == "Settled(Kept)" and "at the same time" in state.history[-1].effect
    assert state.override == NEW and state.left == (OLD,)


@pytest.mark.parametrize(
    ("evidence", "waited", "outcome"),
    [
        (WORSE, 5, "Reverted(Harm)"),
        (SAME, 11, "Reverted(NoGain)"),  # no worse, but no better either: the default is back
        (judge([-0.05] * 40, requests=200), 11, "Reverted(NoGain)"),  # passes the guard, worse by the score
        (None, 11, "Reverted(NoGain)"),
    ],
)
def test_what_is_not_seen_to_be_better_goes_back(evidence, waited, outcome):
    state, _ = compared(evidence, waited=waited)
    assert state.history[-1].outcome == outcome and not state.override
    assert state.doubt == pytest.approx(0.4) and [b.changes for b in state.blocked] == [NEW]


@pytest.mark.parametrize(
    "options",
    [{"busy": "a rollout is under way"}, {"process": "another"}, {"pods": ("pod-9",)}, {"applied": 0.0, "waited": 3}],
)
def test_a_comparison_that_is_disturbed_goes_back(options):
    state = compared(None, **{"waited": 5} | options)[0]
    if options.get("applied") == 0.0:
        assert state.trial.applied == 3 * INTERVAL  # the pod has gone back: now it counts
    else:
        assert state.history[-1].outcome == "Reverted(NoGain)"


def test_few_requests_or_a_short_time_prove_nothing():
    for evidence in (judge([0.5] * 10, requests=10), None):
        assert compared(evidence)[0].phase is Phase.COMPARING
    assert compared(BETTER, applied=4.5 * INTERVAL)[0].phase is Phase.COMPARING


def test_fewer_requests_do_where_there_is_no_doubt():
    clear, plain = judge([0.9] * 12, requests=8), judge([0.3] * 12, requests=8)
    assert clear.passed >= 400 > plain.passed >= 20
    assert compared(clear)[0].history[-1].outcome == "Settled(Kept)"
    assert compared(plain)[0].phase is Phase.COMPARING
    assert compared(replace(clear, requests=7))[0].phase is Phase.COMPARING
    assert (
        compared(clear, applied=4.5 * INTERVAL)[0].phase is Phase.COMPARING
    )  # an interval it must be, whatever it looks like


# canaries


CANARY = replace(TRIAL, pods=("pod-0",), applied=1.0)


def tried(evidence, waited, *, lately=None, **trial):
    """What becomes of 32 → 24 slots on one of three pods, `waited` intervals after they were applied."""
    state = State(spec_hash="h1", phase=Phase.CANARY, trial=replace(CANARY, **trial))
    pods = tuple(PodFact(f"pod-{i}", f"pod-{i}") for i in range(3))
    facts = Facts("Auto", "h1", OLD, pods, None, INTERVAL, evidence=evidence, lately=lately or Lately())
    return advance(state, facts, 1.0 + waited * INTERVAL)[0]


def test_a_canary_that_is_no_worse_and_will_be_clear_soon_is_waited_for():
    soon, late = judge([0.0] * 20, requests=40), judge([0.0] * 8, requests=16)
    assert soon.verdict is Verdict.OPEN
    assert tried(soon, 11).phase is Phase.CANARY and tried(soon, 15).phase is Phase.CANARY
    assert tried(late, 11).history[-1].outcome == "Reverted(LowTraffic)"  # it would take twice as long as is waited at most
    assert tried(soon, 25).history[-1].outcome == "Reverted(LowTraffic)"


@pytest.mark.parametrize(
    ("evidence", "trial"), [(judge([-0.03] * 20), {}), (judge([0.0] * 20), {"single": True}), (None, {})]
)
def test_a_canary_that_looks_worse_or_has_nobody_beside_it_is_not_waited_for(evidence, trial):
    assert tried(evidence, 9).phase is Phase.CANARY
    assert tried(evidence, 11, **trial).history[-1].outcome == "Reverted(LowTraffic)"


def decided(rate, gain, *, share=0.6, pods=2, lately=None):
    """What becomes of a decision that promises so much, at so many requests per second of the service."""
    now = 100.0 * INTERVAL
    stretch = Stretch(0.0, 200, rate, 1.0, 100.0, 200.0, 50.0, share)
    promise = Decision(
        "Change", "Better", "better", target=NEW, gain=gain, current=Forecast(100, share, share, *[1.0] * 6, 0, 0.5),
        best=Forecast(100, share + gain, share + gain, *[1.0] * 6, 0, 0.5),
    )  # fmt: skip
    facts = Facts(
        "Auto", "h1", OLD, tuple(PodFact(f"pod-{i}", f"pod-{i}") for i in range(pods)), None, INTERVAL, decision=promise,
        stretch=stretch, lately=lately or Lately(),
    )  # fmt: skip
    return advance(State(spec_hash="h1", phase=Phase.OBSERVING), facts, now)[0]


def test_what_a_canary_could_not_show_is_not_begun():
    state = decided(0.1, 0.03)
    assert state.reason == "TooLittleTraffic" and state.trial is None and not state.begun and state.next_search > 0
    assert decided(4.0, 0.03).phase is Phase.CANARY and decided(0.5, 0.3).phase is Phase.CANARY
    assert decided(0.1, 0.03, pods=1).phase is Phase.CANARY  # one pod is judged by what it did before
    starved = Lately(20, 0.0, 0.0, 50.0, 0.0, 1.0)
    assert starved.starved and decided(0.1, 0.03, lately=starved).phase is Phase.CANARY


@pytest.mark.parametrize(
    ("share", "reason", "outcome"),
    [
        (0.55, "NoBetter", "Settled(Kept)"),
        (0.49, "NoBetter", "Reverted(NoGain)"),  # worse than before is never kept, whoever is to blame
        (0.55, "WithinError", "Reverted(NoGain)"),
        (0.55, "TwinOff", "Reverted(NoGain)"),  # nobody can say what it is good for
        (0.55, "Better", "Reverted(NoGain)"),  # the old knobs would do better on what came since
    ],
)
def test_one_pod_has_nobody_to_be_compared_with_and_the_twin_is_asked(share, reason, outcome):
    assert promoted(share, count=1)[1] == (Ask(only=(OLD,)),)
    kind = {"TwinOff": "Freeze", "Better": "Change"}.get(reason, "Hold")
    state, _ = promoted(share, count=1, decision=Decision(kind, reason, "", target=OLD))
    assert state.history[-1].outcome == outcome


def test_a_canary_that_passed_by_luck_of_the_queues_goes_on_being_watched():
    trial = replace(TRIAL, pods=("pod-0",), applied=1.0)
    pods = tuple(PodFact(f"pod-{i}", f"pod-{i}") for i in range(2))

    def canary(evidence, at):
        facts = Facts("Auto", "h1", OLD, pods, None, INTERVAL, evidence=evidence)
        return advance(State(spec_hash="h1", phase=Phase.CANARY, trial=trial), facts, at)[0]

    quick = judge([0.8] * 6, requests=10)
    assert quick.verdict is Verdict.PASS and canary(quick, 0.5 * INTERVAL).phase is Phase.CANARY
    assert canary(quick, 3 * INTERVAL).phase is Phase.CANARY  # ten requests
    assert canary(replace(quick, requests=60), 3 * INTERVAL).phase is Phase.VERIFYING
    worse = judge([-0.05] * 60, requests=200)
    assert worse.verdict is Verdict.PASS and canary(worse, 3 * INTERVAL).phase is Phase.CANARY
    assert canary(judge([0.8] * 6 + [-0.9] * 40, requests=200), 3 * INTERVAL).history[-1].outcome == "Reverted(Harm)"


def test_a_pod_that_refuses_what_others_took_over_means_back():
    state = State(spec_hash="h1", phase=Phase.VERIFYING, trial=TRIAL, override=NEW)
    pods = (PodFact("pod-0", "pod-0"), PodFact("pod-1", "pod-1", refused="422: too many"))
    found, _ = advance(state, Facts("Auto", "h1", NEW, pods, None, INTERVAL, after=(300, 0.9)), INTERVAL)
    assert found.history[-1].outcome == "Reverted(Refused)" and not found.override


def empty_promise(pods=3):
    """Pods with a slot too few each, promised everything from a knob that doesn't matter to them; a change in force."""
    forecast = Forecast(100, 1.0, 1.0, 1.0, 1.0, 0.1, 0.2, 0.01, 0.02, 0, 0.5)
    service = Service(Knobs(max_num_seqs=2), rate=2.8, pods=pods).run(8)
    service.look(
        Decision("Change", "Better", "", target={"maxNumBatchedTokens": 4096}, current=forecast, best=forecast, gain=1.0)
    )
    while service.brain.state.phase is not Phase.COMPARING and service.now < 200:
        service.run(2)
    assert service.brain.state.phase is Phase.COMPARING
    return service


def test_the_pod_that_is_compared_with_really_goes_back_and_with_the_operator_gone_for_a_while_it_goes_on():
    service = empty_promise().run(2)  # a step begins with the new knobs
    budgets = sorted(pod.knobs.max_num_batched_tokens for pod in service.pods.values())
    assert budgets == [4096, 4096, 8192]
    kept = State.from_json(json.loads(json.dumps(service.brain.state.to_json())))
    assert kept == service.brain.state
    service.brain = Brain(kept)
    service.run(12 * INTERVAL)
    assert service.brain.state.history[0].outcome == "Reverted(NoGain)"
    assert {pod.knobs.max_num_batched_tokens for pod in service.pods.values()} == {8192}


# the budget of changes


def seen(rate=4.0, prompts=None, now=60.0):
    service = Service(Knobs(max_num_seqs=64), pods=1, rate=rate, prompts=prompts, seconds=now).run(now, every=10.0)
    return service.brain.stretch


@pytest.fixture(scope="module")
def views():
    return {"chat": seen(), "more": seen(rate=5.5), "burst": seen(rate=9.0), "long": seen(prompts={50: 600, 100: 1200})}


def after(views, story, state=None):
    """The state after the views of `story`, each seen for so many intervals, an interval apart."""
    state, now = state or State(begun=(0.0, 1.0, 2.0), left=(OLD,), doubt=0.3), 0.0
    for name, intervals in story:
        for _ in range(intervals):
            now += INTERVAL
            state = follow(state, views[name], now, INTERVAL)
    return state, now


@pytest.mark.parametrize(
    "story",
    [
        [("chat", 40), ("more", 40)],  # a third more of the same
        [("chat", 40), ("burst", 2), ("chat", 20), ("long", 1), ("chat", 5)],  # what doesn't last
        [("chat", 2), ("long", 10)],  # too soon after the last one
    ],
)
def test_what_is_no_shift_or_too_soon_gives_no_new_changes(views, story):
    state, now = after(views, story)
    assert len(state.begun) == MOST_CHANGES and not budget_left(state, now, INTERVAL)
    assert state.left and state.doubt


def test_a_shift_that_lasts_gives_new_changes_once(views):
    state, now = after(views, [("chat", 30), ("long", 5)])
    assert not state.begun and budget_left(state, now, INTERVAL) and not state.left and not state.doubt
    state, now = after(views, [("chat", 5)], replace(state, begun=(1.0, 2.0, 3.0), shifted=INTERVAL))
    assert state.begun  # back again: traffic that swings doesn't make knobs swing


def test_a_change_that_was_begun_when_the_new_traffic_had_just_come_counts_among_its_changes(views):
    state, now = after(views, [("chat", 30)])
    came = replace(views["long"], began=now + 1.0)
    state = replace(state, begun=(1.0, 2.0, now + 2 * INTERVAL), left=(OLD, NEW))
    for look in range(1, 6):
        state = follow(state, came, now + look * INTERVAL, INTERVAL)
    assert state.begun == (now + 2 * INTERVAL,) and state.left == (NEW,)


def test_a_day_later_there_may_be_changes_again():
    state = State(begun=(0.0, 10.0, 20.0))
    assert not budget_left(state, 2000 * INTERVAL, INTERVAL) and budget_left(state, 2881 * INTERVAL, INTERVAL)


def test_without_budget_a_change_is_not_begun_and_the_twin_is_asked_ever_more_rarely(views):
    forecast = Forecast(100, 1.0, 1.0, 1.0, 1.0, 0.1, 0.2, 0.01, 0.02, 0, 0.5)
    decision = Decision("Change", "Better", "", target=NEW, current=forecast, best=forecast, gain=1.0)
    state = State(spec_hash="h1", begun=(0.0, 1.0, 2.0), next_search=45.0)  # asked then, answered 5 s later
    facts = Facts("Auto", "h1", OLD, (PodFact("pod-0", "pod-0"),), None, INTERVAL, decision=decision)
    first, effects = advance(state, facts, 50.0)
    second, _ = advance(first, facts, first.next_search + 5.0)
    assert first.reason == "EnoughChanges" and first.trial is None and not effects
    assert first.next_search == 45.0 + INTERVAL and second.next_search == first.next_search + 2 * INTERVAL


def test_a_freeze_is_looked_at_again_soon_and_ever_more_rarely_if_it_lasts():
    frozen = Decision("Freeze", "TwinOff", "off")
    state, waits = State(spec_hash="h1", idle_searches=5), []
    for _ in range(7):
        asked = state.next_search
        state, _ = advance(state, Facts("Auto", "h1", OLD, (), None, INTERVAL, decision=frozen), asked + 5.0)
        waits.append((state.next_search - asked) / INTERVAL)
    assert waits == [2, 2, 2, 4, 8, 8, 8] and state.idle_searches == 5
    thawed, _ = advance(state, replace(facts(), decision=Decision("Hold", "NoBetter", "")), 500.0)
    assert thawed.freezes == 0


def lost(*, share, requests=20, phase=Phase.SETTLED, kept=True):
    """Whether the twin is asked in the calm after a change, with so many of the last requests in time."""
    state = State(spec_hash="h1", phase=phase, kept=kept, cooldown=200.0, next_search=900.0, shift=(1.0, 1.0, 1.0, 1.0))
    stretch = Stretch(0.0, 200, 1.0, 1.0, 100.0, 200.0, 50.0, 0.9)
    view = Service(Knobs(max_num_seqs=64), pods=1).run(20, every=10.0).brain.view
    known = Facts(
        "Auto", "h1", OLD, (PodFact("pod-0", "pod-0"),), view, INTERVAL, stretch=stretch, lately=Lately(requests, 0.5, share)
    )  # fmt: skip
    return advance(state, known, 150.0)[1] == (Ask(),)


def test_an_objective_that_is_lost_again_does_not_wait_for_the_calm_after_a_change_to_end():
    assert lost(share=0.5)
    assert not lost(share=0.96) and not lost(share=0.9)  # kept; two of twenty may be a stray burst
    assert not lost(share=0.5, phase=Phase.REVERTED)  # who was wrong a minute ago waits
    assert not lost(share=0.5, kept=False)  # the change hadn't brought it back: its backlog may still be there


def test_settling_remembers_whether_the_objective_is_kept():
    known = replace(facts(), after=(100, 0.97))
    for share, kept in ((0.97, True), (0.9, False)):
        state, _ = settle(
            State(phase=Phase.VERIFYING, trial=TRIAL), TRIAL, replace(known, after=(100, share)), 0.0, "Verified", ""
        )
        assert (state.kept, state.share) == (kept, share)


# what follows from a change for the next one


def facts():
    return Facts("Auto", "h1", OLD, (), None, INTERVAL)


def test_nobody_goes_back_to_what_was_left_for_something_better():
    state, _ = settle(State(phase=Phase.VERIFYING, trial=TRIAL), TRIAL, facts(), 0.0, "Verified", "")
    assert state.left == (OLD,)
    service = bad_start(rate=4.0)
    service.run(14)
    question = service.questions[-1]
    first = decide(question)
    assert decide(replace(question, blocked=(dict(first.target),))).target != first.target


@pytest.mark.parametrize(
    ("reason", "doubts"), [(Reason.HARM, True), (Reason.NO_GAIN, True), (Reason.LOW_TRAFFIC, False), (Reason.ROLLOUT, False)]
)
def test_a_promise_that_was_not_kept_raises_the_bar(reason, doubts):
    trying = State(phase=Phase.CANARY, trial=replace(TRIAL, pods=("pod-0",)))
    state, _ = revert(trying, facts(), 0.0, reason, "")
    assert state.doubt == (TRIAL.promised if doubts else 0.0)


def test_a_promise_that_was_not_kept_is_forgotten_bit_by_bit():
    held = Decision("Hold", "NoBetter", "nothing better")
    state = State(spec_hash="h1", doubt=0.3)
    for look in range(4):
        state, _ = advance(state, Facts("Auto", "h1", OLD, (), None, INTERVAL, decision=held), 50.0 * look)
    assert state.doubt == pytest.approx(0.3 * 0.7**4)


def test_the_gain_must_exceed_what_was_promised_in_vain():
    service = bad_start(rate=4.0)
    service.run(14)
    question = service.questions[-1]
    found = decide(question)
    gain = found.best.attainment - found.current.attainment
    assert found.kind == "Change" and gain > 0.05
    doubted = decide(replace(question, doubt=gain + 0.01))
    assert (doubted.kind, doubted.reason) == ("Hold", "WithinError")


def test_evidence_of_few_requests_is_worded_with_its_figures():
    text = Evidence(Verdict.OPEN, 3, 7, 0.5, 1.0, 2.0).text
    assert "3 batches" in text and "7 requests" in text and "+0.500" in text
