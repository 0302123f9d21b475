"""A server that takes no Service on the condition that there is none, as Kubernetes 1.20 (real) or as a proxy plays it."""

import pytest
from operator_fakes import ALL_APIS
from operator_kit import service, settings
from operator_process import BOTH, CHILDREN, operating
from operator_proxy import Fault, FaultyProxy

from paceline_operator.cluster import Cluster, load_configuration
from paceline_operator.metrics import Metrics
from paceline_operator.names import POSTED
from paceline_operator.render import render
from paceline_operator.transport import UNMADE
from patience import eventually

SERVERS = BOTH


def refusals():
    return Fault("PATCH", "/services/", 10_000, status=500, message=UNMADE, holding=b'"resourceVersion": "1"')


@pytest.fixture(scope="module")
def proxy(api, tmp_path_factory):
    found = FaultyProxy(api.kubeconfig, tmp_path_factory.mktemp("proxy"))
    found.faults.append(refusals())
    yield found
    found.close()


@pytest.fixture(scope="module")
def operator(api, proxy, tmp_path_factory):
    with operating(api, tmp_path_factory.mktemp("operator") / "operator.log", proxy.kubeconfig) as found:
        yield found


@pytest.fixture
def cluster(proxy, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(proxy.kubeconfig))
    found = Cluster(load_configuration(), Metrics(), threads=2)
    yield found
    found.close()


def test_the_second_service_and_all_later_ones_take_one_call(api, operator, proxy):
    api.service("first")
    api.complete("first")
    before = len(proxy.calls)
    api.service("second")
    assert sorted(api.complete("second")) == sorted(CHILDREN)
    about = [(verb, path) for verb, path in proxy.writes(before) if "/services" in path]
    assert about == [("POST", f"/api/v1/namespaces/{api.namespace}/services")]
    assert not [
        path for _, verb, path, watch in proxy.calls[before:] if verb == "GET" and not watch and "/services/" in path
    ]


def test_a_service_of_somebody_else_is_not_taken(api, operator):
    theirs = api.create(
        "Service", {"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 80}], "selector": {"a": "b"}}}
    )
    api.service("taken")
    eventually(lambda: api.condition("taken", "Ready").get("reason") == "NameTaken", "the refusal stands in the status")
    assert api.get("Service", "taken") == theirs
    api.delete("Service", "taken")
    api.complete("taken")


def test_an_answer_that_is_lost_makes_nothing_twice(api, operator, proxy):
    api.service("before")
    api.complete("before")
    proxy.faults.append(Fault("POST", "/services", 1, lose_answer=True))
    api.service("lost")
    api.complete("lost")
    assert api.condition("lost", "ChildrenApplied")["status"] == "True"


def test_what_is_posted_is_set_back_like_the_rest(api, operator):
    api.service("edited")
    address = api.complete("edited")["Service"]["spec"].get("clusterIP")
    api.merge("Service", "edited", {"spec": {"selector": {"stolen": "yes", "app.kubernetes.io/name": "theirs"}}})

    def restored():
        found = api.get("Service", "edited")
        return "theirs" not in found["spec"]["selector"].values() and POSTED not in found["metadata"]["annotations"]

    eventually(restored, "it is set back, by an apply")
    assert api.get("Service", "edited")["spec"].get("clusterIP") == address


async def test_a_later_version_takes_out_what_an_earlier_one_posted(api, cluster):
    own = settings()
    rendered = next(
        c for c in render(service(name="later", namespace=api.namespace), own, ALL_APIS) if c["kind"] == "Service"
    )
    earlier = rendered | {"metadata": rendered["metadata"] | {"ownerReferences": []}}  # the cluster would collect it
    extra = {"name": "grpc", "port": 9001, "protocol": "TCP", "targetPort": "http"}
    both = earlier | {"spec": earlier["spec"] | {"ports": [*earlier["spec"]["ports"], extra]}}
    made = await cluster.create(both)
    assert made["metadata"]["annotations"][POSTED] == "true"
    assert await cluster.create(both) is None
    api.merge("Service", "later", {"metadata": {"labels": {"team": "a"}}})
    await cluster.claim(made)
    live = await cluster.apply(earlier)
    assert [port["name"] for port in live["spec"]["ports"]] == ["http"]
    assert live["spec"].get("clusterIP") == made["spec"].get("clusterIP")
    assert (live["spec"]["type"], live["metadata"]["labels"]["team"]) == ("ClusterIP", "a")
    assert POSTED not in live["metadata"]["annotations"]
    ours = [entry["operation"] for entry in live["metadata"]["managedFields"] if entry["manager"] == "paceline-operator"]
    assert ours == ["Apply"]
    version = live["metadata"]["resourceVersion"]
    await cluster.claim(live)  # nothing is left to claim
    assert api.get("Service", "later")["metadata"]["resourceVersion"] == version
