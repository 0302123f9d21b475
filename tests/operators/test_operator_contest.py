"""Somebody who changes our children back each time: few writes, and a word about it."""

import copy

import pytest
from operator_kit import MINIMAL
from operator_world import KEY, World

from paceline_operator.contest import Contests, last_writer


def test_corrections_come_at_once_and_then_more_and_more_rarely():
    contests, now, waits = Contests(), 0.0, []
    for _ in range(14):
        contest = contests.corrected("child", "spec.x", "other", now)
        waits.append(contest.due - now)
        now = contest.due
    assert waits == [0, 0, 0, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


def test_a_contest_is_over_after_a_while_without_one():
    contests = Contests()
    for _ in range(5):
        contest = contests.corrected("child", "spec.x", "", 0.0)
    assert contest.open
    assert contests.get("child", contest.over - 1) == contest
    assert contests.get("child", contest.over) is None
    assert not contests.corrected("child", "spec.x", "", contest.over).open
    assert contests.get("another", 0.0) is None
    contests.forget("child")
    assert contests.get("child", contest.over) is None


def test_the_last_writer_is_named():
    fields = [
        {"manager": "paceline-operator", "time": "2030-01-01T00:00:09Z", "fieldsV1": {"f:spec": {}}},
        {"manager": "kube-controller-manager", "time": "2030-01-01T00:00:08Z", "fieldsV1": {"f:status": {}}},
        {"manager": "old-gitops", "time": "2030-01-01T00:00:01Z", "fieldsV1": {"f:spec": {}}},
        {"manager": "gitops", "time": "2030-01-01T00:00:07Z", "fieldsV1": {"f:spec": {}}},
    ]
    assert last_writer({"metadata": {"managedFields": fields}}) == "gitops"
    assert last_writer({"metadata": {"managedFields": fields[:2]}}) == ""
    assert last_writer({"metadata": {}}) == ""


class Rival:
    """A controller that puts its own grace period back whenever it sees another, and writes with its own manager."""

    def __init__(self, world):
        self._world = world
        self.writes = 0

    def act(self):
        live = copy.deepcopy(self._world.cluster.objects["Deployment", "chat"])
        if live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 1:
            return
        live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
        live["metadata"]["managedFields"] = [{"manager": "rival", "time": "2030", "fieldsV1": {"f:spec": {}}}]
        self.writes += 1
        self._world.sees("Deployment", live)


@pytest.fixture
def world():
    found = World()
    found.manifest(MINIMAL)
    return found


async def test_a_rival_is_no_reason_to_write_for_ever(world):
    await world.run()
    rival, corrections = Rival(world), 0
    for second in range(0, 3600, 20):  # it is there at once, three times a minute for an hour
        world.time = float(second)
        rival.act()
        await world.run()
        corrections += sum(call == ("apply", "Deployment") for call in world.cluster.calls)
    assert 10 < corrections < 25  # 3 at once, then waits of 2, 4, … 256 s, and then one in 5 minutes: not 180
    told = world.condition("ChildrenApplied")
    assert (told["status"], told["reason"]) == ("False", "Contested")
    assert "rival keeps changing spec.template.spec.terminationGracePeriodSeconds of the Deployment" in told["message"]
    assert [event["reason"] for event in world.cluster.events].count("Contested") == 1


async def test_the_pass_says_when_it_is_worth_a_look(world):
    await world.run()
    rival = Rival(world)
    for _ in range(4):
        rival.act()
        result = await world.run()
    assert result.again == pytest.approx(2.0)
    world.time += 2.0
    rival.act()
    await world.run()
    assert ("apply", "Deployment") in world.cluster.calls


async def test_an_edit_of_the_spec_does_not_wait_for_the_rival(world):
    await world.run()
    rival = Rival(world)
    for _ in range(6):
        rival.act()
        await world.run()
    rival.act()
    world.manifest(MINIMAL | {"replicas": 5}, generation=2)
    await world.run()
    assert world.cluster.objects["Deployment", "chat"]["spec"]["replicas"] == 5


async def test_peace_is_told_too(world):
    await world.run()
    rival = Rival(world)
    for _ in range(4):
        rival.act()
        await world.run()
    assert world.condition("ChildrenApplied")["reason"] == "Contested"
    world.time += 3.0
    await world.run()  # the last one is set back
    result = await world.run()
    assert result.again is not None  # nothing else would bring the service back
    world.time += result.again
    await world.run()
    assert world.condition("ChildrenApplied")["status"] == "True"
    assert world.store.get(KEY, "Deployment", "chat")
