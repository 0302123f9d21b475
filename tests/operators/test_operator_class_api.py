"""An InferenceClass on an API server, with the operator as a process: what it gives, what it refuses, and how it goes."""

import contextlib

import pytest
from kubernetes import client
from operator_process import BOTH

from patience import eventually

SERVERS = BOTH
pytestmark = pytest.mark.usefixtures("operator")
CLASSES = "/apis/paceline.io/v1alpha1/inferenceclasses"
SPEC = {
    "defaults": {"batching": {"maxNumSeqs": 12}, "image": "localhost/class:1", "resources": {"limits": {"memory": "1Gi"}}},
    "limits": {"maxReplicas": 2, "resources": {"memory": "2Gi"}},
}


@pytest.fixture
def cls(api):
    """A class of the namespace's name, which no other test of this cluster has."""
    item = {
        "apiVersion": "paceline.io/v1alpha1",
        "kind": "InferenceClass",
        "metadata": {"name": api.namespace},
        "spec": SPEC,
    }
    api.call("POST", CLASSES, item)
    yield api.namespace
    with contextlib.suppress(client.ApiException):
        api.call("DELETE", f"{CLASSES}/{api.namespace}")


def status(api, name):
    return api.get("InferenceService", name).get("status") or {}


def test_a_class_gives_limits_changes_and_goes(api, cls):
    def valid():
        found = api.call("GET", f"{CLASSES}/{cls}").get("status") or {}
        return [c["status"] for c in found.get("conditions", [])] == ["True"]

    eventually(valid, "the class has a status")
    api.service("under", className=cls)
    deployed = api.complete("under")["Deployment"]
    container = deployed["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["resources"]["limits"]["memory"]) == ("localhost/class:1", "1Gi")
    rows = status(api, "under")["effective"]
    assert rows["maxNumSeqs"] == {"value": 12, "origin": "class"}
    assert rows["image"] == {"value": "localhost/class:1", "origin": "class"}
    assert status(api, "under")["className"] == cls

    api.merge("InferenceService", "under", {"spec": {"resources": {"limits": {"memory": "3Gi"}}}})
    eventually(lambda: api.condition("under", "SpecValid").get("status") == "False", "the limit holds")
    assert f"class {cls}: at most 2Gi" in api.condition("under", "SpecValid")["message"]
    before = api.get("Deployment", "under")["metadata"]["resourceVersion"]
    api.merge("InferenceService", "under", {"spec": {"resources": None}})
    eventually(lambda: api.condition("under", "SpecValid").get("status") == "True", "it is mended")

    changed = {"spec": {"defaults": {"batching": {"maxNumSeqs": 9}}}}
    api.call("PATCH", f"{CLASSES}/{cls}", changed, "application/merge-patch+json")
    eventually(lambda: status(api, "under")["effective"]["maxNumSeqs"]["value"] == 9, "a change of the class arrives")
    assert api.get("Deployment", "under")["metadata"]["resourceVersion"] == before

    api.call("DELETE", f"{CLASSES}/{cls}")
    eventually(
        lambda: api.condition("under", "SpecValid").get("reason") == "ClassNotFound", "it says that the class is gone"
    )
    assert api.get("Deployment", "under")["metadata"]["resourceVersion"] == before


def test_a_service_may_come_before_its_class(api):
    name = f"{api.namespace}-late"
    api.service("early", className=name)
    eventually(lambda: api.condition("early", "SpecValid").get("reason") == "ClassNotFound", "it waits for the class")
    assert api.children("early") == {}
    api.call(
        "POST",
        CLASSES,
        {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceClass", "metadata": {"name": name}, "spec": {}},
    )
    try:
        assert api.complete("early")
    finally:
        api.call("DELETE", f"{CLASSES}/{name}")
