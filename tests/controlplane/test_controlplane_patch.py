"""Merge, JSON and strategic merge patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servers import JSON_PATCH, MERGE, STRATEGIC, Api, config_map, deployment


@pytest.fixture
def path(api: Api, ns: str) -> str:
    api.post(f"/api/v1/namespaces/{ns}/configmaps", config_map("a", {"x": "1", "y": "2"}, labels={"l": "1"})).ok()
    return f"/api/v1/namespaces/{ns}/configmaps/a"


@pytest.fixture
def dep(api: Api, ns: str) -> str:
    api.post(f"/apis/apps/v1/namespaces/{ns}/deployments", deployment("d", paused=True)).ok()
    return f"/apis/apps/v1/namespaces/{ns}/deployments/d"


def test_merge_patch_sets_and_removes(api: Api, path: str) -> None:
    body = api.patch(path, {"data": {"x": None, "z": "3"}, "metadata": {"labels": {"m": "2"}}}).ok()
    assert body["data"] == {"y": "2", "z": "3"}
    assert body["metadata"]["labels"] == {"l": "1", "m": "2"}


def test_a_patch_may_insist_on_a_version(api: Api, path: str) -> None:
    version = api.get(path).version
    fresh = api.patch(path, {"metadata": {"resourceVersion": version}, "data": {"x": "9"}})
    assert fresh.status == 200
    stale = api.patch(path, {"metadata": {"resourceVersion": version}, "data": {"x": "8"}})
    assert (stale.status, stale.reason) == (409, "Conflict")


def test_a_patch_cannot_change_the_identity(api: Api, path: str) -> None:
    assert api.patch(path, {"metadata": {"name": "b"}}).status in (400, 422)
    before = api.get(path).ok()["metadata"]
    after = api.patch(path, {"metadata": {"creationTimestamp": "2001-01-01T00:00:00Z"}}).ok()["metadata"]
    assert after["creationTimestamp"] == before["creationTimestamp"]


def test_json_patch_operations(api: Api, path: str) -> None:
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/data/x", "value": "1"},
        {"op": "replace", "path": "/data/x", "value": "9"},
        {"op": "remove", "path": "/data/y"},
        {"op": "add", "path": "/metadata/annotations", "value": {"a/b": "1", "t~t": "2"}},
        {"op": "copy", "from": "/metadata/annotations/a~1b", "path": "/data/c"},
        {"op": "move", "from": "/metadata/annotations/t~0t", "path": "/data/m"},
        {"op": "add", "path": "/metadata/finalizers", "value": ["x.dev/a"]},
        {"op": "add", "path": "/metadata/finalizers/-", "value": "x.dev/c"},
        {"op": "add", "path": "/metadata/finalizers/1", "value": "x.dev/b"},
    ]
    body = api.patch(path, operations, JSON_PATCH).ok()
    assert body["data"] == {"x": "9", "c": "1", "m": "2"}
    assert body["metadata"]["annotations"] == {"a/b": "1"}
    assert body["metadata"]["finalizers"] == ["x.dev/a", "x.dev/b", "x.dev/c"]
    api.patch(path, [{"op": "remove", "path": "/metadata/finalizers"}], JSON_PATCH).ok()


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/data/x", "value": "wrong"},
        {"op": "remove", "path": "/data/none"},
        {"op": "replace", "path": "/data/none/deep", "value": "1"},
    ],
)
def test_a_failing_json_patch_is_invalid_and_changes_nothing(api: Api, path: str, operation: dict[str, Any]) -> None:
    before = api.get(path).ok()
    answer = api.patch(path, [{"op": "add", "path": "/data/new", "value": "1"}, operation], JSON_PATCH)
    assert (answer.status, answer.reason) == (422, "Invalid")
    assert api.get(path).ok() == before


def test_json_patch_must_be_a_list(api: Api, path: str) -> None:
    assert api.patch(path, {"op": "test"}, JSON_PATCH).status == 400


def test_unknown_patch_formats_are_refused(api: Api, path: str) -> None:
    answer = api.patch(path, {"data": {}}, "application/json")
    assert (answer.status, answer.reason) == (415, "UnsupportedMediaType")


def test_patching_what_is_not_there(api: Api, path: str) -> None:
    assert api.patch(f"{path}-none", {"data": {}}).status == 404


def test_strategic_merge_merges_lists_by_key(api: Api, dep: str) -> None:
    def containers(patch: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
        body = {"spec": {"template": {"spec": {"containers": patch, **more}}}}
        return api.patch(dep, body, STRATEGIC).ok()["spec"]["template"]["spec"]["containers"]

    main = containers([{"name": "main", "env": [{"name": "B", "value": "2"}]}])[0]
    assert {e["name"]: e["value"] for e in main["env"]} == {"A": "1", "B": "2"}
    assert main["image"] == "localhost/none:1"
    main = containers([{"name": "main", "env": [{"name": "A", "value": "9"}], "args": ["x"]}])[0]
    assert {e["name"]: e["value"] for e in main["env"]} == {"A": "9", "B": "2"}
    assert containers([{"name": "main", "args": ["y", "z"]}])[0]["args"] == ["y", "z"]
    main = containers([{"name": "main", "env": [{"name": "A", "$patch": "delete"}]}])[0]
    assert [e["name"] for e in main["env"]] == ["B"]
    main = containers([{"name": "main", "ports": [{"containerPort": 80, "name": "a"}, {"containerPort": 81, "name": "b"}]}])[
        0
    ]
    main = containers([{"name": "main", "ports": [{"containerPort": 80, "name": "c"}]}])[0]
    assert sorted((p["containerPort"], p["name"]) for p in main["ports"]) == [(80, "c"), (81, "b")]
    both = containers([{"name": "side", "image": "localhost/side:1"}])
    assert sorted(c["name"] for c in both) == ["main", "side"]
    order = [{"name": "side"}, {"name": "main"}]
    ordered = containers(order, **{"$setElementOrder/containers": order})
    assert [c["name"] for c in ordered] == ["side", "main"]


def test_strategic_merge_directives(api: Api, dep: str) -> None:
    patch = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
    assert api.patch(dep, patch, STRATEGIC).ok()["spec"]["strategy"] == {"type": "Recreate"}
    labels = {"metadata": {"labels": {"a": "1", "b": "2"}}}
    api.patch(dep, labels, STRATEGIC).ok()
    assert api.patch(dep, {"metadata": {"labels": {"a": None}}}, STRATEGIC).ok()["metadata"]["labels"] == {"b": "2"}
    replace = {"metadata": {"labels": {"$patch": "replace", "c": "3"}}}
    assert api.patch(dep, replace, STRATEGIC).ok()["metadata"]["labels"] == {"c": "3"}
    api.patch(dep, {"metadata": {"finalizers": ["x.dev/a"]}}, STRATEGIC).ok()
    both = api.patch(dep, {"metadata": {"finalizers": ["x.dev/b"]}}, STRATEGIC).ok()["metadata"]["finalizers"]
    assert sorted(both) == ["x.dev/a", "x.dev/b"]
    drop = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["x.dev/a", "x.dev/b"]}}
    assert not api.patch(dep, drop, STRATEGIC).ok()["metadata"].get("finalizers")


def test_volumes_merge_by_name_and_retain_their_source(api: Api, dep: str) -> None:
    def volumes(patch: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"spec": {"template": {"spec": {"volumes": patch}}}}
        found = api.patch(dep, body, STRATEGIC).ok()["spec"]["template"]["spec"]["volumes"]
        return {volume["name"]: volume for volume in found}

    volumes([{"name": "v", "emptyDir": {}}, {"name": "w", "configMap": {"name": "m"}}])
    after = volumes([{"name": "v", "$retainKeys": ["name", "secret"], "secret": {"secretName": "s"}}])
    assert set(after["v"]) == {"name", "secret"}
    assert after["w"]["configMap"] == {"name": "m", "defaultMode": 420}


def test_custom_resources_take_no_strategic_merge(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    body = {"apiVersion": _version(widgets(ns)), "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1}}
    api.post(widgets(ns), body).ok()
    answer = api.patch(widgets(ns, "w"), {"spec": {"size": 2}}, STRATEGIC)
    assert (answer.status, answer.reason) == (415, "UnsupportedMediaType")
    assert MERGE in answer.body["message"]


def test_the_format_is_checked_before_the_object(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    assert api.patch(widgets(ns, "none"), {}, STRATEGIC).status == 415


def test_patched_items_come_first_unless_the_live_order_says_otherwise(api: Api, dep: str) -> None:
    def environment(*names: str) -> list[str]:
        env = [{"name": name, "value": "1"} for name in names]
        body = {"spec": {"template": {"spec": {"containers": [{"name": "main", "env": env}]}}}}
        stored = api.patch(dep, body, STRATEGIC).ok()
        return [e["name"] for e in stored["spec"]["template"]["spec"]["containers"][0]["env"]]

    assert environment("B") == ["B", "A"]
    assert environment("C", "D") == ["C", "D", "B", "A"]
    assert environment("A", "C") == ["D", "B", "A", "C"]


def _version(path: str) -> str:
    return "/".join(path.split("/")[2:4])
