"""Deletion: finalizers, grace, owners, namespaces, preconditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servers import Api, config_map, eventually, pod, widget_crd


def maps(ns: str, *name: str) -> str:
    return "/".join([f"/api/v1/namespaces/{ns}/configmaps", *name])


def owned(name: str, *owners: dict[str, Any], block: bool = False, **meta: Any) -> dict[str, Any]:
    references = [
        {
            "apiVersion": owner.get("apiVersion", "v1"),
            "kind": owner.get("kind", "ConfigMap"),
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": block,
        }
        for owner in owners
    ]
    return config_map(name, ownerReferences=references, **meta)


def test_deletion_answers_with_success(api: Api, ns: str) -> None:
    created = api.post(maps(ns), config_map("a")).ok()
    body = api.delete(maps(ns, "a")).ok()
    assert (body["kind"], body["status"]) == ("Status", "Success")
    assert body["details"] == {"name": "a", "kind": "configmaps", "uid": created["metadata"]["uid"]}
    assert api.gone(maps(ns, "a"))


def test_preconditions_guard_a_deletion(api: Api, ns: str) -> None:
    created = api.post(maps(ns), config_map("a")).ok()["metadata"]
    for wrong in ({"uid": "6f9619ff-8b86-d011-b42d-00c04fc964ff"}, {"resourceVersion": "1"}):
        answer = api.delete(maps(ns, "a"), {"preconditions": wrong})
        assert (answer.status, answer.reason) == (409, "Conflict")
    right = {"uid": created["uid"], "resourceVersion": created["resourceVersion"]}
    assert api.delete(maps(ns, "a"), {"preconditions": right}).status == 200


def test_finalizers_hold_an_object_back(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    version = "/".join(widgets(ns).split("/")[2:4])
    meta = {"name": "w", "finalizers": ["x.dev/y"]}
    api.post(widgets(ns), {"apiVersion": version, "kind": "Widget", "metadata": meta, "spec": {"size": 1}}).ok()
    dying = api.delete(widgets(ns, "w")).ok()["metadata"]
    assert dying["deletionGracePeriodSeconds"] == 0
    assert dying["generation"] == 2  # its wanted state changed: it's wanted gone
    again = api.delete(widgets(ns, "w")).ok()["metadata"]
    assert again["deletionTimestamp"] == dying["deletionTimestamp"]
    added = api.patch(widgets(ns, "w"), {"metadata": {"finalizers": ["x.dev/y", "x.dev/z"]}})
    assert added.status == 422
    assert "no new finalizers can be added if the object is being deleted" in added.body["message"]
    assert api.patch(widgets(ns, "w"), {"spec": {"size": 2}}).ok()["spec"]["size"] == 2
    api.patch(widgets(ns, "w"), {"metadata": {"finalizers": []}}).ok()
    assert api.gone(widgets(ns, "w"))


def test_a_deletion_cannot_be_taken_back(api: Api, ns: str) -> None:
    api.post(maps(ns), config_map("a", finalizers=["x.dev/y"])).ok()
    api.delete(maps(ns, "a")).ok()
    assert "deletionTimestamp" in api.patch(maps(ns, "a"), {"metadata": {"deletionTimestamp": None}}).ok()["metadata"]
    api.patch(maps(ns, "a"), {"metadata": {"finalizers": None}}).ok()


def test_a_collection_is_deleted_by_selector(api: Api, ns: str) -> None:
    for name in "abc":
        api.post(maps(ns), config_map(name, labels={"kill": "no" if name == "c" else "yes"})).ok()
    assert api.delete(maps(ns), labelSelector="kill=yes").status == 200
    assert [api.gone(maps(ns, name)) for name in "abc"] == [True, True, False]


def test_an_unscheduled_pod_goes_at_once(api: Api, ns: str) -> None:
    path = f"/api/v1/namespaces/{ns}/pods"
    api.post(path, pod("a")).ok()
    assert api.delete(f"{path}/a").ok()["kind"] == "Pod"
    assert api.gone(f"{path}/a")


def test_a_running_pod_gets_its_grace_period(api: Api, ns: str) -> None:
    path = f"/api/v1/namespaces/{ns}/pods"
    body = pod("a")
    body["spec"] |= {"terminationGracePeriodSeconds": 3600, "nodeName": "nowhere"}
    api.post(path, body).ok()
    dying = api.delete(f"{path}/a").ok()["metadata"]
    assert dying["deletionGracePeriodSeconds"] == 3600
    assert api.get(f"{path}/a").ok()["metadata"]["deletionTimestamp"] == dying["deletionTimestamp"]
    shorter = api.delete(f"{path}/a", gracePeriodSeconds=1800).ok()["metadata"]
    assert shorter["deletionGracePeriodSeconds"] == 1800
    assert shorter["deletionTimestamp"] < dying["deletionTimestamp"]
    longer = api.delete(f"{path}/a", gracePeriodSeconds=3000).ok()["metadata"]
    assert longer["deletionGracePeriodSeconds"] == 1800
    api.delete(f"{path}/a", {"gracePeriodSeconds": 0}).ok()
    assert api.gone(f"{path}/a")


def test_dependents_go_with_their_owner(api: Api, ns: str) -> None:
    owner = api.post(maps(ns), config_map("owner")).ok()
    child = api.post(maps(ns), owned("child", owner)).ok()
    api.post(maps(ns), owned("grandchild", child)).ok()
    api.post(maps(ns), config_map("stranger")).ok()
    api.delete(maps(ns, "owner"), {"propagationPolicy": "Background"}).ok()
    assert api.gone(maps(ns, "owner"))
    eventually(lambda: api.gone(maps(ns, "child")) and api.gone(maps(ns, "grandchild")))
    assert not api.gone(maps(ns, "stranger"))


def test_a_second_owner_keeps_a_dependent(api: Api, ns: str) -> None:
    owners = [api.post(maps(ns), config_map(name)).ok() for name in ("one", "two")]
    api.post(maps(ns), owned("child", *owners)).ok()
    api.delete(maps(ns, "one")).ok()

    def references() -> list[str]:
        return [r["name"] for r in api.get(maps(ns, "child")).ok()["metadata"]["ownerReferences"]]

    eventually(lambda: references() == ["two"])
    api.delete(maps(ns, "two")).ok()
    eventually(lambda: api.gone(maps(ns, "child")))


def test_an_owner_that_never_was_collects_too(api: Api, ns: str) -> None:
    ghost = {"metadata": {"name": "ghost", "uid": "6f9619ff-8b86-d011-b42d-00c04fc964ff"}}
    api.post(maps(ns), owned("child", ghost)).ok()
    eventually(lambda: api.gone(maps(ns, "child")))


def test_orphans_stay(api: Api, ns: str) -> None:
    owner = api.post(maps(ns), config_map("owner")).ok()
    api.post(maps(ns), owned("child", owner)).ok()
    api.delete(maps(ns, "owner"), {"propagationPolicy": "Orphan"}).ok()
    eventually(lambda: api.gone(maps(ns, "owner")))
    assert not api.get(maps(ns, "child")).ok()["metadata"].get("ownerReferences")


def test_foreground_waits_for_blocking_dependents(api: Api, ns: str) -> None:
    owner = api.post(maps(ns), config_map("owner")).ok()
    api.post(maps(ns), owned("child", owner, block=True, finalizers=["x.dev/y"])).ok()
    dying = api.delete(maps(ns, "owner"), {"propagationPolicy": "Foreground"}).ok()
    assert dying["metadata"]["finalizers"] == ["foregroundDeletion"]
    eventually(lambda: "deletionTimestamp" in api.get(maps(ns, "child")).ok()["metadata"])
    assert not api.gone(maps(ns, "owner"))
    api.patch(maps(ns, "child"), {"metadata": {"finalizers": None}}).ok()
    eventually(lambda: api.gone(maps(ns, "child")) and api.gone(maps(ns, "owner")))


def test_an_unknown_policy_is_refused(api: Api, ns: str) -> None:
    api.post(maps(ns), config_map("a")).ok()
    assert api.delete(maps(ns, "a"), {"propagationPolicy": "Sideways"}).status in (400, 422)
    assert not api.gone(maps(ns, "a"))


def test_a_namespace_takes_its_content_along(api: Api, ns: str) -> None:
    api.post(maps(ns), config_map("a", finalizers=["x.dev/y"])).ok()
    dying = api.delete(f"/api/v1/namespaces/{ns}").ok()
    assert "deletionTimestamp" in dying["metadata"]
    assert eventually(lambda: api.get(f"/api/v1/namespaces/{ns}").ok()["status"]["phase"] == "Terminating")
    refused = api.post(maps(ns), config_map("late"))
    assert (refused.status, refused.reason) == (403, "Forbidden")
    assert "because it is being terminated" in refused.body["message"]
    eventually(lambda: "deletionTimestamp" in api.get(maps(ns, "a")).ok()["metadata"])
    assert not api.gone(f"/api/v1/namespaces/{ns}")
    api.patch(maps(ns, "a"), {"metadata": {"finalizers": None}}).ok()
    eventually(lambda: api.gone(f"/api/v1/namespaces/{ns}"))


@pytest.mark.parametrize("scope", ["Namespaced"])
def test_a_crd_takes_its_objects_along(api: Api, ns: str, scope: str) -> None:
    group = f"gone-{api.prefix}.paceline.dev"
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    api.post(crds, widget_crd(group, "gadgets", "Gadget")).ok()
    path = f"/apis/{group}/v1/namespaces/{ns}/gadgets"
    eventually(lambda: api.get(path).status == 200)
    body = {"apiVersion": f"{group}/v1", "kind": "Gadget", "metadata": {"name": "g"}, "spec": {"size": 1}}
    eventually(lambda: api.post(path, body).status in (201, 409))
    api.delete(f"{crds}/gadgets.{group}").ok()
    eventually(lambda: api.gone(f"{crds}/gadgets.{group}"))
    eventually(lambda: api.get(path).status == 404)
