"""Clients that know nothing of which server they talk to: the official Python client, and a kopf operator."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import kubernetes
import pytest
import yaml
from kubernetes import client, watch
from servers import SETTLE_S, Api, eventually

OPERATOR = """
import kopf

GROUP = "{group}"


@kopf.on.startup()
def configure(settings, **_):
    settings.persistence.finalizer = "paceline.dev/suite"
    settings.posting.enabled = True
    settings.watching.server_timeout = 5


@kopf.on.create(GROUP, "widgets")
def created(spec, patch, body, **_):
    patch.status["phase"] = "Created"
    patch.status["observed"] = spec["size"]
    kopf.info(body, reason="Made", message="made by the suite")


@kopf.on.update(GROUP, "widgets", field="spec.size")
def changed(old, new, patch, **_):
    patch.status["phase"] = f"{{old}}-{{new}}"
    patch.status["observed"] = new


@kopf.on.delete(GROUP, "widgets")
def deleted(name, namespace, memo, **_):
    print("deleted", namespace, name, flush=True)


@kopf.on.event("configmaps", labels={{"suite": kopf.PRESENT}})
def seen(name, namespace, type, **_):
    print("event", type, namespace, name, flush=True)
"""


def test_the_official_client_does_crud(api: Api, ns: str) -> None:
    core = client.CoreV1Api(api.client)
    body = client.V1ConfigMap(metadata=client.V1ObjectMeta(name="a", labels={"l": "1"}), data={"x": "1"})
    created = core.create_namespaced_config_map(ns, body)
    assert created.metadata.creation_timestamp <= dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)
    created.data["x"] = "2"
    assert core.replace_namespaced_config_map("a", ns, created).data == {"x": "2"}
    with pytest.raises(client.ApiException) as caught:
        core.replace_namespaced_config_map("a", ns, created)
    assert caught.value.status == 409
    patched = core.patch_namespaced_config_map("a", ns, {"data": {"y": "3"}})
    assert patched.data == {"x": "2", "y": "3"}
    names = [item.metadata.name for item in core.list_namespaced_config_map(ns, label_selector="l=1").items]
    assert names == ["a"]
    core.delete_namespaced_config_map("a", ns)
    with pytest.raises(client.ApiException) as caught:
        core.read_namespaced_config_map("a", ns)
    assert caught.value.status == 404


def test_the_official_client_renders_workloads(api: Api, ns: str) -> None:
    apps, core = client.AppsV1Api(api.client), client.CoreV1Api(api.client)
    container = client.V1Container(name="main", image="localhost/none:1", ports=[client.V1ContainerPort(container_port=80)])
    template = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(labels={"app": "d"}), spec=client.V1PodSpec(containers=[container])
    )
    spec = client.V1DeploymentSpec(replicas=0, selector=client.V1LabelSelector(match_labels={"app": "d"}), template=template)
    apps.create_namespaced_deployment(ns, client.V1Deployment(metadata=client.V1ObjectMeta(name="d"), spec=spec))
    assert apps.read_namespaced_deployment("d", ns).spec.template.spec.containers[0].ports[0].protocol == "TCP"
    ports = [client.V1ServicePort(port=80, name="http")]
    service = client.V1Service(
        metadata=client.V1ObjectMeta(name="s"), spec=client.V1ServiceSpec(selector={"app": "d"}, ports=ports)
    )
    stored = core.create_namespaced_service(ns, service)
    assert (stored.spec.type, stored.spec.ports[0].target_port, stored.spec.ports[0].protocol) == ("ClusterIP", 80, "TCP")
    apps.patch_namespaced_deployment_scale("d", ns, {"spec": {"replicas": 0}})
    assert apps.read_namespaced_deployment_scale("d", ns).status.selector == "app=d"
    apps.delete_namespaced_deployment("d", ns)


def test_the_official_client_applies_dynamically(api: Api, ns: str, widgets: Callable[..., str]) -> None:
    dynamic = kubernetes.dynamic.DynamicClient(api.client)
    version = "/".join(widgets(ns).split("/")[2:4])
    resource = dynamic.resources.get(api_version=version, kind="Widget")
    body = {"apiVersion": version, "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 3}}
    assert resource.server_side_apply(body=body, namespace=ns, field_manager="dyn").spec.size == 3
    assert resource.get(name="w", namespace=ns).metadata.managedFields[0].manager == "dyn"
    assert [item.metadata.name for item in resource.get(namespace=ns).items] == ["w"]
    resource.delete(name="w", namespace=ns)


def test_the_official_client_watches(api: Api, ns: str) -> None:
    core = client.CoreV1Api(api.client)
    version = core.list_namespaced_secret(ns).metadata.resource_version
    core.create_namespaced_secret(ns, client.V1Secret(metadata=client.V1ObjectMeta(name="a"), string_data={"k": "v"}))
    core.delete_namespaced_secret("a", ns)
    stream = watch.Watch().stream(
        core.list_namespaced_secret,
        ns,
        resource_version=version,
        field_selector="metadata.name=a",
        timeout_seconds=2,
        allow_watch_bookmarks=True,
    )
    seen = [(event["type"], event["object"].metadata.name) for event in stream if event["type"] != "BOOKMARK"]
    assert seen == [("ADDED", "a"), ("DELETED", "a")]


def test_a_lease_changes_hands_once(api: Api, ns: str) -> None:
    coordination = client.CoordinationV1Api(api.client)
    now = dt.datetime.now(dt.UTC)
    spec = client.V1LeaseSpec(holder_identity="one", lease_duration_seconds=15, acquire_time=now, renew_time=now)
    coordination.create_namespaced_lease(ns, client.V1Lease(metadata=client.V1ObjectMeta(name="l"), spec=spec))
    first, second = (coordination.read_namespaced_lease("l", ns) for _ in range(2))
    first.spec.holder_identity, second.spec.holder_identity = "two", "three"
    coordination.replace_namespaced_lease("l", ns, first)
    with pytest.raises(client.ApiException) as caught:
        coordination.replace_namespaced_lease("l", ns, second)
    assert caught.value.status == 409
    assert coordination.read_namespaced_lease("l", ns).spec.holder_identity == "two"


def test_objects_round_trip_as_yaml(api: Api, ns: str) -> None:
    path = f"/api/v1/namespaces/{ns}/configmaps"
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": "ä\n"}})
    assert api.request("POST", path, text.encode(), "application/yaml").ok()["data"] == {"x": "ä\n"}


@pytest.fixture
def operator(api: Api, ns: str, widgets: Callable[..., str], tmp_path: Path) -> Iterator[Path]:
    """A kopf operator in a process of its own, against `ns`; yields its log."""
    group = widgets(ns).split("/")[2]
    code, log = tmp_path / "operator_under_test.py", tmp_path / "log"
    code.write_text(textwrap.dedent(OPERATOR.format(group=group)))
    command = [sys.executable, "-m", "kopf", "run", "--standalone", "--namespace", ns, str(code)]
    environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig)}
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield log
        finally:
            process.terminate()
            process.wait(SETTLE_S)


def test_a_kopf_operator_works(api: Api, ns: str, widgets: Callable[..., str], operator: Path) -> None:
    version = "/".join(widgets(ns).split("/")[2:4])
    path = widgets(ns, "w")
    body = {"apiVersion": version, "kind": "Widget", "metadata": {"name": "w"}, "spec": {"size": 1}}
    api.post(widgets(ns), body).ok()

    def status() -> dict[str, object]:
        return api.get(path).ok().get("status") or {}

    eventually(lambda: status().get("phase") == "Created", operator.read_text())
    annotations = eventually(lambda: api.get(path).ok()["metadata"].get("annotations"))
    assert "kopf.zalando.org/last-handled-configuration" in annotations
    assert api.get(path).ok()["metadata"]["finalizers"] == ["paceline.dev/suite"]
    events = f"/api/v1/namespaces/{ns}/events"
    found = eventually(lambda: api.get(events, fieldSelector="involvedObject.name=w,reason=Made").ok()["items"])
    assert found[0]["message"] == "made by the suite"
    api.patch(path, {"spec": {"size": 5}}).ok()
    eventually(lambda: status() == {"phase": "1-5", "observed": 5}, operator.read_text())
    api.post(f"/api/v1/namespaces/{ns}/configmaps", {"metadata": {"name": "c", "labels": {"suite": "x"}}}).ok()
    eventually(lambda: f"event ADDED {ns} c" in operator.read_text(), operator.read_text())
    api.delete(path).ok()
    eventually(lambda: api.gone(path), operator.read_text())
    assert f"deleted {ns} w" in operator.read_text()
