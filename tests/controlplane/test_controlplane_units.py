"""Parts of the embedded server that can't be seen from outside in a test's time: expiry, limits, compaction, bookmarks."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from servers import config_map

from paceline_local.apiserver import journal as journal_module
from paceline_local.apiserver import store as store_module
from paceline_local.apiserver import watches
from paceline_local.apiserver.collector import Collector
from paceline_local.apiserver.errors import ApiError
from paceline_local.apiserver.journal import Journal
from paceline_local.apiserver.objects import timestamp
from paceline_local.apiserver.operations import Operations
from paceline_local.apiserver.resources import Registry
from paceline_local.apiserver.store import Store
from paceline_local.apiserver.tables import age, json_path
from paceline_local.apiserver.targets import Target, WriteOptions
from paceline_local.apiserver.watches import Selection

NOW = 1_800_000_000.0
WRITER = WriteOptions(manager="unit")


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def operations(tmp_path: Path, clock: Clock) -> Operations:
    made = Operations(Store(Journal(tmp_path)), Registry(), clock)
    made.create(target(made, "namespaces"), {"metadata": {"name": "default"}}, WRITER)
    return made


def target(operations: Operations, plural: str, name: str = "") -> Target:
    resource = operations.registry.find("", "v1", plural)
    return Target(resource, "default" if resource.namespaced else "", name)


def event(name: str, seen: float) -> dict[str, Any]:
    return {"metadata": {"name": name}, "lastTimestamp": timestamp(seen), "involvedObject": {}, "message": name}


def test_events_expire_an_hour_after_they_were_last_seen(operations: Operations, clock: Clock) -> None:
    for name, seen in (("old", NOW - 3601), ("young", NOW - 3500)):
        operations.create(target(operations, "events"), event(name, seen), WRITER)
    collector = Collector(operations)
    while collector.sweep():
        pass
    assert [key[2] for key, _ in operations.store.select("events")] == ["young"]
    clock.now += 200
    assert collector.sweep()
    assert not list(operations.store.select("events"))


def test_one_bad_object_does_not_keep_the_collector_from_others(
    operations: Operations, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations.create(target(operations, "events"), event("bad", NOW) | {"lastTimestamp": "yesterday"}, WRITER)
    operations.create(target(operations, "events"), event("old", NOW - 3601), WRITER)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "gone"}
    for name in ("sick", "well"):
        operations.create(target(operations, "configmaps"), config_map(name, ownerReferences=[owner]), WRITER)
    collector, remove = Collector(operations), operations.remove

    def refuse(key: Any, options: Any) -> None:
        if key[2] == "sick":
            raise RuntimeError("a bug")
        remove(key, options)

    monkeypatch.setattr(operations, "remove", refuse)
    while collector.sweep():
        pass
    assert [key[2] for key, _ in operations.store.select("events")] == ["bad"]
    assert [key[2] for key, _ in operations.store.select("configmaps")] == ["sick"]
    assert collector.failures > 0
    clock.now += 3601
    collector.sweep()
    assert not list(operations.store.select("events"))  # by the time of its creation


def test_the_window_of_changes_is_bounded(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_WINDOW", 5)
    for number in range(10):
        operations.create(target(operations, "configmaps"), config_map(f"m{number}"), WRITER)
    newest = operations.store.revision
    assert len(operations.store.since("configmaps", newest - 5)) == 5
    with pytest.raises(ApiError) as caught:
        operations.store.since("configmaps", newest - 6)
    assert (caught.value.code, caught.value.reason) == (410, "Expired")


def test_the_journal_is_compacted_when_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 20_000)
    store = Store(Journal(tmp_path))
    for number in range(500):
        store.write(("configmaps", "default", "a"), config_map("a", {"n": str(number)}))
    path = tmp_path / "journal.jsonl"
    assert path.stat().st_size < 25_000
    again = Store(Journal(tmp_path))
    assert again.revision == store.revision == 500
    assert again.get(("configmaps", "default", "a")) == store.get(("configmaps", "default", "a"))


def test_much_live_data_is_not_written_anew_with_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
    journal = Journal(tmp_path)
    store, compactions = Store(journal), 0
    for number in range(20):
        store.write(("configmaps", "default", f"m{number}"), config_map(f"m{number}", {"n": "x" * 500}))
    compact = journal.compact

    def counted(*arguments: Any) -> None:
        nonlocal compactions
        compactions += 1
        compact(*arguments)

    monkeypatch.setattr(journal, "compact", counted)
    for number in range(100):
        store.write(("configmaps", "default", "small"), config_map("small", {"n": str(number)}))
    assert 1 <= compactions <= 5


def test_a_compaction_that_fails_fails_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
    store = Store(Journal(tmp_path))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "fsync", full)
        for number in range(50):
            store.write(("configmaps", "default", "a"), config_map("a", {"n": str(number)}))
    again = Store(Journal(tmp_path))
    assert again.get(("configmaps", "default", "a")) == store.get(("configmaps", "default", "a"))


def test_a_full_disk_loses_only_the_refused_write(
    tmp_path: Path, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 20:
            return written(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    operations.create(target(operations, "configmaps"), config_map("before"), WRITER)
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "write", lambda fd, data: full(fd, data) if len(data) > 200 else full(fd, b""))
        with pytest.raises(OSError, match="No space left"):
            operations.create(target(operations, "configmaps"), config_map("refused"), WRITER)
    operations.create(target(operations, "configmaps"), config_map("after"), WRITER)
    assert operations.store.get(("configmaps", "default", "refused")) is None
    again = Store(Journal(tmp_path))
    assert [key[2] for key, _ in again.select("configmaps")] == ["after", "before"]


async def watched(operations: Operations, query: dict[str, str], during: Any = None) -> list[tuple[str, dict[str, Any]]]:
    lines: list[tuple[str, dict[str, Any]]] = []

    async def send(line: bytes) -> None:
        parsed = json.loads(line)
        lines.append((parsed["type"], parsed["object"]))
        if during is not None:
            during()

    selection = Selection.from_query(target(operations, "configmaps"), query)
    await watches.watch(operations.store, selection, query, lambda obj: obj, send)
    return lines


async def test_bookmarks_come_only_if_asked_for(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_BOOKMARK_S", 0.05)
    version = str(operations.store.revision)
    query = {"resourceVersion": version, "timeoutSeconds": "1"}
    assert await watched(operations, query) == []
    marks = await watched(operations, {**query, "allowWatchBookmarks": "true"})
    assert {kind for kind, _ in marks} == {"BOOKMARK"}
    assert marks[0][1] == {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"resourceVersion": version}}


async def test_a_watch_that_lags_too_far_is_cut_off(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_BACKLOG", 3)
    operations.create(target(operations, "configmaps"), config_map("first"), WRITER)
    burst = iter(range(5))

    def write_more() -> None:
        for number in burst:
            operations.create(target(operations, "configmaps"), config_map(f"m{number}"), WRITER)

    async with asyncio.timeout(10):
        seen = await watched(operations, {"timeoutSeconds": "5"}, write_more)
    assert seen[0][0] == "ADDED"
    assert (seen[-1][0], seen[-1][1]["code"]) == ("ERROR", 410)


async def test_a_failing_sweep_is_counted_and_tried_again(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(operations)
    healed = asyncio.Event()

    def sweep() -> bool:
        if collector.failures == 0:
            raise RuntimeError("a bad object")
        healed.set()
        return False

    monkeypatch.setattr(collector, "sweep", sweep)
    monkeypatch.setattr("paceline_local.apiserver.collector._RETRY_S", 0.0)
    task = asyncio.create_task(collector.run())
    async with asyncio.timeout(10):
        await healed.wait()
    task.cancel()
    assert collector.failures == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (180, "3m"),
        (192, "3m12s"),
        (3600, "60m"),
        (5 * 3600 + 60, "5h1m"),
        (30 * 3600, "30h"),
        (864000, "10d"),
    ],
)
def test_ages_read_as_in_kubectl(seconds: int, text: str) -> None:
    assert age(timestamp(NOW - seconds), NOW) == text


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (".spec.size", [3]),
        (".spec.none.deeper", []),
        ('.status.conditions[?(@.type=="Ready")].status', ["True"]),
        (".status.conditions[0].type", ["Live"]),
        (".status.conditions[*].type", ["Live", "Ready"]),
        (r".metadata.labels.app\.kubernetes\.io/name", ["x"]),
        (".metadata.labels['app.kubernetes.io/name']", ["x"]),
        ("{.spec.size}", [3]),
    ],
)
def test_printer_columns_find_their_values(path: str, found: list[Any]) -> None:
    conditions = [{"type": "Live", "status": "False"}, {"type": "Ready", "status": "True"}]
    labels = {"app.kubernetes.io/name": "x"}
    assert (
        json_path({"spec": {"size": 3}, "status": {"conditions": conditions}, "metadata": {"labels": labels}}, path) == found
    )
