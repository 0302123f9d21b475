"""A change of a class rolls so many services at a time, spares those whose own spec is new, and stops where it fails."""

import copy

import pytest
from operator_fakes import FakeCluster
from operator_kit import MINIMAL, body
from operator_pods import deployment as numbers
from operator_world import reconciler
from test_operator_class import cls

from paceline_operator.class_keeper import ClassKeeper, concerned
from paceline_operator.errors import SpecError
from paceline_operator.store import Key, Store
from paceline_operator.turns import Turns

NAMES = ["a", "b", "c", "d"]


class Fleet:
    """Services of one class with their Deployments; `ready` lets a rollout end."""

    def __init__(self, most=2, fleet=None):
        self.cluster = fleet.cluster if fleet else FakeCluster()
        self.store, self.woken = Store(), []
        self.keeper = ClassKeeper(self.cluster)
        self.reconciler = reconciler(
            self.cluster, self.store, classes=self.keeper.book, wake=self.woken.append, CLASS_ROLLOUTS=str(most)
        )
        for item in copy.deepcopy(list(fleet.cluster.objects.values()) if fleet else []):
            self.store.put(item["kind"], item)

    def service(self, name, **spec):
        item = body(MINIMAL | {"className": "gpu"} | spec, name=name, uid=f"uid-{name}")
        item["status"] = self.cluster.objects.get(("InferenceService", name), {}).get("status", {})
        self.store.put("InferenceService", self.cluster.add(item))

    def changes(self, version, **spec):
        assert self.keeper.observe({"type": "MODIFIED", "object": cls(spec, version=version)})

    async def run(self, *names):
        for name in names:
            await self.reconciler.reconcile(Key("team-a", name), {})

    def status(self, name, *, ready):
        found = copy.deepcopy(self.cluster.objects["Deployment", name])
        found["status"] = numbers(replicas=1, ready=int(ready), updated=1)["status"]
        self.store.put("Deployment", self.cluster.add(found))

    def images(self):
        deployments = {name: self.cluster.objects["Deployment", name]["spec"]["template"] for name in NAMES}
        return {name: template["spec"]["containers"][0]["image"] for name, template in deployments.items()}

    def rolled(self, image):
        return [name for name, found in self.images().items() if found == image]

    def progressing(self, name):
        found = self.cluster.status(name)["conditions"]
        return next(c["reason"] for c in found if c["type"] == "Progressing")


@pytest.fixture
async def fleet():
    found = Fleet()
    found.changes("1", defaults={"image": "registry/x:1"})
    for name in NAMES:
        found.service(name)
    await found.run(*NAMES)
    for name in NAMES:
        found.status(name, ready=True)
    await found.run(*NAMES)
    assert found.rolled("registry/x:1") == NAMES
    return found


async def test_so_many_roll_at_once_and_the_next_follow_when_they_are_done(fleet):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    assert fleet.rolled("registry/x:2") == ["a", "b"]
    assert (fleet.progressing("c"), fleet.progressing("d")) == ("WaitingForTurn", "WaitingForTurn")
    for name in ("a", "b"):
        fleet.status(name, ready=False)
    await fleet.run(*NAMES)
    fleet.cluster.calls.clear()
    await fleet.run(*NAMES)  # nothing has happened since
    assert fleet.cluster.writes() == []
    fleet.status("a", ready=True)
    await fleet.run("a")
    assert fleet.woken == [Key("team-a", "c")]
    await fleet.run("c", "d")
    assert fleet.rolled("registry/x:2") == ["a", "b", "c"]


async def test_a_change_that_does_not_come_up_stops_there_and_a_mended_class_frees_it(fleet):
    fleet.changes("2", defaults={"image": "registry/broken:2"})
    await fleet.run(*NAMES)
    for name in ("a", "b"):
        fleet.status(name, ready=False)
    await fleet.run(*NAMES)
    assert fleet.rolled("registry/broken:2") == ["a", "b"]
    fleet.changes("3", defaults={"image": "registry/x:3"})
    await fleet.run(*NAMES)
    assert fleet.rolled("registry/x:3") == ["a", "b"]


async def test_a_class_that_is_taken_back_ends_the_waiting(fleet):
    fleet.changes("2", defaults={"image": "registry/broken:2"})
    await fleet.run(*NAMES)
    fleet.changes("3", defaults={"image": "registry/x:1"})
    await fleet.run("c", "d")
    assert fleet.progressing("c") == "Complete"
    await fleet.run("a", "b")
    assert fleet.rolled("registry/x:1") == NAMES


async def test_an_edit_of_the_service_itself_does_not_wait(fleet):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    fleet.service("d", env=[{"name": "A", "value": "b"}])
    await fleet.run("d")
    assert "d" in fleet.rolled("registry/x:2")


async def test_places_that_come_free_together_are_all_taken(fleet):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    for name in ("a", "b"):
        fleet.status(name, ready=True)
    await fleet.run("a", "b")  # both, before whoever was woken by the first gets a worker
    while fleet.woken:
        key = fleet.woken[0]
        fleet.woken[:] = [other for other in fleet.woken if other != key]  # as a queue does
        await fleet.run(key.base)
    assert fleet.rolled("registry/x:2") == NAMES


@pytest.mark.parametrize("fate", ["broken", "deleted"])
async def test_who_can_not_use_a_turn_passes_it_on(fleet, fate):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    fleet.status("a", ready=True)
    await fleet.run("a")
    assert fleet.woken == [Key("team-a", "c")]
    if fate == "broken":
        fleet.service("c", replicas="many")
    else:
        fleet.store.remove("InferenceService", fleet.cluster.objects["InferenceService", "c"])
    await fleet.run("c")
    assert fleet.woken[1:] == [Key("team-a", "d")]


async def test_a_spec_that_is_broken_while_it_rolls_keeps_its_turn_no_longer_than_its_pods_need(fleet):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    fleet.status("a", ready=False)
    fleet.service("a", replicas="many")
    await fleet.run("a")
    assert fleet.woken == []
    fleet.status("a", ready=True)
    await fleet.run("a")
    assert fleet.woken == [Key("team-a", "c")]


async def test_live_knobs_reach_everybody_at_once_and_roll_nobody(fleet):
    before = fleet.images()
    fleet.changes("2", defaults={"image": "registry/x:1", "batching": {"maxNumSeqs": 7}})
    await fleet.run(*NAMES)
    assert fleet.images() == before
    assert all(
        '"maxNumSeqs": 7' in fleet.cluster.objects["ConfigMap", f"{name}-knobs"]["data"]["knobs.json"] for name in NAMES
    )
    assert {fleet.progressing(name) for name in NAMES} == {"Complete"}


async def test_a_new_operator_knows_whose_turn_it_is(fleet):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    for name in ("a", "b"):
        fleet.status(name, ready=False)
    fresh = Fleet(fleet=fleet)
    fresh.changes("2", defaults={"image": "registry/x:2"})
    fresh.reconciler.resume()
    await fresh.run(*reversed(NAMES))  # passes come in any order
    assert fresh.rolled("registry/x:2") == ["a", "b"]
    fresh.status("b", ready=True)
    await fresh.run("b")
    assert fresh.woken == [Key("team-a", "d")]


async def test_a_service_that_is_deleted_frees_its_turn(fleet):
    fleet.changes("2", defaults={"image": "registry/x:2"})
    await fleet.run(*NAMES)
    fleet.store.remove("InferenceService", fleet.cluster.objects["InferenceService", "a"])
    await fleet.run("a")
    assert fleet.woken == [Key("team-a", "c")]


async def test_a_class_deleted_in_use_is_told_and_touches_no_pod(fleet):
    fleet.keeper.observe({"type": "DELETED", "object": cls({})})
    fleet.cluster.calls.clear()
    await fleet.run(*NAMES)
    assert {kind for verb, kind in fleet.cluster.writes()} == set(NAMES)  # statuses
    spec_valid = next(c for c in fleet.cluster.status("a")["conditions"] if c["type"] == "SpecValid")
    assert (spec_valid["status"], spec_valid["reason"]) == ("False", "ClassNotFound")
    assert [event["reason"] for event in fleet.cluster.events][-1] == "ClassNotFound"
    fleet.changes("9", defaults={"image": "registry/x:1"})
    fleet.cluster.calls.clear()
    await fleet.run(*NAMES)
    assert {kind for verb, kind in fleet.cluster.writes()} == set(NAMES)


async def test_status_names_class_and_origins(fleet):
    status = fleet.cluster.status("a")
    assert status["className"] == "gpu"
    assert status["effective"]["image"] == {"value": "registry/x:1", "origin": "class"}


async def test_a_class_gets_a_status_of_its_own_once():
    cluster = FakeCluster()
    keeper = ClassKeeper(cluster)
    item = cluster.add(cls({"limits": {"strategies": []}}))
    keeper.observe({"type": "ADDED", "object": item})
    await keeper.report("gpu")
    found = cluster.objects["InferenceClass", "gpu"]
    condition = found["status"]["conditions"][0]
    assert (condition["type"], condition["status"], found["status"]["observedGeneration"]) == ("Valid", "False", 1)
    keeper.observe({"type": "MODIFIED", "object": found})
    cluster.calls.clear()
    await keeper.report("gpu")
    await keeper.report("other")
    assert cluster.calls == []


async def test_a_list_of_classes_never_replaces_what_a_watch_told_since_it_was_asked_for():
    cluster = FakeCluster()
    keeper = ClassKeeper(cluster)
    for name in ("a", "b", "c", "d"):
        keeper.observe({"type": "ADDED", "object": cls({}, name=name, version="1")})
    changed, made = cls({"defaults": {"image": "registry/x:2"}}, name="a", version="2"), cls({}, name="e", version="3")

    async def classes():
        listed = [cls({}, name=name, version="1") for name in ("a", "b", "c")]  # d went, and nobody was told
        keeper.observe({"type": "MODIFIED", "object": changed})
        keeper.observe({"type": "ADDED", "object": made})
        keeper.observe({"type": "DELETED", "object": listed[1]})
        return listed

    cluster.classes = classes
    assert await keeper.relist()
    assert sorted(keeper.names()) == ["a", "c", "e"]
    assert keeper.book.of(body(MINIMAL | {"className": "a"})).defaults == {"image": "registry/x:2"}
    assert keeper.book.of(body(MINIMAL | {"className": "e"}))
    for name in ("b", "d"):
        with pytest.raises(SpecError, match="no such InferenceClass"):
            keeper.book.of(body(MINIMAL | {"className": name}))


def test_only_services_that_a_class_may_concern_are_looked_at():
    services = [
        ("a", body(MINIMAL | {"className": "x"})),
        ("b", body()),
        ("c", body(MINIMAL | {"className": "y"})),
        ("d", {}),
    ]
    assert list(concerned(services, "x")) == ["a", "b", "d"]


def test_turns_are_counted_per_class():
    turns = Turns(1, lambda _: None)
    assert turns.take(Key("n", "a"), "x")
    assert turns.take(Key("n", "b"), "y")
    assert not turns.take(Key("n", "c"), "x")
    assert turns.take(Key("n", "a"), "x")  # it has one already
