"""Server-side apply: ownership, conflicts, removal, and what other writers own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servers import STRATEGIC, Api, config_map, deployment, eventually, managers


@pytest.fixture
def path(api: Api, ns: str) -> str:
    return f"/api/v1/namespaces/{ns}/configmaps/a"


@pytest.fixture
def dep(api: Api, ns: str) -> str:
    return f"/apis/apps/v1/namespaces/{ns}/deployments/d"


def data(fields: dict[str, Any]) -> set[str]:
    return {name.removeprefix("f:") for name in fields.get("f:data", {}) if name != "."}


def test_apply_creates_and_records_ownership(api: Api, path: str) -> None:
    answer = api.apply(path, config_map("a", {"x": "1"}, labels={"l": "1"}))
    assert answer.status == 201
    entry = answer.body["metadata"]["managedFields"][0]
    assert (entry["manager"], entry["operation"], entry["apiVersion"]) == ("applier", "Apply", "v1")
    assert entry["fieldsType"] == "FieldsV1"
    assert entry["fieldsV1"] == {"f:data": {"f:x": {}}, "f:metadata": {"f:labels": {"f:l": {}}}}
    assert api.apply(path, config_map("a", {"x": "1"}, labels={"l": "1"})).status == 200


def test_applying_the_same_again_writes_nothing(api: Api, path: str, dep: str) -> None:
    first = api.apply(path, config_map("a", {"x": "1"}))
    assert api.apply(path, config_map("a", {"x": "1"})).version == first.version
    api.apply(dep, deployment("d", paused=True)).ok()
    # a real Deployment controller writes its status in between, once
    eventually(lambda: len({api.apply(dep, deployment("d", paused=True)).version for _ in range(3)}) == 1)


def test_what_the_manager_no_longer_applies_is_removed(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1", "y": "2"}, labels={"l": "1"})).ok()
    body = api.apply(path, config_map("a", {"x": "1"})).ok()
    assert body["data"] == {"x": "1"}
    assert not body["metadata"].get("labels")


def test_what_others_own_stays(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1", "y": "2"})).ok()
    api.apply(path, config_map("a", {"y": "2", "z": "3"}), "second").ok()
    body = api.apply(path, config_map("a", {"x": "1"})).ok()
    assert body["data"] == {"x": "1", "y": "2", "z": "3"}
    owners = managers(body)
    assert data(owners["applier", "Apply"]) == {"x"}
    assert data(owners["second", "Apply"]) == {"y", "z"}


def test_a_conflict_names_the_owner_and_force_takes_over(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1", "y": "1"})).ok()
    answer = api.apply(path, config_map("a", {"x": "2"}), "second")
    assert (answer.status, answer.reason) == (409, "Conflict")
    causes = answer.body["details"]["causes"]
    assert [(cause["reason"], cause["field"]) for cause in causes] == [("FieldManagerConflict", ".data.x")]
    assert 'conflict with "applier"' in causes[0]["message"]
    assert "Apply failed with 1 conflict" in answer.body["message"]
    body = api.apply(path, config_map("a", {"x": "2"}), "second", force="true").ok()
    assert body["data"] == {"x": "2", "y": "1"}
    assert data(managers(body)["applier", "Apply"]) == {"y"}
    assert data(managers(body)["second", "Apply"]) == {"x"}


def test_equal_values_are_shared(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1"})).ok()
    body = api.apply(path, config_map("a", {"x": "1"}), "second").ok()
    assert data(managers(body)["applier", "Apply"]) == data(managers(body)["second", "Apply"]) == {"x"}
    assert api.apply(path, config_map("a", {}), "second").ok()["data"] == {"x": "1"}


def test_an_update_takes_ownership_of_what_it_changes(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1", "y": "1"})).ok()
    body = api.patch(path, {"data": {"x": "2", "n": "1"}}, fieldManager="editor").ok()
    assert data(managers(body)["applier", "Apply"]) == {"y"}
    assert data(managers(body)["editor", "Update"]) == {"x", "n"}
    answer = api.apply(path, config_map("a", {"x": "1", "y": "1"}))
    assert answer.status == 409
    assert 'conflict with "editor" using v1' in answer.body["message"]
    body = api.apply(path, config_map("a", {"x": "1", "y": "1"}), force="true").ok()
    assert body["data"] == {"x": "1", "y": "1", "n": "1"}


def test_the_user_agent_names_an_unnamed_updater(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1"})).ok()
    body = api.patch(path, {"data": {"n": "1"}}).ok()
    assert ("suite", "Update") in managers(body)


def test_removing_a_field_removes_its_owners(api: Api, path: str) -> None:
    api.apply(path, config_map("a", {"x": "1", "y": "1"})).ok()
    body = api.patch(path, {"data": {"x": None}}, fieldManager="editor").ok()
    assert data(managers(body)["applier", "Apply"]) == {"y"}
    assert api.apply(path, config_map("a", {"x": "1", "y": "1"})).ok()["data"] == {"x": "1", "y": "1"}


def test_apply_needs_a_manager_and_no_managed_fields(api: Api, path: str) -> None:
    answer = api.patch(path, config_map("a"), "application/apply-patch+yaml")
    assert answer.status in (400, 422)
    assert "fieldManager" in answer.body["message"]
    stored = api.apply(path, config_map("a")).ok()
    fields = stored["metadata"].get("managedFields") or [{"manager": "m", "operation": "Apply", "apiVersion": "v1"}]
    answer = api.apply(path, config_map("a", managedFields=fields))
    assert answer.status == 400
    assert "managedFields must be nil" in answer.body["message"]


def test_an_update_may_hand_its_fields_to_an_applier(api: Api, ns: str, path: str) -> None:
    """How a client turns to apply: until it does so, what it created without stays when an apply leaves it out."""
    made = api.post(f"/api/v1/namespaces/{ns}/configmaps", config_map("a", {"x": "1", "y": "1"}), fieldManager="applier")
    (entry,) = made.ok()["metadata"]["managedFields"]
    assert entry["operation"] == "Update"
    assert api.apply(path, config_map("a", {"x": "1"})).ok()["data"] == {"x": "1", "y": "1"}
    body = api.patch(path, {"metadata": {"managedFields": [{**entry, "operation": "Apply"}]}}, fieldManager="applier").ok()
    assert set(managers(body)) == {("applier", "Apply")}
    assert api.apply(path, config_map("a", {"x": "1"})).ok()["data"] == {"x": "1"}


@pytest.mark.parametrize("entry", ["text", {"manager": "a"}])
def test_managed_fields_that_say_nothing_change_no_ownership(api: Api, path: str, entry: Any) -> None:
    api.apply(path, config_map("a", {"x": "1"})).ok()
    api.patch(path, {"metadata": {"managedFields": [entry]}})  # taken or refused
    assert not api.apply(path, config_map("a")).ok().get("data")


def test_apply_takes_yaml(api: Api, path: str) -> None:
    text = b"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata:\n  x: 'yes'\n  t: 2026-01-01T00:00:00Z\n"
    assert api.apply(path, text).ok()["data"] == {"x": "yes", "t": "2026-01-01T00:00:00Z"}
    assert api.apply(path, b"a: [").status == 400


def test_apply_may_insist_on_a_version(api: Api, path: str) -> None:
    first = api.apply(path, config_map("a", {"x": "1"}))
    api.apply(path, config_map("a", {"x": "2"})).ok()
    assert api.apply(path, config_map("a", {"x": "3"}, resourceVersion=first.version)).status == 409


def test_items_of_keyed_lists_have_their_own_owners(api: Api, dep: str) -> None:
    body = deployment("d", paused=True)
    api.apply(dep, body).ok()
    other = {**body, "spec": {"selector": body["spec"]["selector"], "template": _template("B", "2")}}
    merged = api.apply(dep, other, "second").ok()
    env = merged["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {e["name"]: e["value"] for e in env} == {"A": "1", "B": "2"}
    fields = managers(merged)["second", "Apply"]["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"main"}']
    assert set(fields["f:env"]) == {'k:{"name":"B"}'}
    assert fields["f:env"]['k:{"name":"B"}'] == {".": {}, "f:name": {}, "f:value": {}}
    assert "f:image" not in fields
    body["spec"]["template"]["spec"]["containers"][0].pop("env")
    env = api.apply(dep, body).ok()["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [e["name"] for e in env] == ["B"]


def _template(name: str, value: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "env": [{"name": name, "value": value}]}]}}


def test_a_whole_item_can_be_given_up(api: Api, dep: str) -> None:
    body = deployment("d", paused=True)
    spec = body["spec"]["template"]["spec"]
    spec["containers"].append({"name": "side", "image": "localhost/side:1"})
    spec["volumes"] = [{"name": "v", "emptyDir": {}}]
    api.apply(dep, body).ok()
    spec["containers"].pop()
    del spec["volumes"]
    after = api.apply(dep, body).ok()["spec"]["template"]["spec"]
    assert [c["name"] for c in after["containers"]] == ["main"]
    assert not after.get("volumes")


def test_an_item_goes_even_if_others_own_a_field_inside(api: Api, dep: str) -> None:
    body = deployment("d", paused=True)
    api.apply(dep, body).ok()
    changed = [{"name": "main", "env": [{"name": "A", "value": "2"}]}]
    patch = {"spec": {"template": {"spec": {"containers": changed}}}}
    api.patch(dep, patch, STRATEGIC, fieldManager="editor").ok()
    del body["spec"]["template"]["spec"]["containers"][0]["env"]
    after = api.apply(dep, body).ok()
    assert "env" not in after["spec"]["template"]["spec"]["containers"][0]


def test_undeclared_fields_cannot_be_applied(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    version = "/".join(widgets(ns).split("/")[2:4])
    body = {"apiVersion": version, "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1, "unknown": 1}}
    answer = api.apply(widgets(ns, "w"), body)
    assert answer.status == 500
    assert ".spec.unknown: field not declared in schema" in answer.body["message"]


def test_ports_are_keyed_by_number_and_protocol(api: Api, dep: str) -> None:
    def with_ports(*ports: dict[str, Any]) -> dict[str, Any]:
        body = deployment("d", paused=True)
        body["spec"]["template"]["spec"]["containers"][0]["ports"] = list(ports)
        return body

    http = {"containerPort": 80, "protocol": "TCP", "name": "http"}
    api.apply(dep, with_ports(http, {"containerPort": 81, "protocol": "TCP"})).ok()
    after = api.apply(dep, with_ports(http)).ok()
    assert after["spec"]["template"]["spec"]["containers"][0]["ports"] == [http]


def test_plain_lists_and_selectors_are_owned_whole(api: Api, dep: str) -> None:
    body = deployment("d", paused=True)
    body["spec"]["template"]["spec"]["containers"][0]["args"] = ["a", "b"]
    stored = api.apply(dep, body).ok()
    fields = managers(stored)["applier", "Apply"]["f:spec"]
    assert fields["f:selector"] == {} or api.minor < 21
    assert fields["f:template"]["f:spec"]["f:containers"]['k:{"name":"main"}']["f:args"] == {}
    body["spec"]["template"]["spec"]["containers"][0]["args"] = ["b"]
    after = api.apply(dep, body).ok()
    assert after["spec"]["template"]["spec"]["containers"][0]["args"] == ["b"]


def test_defaults_belong_to_nobody_who_applies(api: Api, dep: str) -> None:
    body = deployment("d", paused=True)
    del body["spec"]["replicas"]
    stored = api.apply(dep, body).ok()
    assert stored["spec"]["replicas"] == 1
    assert "f:replicas" not in managers(stored)["applier", "Apply"]["f:spec"]
    api.patch(f"{dep}/scale", {"spec": {"replicas": 0}}, fieldManager="scaler").ok()
    assert api.apply(dep, body).ok()["spec"]["replicas"] == 0


def test_applying_under_a_live_scaler_conflicts(api: Api, dep: str) -> None:
    api.apply(dep, deployment("d", paused=True, replicas=0)).ok()
    api.patch(dep, {"spec": {"replicas": 1}}, fieldManager="scaler").ok()
    answer = api.apply(dep, deployment("d", paused=True, replicas=0))
    assert answer.status == 409
    assert answer.body["details"]["causes"][0]["field"] == ".spec.replicas"
    api.patch(dep, {"spec": {"replicas": 0}}, fieldManager="scaler").ok()
    assert api.apply(dep, deployment("d", paused=True, replicas=0)).status == 200


def test_a_custom_resource_follows_its_schema(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    def widget(**spec: Any) -> dict[str, Any]:
        version = "/".join(widgets(ns).split("/")[2:4])
        return {"apiVersion": version, "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1, **spec}}

    path = widgets(ns, "w")
    api.apply(path, widget(list=["a"], tags=["t"], parts=[{"name": "p", "size": 1}])).ok()
    other = widget(tags=["u"], parts=[{"name": "q", "size": 2}])
    both = api.apply(path, other, "second").ok()
    assert both["spec"]["tags"] == ["t", "u"]
    assert [part["name"] for part in both["spec"]["parts"]] == ["p", "q"]
    fields = managers(both)["second", "Apply"]["f:spec"]
    assert fields["f:tags"] == {'v:"u"': {}}
    assert set(fields["f:parts"]) == {'k:{"name":"q"}'}
    conflict = api.apply(path, widget(list=["b"]), "third")
    assert (conflict.status, conflict.body["details"]["causes"][0]["field"]) == (409, ".spec.list")
    after = api.apply(path, widget(list=["a"])).ok()["spec"]
    assert after["tags"] == ["u"]
    assert [part["name"] for part in after["parts"]] == ["q"]


def test_status_is_applied_on_its_own(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    version = "/".join(widgets(ns).split("/")[2:4])
    base = {"apiVersion": version, "kind": "Widget", "metadata": {"name": "w"}}
    path = widgets(ns, "w")
    api.apply(path, {**base, "spec": {"size": 1}}).ok()
    body = api.apply(f"{path}/status", {**base, "status": {"phase": "Ready"}}, "controller").ok()
    assert body["status"] == {"phase": "Ready"}
    assert body["metadata"]["generation"] == 1
    entry = next(e for e in body["metadata"]["managedFields"] if e["manager"] == "controller")
    assert entry["fieldsV1"] == {"f:status": {"f:phase": {}}}
    assert entry.get("subresource") == ("status" if api.tracks_subresources else None)
    again = api.apply(path, {**base, "spec": {"size": 1}}).ok()
    assert again["status"] == {"phase": "Ready"}
    body = api.apply(f"{path}/status", {**base, "status": {"observed": 1}}, "controller").ok()
    assert body["status"] == {"observed": 1}


def test_owner_references_merge_by_uid(api: Api, ns: str, path: str) -> None:
    owner = api.post(f"/api/v1/namespaces/{ns}/configmaps", config_map("owner")).ok()
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    stored = api.apply(path, config_map("a", ownerReferences=[reference])).ok()
    element = f'k:{{"uid":"{reference["uid"]}"}}'
    assert element in managers(stored)["applier", "Apply"]["f:metadata"]["f:ownerReferences"]
    assert not api.apply(path, config_map("a", {"x": "1"})).ok()["metadata"].get("ownerReferences")
