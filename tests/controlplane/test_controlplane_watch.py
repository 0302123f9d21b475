"""Watches: order, selectors, resuming, expiry."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import Api, config_map

Events = Iterator[tuple[str, dict[str, Any]]]


def maps(ns: str, *name: str) -> str:
    return "/".join([f"/api/v1/namespaces/{ns}/configmaps", *name])


def take(events: Events, count: int) -> list[tuple[str, str]]:
    ours = ((kind, obj["metadata"]["name"]) for kind, obj in events if obj["metadata"].get("name") != "kube-root-ca.crt")
    return list(itertools.islice(ours, count))


def test_events_come_in_order(api: Api, ns: str) -> None:
    version = api.get(maps(ns)).version
    with api.watching(maps(ns), resourceVersion=version) as events:
        api.post(maps(ns), config_map("a")).ok()
        api.patch(maps(ns, "a"), {"data": {"x": "1"}}).ok()
        api.post(maps(ns), config_map("b")).ok()
        api.delete(maps(ns, "a")).ok()
        assert take(events, 4) == [("ADDED", "a"), ("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a")]


def test_versions_grow_and_a_deletion_has_its_own(api: Api, ns: str) -> None:
    version = api.get(maps(ns)).version
    with api.watching(maps(ns), resourceVersion=version, fieldSelector="metadata.name=a") as events:
        created = api.post(maps(ns), config_map("a"))
        changed = api.patch(maps(ns, "a"), {"data": {"x": "1"}})
        api.delete(maps(ns, "a")).ok()
        seen = [int(obj["metadata"]["resourceVersion"]) for _, obj in itertools.islice(events, 3)]
    assert seen[:2] == [int(created.version), int(changed.version)]
    assert seen[2] > seen[1]


def test_without_a_version_a_watch_starts_with_what_is_there(api: Api, ns: str) -> None:
    for name in "ab":
        api.post(maps(ns), config_map(name)).ok()
    for params in ({}, {"resourceVersion": "0"}):
        with api.watching(maps(ns), **params) as events:
            assert sorted(take(events, 2)) == [("ADDED", "a"), ("ADDED", "b")]


def test_a_watch_resumes_after_a_version(api: Api, ns: str) -> None:
    first = api.post(maps(ns), config_map("a"))
    api.patch(maps(ns, "a"), {"data": {"x": "1"}}).ok()
    api.delete(maps(ns, "a")).ok()
    with api.watching(maps(ns), resourceVersion=first.version) as events:
        assert take(events, 2) == [("MODIFIED", "a"), ("DELETED", "a")]


def test_objects_enter_and_leave_a_selection(api: Api, ns: str) -> None:
    version = api.get(maps(ns)).version
    with api.watching(maps(ns), resourceVersion=version, labelSelector="on=yes") as events:
        api.post(maps(ns), config_map("a")).ok()
        api.patch(maps(ns, "a"), {"metadata": {"labels": {"on": "yes"}}}).ok()
        api.patch(maps(ns, "a"), {"data": {"x": "1"}}).ok()
        left = api.patch(maps(ns, "a"), {"metadata": {"labels": {"on": "no"}}})
        api.patch(maps(ns, "a"), {"metadata": {"labels": {"on": "yes"}}}).ok()
        seen = list(itertools.islice(events, 4))
    assert [kind for kind, _ in seen] == ["ADDED", "MODIFIED", "DELETED", "ADDED"]
    assert seen[2][1]["metadata"]["resourceVersion"] == left.version
    assert seen[2][1]["metadata"]["labels"] == {"on": "yes"}  # the last state that was selected


def test_one_object_is_watched_by_name(api: Api, ns: str) -> None:
    version = api.get(maps(ns)).version
    with api.watching(maps(ns), resourceVersion=version, fieldSelector="metadata.name=b") as events:
        for name in "ab":
            api.post(maps(ns), config_map(name)).ok()
        assert take(events, 1) == [("ADDED", "b")]


def test_the_timeout_ends_a_watch(api: Api, ns: str) -> None:
    version = api.get(maps(ns)).version
    with api.watching(maps(ns), resourceVersion=version, timeoutSeconds=1, fieldSelector="metadata.name=a") as events:
        assert list(events) == []


def test_a_forgotten_version_has_expired(api: Api, ns: str) -> None:
    with api.watching(maps(ns), resourceVersion="1") as events:
        kind, status = next(events)
    if api.real and kind == "ADDED":
        pytest.skip("this server is too young to have forgotten its first version: etcd is compacted every 5 minutes")
    assert kind == "ERROR"
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 410, "Expired")
    assert "too old resource version: 1" in status["message"]


def test_all_namespaces_are_watched_together(api: Api, ns: str) -> None:
    other = api.new_namespace()
    version = api.get("/api/v1/configmaps").version
    with api.watching("/api/v1/configmaps", resourceVersion=version, labelSelector=f"suite={ns}") as events:
        for namespace in (ns, other):
            api.post(maps(namespace), config_map("a", labels={"suite": ns})).ok()
        assert [obj["metadata"]["namespace"] for _, obj in itertools.islice(events, 2)] == [ns, other]


def test_finalizers_show_as_modified_then_deleted(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    version = api.get(widgets(ns)).version
    body = {"apiVersion": "/".join(widgets(ns).split("/")[2:4]), "kind": "Widget", "spec": {"size": 1}}
    with api.watching(widgets(ns), resourceVersion=version) as events:
        api.post(widgets(ns), {**body, "metadata": {"name": "w", "finalizers": ["x.dev/y"]}}).ok()
        api.delete(widgets(ns, "w")).ok()
        api.patch(widgets(ns, "w"), {"metadata": {"finalizers": None}}).ok()
        seen = list(itertools.islice(events, 3))
    assert [kind for kind, _ in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert "deletionTimestamp" in seen[1][1]["metadata"]
