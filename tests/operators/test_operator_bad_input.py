"""What clusters do to an operator: KServe's kind of the same name, a CRD of an older version, statuses edited by hand,
finalizers of others, a namespace that goes. On the embedded API server: CRDs belong to everybody on a real one."""

import copy
import time

import pytest
import yaml
from operator_kit import loose_crd
from operator_process import CRDS, PLURAL, Api, Operator

from patience import eventually

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def writes(operator):
    return {verb: count for verb, count in operator.calls().items() if verb != "GET"}


def settle(operator, seconds=2.5):
    """Return the writes once there are no more of them; a loop fails the test."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        before = writes(operator)
        time.sleep(seconds)
        if writes(operator) == before:
            return before
    raise AssertionError("the operator never stops writing")


def test_kserves_service_of_the_same_name_keeps_what_it_has(api, operator):
    definition = loose_crd("InferenceService", "serving.kserve.io", "inferenceservices", version="v1beta1")
    api.call("POST", DEFINITIONS, definition)
    path = f"/apis/serving.kserve.io/v1beta1/namespaces/{api.namespace}/inferenceservices"
    eventually(lambda: api.call("GET", path), "KServe's kind is served")
    body = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": {"name": "chat"}}
    theirs = api.call("POST", path, body)
    owner = {key: theirs[key] for key in ("apiVersion", "kind")} | {"name": "chat", "uid": theirs["metadata"]["uid"]}
    service = {
        "metadata": {"name": "chat", "ownerReferences": [owner | {"controller": True}]},
        "spec": {"type": "ExternalName", "externalName": "gateway.example.com"},
    }
    before = api.create("Service", service)
    api.service("chat")
    eventually(lambda: api.condition("chat", "Ready").get("reason") == "NameTaken", "the clash is told")
    assert "a Service called chat" in api.condition("chat", "Ready")["message"]
    assert api.get("Service", "chat") == before
    api.service("beside")
    api.complete("beside")
    assert api.call("GET", f"{path}/chat")["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    "edit",
    [
        {"conditions": [], "observedGeneration": 99},
        {"conditions": None, "effective": None, "url": "http://elsewhere"},
        {"replicas": -7, "readyReplicas": 12},
    ],
)
def test_a_status_that_somebody_edits_is_put_right(api, operator, edit):
    name = f"edited-{len(edit)}-{len(str(edit))}"
    api.service(name)
    api.complete(name)
    settle(operator)
    told = api.get("InferenceService", name)["status"]
    api.merge("InferenceService", name, {"status": edit}, "/status")

    def as_before():
        now = api.get("InferenceService", name)["status"]
        times = [{c["type"]: (c["status"], c["reason"]) for c in s.get("conditions") or []} for s in (told, now)]
        return times[0] == times[1] and {**now, "conditions": 0} == {**told, "conditions": 0}

    eventually(as_before, "the status is as it was")
    settle(operator)


def test_a_finalizer_of_others_is_waited_for_without_a_word(api, operator):
    api.service("held")
    children = api.complete("held")
    api.merge("InferenceService", "held", {"metadata": {"finalizers": ["example.com/audit"]}})
    settle(operator)
    api.delete("InferenceService", "held")
    before = settle(operator)
    meta = api.get("InferenceService", "held")["metadata"]
    assert meta["finalizers"] == ["example.com/audit"]
    # an edit of one that is going brings nothing back and starts nothing
    api.delete("ConfigMap", "held-knobs")
    assert settle(operator) == before
    assert api.get("ConfigMap", "held-knobs") is None
    assert api.get("Deployment", "held")["metadata"]["uid"] == children["Deployment"]["metadata"]["uid"]
    api.merge("InferenceService", "held", {"metadata": {"finalizers": None}})
    eventually(lambda: api.get("InferenceService", "held") is None, "it goes with the finalizer")
    eventually(lambda: api.children("held") == {}, "and its children with it")


def test_a_crd_of_an_older_version_costs_what_it_lacks_and_no_loop(api, operator):
    definitions = [yaml.safe_load(file.read_text()) for file in CRDS]
    crd = next(found for found in definitions if found["spec"]["names"]["plural"] == PLURAL)
    name = crd["metadata"]["name"]
    older = copy.deepcopy(crd)
    root = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del root["status"]["properties"]["effective"]
    current = api.call("GET", f"{DEFINITIONS}/{name}")
    api.call("PUT", f"{DEFINITIONS}/{name}", older | {"metadata": current["metadata"]})
    try:
        api.service("older", batching={"maxNumSeqs": 7})
        api.complete("older")
        settle(operator)
        assert "effective" not in api.get("InferenceService", "older")["status"]
        api.merge("InferenceService", "older", {"spec": {"batching": {"maxNumSeqs": 9}}})
        eventually(lambda: '"maxNumSeqs": 9' in api.get("ConfigMap", "older-knobs")["data"]["knobs.json"], "it works on")
        settle(operator)
    finally:
        current = api.call("GET", f"{DEFINITIONS}/{name}")
        api.call("PUT", f"{DEFINITIONS}/{name}", crd | {"metadata": current["metadata"]})


@pytest.mark.parametrize("alive", [True, False], ids=["with the operator", "without it"])
def test_a_namespace_goes_with_its_services(api, tmp_path, alive):
    mine = Api(api.kubeconfig)
    mine.prepare()
    operator = Operator(mine, tmp_path / "operator.log")
    try:
        eventually(operator.ready, "the operator has started")
        mine.service("chat")
        mine.complete("chat")
        if not alive:
            operator.kill()
        path = f"/api/v1/namespaces/{mine.namespace}"
        mine.call("DELETE", path)
        eventually(lambda: mine.call("GET", path) is None, "the namespace goes")
        assert not alive or operator.running
    finally:
        if operator.running:
            operator.kill()
        print((tmp_path / "operator.log").read_text()[-3000:])
