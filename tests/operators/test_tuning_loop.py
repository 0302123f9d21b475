"""The tuner as it runs: outages, edits and other people's states in the middle of things, and pods that don't obey."""

import json
from dataclasses import replace

import pytest
from operator_kit import service
from tuning_world import AUTO, INTERVAL, KEY, World

from paceline_operator.effective import spec_hash
from paceline_operator.tuning.asked import still_asked
from paceline_operator.tuning.facts import Situation
from paceline_operator.tuning.overrides import config_map
from paceline_operator.tuning.state import Phase, State, Trial

TRIAL = Trial(
    {"maxNumSeqs": 1}, {"maxNumSeqs": 32}, "w", 9900.0, ("chat-1",), "chat-1/c", 0.1, 0.4, 0.9, 8.0, applied=9990.0
)


def written(phase=Phase.CANARY, *, spec=AUTO, **changes):
    """The ConfigMap that an operator before this one left: a canary on one pod."""
    found = service(spec)
    return config_map(found, State(spec_hash=spec_hash(found), phase=phase, **{"trial": TRIAL} | changes))


async def settled(**options):
    world = World(**options)
    assert await world.run(300, lambda: "TuningSettled" in world.api.told)
    assert world.running == [world.state.override["maxNumSeqs"]] * 3 and world.running[0] >= 4
    return world


async def test_one_slot_becomes_enough_on_all_pods_and_the_cluster_is_told():
    world = await settled()
    assert world.api.told == ["TuningCanary", "TuningPromoting", "TuningPromoted", "TuningSettled"]
    assert json.loads(world.config_map["data"]["knobs.json"])["knobs"] == world.state.override


async def test_an_outage_of_the_api_when_the_twin_is_asked_does_not_end_tuning():
    world = await settled()
    world.api.away = True
    world.edit(AUTO | {"batching": {"maxNumSeqs": 2}})  # something to be written, and a reason to ask
    await world.run(60)
    before, told = len(world.asked), len(world.api.told)
    world.api.away = False
    assert await world.run(200, lambda: world.api.told[told:].count("TuningCanary") == 1)
    assert len(world.asked) > before
    assert world.api.told[told] == "TuningDropped"  # what couldn't be told then is told now


@pytest.mark.parametrize("phase", ["Probing", 3, None])
async def test_a_canary_of_a_state_that_cannot_be_read_goes_back_and_tuning_goes_on(phase):
    left = written()
    left["data"]["state.json"] = json.dumps(json.loads(left["data"]["state.json"]) | {"phase": phase})
    world = World(config_map=left)
    assert world.targets[KEY].trial_pods == {"chat-1"}
    await world.run(4)
    assert world.running == [1, 1, 1] and "trial.json" not in world.config_map["data"]
    assert await world.run(300, lambda: "TuningSettled" in world.api.told)


async def test_the_override_of_a_state_that_cannot_be_read_stays_in_force():
    left = written(Phase.SETTLED, trial=None, override={"maxNumSeqs": 32})
    left["data"]["state.json"] = "{"
    world = World(config_map=left)
    await world.run(60)
    assert world.running == [32, 32, 32] and world.state.override == {"maxNumSeqs": 32}


async def test_an_operator_that_takes_over_goes_on_with_the_canary_of_the_last_one():
    world = World(config_map=written())
    await world.run(4)
    assert world.state.trial.after == {"maxNumSeqs": 32} and world.running == [1, 32, 1]
    assert await world.run(100, lambda: "TuningSettled" in world.api.told)
    assert "TuningCanary" not in world.api.told and world.running == [32, 32, 32]


@pytest.mark.parametrize("at", ["TuningCanary", "TuningPromoted", "TuningSettled"])
async def test_bounds_that_are_narrowed_end_what_they_exclude_and_count_from_then_on(at):
    world = World()
    assert await world.run(300, lambda: at in world.api.told)
    told = len(world.api.told)
    world.edit(AUTO | {"tuning": {"mode": "Auto", "bounds": {"maxNumSeqs": {"max": 4}}}})
    await world.run(2 * INTERVAL)
    assert "TuningDropped" in world.api.told[told:]
    assert await world.run(300, lambda: "TuningSettled" in world.api.told[told:])
    assert world.running == [4, 4, 4] and world.state.override == {"maxNumSeqs": 4}
    assert world.tuner.status(KEY).content["applied"] == {"maxNumSeqs": 4}


@pytest.mark.parametrize(
    "edit",
    [
        {"batching": {"maxNumSeqs": 64}},
        {"tuning": {"mode": "Auto", "bounds": {"maxNumSeqs": {"max": 2}}}},
        {"slo": {"ttft": "100s", "tpot": "10s"}},
    ],
)
async def test_an_answer_about_what_was_edited_meanwhile_is_not_acted_on(edit):
    world = World()
    world.answers.clear()
    assert await world.run(100, lambda: bool(world.asked))
    await world.run(1)
    world.edit(AUTO | edit)
    await world.run(2 * INTERVAL)
    world.answers.set()
    await world.run(4)
    assert world.state.trial is None and world.running == [edit.get("batching", AUTO["batching"])["maxNumSeqs"]] * 3


async def test_an_answer_to_another_kind_of_question_is_not_acted_on():
    world = World()
    assert await world.run(100, lambda: bool(world.asked))
    (search,), state = world.asked, replace(world.state, trial=None)
    now = Situation("team-a/chat", "Auto", "h", dict(search.knobs), dict(search.bounds), (), 1.0, 0.06, 95.0, INTERVAL)
    assert still_asked(search, now, state)
    only = replace(search, only=({"maxNumSeqs": 1},))
    assert not still_asked(only, now, state)  # it came after the change had been taken back
    verifying = replace(state, phase=Phase.VERIFYING, trial=replace(TRIAL, pods=()))
    assert still_asked(only, now, verifying) and not still_asked(search, now, verifying)
    assert not still_asked(replace(only, only=({"maxNumSeqs": 2},)), now, verifying)


async def test_a_promotion_that_a_pod_does_not_take_over_is_taken_back_and_not_called_verified():
    world = World()
    world.deaf.add("chat-2")
    assert await world.run(200, lambda: "TuningReverted" in world.api.told)
    await world.run(4)
    assert "TuningSettled" not in world.api.told and world.running == [1, 1, 1]
    change = world.state.history[-1]
    assert change.outcome == "Reverted(NotApplied)" and "chat-2" in change.effect


async def test_a_canary_that_its_pod_refuses_is_taken_back_in_its_words():
    world = World()
    world.refusing["chat-0"] = "maxNumSeqs: more than the pool holds"
    assert await world.run(100, lambda: "TuningReverted" in world.api.told)
    assert world.state.history[-1].outcome == "Reverted(Refused)"
    assert "more than the pool holds" in world.state.history[-1].effect


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_clock_that_goes_back_leaves_no_canary_unwatched(restarted):
    world = World()
    assert await world.run(100, lambda: "TuningCanary" in world.api.told)
    world.back = 3600.0
    if restarted:
        world.restart()
    await world.run(INTERVAL / 2)
    assert world.running == [1, 1, 1] and "TuningReverted" in world.api.told
    assert await world.run(300, lambda: "TuningSettled" in world.api.told)
