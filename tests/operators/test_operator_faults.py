"""The real operator process before an API server that throttles, loses answers, forgets watches; and what it costs."""

import time
from itertools import pairwise

import pytest
from operator_kit import loose_crd
from operator_process import CHILDREN, Operator, operating
from operator_proxy import Fault, FaultyProxy

from paceline_operator.names import REVISION, UPGRADE
from patience import eventually

LATER = """
import sys
from paceline_operator import render
from paceline_operator.pod import pod_template, revision_of
from paceline_operator.names import REVISION

def later(service, settings, base):
    template = pod_template(service, settings, base)
    template["spec"]["containers"][0]["env"].append({"name": "LATER", "value": "1"})
    template["metadata"]["annotations"][REVISION] = revision_of(template)
    return template

render.pod_template = later
from paceline_operator.__main__ import main
sys.argv = ["paceline-operator"]
main()
"""


@pytest.fixture(scope="module")
def proxy(api, tmp_path_factory):
    found = FaultyProxy(api.kubeconfig, tmp_path_factory.mktemp("proxy"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def operator(api, proxy, tmp_path_factory):
    with operating(api, tmp_path_factory.mktemp("operator") / "operator.log", proxy.kubeconfig) as found:
        yield found


@pytest.fixture(autouse=True)
def no_faults(proxy):
    yield
    proxy.faults.clear()


def settle(proxy, seconds=1.5):
    """Wait until the operator has written nothing for a while; return how many calls there were."""
    while True:
        before = len(proxy.writes())
        time.sleep(seconds)
        if len(proxy.writes()) == before:
            return len(proxy.calls)


def become_ready(api, name):
    """Say of a Deployment what its controller would say of one whose pods all run."""
    meta = api.get("Deployment", name)["metadata"]
    figures = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 1)
    api.merge("Deployment", name, {"status": {"observedGeneration": meta["generation"], **figures}}, "/status")


def test_a_new_service_costs_a_call_per_child_and_three(api, operator, proxy):
    before = settle(proxy)
    api.service("cheap", replicas=1)
    api.complete("cheap")
    become_ready(api, "cheap")
    eventually(lambda: api.condition("cheap", "Ready").get("status") == "True", "it is ready")
    settle(proxy)
    calls = [(verb, path) for _, verb, path, watch in proxy.calls[before:] if "cheap" in path or verb != "GET"]
    assert len(calls) <= len(CHILDREN) + 3, calls
    assert not [call for call in calls if call[0] == "GET"]


def test_a_steady_service_and_a_restart_cost_no_write(api, operator, proxy):
    api.service("steady")
    api.complete("steady")
    before = settle(proxy)
    time.sleep(7)  # longer than a resync
    operator.kill()
    operator.start()
    eventually(operator.ready, "the operator is back", 120)
    time.sleep(3)
    assert proxy.writes(before) == []


def test_a_server_that_throttles_is_given_the_time_it_asks_for(api, operator, proxy):
    settle(proxy)
    proxy.faults.append(Fault("PATCH", "/deployments/throttled", 2, status=429, headers={"Retry-After": "1"}))
    api.service("throttled")
    api.complete("throttled")
    times = [when for when, verb, path, _ in proxy.calls if verb == "PATCH" and path.endswith("/deployments/throttled")]
    assert len(times) == 3
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(times))


@pytest.mark.parametrize("status", [409, 503])
def test_passing_troubles_are_made_up_for(api, operator, proxy, status):
    name = f"trouble-{status}"
    proxy.faults.append(Fault("PATCH", name, 3, status=status))
    api.service(name)
    api.complete(name)
    assert api.condition(name, "ChildrenApplied")["status"] == "True"


def test_an_answer_that_is_lost_makes_nothing_twice(api, operator, proxy):
    """The server has done it, and nobody knows: the next attempt finds the child and takes it for ours."""
    for plural in ("serviceaccounts", "configmaps", "services", "deployments"):
        proxy.faults.append(Fault("PATCH", f"/{plural}/lost", 1, lose_answer=True))
    api.service("lost")
    children = api.complete("lost")
    assert {child["metadata"]["generation"] for kind, child in children.items() if kind == "Deployment"} == {1}
    assert api.condition("lost", "ChildrenApplied")["status"] == "True"


def test_a_watch_that_has_lost_its_place_starts_anew(api, operator, proxy):
    api.service("expired")
    api.complete("expired")
    proxy.faults.append(Fault("WATCH", "/deployments", 3, expire=True))
    proxy.faults.append(Fault("WATCH", "/services", 3, expire=True))
    operator.kill()
    api.delete("Service", "expired")
    operator.start()
    eventually(lambda: api.get("Service", "expired"), "the Service is back")
    api.delete("Deployment", "expired")
    eventually(lambda: api.get("Deployment", "expired"), "the Deployment is back")
    assert operator.running


def test_a_kind_that_comes_later_is_made_watched_and_pruned(api, operator, proxy):
    scaling = {"maxReplicas": 3, "provider": "KEDA", "prometheus": "http://prom:9090", "waitingRequests": 5}
    api.service("late", scaling=scaling)
    eventually(lambda: api.condition("late", "ChildrenApplied").get("reason") == "ApiMissing", "it is told")
    assert "ScaledObject" in api.condition("late", "ChildrenApplied")["message"]
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    api.call("POST", crds, loose_crd("ScaledObject", "keda.sh", "scaledobjects"))
    path = f"/apis/keda.sh/v1alpha1/namespaces/{api.namespace}/scaledobjects/late"
    found = eventually(lambda: api.call("GET", path), "it is made once its CRD is there")
    assert found["spec"]["scaleTargetRef"]["kind"] == "InferenceService"
    eventually(lambda: api.condition("late", "ChildrenApplied").get("status") == "True", "the status follows")
    settle(proxy)
    api.call("DELETE", path)
    eventually(lambda: api.call("GET", path), "it is watched")
    api.merge("InferenceService", "late", {"spec": {"scaling": None}})
    eventually(lambda: api.call("GET", path) is None, "it goes when it is switched off")


def scale(api, name, replicas):
    return api.merge("InferenceService", name, {"spec": {"replicas": replicas}}, "/scale")


def test_an_autoscaler_and_the_operator_do_not_fight(api, operator, proxy):
    """It scales the service; the Deployment follows once, and nobody sets anything back."""
    api.service("scaled", scaling={"maxReplicas": 3, "waitingRequests": 5}, replicas=1)
    api.complete("scaled")
    scale(api, "scaled", 3)
    eventually(lambda: api.get("Deployment", "scaled")["spec"]["replicas"] == 3, "the Deployment follows")
    api.merge("InferenceService", "scaled", {"spec": {"batching": {"maxNumSeqs": 8}}})
    before = settle(proxy)
    time.sleep(6)
    assert api.get("Deployment", "scaled")["spec"]["replicas"] == 3
    assert api.get("InferenceService", "scaled")["spec"]["replicas"] == 3
    assert [path for _, path in proxy.writes(before) if path.endswith("/deployments/scaled")] == []


def test_an_update_of_an_operator_restarts_no_pod(api, operator, proxy, tmp_path):
    """Two versions in turn, as processes; the later one makes another template and has another default image."""
    api.service("kept")
    before = api.complete("kept")["Deployment"]
    assert operator.stop() == 0
    program = tmp_path / "later.py"
    program.write_text(LATER)
    later = Operator(
        api, tmp_path / "later.log", proxy.kubeconfig, program=[str(program)], PACELINE_RUNTIME_IMAGE="localhost/pause:9"
    )
    try:
        eventually(lambda: api.condition("kept", "UpgradeAvailable").get("status") == "True", "the upgrade is shown")
        live = api.get("Deployment", "kept")
        assert live["spec"]["template"] == before["spec"]["template"]
        assert live["metadata"]["generation"] == before["metadata"]["generation"]
        api.merge("InferenceService", "kept", {"metadata": {"annotations": {UPGRADE: "now"}}})
        eventually(lambda: "LATER" in str(api.get("Deployment", "kept")["spec"]), "the annotation rolls the pods")
        eventually(lambda: api.condition("kept", "UpgradeAvailable").get("status") == "False", "and that is told")
        fresh = api.get("Deployment", "kept")
        revisions = [d["spec"]["template"]["metadata"]["annotations"][REVISION] for d in (before, fresh)]
        assert revisions[0] != revisions[1]
        assert later.stop() == 0
    finally:
        if later.running:
            later.kill()
        operator.start()
