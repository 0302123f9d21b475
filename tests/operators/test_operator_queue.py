"""The work queue (one worker per key, bursts collapse) and the store (older never replaces newer, lists mend gaps)."""

import asyncio

import pytest
from operator_kit import body
from operator_pods import pod

from paceline_operator.store import Key, Store
from paceline_operator.workqueue import WorkQueue

KEY = Key("team-a", "chat")


async def test_a_burst_is_one_look():
    queue = WorkQueue()
    for _ in range(5):
        queue.add("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    assert len(queue) == 0


async def test_a_key_that_comes_back_while_it_is_worked_on_is_looked_at_again():
    queue = WorkQueue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0  # nobody else may take it now
    queue.done("a")
    assert await asyncio.wait_for(queue.get(), 1) == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_a_delayed_look_comes_and_the_earliest_wins():
    queue = WorkQueue()
    queue.add_later("a", 60)
    queue.add_later("a", 0.01)
    queue.add_later("a", 30)
    assert await asyncio.wait_for(queue.get(), 5) == "a"


async def test_a_look_now_replaces_one_later():
    queue = WorkQueue()
    queue.add_later("a", 60)
    queue.add("a")
    await queue.get()
    queue.done("a")
    queue.close()
    assert len(queue) == 0


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


async def test_failures_in_a_row_wait_longer_and_success_forgets_them():
    clock = Clock()
    queue = WorkQueue(clock=clock)
    delays = []
    for _ in range(12):
        delays.append(queue.retry("a"))
        clock.now += delays[-1]
    assert delays[0] <= 1.2
    assert delays[3] > delays[0]
    assert 48 <= max(delays) <= 72
    queue.succeed("a")
    assert queue.retry("a") <= 1.2
    queue.close()


async def test_failures_of_looks_that_came_early_do_not_make_the_next_one_later():
    clock = Clock()
    queue = WorkQueue(clock=clock)
    assert all(queue.retry("a") <= 1.2 for _ in range(12))  # twelve events within no time
    clock.now += 1.3
    assert 1.6 <= queue.retry("a") <= 2.4
    queue.close()


def versioned(version, **options):
    found = pod(**options)
    found["metadata"]["resourceVersion"] = str(version)
    return found


def test_objects_are_found_by_their_service():
    store = Store()
    assert store.put("InferenceService", body()) == KEY
    assert store.put("Pod", pod("b")) == store.put("Pod", pod("a")) == KEY
    assert [p["metadata"]["name"] for p in store.all(KEY, "Pod")] == ["a", "b"]
    assert store.service(KEY)["metadata"]["uid"] == "uid-1"
    assert store.count("Pod") == 2
    assert store.put("Pod", {"metadata": {"name": "x", "namespace": "y"}}) is None
    assert list(store) == [KEY]


def test_the_bulk_of_an_object_is_not_kept():
    store = Store()
    store.put("Pod", pod(managedFields=[{}]))
    assert "managedFields" not in store.all(KEY, "Pod")[0]["metadata"]


@pytest.mark.parametrize(("first", "second", "kept"), [(9, 10, "10"), (10, 9, "10"), (5, 5, "5")])
def test_an_older_version_never_replaces_a_newer_one(first, second, kept):
    store = Store()
    store.put("Pod", versioned(first))
    store.put("Pod", versioned(second))
    assert store.all(KEY, "Pod")[0]["metadata"]["resourceVersion"] == kept


def test_a_new_object_of_the_same_name_replaces_the_old_one():
    store = Store()
    store.put("Pod", versioned(10))
    fresh = versioned(12)
    fresh["metadata"]["uid"] = "another"
    store.put("Pod", fresh)
    assert store.all(KEY, "Pod")[0]["metadata"]["uid"] == "another"
    store.remove("Pod", versioned(11))  # the late news of the old one's end
    assert store.all(KEY, "Pod")
    store.remove("Pod", fresh)
    assert list(store) == []


def renewed(uid):
    found = versioned(20)
    found["metadata"]["uid"] = uid
    return found


@pytest.mark.parametrize("told", ["removed", "replaced", "missing in a list"])
def test_a_late_answer_about_an_object_that_is_gone_does_not_replace_its_successor(told):
    store = Store()
    store.put("Pod", versioned(10))
    if told == "removed":
        store.remove("Pod", versioned(11))
    elif told == "missing in a list":
        store.replace("Pod", [], None)
    store.put("Pod", renewed("successor"))
    assert store.put("Pod", versioned(10)) == KEY
    assert store.all(KEY, "Pod")[0]["metadata"]["uid"] == "successor"
    store.remove("Pod", versioned(11))  # the watch of the old one may be behind, too
    assert store.all(KEY, "Pod")[0]["metadata"]["uid"] == "successor"


def test_a_late_answer_does_not_bring_back_what_was_deleted_before_it_was_known():
    store = Store()
    store.remove("Pod", versioned(11))
    store.put("Pod", versioned(10))
    assert store.all(KEY, "Pod") == []


def test_a_late_answer_about_an_object_that_was_never_known_does_not_bury_its_successor():
    """Made by us and deleted in a gap of the watch: nobody has told of its end."""
    store = Store()
    store.put("Pod", renewed("successor"))
    store.put("Pod", versioned(10))
    assert store.all(KEY, "Pod")[0]["metadata"]["uid"] == "successor"
    later = renewed("successor")
    later["metadata"]["resourceVersion"] = "21"
    store.put("Pod", later)
    assert store.all(KEY, "Pod")[0]["metadata"]["resourceVersion"] == "21"


def test_a_list_counts_more_than_anything_before_it():
    """An etcd that is restored from a backup has older versions, and objects that had gone."""
    store = Store()
    store.put("Pod", versioned(10, name="older"))
    store.put("Pod", versioned(10, name="back"))
    store.remove("Pod", versioned(11, name="back"))
    store.replace("Pod", [versioned(4, name="older"), versioned(4, name="back")], None)
    assert [p["metadata"]["resourceVersion"] for p in store.all(KEY, "Pod")] == ["4", "4"]
    store.put("Pod", versioned(5, name="back"))
    assert store.get(KEY, "Pod", "back")["metadata"]["resourceVersion"] == "5"


def test_a_list_mends_what_the_watch_missed():
    store = Store()
    for name in ("kept", "gone"):
        store.put("Pod", versioned(1, name=name))
    store.put("InferenceService", body())
    changed = store.replace("Pod", [versioned(1, name="kept"), versioned(4, name="new")], None)
    assert changed == {KEY}
    assert [p["metadata"]["name"] for p in store.all(KEY, "Pod")] == ["kept", "new"]
    assert store.replace("Pod", [versioned(1, name="kept"), versioned(4, name="new")], None) == set()
    assert store.replace("Pod", [], "another-namespace") == set()
    assert store.service(KEY) is not None
    assert store.replace("InferenceService", [], "team-a") == {KEY}
    assert store.service(KEY) is None


def test_a_list_does_not_undo_what_a_watch_told_while_it_was_under_way():
    store = Store()
    for name in ("old", "going"):
        store.put("Pod", versioned(1, name=name))
    store.begin_list()
    store.put("Pod", versioned(7, name="made-meanwhile"))
    store.remove("Pod", versioned(8, name="going"))
    store.replace("Pod", [versioned(1, name="old"), versioned(1, name="going")], None)
    assert [p["metadata"]["name"] for p in store.all(KEY, "Pod")] == ["made-meanwhile", "old"]
    store.begin_list()
    store.replace("Pod", [versioned(1, name="old")], None)  # the next one counts
    assert [p["metadata"]["name"] for p in store.all(KEY, "Pod")] == ["old"]


async def test_how_long_keys_wait_is_told():
    waits = []
    queue = WorkQueue(waits.append)
    queue.add("a")
    queue.add("a")
    await queue.get()
    queue.add("a")  # comes back when it is released
    queue.done("a")
    await queue.get()
    assert len(waits) == 2
    assert all(wait >= 0 for wait in waits)
