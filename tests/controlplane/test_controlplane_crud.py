"""Create, read, update, delete, and how refusals look."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Api, config_map, deployment, pod


@pytest.mark.cluster
def test_the_real_server_is_asked_too() -> None:
    """One skipped test says it for the whole suite, which is parametrised over both servers."""
    if "KUBECONFIG" not in os.environ:
        pytest.skip("KUBECONFIG isn't set: only the embedded server was tested, with no real one to compare it with")
    api = Api(Path(os.environ["KUBECONFIG"]), real=True)
    with api.http:
        assert api.minor >= 20


def maps(ns: str, *name: str) -> str:
    return "/".join([f"/api/v1/namespaces/{ns}/configmaps", *name])


def deployments(ns: str, *name: str) -> str:
    return "/".join([f"/apis/apps/v1/namespaces/{ns}/deployments", *name])


def test_create_sets_the_servers_metadata(api: Api, ns: str) -> None:
    answer = api.post(maps(ns), config_map("a", {"x": "1"}))
    meta = answer.ok()["metadata"]
    assert answer.status == 201
    assert re.fullmatch(r"[0-9a-f-]{36}", meta["uid"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", meta["creationTimestamp"])
    assert meta["namespace"] == ns
    assert int(meta["resourceVersion"]) > 0
    assert "generation" not in meta
    assert api.get(maps(ns, "a")).ok()["data"] == {"x": "1"}


def test_generate_name_appends_to_the_prefix(api: Api, ns: str) -> None:
    names = {api.post(maps(ns), {"metadata": {"generateName": "x-"}, "data": {}}).ok()["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch(r"x-[a-z0-9]{5}", name) for name in names)


def test_a_taken_name_is_a_conflict(api: Api, ns: str) -> None:
    api.post(maps(ns), config_map("a")).ok()
    answer = api.post(maps(ns), config_map("a"))
    assert (answer.status, answer.reason) == (409, "AlreadyExists")
    assert answer.body["message"] == 'configmaps "a" already exists'
    assert answer.body["details"] == {"name": "a", "kind": "configmaps"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/v1/namespaces/{ns}/configmaps/none", 'configmaps "none" not found'),
        ("/apis/apps/v1/namespaces/{ns}/deployments/none", 'deployments.apps "none" not found'),
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_missing_object_is_not_found(api: Api, ns: str, method: str, path: str, message: str) -> None:
    answer = api.request(method, path.format(ns=ns))
    assert (answer.status, answer.reason, answer.body["kind"]) == (404, "NotFound", "Status")
    assert answer.body["message"] == message
    assert answer.body["status"] == "Failure"


@pytest.mark.parametrize(
    "path", ["/api/v1/nonsense", "/apis/none.example/v1/things", "/apis/apps/v9/deployments", "/apis/apps/v9", "/api/v9"]
)
def test_an_unknown_resource_is_not_found(api: Api, path: str) -> None:
    assert api.get(path).status == 404


def test_objects_need_an_existing_namespace(api: Api) -> None:
    answer = api.post(maps(f"{api.prefix}-missing"), config_map("a"))
    assert (answer.status, answer.reason) == (404, "NotFound")
    assert answer.body["message"] == f'namespaces "{api.prefix}-missing" not found'


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a..b", "x" * 254])
def test_bad_names_are_invalid(api: Api, ns: str, name: str) -> None:
    answer = api.post(maps(ns), config_map(name))
    assert (answer.status, answer.reason) == (422, "Invalid")
    assert answer.body["details"]["causes"][0]["field"] == "metadata.name"


def test_a_name_is_required(api: Api, ns: str) -> None:
    answer = api.post(maps(ns), {"metadata": {}, "data": {}})
    assert (answer.status, answer.reason) == (422, "Invalid")
    assert "name or generateName is required" in answer.body["message"]


def test_bodies_must_parse_and_match_the_path(api: Api, ns: str) -> None:
    assert api.post(maps(ns), b"{").status == 400
    api.post(maps(ns), config_map("a")).ok()
    assert api.put(maps(ns, "a"), config_map("b")).status == 400
    assert api.post(maps(ns), config_map("c", namespace="other")).status == 400
    assert api.post(maps(ns), {**config_map("d"), "kind": "Secret"}).status == 400
    assert api.request("POST", maps(ns), b"x", "text/plain").status == 415
    for wrong in ({"labels": {"a": 1}}, {"labels": ["a"]}, {"annotations": "a"}):
        assert api.post(maps(ns), config_map("e", **wrong)).status == 400
    assert api.post(maps(ns), {**config_map("e"), "data": {"x": 1}}).status == 400
    assert api.post(deployments(ns), {**deployment("e"), "spec": "x"}).status == 400
    template = {"metadata": {"labels": {"app": "e"}}, "spec": {"containers": ["x"]}}
    assert api.post(deployments(ns), deployment("e", template=template)).status == 400
    assert api.post(maps(ns), b"\xff\xfe").status == 400


def test_update_replaces_and_needs_the_current_version(api: Api, ns: str) -> None:
    first = api.post(maps(ns), config_map("a", {"x": "1", "y": "2"})).ok()
    second = api.put(maps(ns, "a"), {**first, "data": {"x": "3"}}).ok()
    assert second["data"] == {"x": "3"}
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert int(second["metadata"]["resourceVersion"]) > int(first["metadata"]["resourceVersion"])
    stale = api.put(maps(ns, "a"), {**first, "data": {"x": "4"}})
    assert (stale.status, stale.reason) == (409, "Conflict")
    assert "the object has been modified; please apply your changes to the latest version" in stale.body["message"]
    assert api.put(maps(ns, "a"), config_map("a", {"x": "5"})).ok()["data"] == {"x": "5"}


def test_update_of_another_uid_is_a_conflict(api: Api, ns: str) -> None:
    api.post(maps(ns), config_map("a")).ok()
    answer = api.put(maps(ns, "a"), config_map("a", {"x": "1"}, uid="6f9619ff-8b86-d011-b42d-00c04fc964ff"))
    assert (answer.status, answer.reason) == (409, "Conflict")
    assert "Precondition failed: UID" in answer.body["message"]


def test_writing_the_same_again_changes_nothing(api: Api, ns: str) -> None:
    first = api.post(maps(ns), config_map("a", {"x": "1"}))
    assert api.put(maps(ns, "a"), config_map("a", {"x": "1"})).version == first.version
    assert api.patch(maps(ns, "a"), {"data": {"x": "1"}}).version == first.version


def test_dry_run_changes_nothing(api: Api, ns: str) -> None:
    assert api.post(maps(ns), config_map("a"), dryRun="All").status == 201
    assert api.gone(maps(ns, "a"))
    api.post(maps(ns), config_map("a", {"x": "1"})).ok()
    assert api.patch(maps(ns, "a"), {"data": {"x": "2"}}, dryRun="All").ok()["data"] == {"x": "2"}
    assert api.delete(maps(ns, "a"), dryRun="All").status == 200
    assert api.get(maps(ns, "a")).ok()["data"] == {"x": "1"}


def test_methods_that_a_path_lacks(api: Api, ns: str) -> None:
    for answer in (api.put(maps(ns), config_map("a")), api.post(maps(ns, "a"), config_map("a"))):
        assert (answer.status, answer.reason) == (405, "MethodNotAllowed")


def test_lists_have_a_version_and_filter(api: Api, ns: str) -> None:
    for name, tier in (("a", "x"), ("b", "y"), ("c", "")):
        api.post(maps(ns), config_map(name, labels={"suite": "yes", **({"tier": tier} if tier else {})})).ok()

    def names(**params: str) -> str:
        items = api.get(maps(ns), **params).ok()["items"]
        return "".join(item["metadata"]["name"] for item in items if item["metadata"]["name"] in "abc")

    body = api.get(maps(ns)).ok()
    assert (body["kind"], body["apiVersion"]) == ("ConfigMapList", "v1")
    assert int(body["metadata"]["resourceVersion"]) > 0
    assert names() == "abc"
    for selector, expected in (
        ("tier=x", "a"),
        ("tier==y", "b"),
        ("tier!=x,suite", "bc"),
        ("tier in (x, y)", "ab"),
        ("tier notin (x),suite=yes", "bc"),
        ("tier", "ab"),
        ("!tier,suite", "c"),
        ("suite=yes,tier in (y)", "b"),
    ):
        assert names(labelSelector=selector) == expected, selector
    assert names(fieldSelector="metadata.name=b") == "b"
    assert names(fieldSelector="metadata.name!=b", labelSelector="suite") == "ac"
    assert api.get(maps(ns), labelSelector="a b c").status == 400
    assert api.get(maps(ns), fieldSelector="data.x=1").status == 400


def test_pod_fields_can_be_selected(api: Api, ns: str) -> None:
    path = f"/api/v1/namespaces/{ns}/pods"
    api.post(path, pod("a")).ok()
    assert [p["metadata"]["name"] for p in api.get(path, fieldSelector="status.phase=Pending").ok()["items"]] == ["a"]
    assert api.get(path, fieldSelector="status.phase=Running").ok()["items"] == []
    assert len(api.get(path, fieldSelector="spec.nodeName=").ok()["items"]) == 1


def test_generation_counts_spec_changes_only(api: Api, ns: str) -> None:
    def generation(body: dict, path: str = "d") -> int:
        return api.patch(deployments(ns, *path.split("/")), body).ok()["metadata"]["generation"]

    assert api.post(deployments(ns), deployment("d", paused=True)).ok()["metadata"]["generation"] == 1
    assert generation({"metadata": {"labels": {"x": "y"}}}) == 1
    assert generation({"spec": {"minReadySeconds": 5}}) == 2
    assert generation({"spec": {"minReadySeconds": 5}}) == 2
    assert generation({"metadata": {"annotations": {"x": "y"}}}) == 3  # so it is for Deployments
    assert generation({"status": {"observedGeneration": 3}}, "d/status") == 3
    assert generation({"metadata": {"generation": 77}}) == 3


def test_deployments_get_defaults(api: Api, ns: str) -> None:
    spec = api.post(deployments(ns), deployment("d")).ok()["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}}
    assert spec["progressDeadlineSeconds"] == 600
    assert spec["revisionHistoryLimit"] == 10
    podspec = spec["template"]["spec"]
    assert (podspec["restartPolicy"], podspec["dnsPolicy"]) == ("Always", "ClusterFirst")
    assert podspec["terminationGracePeriodSeconds"] == 30
    assert "enableServiceLinks" not in podspec  # a default of Pods, not of templates
    container = podspec["containers"][0]
    assert (container["imagePullPolicy"], container["terminationMessagePolicy"]) == ("IfNotPresent", "File")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"selector": {"matchLabels": {"app": "other"}}}, "spec.template.metadata.labels"),
        ({"replicas": -1}, "spec.replicas"),
        ({"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}}, "spec.strategy.rollingUpdate"),
        ({"template": {"metadata": {"labels": {"app": "d"}}, "spec": {"containers": []}}}, "spec.template.spec.containers"),
    ],
)
def test_a_wrong_deployment_is_invalid(api: Api, ns: str, change: dict, field: str) -> None:
    answer = api.post(deployments(ns), deployment("d", **change))
    assert (answer.status, answer.reason) == (422, "Invalid")
    assert field in [cause["field"] for cause in answer.body["details"]["causes"]]
    assert answer.body["message"].startswith('Deployment.apps "d" is invalid: ')


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", 7),
        ("metadata.generateName", 7),
        ("metadata.ownerReferences", 7),
        ("metadata.ownerReferences", [7]),
        ("spec.replicas", "many"),
        ("spec.selector.matchLabels", 7),
        ("spec.template.spec.containers", [7]),
    ],
)
def test_a_part_of_the_wrong_type_is_a_bad_request(api: Api, ns: str, path: str, value: Any) -> None:
    body = deployment("d")
    *parents, last = path.split(".")
    part = body
    for parent in parents:
        part = part[parent]
    part[last] = value
    answer = api.post(deployments(ns), body)
    assert (answer.status, answer.reason) == (400, "BadRequest")


@pytest.mark.parametrize("options", [{"gracePeriodSeconds": "soon"}, {"preconditions": "none"}])
def test_deletion_options_of_the_wrong_type_are_a_bad_request(api: Api, ns: str, options: dict) -> None:
    api.post(deployments(ns), deployment("d")).ok()
    answer = api.request("DELETE", f"{deployments(ns)}/d", options)
    assert answer.status in ((400, 500) if api.real else (400,))  # Kubernetes 1.20 answers 500 with the decoder's words
    api.get(f"{deployments(ns)}/d").ok()


def test_an_event_about_something_of_the_wrong_type_is_a_bad_request(api: Api, ns: str) -> None:
    answer = api.post(f"/api/v1/namespaces/{ns}/events", {"metadata": {"name": "e"}, "involvedObject": 7})
    assert (answer.status, answer.reason) == (400, "BadRequest")


def test_pods_get_defaults(api: Api, ns: str) -> None:
    body = pod("p")
    body["spec"]["containers"][0] |= {
        "resources": {"limits": {"memory": "1Gi"}},
        "readinessProbe": {"httpGet": {"port": 80}},
    }
    body["spec"]["volumes"] = [{"name": "c", "configMap": {"name": "c"}}, {"name": "s", "secret": {"secretName": "s"}}]
    stored = api.post(f"/api/v1/namespaces/{ns}/pods", body).ok()
    spec, container = stored["spec"], stored["spec"]["containers"][0]
    assert (spec["restartPolicy"], spec["schedulerName"], spec["enableServiceLinks"]) == (
        "Always",
        "default-scheduler",
        True,
    )
    assert container["resources"]["requests"] == {"memory": "1Gi"}
    assert container["ports"] == [{"containerPort": 80, "protocol": "TCP"}]
    probe = container["readinessProbe"]
    assert probe["httpGet"] == {"path": "/", "port": 80, "scheme": "HTTP"}
    assert (probe["periodSeconds"], probe["timeoutSeconds"], probe["failureThreshold"]) == (10, 1, 3)
    assert [v["configMap"]["defaultMode"] for v in spec["volumes"] if "configMap" in v] == [420]
    assert stored["status"]["phase"] == "Pending"


def test_the_selector_of_a_deployment_is_immutable(api: Api, ns: str) -> None:
    api.post(deployments(ns), deployment("d")).ok()
    template = {"metadata": {"labels": {"app": "e"}}}
    answer = api.patch(deployments(ns, "d"), {"spec": {"selector": {"matchLabels": {"app": "e"}}, "template": template}})
    assert answer.status == 422
    assert "field is immutable" in answer.body["message"]


def test_status_is_written_through_its_subresource_only(api: Api, ns: str) -> None:
    api.post(f"/api/v1/namespaces/{ns}/pods", {**pod("a"), "status": {"phase": "Running"}}).ok()
    path = f"/api/v1/namespaces/{ns}/pods/a"
    assert api.get(path).ok()["status"]["phase"] == "Pending"
    assert api.patch(path, {"status": {"phase": "Running"}}).ok()["status"]["phase"] == "Pending"
    written = api.patch(f"{path}/status", {"status": {"phase": "Running"}, "spec": {"nodeSelector": {"x": "y"}}}).ok()
    assert written["status"]["phase"] == "Running"
    assert written["spec"]["nodeSelector"] == pod("a")["spec"]["nodeSelector"]
    assert api.get(f"{path}/status").ok()["status"]["phase"] == "Running"


def test_secrets_take_plain_text(api: Api, ns: str) -> None:
    path = f"/api/v1/namespaces/{ns}/secrets"
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "hello"}}
    stored = api.post(path, body).ok()
    assert stored["data"] == {"a": "aGVsbG8="}
    assert stored["type"] == "Opaque"
    assert "stringData" not in stored


def test_scale_of_a_deployment(api: Api, ns: str) -> None:
    created = api.post(deployments(ns), deployment("d", paused=True)).ok()
    path = deployments(ns, "d", "scale")
    scale = api.get(path).ok()
    assert (scale["kind"], scale["apiVersion"], scale["spec"]) == ("Scale", "autoscaling/v1", {})
    assert scale["status"]["selector"] == "app=d"
    assert api.patch(path, {"spec": {"replicas": 2}}).ok()["spec"]["replicas"] == 2
    live = api.get(deployments(ns, "d")).ok()
    assert live["spec"]["replicas"] == 2
    assert live["metadata"]["generation"] > created["metadata"]["generation"]
    assert api.patch(path, {"spec": {"replicas": -1}}).status == 422
    scale["spec"]["replicas"] = 0
    assert api.put(path, scale).status == 409  # its resourceVersion is old by now


def test_binding_gives_a_pod_its_node(api: Api, ns: str) -> None:
    path = f"/api/v1/namespaces/{ns}/pods"
    api.post(path, pod("a")).ok()
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "a"},
        "target": {"kind": "Node", "name": "nowhere"},
    }
    assert api.post(f"{path}/a/binding", binding).status == 201
    assert api.get(f"{path}/a").ok()["spec"]["nodeName"] == "nowhere"
    assert api.post(f"{path}/a/binding", binding).status == 409
    api.delete(f"{path}/a", gracePeriodSeconds=0).ok()


def test_self_reviews_are_answered(api: Api) -> None:
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": "list", "resource": "pods"}},
    }
    answer = api.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    assert answer.status == 201
    assert answer.body["status"]["allowed"] is True


def test_every_kind_that_the_operator_renders_is_served(api: Api, ns: str) -> None:
    wanted = {
        "/api/v1": "pods services serviceaccounts configmaps secrets events nodes endpoints namespaces pods/status",
        "/apis/apps/v1": "deployments deployments/status deployments/scale replicasets",
        f"/apis/policy/{api.policy_version}": "poddisruptionbudgets poddisruptionbudgets/status",
        "/apis/coordination.k8s.io/v1": "leases",
        "/apis/apiextensions.k8s.io/v1": "customresourcedefinitions customresourcedefinitions/status",
        "/apis/rbac.authorization.k8s.io/v1": "roles rolebindings clusterroles clusterrolebindings",
        "/apis/networking.k8s.io/v1": "networkpolicies",
        "/apis/events.k8s.io/v1": "events",
    }
    for path, names in wanted.items():
        body = api.get(path).ok()
        assert body["kind"] == "APIResourceList"
        served = {resource["name"]: resource for resource in body["resources"]}
        assert set(names.split()) <= set(served), path
        for resource in served.values():
            assert {"name", "singularName", "namespaced", "kind", "verbs"} <= set(resource)
    groups = {group["name"]: group for group in api.get("/apis").ok()["groups"]}
    assert groups["apps"]["preferredVersion"] == {"groupVersion": "apps/v1", "version": "v1"}
    assert api.get("/api").ok()["versions"] == ["v1"]
    assert api.get("/apis/apps").ok()["preferredVersion"]["version"] == "v1"


def test_disruption_budgets_keep_their_status_apart(api: Api, ns: str) -> None:
    path = f"/apis/policy/{api.policy_version}/namespaces/{ns}/poddisruptionbudgets"
    body = {
        "apiVersion": f"policy/{api.policy_version}",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "p"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "none"}}},
        "status": {"currentHealthy": 7},
    }
    created = api.post(path, body).ok()
    assert created["metadata"]["generation"] == 1
    assert created["status"]["currentHealthy"] == 0


def test_events_are_one_set_of_objects_in_two_groups(api: Api, ns: str) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e1"},
        "involvedObject": {"kind": "Pod", "name": "a", "namespace": ns, "apiVersion": "v1"},
        "reason": "Tested",
        "message": "hello",
        "type": "Normal",
        "reportingComponent": "suite",
        "reportingInstance": "1",
        "action": "Test",
        "eventTime": "2026-01-01T00:00:00.000000Z",
    }
    api.post(f"/api/v1/namespaces/{ns}/events", body).ok()
    modern = api.get(f"/apis/events.k8s.io/v1/namespaces/{ns}/events/e1").ok()
    assert (modern["note"], modern["regarding"]["name"]) == ("hello", "a")
    assert modern["reportingController"] == "suite"
    found = api.get(f"/api/v1/namespaces/{ns}/events", fieldSelector="involvedObject.name=a,reason=Tested").ok()
    assert [event["metadata"]["name"] for event in found["items"]] == ["e1"]
    assert api.get(f"/api/v1/namespaces/{ns}/events", fieldSelector="involvedObject.kind=Node").ok()["items"] == []


def test_leases_need_a_version_to_be_replaced(api: Api, ns: str) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{ns}/leases"
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "l"},
        "spec": {"holderIdentity": "a"},
    }
    api.post(path, body).ok()
    answer = api.put(f"{path}/l", {**body, "spec": {"holderIdentity": "b"}})
    assert answer.status == 422
    assert "must be specified for an update" in answer.body["message"]


def test_tables_for_kubectl(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    api.post(maps(ns), config_map("a", {"x": "1", "y": "2"})).ok()
    table = api.table(maps(ns), fieldSelector="metadata.name=a")
    assert table["kind"] == "Table"
    assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "Data", "Age"]
    row = table["rows"][0]
    assert row["cells"][:2] == ["a", 2]
    assert (row["object"]["kind"], row["object"]["metadata"]["name"]) == ("PartialObjectMetadata", "a")
    for path, expected in (
        (deployments(ns), ["Name", "Ready", "Up-to-date", "Available", "Age"]),
        (f"/api/v1/namespaces/{ns}/pods", ["Name", "Ready", "Status", "Restarts", "Age"]),
        (f"/api/v1/namespaces/{ns}/services", ["Name", "Type", "Cluster-IP", "External-IP", "Port(s)", "Age"]),
        (f"/api/v1/namespaces/{ns}/secrets", ["Name", "Type", "Data", "Age"]),
        (f"/api/v1/namespaces/{ns}/events", ["Last Seen", "Type", "Reason", "Object", "Message"]),
        (f"/apis/apps/v1/namespaces/{ns}/replicasets", ["Name", "Desired", "Current", "Ready", "Age"]),
        (widgets(ns), ["Name", "Size", "Phase", "Age"]),
    ):
        columns = api.table(path)["columnDefinitions"]
        assert [column["name"] for column in columns if not column["priority"]] == expected


def test_an_object_has_one_controller(api: Api, ns: str) -> None:
    owners = [{"apiVersion": "v1", "kind": "ConfigMap", "name": f"o{n}", "uid": f"u{n}", "controller": True} for n in (1, 2)]
    answer = api.post(f"/api/v1/namespaces/{ns}/configmaps", config_map("owned", ownerReferences=owners))
    assert answer.status == 422
    assert "Only one reference can have Controller set to true" in answer.body["message"]
