"""Custom resources: schema, defaults, pruning, status, scale, what the CRD itself says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import Api, eventually, widget_crd

Path = Callable[..., str]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def widget(path: str, **spec: Any) -> dict[str, Any]:
    version = "/".join(path.split("/")[2:4])
    return {"apiVersion": version, "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1, **spec}}


def test_the_crd_is_established(api: Api, widgets: Path) -> None:
    group = widgets("x").split("/")[2]
    crd = eventually(lambda: _established(api.get(f"{CRDS}/widgets.{group}").ok()))
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions["NamesAccepted"] == "True"
    assert crd["status"]["storedVersions"] == ["v1"]
    assert crd["status"]["acceptedNames"]["listKind"] == "WidgetList"
    assert crd["spec"]["names"]["singular"] == "widget"
    assert crd["spec"]["conversion"] == {"strategy": "None"}


def _established(crd: dict[str, Any]) -> dict[str, Any] | None:
    conditions = {c["type"]: c["status"] for c in crd.get("status", {}).get("conditions") or []}
    return crd if conditions.get("Established") == "True" else None


def test_discovery_lists_the_custom_resource(api: Api, widgets: Path) -> None:
    group = widgets("x").split("/")[2]
    resources = {r["name"]: r for r in api.get(f"/apis/{group}/v1").ok()["resources"]}
    main = resources["widgets"]
    assert (main["kind"], main["namespaced"], main["shortNames"]) == ("Widget", True, ["wd"])
    assert {"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"} == set(main["verbs"])
    assert set(resources["widgets/status"]["verbs"]) == {"get", "patch", "update"}
    assert (resources["widgets/scale"]["kind"], resources["widgets/scale"]["group"]) == ("Scale", "autoscaling")
    assert group in [g["name"] for g in api.get("/apis").ok()["groups"]]
    assert api.get(widgets("default")).ok()["kind"] == "WidgetList"


def test_unknown_fields_are_pruned(api: Api, ns: str, widgets: Path) -> None:
    anything = {"any": {"thing": 1}, "list": [{"name": "a", "deep": [[{"b": 1}], 2]}]}
    body = widget(widgets(ns), unknown=1, nested={"on": False, "extra": 2}, free=anything, labels={"a": "b"})
    stored = api.post(widgets(ns), {**body, "stray": True}).ok()
    assert "unknown" not in stored["spec"]
    assert "stray" not in stored
    assert stored["spec"]["nested"] == {"on": False}
    assert stored["spec"]["free"] == anything
    assert stored["spec"]["labels"] == {"a": "b"}


def test_strict_validation_names_unknown_fields(api: Api, ns: str, widgets: Path) -> None:
    if not api.validates_fields:
        pytest.skip(f"fieldValidation came with Kubernetes 1.25, this server is 1.{api.minor}")
    body = widget(widgets(ns), unknown=1)
    answer = api.post(widgets(ns), body, fieldValidation="Strict")
    assert (answer.status, answer.reason) == (400, "BadRequest")
    assert 'unknown field "spec.unknown"' in answer.body["message"]
    warned = api.post(widgets(ns), body)
    assert warned.headers["Warning"] == '299 - "unknown field \\"spec.unknown\\""'
    assert "Warning" not in api.patch(widgets(ns, "w"), {"spec": {"unknown": 1}}, fieldValidation="Ignore").headers


def test_defaults_fill_what_is_absent(api: Api, ns: str, widgets: Path) -> None:
    stored = api.post(widgets(ns), widget(widgets(ns), nested={})).ok()["spec"]
    assert stored["level"] == "low"
    assert stored["nested"] == {"on": True}
    assert api.patch(widgets(ns, "w"), {"spec": {"level": "high"}}).ok()["spec"]["level"] == "high"
    assert api.patch(widgets(ns, "w"), {"spec": {"level": None}}).ok()["spec"]["level"] == "low"


def test_nullable_keeps_null(api: Api, ns: str, widgets: Path) -> None:
    stored = api.post(widgets(ns), widget(widgets(ns), note=None, level=None, plain=None)).ok()["spec"]
    assert "plain" not in stored
    assert "note" in stored
    assert stored["note"] is None
    assert stored["level"] == "low"


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"size": 0}, "spec.size", "should be greater than or equal to 1"),
        ({"size": 101}, "spec.size", "should be less than or equal to 100"),
        ({"size": "big"}, "spec.size", 'Invalid value: "string": spec.size in body must be of type integer'),
        ({"size": 1.5}, "spec.size", "must be of type integer"),
        ({"size": True}, "spec.size", "must be of type integer"),
        ({"size": None}, "spec.size", ""),
        ({"ratio": 0}, "spec.ratio", "should be greater than 0"),
        ({"mode": "other"}, "spec.mode", 'Unsupported value: "other": supported values: "static", "continuous"'),
        ({"code": "A1"}, "spec.code", "spec.code in body should match '^[a-z]+$'"),
        ({"code": "a"}, "spec.code", "should be at least 2 chars long"),
        ({"code": "abcdef"}, "spec.code", "5"),
        ({"list": ["a", "b", "c", "d"]}, "spec.list", "3 items"),
        ({"list": [1]}, "spec.list", "must be of type string"),
        ({"list": "a"}, "spec.list", "must be of type array"),
        ({"nested": {"on": "yes"}}, "spec.nested.on", "must be of type boolean"),
        ({"labels": {"a": 1}}, "spec.labels.a", "must be of type string"),
        ({"parts": [{"size": 1}]}, "spec.parts[0].name", "Required value"),
        ({"parts": [{"name": "a"}, {"name": "a"}]}, "spec.parts[1]", "Duplicate value"),
        ({"tags": ["a", "a"]}, "spec.tags[1]", "Duplicate value"),
    ],
)
def test_the_schema_refuses(api: Api, ns: str, widgets: Path, change: dict[str, Any], field: str, words: str) -> None:
    answer = api.post(widgets(ns), widget(widgets(ns), **change))
    assert (answer.status, answer.reason) == (422, "Invalid"), answer.body
    group = widgets(ns).split("/")[2]
    assert answer.body["message"].startswith(f'Widget.{group} "w" is invalid: ')
    causes = [(_unindexed(cause["field"]), cause["message"]) for cause in answer.body["details"]["causes"]]
    assert any(_unindexed(field) == where and words in message for where, message in causes), causes
    assert api.gone(widgets(ns, "w"))


def _unindexed(field: str) -> str:
    """Old servers leave indexes out (`spec.parts.name`), or name the item where others name the list."""
    return re.sub(r"\[[^]]*\]", "", field)


def test_required_fields(api: Api, ns: str, widgets: Path) -> None:
    body = widget(widgets(ns))
    del body["spec"]["size"]
    answer = api.post(widgets(ns), body)
    assert answer.status == 422
    assert "spec.size: Required value" in answer.body["message"]


def test_an_update_is_validated_too(api: Api, ns: str, widgets: Path) -> None:
    api.post(widgets(ns), widget(widgets(ns))).ok()
    assert api.patch(widgets(ns, "w"), {"spec": {"size": 0}}).status == 422
    assert api.apply(widgets(ns, "w"), widget(widgets(ns), size=0), force="true").status == 422
    assert api.get(widgets(ns, "w")).ok()["spec"]["size"] == 1


def test_a_replacement_needs_a_version(api: Api, ns: str, widgets: Path) -> None:
    live = api.post(widgets(ns), widget(widgets(ns))).ok()
    answer = api.put(widgets(ns, "w"), widget(widgets(ns), size=2))
    assert answer.status == 422
    assert "metadata.resourceVersion" in answer.body["message"]
    live["spec"]["size"] = 2
    assert api.put(widgets(ns, "w"), live).ok()["metadata"]["generation"] == 2


def test_status_and_spec_are_isolated(api: Api, ns: str, widgets: Path) -> None:
    created = api.post(widgets(ns), {**widget(widgets(ns)), "status": {"phase": "Fake"}}).ok()
    assert "status" not in created
    assert created["metadata"]["generation"] == 1
    path, status = widgets(ns, "w"), widgets(ns, "w", "status")
    written = api.patch(status, {"status": {"phase": "Ready", "junk": 1}, "spec": {"size": 9}}).ok()
    assert written["status"] == {"phase": "Ready"}
    assert written["spec"]["size"] == 1
    assert written["metadata"]["generation"] == 1
    kept = api.patch(path, {"status": {"phase": "Fake"}, "spec": {"size": 2}}).ok()
    assert kept["status"] == {"phase": "Ready"}
    assert kept["metadata"]["generation"] == 2
    labelled = api.patch(path, {"metadata": {"labels": {"a": "b"}}}).ok()
    assert labelled["metadata"]["generation"] == 2
    ignored = api.patch(status, {"metadata": {"labels": {"a": "c"}}, "status": {"observed": 2}}).ok()
    assert ignored["metadata"]["labels"] == {"a": "b"}
    ignored["status"]["phase"] = "Done"
    assert api.put(status, ignored).ok()["status"] == {"phase": "Done", "observed": 2}
    assert api.patch(status, {"status": {"observed": "x"}}).status == 422


def test_scale_of_a_custom_resource(api: Api, ns: str, widgets: Path) -> None:
    api.post(widgets(ns), widget(widgets(ns), replicas=2)).ok()
    api.patch(widgets(ns, "w", "status"), {"status": {"replicas": 1, "selector": "app=w"}}).ok()
    path = widgets(ns, "w", "scale")
    scale = api.get(path).ok()
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": "app=w"}
    scale["spec"]["replicas"] = 3
    assert api.put(path, scale).ok()["spec"] == {"replicas": 3}
    assert api.patch(path, {"spec": {"replicas": 4}}).ok()["spec"] == {"replicas": 4}
    live = api.get(widgets(ns, "w")).ok()
    assert (live["spec"]["replicas"], live["metadata"]["generation"]) == (4, 3)
    assert api.put(path, scale).status == 409


def test_printer_columns(api: Api, ns: str, widgets: Path) -> None:
    api.post(widgets(ns), widget(widgets(ns), size=7)).ok()
    api.patch(widgets(ns, "w", "status"), {"status": {"phase": "Ready"}}).ok()
    table = api.table(widgets(ns))
    assert [(c["name"], c["type"], c["priority"]) for c in table["columnDefinitions"]] == [
        ("Name", "string", 0),
        ("Size", "integer", 0),
        ("Phase", "string", 0),
        ("Level", "string", 1),
        ("Age", "date", 0),
    ]
    assert table["rows"][0]["cells"][:4] == ["w", 7, "Ready", "low"]
    assert table["rows"][0]["cells"][4].endswith("s")


@pytest.fixture(scope="session")
def gauges(api: Api) -> Iterator[Path]:
    group = f"more-{api.prefix}.paceline.dev"
    positive = {"type": "integer", "minimum": 1}
    either = {"a": positive, "b": positive}
    more = {
        "percent": {"x-kubernetes-int-or-string": True},
        "either": {
            "type": "object",
            "properties": either,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        "raw": {"type": "object", "x-kubernetes-embedded-resource": True, "x-kubernetes-preserve-unknown-fields": True},
        "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"n": positive}}},
    }
    api.post(CRDS, widget_crd(group, "gauges", "Gauge", more)).ok()
    eventually(lambda: api.get(f"/apis/{group}/v1/gauges").status == 200)
    yield lambda namespace, *name: "/".join([f"/apis/{group}/v1/namespaces/{namespace}/gauges", *name])
    api.delete(f"{CRDS}/gauges.{group}")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"percent": 10}, None),
        ({"percent": "10%"}, None),
        ({"percent": 1.5}, "spec.percent"),
        ({"percent": [1]}, "spec.percent"),
        ({"either": {"a": 1}}, None),
        ({"either": {"a": 1, "b": 1}}, "spec.either"),
        ({"either": {}}, "spec.either"),
        ({"raw": {"apiVersion": "v1", "kind": "Any", "metadata": {"name": "n"}, "deep": {"x": 1}}}, None),
        ({"map": {"k": {"n": 1}}}, None),
        ({"map": {"k": {"n": 0}}}, "spec.map.k.n"),
    ],
)
def test_the_rest_of_the_schema(api: Api, ns: str, gauges: Path, spec: dict[str, Any], field: str | None) -> None:
    body = {**widget(gauges(ns), **spec), "kind": "Gauge"}
    answer = api.post(gauges(ns), body)
    if field is None:
        assert {key: value for key, value in answer.ok()["spec"].items() if key in spec} == spec
    else:
        assert answer.status == 422
        assert field in answer.body["message"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"metadata": {"name": "wrong.example.dev"}}, "metadata.name"),
        ({"versions": []}, "spec.versions"),
        ({"scope": None}, "spec.scope"),
    ],
)
def test_a_wrong_crd_is_invalid(api: Api, change: dict[str, Any], field: str) -> None:
    crd = widget_crd(f"bad-{api.prefix}.paceline.dev")
    crd["metadata"] |= change.get("metadata", {})
    crd["spec"] |= {name: value for name, value in change.items() if name != "metadata"}
    answer = api.post(CRDS, crd)
    assert (answer.status, answer.reason) == (422, "Invalid")
    assert field in answer.body["message"]


def test_a_new_version_of_the_schema_takes_effect(api: Api, ns: str) -> None:
    group = f"next-{api.prefix}.paceline.dev"
    path = f"/apis/{group}/v1/namespaces/{ns}/widgets"
    created = api.post(CRDS, widget_crd(group)).ok()
    try:
        eventually(lambda: api.get(path).status == 200)
        properties = ("spec", "versions", 0, "schema", "openAPIV3Schema", "properties", "spec", "properties")
        crd = api.get(f"{CRDS}/widgets.{group}").ok()
        node: Any = crd
        for part in properties:
            node = node[part]
        node["added"] = {"type": "string", "default": "new"}
        stored = eventually(lambda: _replaced(api, group, crd))
        assert stored["metadata"]["generation"] == created["metadata"]["generation"] + 1
        eventually(lambda: api.post(path, widget(path), dryRun="All").ok()["spec"].get("added") == "new")
    finally:
        api.delete(f"{CRDS}/widgets.{group}")


def _replaced(api: Api, group: str, crd: dict[str, Any]) -> dict[str, Any] | None:
    """Replace the CRD; a real server may still be writing its status."""
    crd["metadata"]["resourceVersion"] = api.get(f"{CRDS}/widgets.{group}").version
    answer = api.put(f"{CRDS}/widgets.{group}", crd)
    return None if answer.status == 409 else answer.ok()
