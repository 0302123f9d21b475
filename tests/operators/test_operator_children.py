"""Children beside the pods: what the spec switches on, only where the server has it, gone when it is switched off."""

import copy

import pytest
from operator_fakes import ALL_APIS
from operator_kit import MINIMAL, service, settings
from operator_world import KEY, World

from paceline_operator.api_kinds import KINDS, OPTIONAL, WATCHED, Apis
from paceline_operator.errors import ApiRefused, SpecError
from paceline_operator.names import APPLIED, SERVICE_LABEL
from paceline_operator.render import missing_kinds, render

IN_CLUSTER = {"OPERATOR_NAMESPACE": "paceline-system"}
EVERYTHING = MINIMAL | {
    "scaling": {"maxReplicas": 4, "waitingRequests": 5, "kvCacheUtilization": 80},
    "routing": {
        "endpointPicker": {"name": "epp"},
        "gateway": {"name": "public", "namespace": "gateways", "sectionName": "https"},
        "hostnames": ["llm.example.com"],
    },
    "monitoring": {"podMonitor": True, "rules": True, "interval": "30s", "labels": {"release": "prometheus"}},
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "chat-ui"}}}]},
    "slo": {"ttft": "500ms", "tpot": "50ms", "percentile": 99},
    "queueName": "team-a",
    "priorityClassName": "serving",
}
SWITCHED_ON = {"HorizontalPodAutoscaler", "InferencePool", "HTTPRoute", "PodMonitor", "PrometheusRule"}


def children(spec=MINIMAL, *, apis=ALL_APIS, **environment):
    found = render(service(spec), settings(**(IN_CLUSTER | environment)), apis)
    return {child["kind"]: child for child in found}


def spec_of(kind, spec=EVERYTHING, **options):
    return children(spec, **options)[kind]["spec"]


def test_a_plain_service_has_none_of_them():
    assert set(children()) == {
        "Secret", "ServiceAccount", "ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment",
    }  # fmt: skip


def test_what_is_switched_on_is_there():
    assert set(children(EVERYTHING)) - set(children()) == SWITCHED_ON


def test_what_the_server_lacks_is_left_out_and_named():
    bare = Apis.of({"policy/v1": {"poddisruptionbudgets"}})
    assert not SWITCHED_ON & set(children(EVERYTHING, apis=bare))
    assert missing_kinds(service(EVERYTHING), settings(), bare) == sorted(SWITCHED_ON)
    assert missing_kinds(service(EVERYTHING), settings(), ALL_APIS) == []
    assert missing_kinds(service(), settings(), Apis.of({})) == []  # nobody asked for anything


def test_the_admin_port_is_the_operators_alone():
    public, admin = spec_of("NetworkPolicy", MINIMAL)["ingress"]
    assert public == {"ports": [{"port": 8000, "protocol": "TCP"}]}
    (peer,) = admin["from"]
    assert admin["ports"] == [{"port": 9000, "protocol": "TCP"}]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "paceline-system"}}
    assert peer["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "paceline-operator"}}


def test_clients_may_be_named():
    public, _ = spec_of("NetworkPolicy")["ingress"]
    assert public["from"] == [{"podSelector": {"matchLabels": {"app": "chat-ui"}}}]


def test_servers_that_do_not_label_namespaces_select_the_operators_pods():
    old = Apis.of({"policy/v1beta1": {"poddisruptionbudgets"}, "networking.k8s.io/v1": {"networkpolicies"}})
    _, admin = spec_of("NetworkPolicy", MINIMAL, apis=old)["ingress"]
    assert admin["from"][0]["namespaceSelector"] == {}
    assert admin["from"][0]["podSelector"]["matchLabels"]


def test_no_policy_shuts_out_an_operator_that_does_not_know_where_it_is():
    assert "NetworkPolicy" not in children(OPERATOR_NAMESPACE="")
    assert "NetworkPolicy" not in children(MINIMAL | {"networkPolicy": {"enabled": False}})


def test_an_autoscaler_scales_the_inference_service():
    autoscaler = children(EVERYTHING)["HorizontalPodAutoscaler"]
    spec = autoscaler["spec"]
    assert autoscaler["apiVersion"] == "autoscaling/v2"
    assert spec["scaleTargetRef"] == {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceService", "name": "chat"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 4)
    metrics = {metric["pods"]["metric"]["name"]: metric["pods"]["target"]["averageValue"] for metric in spec["metrics"]}
    assert metrics == {"vllm_num_requests_waiting": "5", "vllm_kv_cache_usage_perc": "800m"}
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_an_old_server_gets_the_old_version_of_the_autoscaler():
    old = Apis.of({"autoscaling/v2beta2": {"horizontalpodautoscalers"}, "autoscaling/v1": {"horizontalpodautoscalers"}})
    assert children(EVERYTHING, apis=old)["HorizontalPodAutoscaler"]["apiVersion"] == "autoscaling/v2beta2"


def test_keda_asks_prometheus_for_sums_over_the_pods():
    scaling = {"maxReplicas": 4, "minReplicas": 0, "provider": "KEDA", "prometheus": "http://prom:9090"}
    found = children(MINIMAL | {"scaling": scaling | {"waitingRequests": 5, "kvCacheUtilization": 80}})
    assert "HorizontalPodAutoscaler" not in found
    spec = found["ScaledObject"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 4)
    waiting, usage = (trigger["metadata"] for trigger in spec["triggers"])
    assert waiting["query"] == 'sum(vllm:num_requests_waiting{namespace="team-a",pod=~"chat-[a-z0-9]+-[a-z0-9]+"})'
    assert (waiting["threshold"], usage["threshold"]) == ("5", "80")
    assert waiting["serverAddress"] == "http://prom:9090"


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"maxReplicas": 2}, "spec.scaling"),
        ({"maxReplicas": 2, "minReplicas": 3, "cpuUtilization": 50}, "spec.scaling.minReplicas"),
        ({"maxReplicas": 2, "minReplicas": 0, "cpuUtilization": 50}, "spec.scaling.minReplicas"),
        ({"maxReplicas": 2, "provider": "KEDA", "waitingRequests": 1}, "spec.scaling.prometheus"),
        (
            {"maxReplicas": 2, "provider": "KEDA", "prometheus": "http://p", "waitingRequests": 1, "cpuUtilization": 9},
            "spec.scaling.cpuUtilization",
        ),
        ({"maxReplicas": 2, "waitingRequests": 1, "cooldown": "2h"}, "spec.scaling.cooldown"),
    ],
)
def test_scaling_that_makes_no_sense_is_refused_with_its_field(scaling, field):
    with pytest.raises(SpecError) as raised:
        service(MINIMAL | {"scaling": scaling})
    assert [problem.field for problem in raised.value.problems] == [field]


def test_a_pool_has_its_picker_and_the_route_leads_to_it():
    pool, route = spec_of("InferencePool"), spec_of("HTTPRoute")
    picker = {"group": "", "kind": "Service", "name": "epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert pool["endpointPickerRef"] == picker
    assert pool["targetPorts"] == [{"number": 8000}]
    assert pool["selector"]["matchLabels"][SERVICE_LABEL] == "chat"
    (parent,), (rule,) = route["parentRefs"], route["rules"]
    assert (parent["name"], parent["namespace"], parent["sectionName"]) == ("public", "gateways", "https")
    assert route["hostnames"] == ["llm.example.com"]
    assert (rule["backendRefs"][0]["kind"], rule["timeouts"]) == ("InferencePool", {"request": "0s"})


def test_without_a_picker_the_route_leads_to_the_service():
    found = children(MINIMAL | {"routing": {"gateway": {"name": "public"}}})
    (backend,) = found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["port"]) == ("Service", 8000)
    assert "InferencePool" not in found
    assert "hostnames" not in found["HTTPRoute"]["spec"]


def test_monitoring_objects_carry_the_labels_that_a_prometheus_selects():
    found = children(EVERYTHING)
    for kind in ("PodMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "prometheus"
    assert "release" not in found["HTTPRoute"]["metadata"]["labels"]
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "http", "path": "/metrics", "interval": "30s"}


def test_alerts_follow_the_objectives():
    (group,) = spec_of("PrometheusRule")["groups"]
    alerts = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert alerts["PacelineTimeToFirstToken"].startswith("histogram_quantile(0.99, ")
    assert alerts["PacelineTimeToFirstToken"].endswith(" > 0.5")
    assert alerts["PacelineTimePerToken"].endswith(" > 0.05")
    plain = MINIMAL | {"monitoring": {"rules": True}}
    (group,) = spec_of("PrometheusRule", plain)["groups"]
    assert [rule["alert"] for rule in group["rules"]] == ["PacelineNotReady", "PacelineKvCacheFull"]


def test_kueue_finds_its_queue_and_pods_their_priority():
    deployment = children(EVERYTHING)["Deployment"]
    assert deployment["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == "serving"


def test_everything_that_is_made_is_watched_and_nothing_secret_is():
    assert set(WATCHED.values()) == set(KINDS)
    assert set(children(EVERYTHING)) - {"Secret"} <= set(KINDS)
    assert "Secret" not in KINDS
    assert set(OPTIONAL) >= SWITCHED_ON


async def test_what_is_switched_off_goes_and_nothing_else():
    world = World(**IN_CLUSTER)
    world.manifest(EVERYTHING)
    await world.run()
    assert {kind for kind, _ in world.cluster.objects} >= SWITCHED_ON
    owner = world.cluster.objects["Service", "chat"]["metadata"]["ownerReferences"]
    labels = {SERVICE_LABEL: "chat"}
    foreign = {"name": "theirs", "namespace": "team-a", "uid": "x", "labels": labels}
    unstamped = {"name": "tuned", "namespace": "team-a", "uid": "y", "labels": labels, "ownerReferences": owner}
    other = {"uid": "another", "controller": True}
    stamped = foreign | {"name": "stamped", "annotations": {APPLIED: "z"}, "ownerReferences": [other]}
    for meta in (foreign, unstamped, stamped):
        world.sees("ConfigMap", {"kind": "ConfigMap", "metadata": copy.deepcopy(meta)})
    world.manifest(MINIMAL, generation=2)
    await world.run()
    assert {kind for verb, kind in world.cluster.calls if verb == "delete"} == SWITCHED_ON
    assert not {kind for kind, _ in world.cluster.objects} & SWITCHED_ON
    assert {name for kind, name in world.cluster.objects if kind == "ConfigMap"} >= {"theirs", "tuned", "stamped"}
    await world.run()
    assert world.cluster.calls == []


async def test_a_kind_that_is_missing_is_told_and_does_not_stop_the_pods():
    world = World(**IN_CLUSTER)
    world.cluster.apis = Apis.of({"policy/v1": {"poddisruptionbudgets"}})
    world.manifest(EVERYTHING)
    result = await world.run()
    assert ("apply", "Deployment") in world.cluster.calls
    assert not result.retry
    told = world.condition("ChildrenApplied")
    assert (told["status"], told["reason"]) == ("False", "ApiMissing")
    assert "InferencePool" in told["message"]
    assert [event["reason"] for event in world.cluster.events] == ["ApiMissing"]
    world.cluster.apis = ALL_APIS  # its CRD is installed
    await world.run()
    assert world.condition("ChildrenApplied")["status"] == "True"
    assert ("apply", "InferencePool") in world.cluster.calls


async def test_a_route_that_the_server_refuses_does_not_hold_the_pods_up():
    world = World(**IN_CLUSTER)
    world.cluster.refuse["HTTPRoute"] = ApiRefused(422, "spec.hostnames: not yours")
    world.manifest(EVERYTHING)
    result = await world.run()
    assert result.retry
    assert result.target is not None
    assert ("apply", "Deployment") in world.cluster.calls
    assert world.condition("ChildrenApplied")["message"] == "spec.hostnames: not yours"
    assert world.condition("Ready")["reason"] == "Starting"  # as any that has just been made
    assert world.store.get(KEY, "Deployment", "chat")
