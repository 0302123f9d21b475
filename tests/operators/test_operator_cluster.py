"""The real operator process against the embedded API server, and the one that KUBECONFIG names. No pod runs: states are
set by hand."""

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml
from kubernetes import client
from operator_kit import KEY
from operator_process import BOTH, CHILDREN, GROUP, PLURAL, Api, Operator, Proxy

from embedded import embedded_server
from paceline_core.knobs import Knobs, knobs_to_wire
from paceline_operator.names import RESTART_HASH, SERVICE_LABEL, admin_token
from patience import eventually

CHART = Path(__file__).parents[2] / "charts" / "paceline"
SERVERS = BOTH


@pytest.fixture(scope="module")
def collects_garbage(api):
    """Skip where nobody deletes dependents: that is a controller's work, not the API server's."""
    owner = api.create("ConfigMap", {"metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    api.create("ConfigMap", {"metadata": {"name": "dependent", "ownerReferences": [reference]}})
    api.delete("ConfigMap", "owner")
    with contextlib.suppress(AssertionError):
        eventually(lambda: api.get("ConfigMap", "dependent") is None, "the dependent goes")
        return
    pytest.skip("no garbage collector runs on this API server")


def knobs_of(api, name):
    return loads(api.get("ConfigMap", f"{name}-knobs")["data"]["knobs.json"])["knobs"]


def spec_of(deployment):
    return deployment["spec"]["template"]


def test_children_appear_owned_and_labelled(api, operator):
    owner = api.service("appear", batching={"maxNumSeqs": 8})
    children = api.complete("appear")
    assert sorted(children) == sorted(CHILDREN)
    for child in children.values():
        assert [reference["uid"] for reference in child["metadata"]["ownerReferences"]] == [owner["metadata"]["uid"]]
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "paceline"
        managers = {entry["manager"] for entry in child["metadata"].get("managedFields", [])}
        assert "paceline-operator" in managers
    assert "finalizers" not in api.get("InferenceService", "appear")["metadata"]
    assert knobs_of(api, "appear")["maxNumSeqs"] == 8
    assert api.condition("appear", "SpecValid")["status"] == "True"


def test_drift_is_corrected_within_seconds(api, operator):
    api.service("drift")
    before = api.complete("drift")
    api.merge("Deployment", "drift", {"spec": {"replicas": 2, "template": {"spec": {"terminationGracePeriodSeconds": 1}}}})
    api.merge("Service", "drift", {"spec": {"selector": {"stolen": "yes", SERVICE_LABEL: None}}})
    api.delete("ConfigMap", "drift-knobs")
    api.delete("ServiceAccount", "drift")

    def restored():
        found = api.children("drift")
        return (
            len(found) == len(CHILDREN)
            and found["Deployment"]["spec"]["replicas"] == 0
            and spec_of(found["Deployment"]) == spec_of(before["Deployment"])
            and found["Service"]["spec"]["selector"].get(SERVICE_LABEL) == "drift"
        )

    eventually(restored, "everything is as it was")


def test_fields_of_others_are_left_alone(api, operator):
    api.service("shared")
    api.complete("shared")
    api.merge("Deployment", "shared", {"metadata": {"annotations": {"team": "a"}, "labels": {"cost": "b"}}})
    api.merge("Service", "shared", {"metadata": {"annotations": {"mesh": "on"}}})
    api.merge("InferenceService", "shared", {"spec": {"batching": {"maxNumSeqs": 5}, "env": [{"name": "A", "value": "b"}]}})
    eventually(lambda: "A" in dumps(api.get("Deployment", "shared")["spec"]), "the edit is rolled out")
    meta = api.get("Deployment", "shared")["metadata"]
    assert (meta["annotations"]["team"], meta["labels"]["cost"]) == ("a", "b")
    assert api.get("Service", "shared")["metadata"]["annotations"]["mesh"] == "on"
    api.merge("InferenceService", "shared", {"spec": {"env": []}})
    eventually(lambda: '"A"' not in dumps(api.get("Deployment", "shared")["spec"]), "what was taken out is gone")


def test_a_knob_edit_leaves_the_pod_template_alone(api, operator):
    api.service("live", batching={"strategy": "continuous"})
    before = api.complete("live")["Deployment"]
    api.merge(
        "InferenceService", "live", {"spec": {"batching": {"strategy": "static", "maxNumSeqs": 4, "kvMemoryFraction": 0.5}}}
    )
    eventually(lambda: knobs_of(api, "live")["strategy"] == "static", "the ConfigMap has the new strategy")
    eventually(lambda: api.get("InferenceService", "live")["status"]["strategy"] == "static", "the status says so")
    after = api.complete("live")["Deployment"]
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    api.merge("InferenceService", "live", {"spec": {"batching": {"maxNumSeqsLimit": 512}}})

    def rolled():
        return spec_of(api.get("Deployment", "live"))["metadata"]["annotations"][RESTART_HASH]

    old = spec_of(before)["metadata"]["annotations"][RESTART_HASH]
    eventually(lambda: rolled() != old, "a knob that sizes buffers rolls the pods")


def versions(api, names):
    found = {}
    for name in names:
        for kind, child in {**api.children(name), "InferenceService": api.get("InferenceService", name)}.items():
            found[name, kind] = child["metadata"]["resourceVersion"]
    return found


def test_a_steady_fleet_and_a_restart_cause_no_write(api, operator):
    names = [item["metadata"]["name"] for item in api.items("InferenceService")]
    assert names
    for name in names:
        api.complete(name)
    time.sleep(2)  # the last statuses of Deployments arrive
    before = versions(api, names)
    operator.kill()
    operator.start()
    eventually(operator.ready, "the operator is back")
    time.sleep(7)  # longer than a resync
    assert versions(api, names) == before
    assert set(operator.calls()) == {"GET"}


def test_an_edit_while_the_operator_is_down_is_made_up_for(api, operator):
    api.service("down")
    api.complete("down")
    operator.kill()
    api.merge("InferenceService", "down", {"spec": {"batching": {"strategy": "dynamic"}}})
    api.delete("Service", "down")
    operator.start()
    eventually(lambda: knobs_of(api, "down")["strategy"] == "dynamic", "the edit is seen")
    eventually(lambda: api.get("Service", "down"), "the Service is back")


def test_a_foreign_deployment_is_not_taken(api, operator):
    labels = {"app": "theirs"}
    container = {"name": "main", "image": "localhost/pause:3.2"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "taken"},
        "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod},
    }
    api.create("Deployment", body)
    api.service("taken")
    eventually(lambda: api.condition("taken", "Ready").get("reason") == "NameTaken", "the refusal stands in the status")
    assert "a Deployment called taken" in api.condition("taken", "Ready")["message"]
    theirs = api.get("Deployment", "taken")
    assert "ownerReferences" not in theirs["metadata"]
    assert theirs["spec"]["template"]["spec"]["containers"][0]["name"] == "main"
    eventually(lambda: any(e["reason"] == "NameTaken" for e in api.events("taken")), "an event tells it")
    api.delete("Deployment", "taken")
    api.complete("taken")


def test_a_foreign_secret_is_not_taken(api, operator):
    api.create("Secret", {"metadata": {"name": "guarded-admin"}, "type": "Opaque", "data": {"key": "eA=="}})
    api.service("guarded")
    eventually(lambda: "a Secret called guarded-admin" in api.condition("guarded", "Ready").get("message", ""), "it is told")
    secret = api.get("Secret", "guarded-admin")
    assert secret["data"] == {"key": "eA=="}
    assert "ownerReferences" not in secret["metadata"]


BAD = {
    "unknown": ({"batchings": {"maxNumSeqs": 4}}, ["spec.batchings", "did you mean 'batching'?"]),
    "unknown-deep": ({"batching": {"maxNumSeq": 4}}, ["spec.batching.maxNumSeq", "maxNumSeqs"]),
    "budget": ({"batching": {"maxNumSeqs": 64, "maxNumBatchedTokens": 8}}, ["maxNumBatchedTokens", "64"]),
    "delay": ({"batching": {"maxQueueDelay": "2h"}}, ["spec.batching.maxQueueDelay", "1h"]),
    "scheme": ({"model": {"uri": "ftp://somewhere/model"}}, ["spec.model.uri", "ftp"]),
    "template": ({"template": {"spec": {"hostNetwork": True}}}, ["spec.template", "PACELINE_ALLOW"]),
}


@pytest.mark.parametrize("fault", sorted(BAD))
def test_a_spec_that_only_the_operator_can_judge_is_told(api, operator, fault):
    spec, words = BAD[fault]
    name = f"bad-{fault}"
    try:
        api.service(name, **spec)
    except client.ApiException as refusal:  # a server with CEL says it at once
        if refusal.status != 422:
            raise
        return
    condition = eventually(
        lambda: c if (c := api.condition(name, "SpecValid")).get("status") == "False" else None, "it is told"
    )
    assert all(word in condition["message"] for word in words), condition
    event = eventually(lambda: [e for e in api.events(name) if e["reason"] == "InvalidSpec"], "an event tells it")[0]
    assert event["type"] == "Warning"
    assert words[0] in event["message"]
    assert api.children(name) == {}
    assert api.condition(name, "Ready")["status"] == "False"


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": -1},
        {"replicas": "two"},
        {"batching": {"strategy": "psychic"}},
        {"batching": {"maxNumSeqs": 0}},
        {"slo": {"ttft": "5"}},
        {"resources": {"limits": {"memory": "lots"}}},
        {"model": {}},
    ],
)
def test_a_spec_that_breaks_the_schema_is_refused_by_the_server(api, operator, spec):
    with pytest.raises(client.ApiException) as raised:
        api.service("refused", **spec)
    assert raised.value.status == 422
    assert next(iter(spec)) in raised.value.reason


TEMPLATES = {
    "wrong-type": ({"spec": {"containers": [{"name": "runtime", "env": "x"}]}}, "list"),
    "unknown-field": ({"spec": {"nodeSelektor": {}}}, "nodeSelektor"),
    "no-image": ({"spec": {"containers": [{"name": "sidecar"}]}}, "image"),
}


@pytest.fixture
def generous(api, operator, tmp_path):
    """The operator with templates allowed, in place of the strict one."""
    operator.stop()
    found = Operator(api, tmp_path / "operator.log", PACELINE_ALLOW_TEMPLATE="any")
    yield found
    found.stop()
    operator.start()


def test_a_template_that_the_server_refuses_is_told_in_its_words(api, generous):
    refused = {name: fault for name, fault in TEMPLATES.items() if not _takes(api, fault[0])}
    if not refused:
        pytest.skip("this API server takes any pod template")
    for name, (template, _) in refused.items():
        api.service(f"template-{name}", template=template)
    for name, (_, word) in refused.items():
        is_told = lambda name=name: api.condition(f"template-{name}", "Ready").get("reason") == "Rejected"  # noqa: E731
        eventually(is_told, f"{name} is told")
        assert word in api.condition(f"template-{name}", "Ready")["message"]


def _takes(api, template):
    """Return whether the server takes such a Deployment at all: a development server may not know the pods' schema."""
    containers = [{"name": "runtime", "image": "x"}]
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": containers} | template["spec"]}
    spec = {"replicas": 0, "selector": {"matchLabels": {"a": "b"}}, "template": pod}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "probe"}, "spec": spec}
    path = api.path("Deployment", "probe") + "?fieldManager=probe"
    try:
        api.call("PATCH", path, body, "application/apply-patch+yaml")
    except client.ApiException:
        return False
    api.delete("Deployment", "probe")
    return True


def test_a_mended_spec_is_taken(api, operator):
    api.service("mended", typo=1)
    eventually(lambda: api.condition("mended", "SpecValid").get("status") == "False", "the typo is told")
    api.merge("InferenceService", "mended", {"spec": {"typo": None}})
    api.complete("mended")
    assert api.condition("mended", "SpecValid")["status"] == "True"


def pod(api, name, owner, status, **annotations):
    """A pod of service `owner` that no scheduler and no kubelet looks at, in the state that `status` says."""
    labels = {SERVICE_LABEL: owner, "app.kubernetes.io/name": "paceline-runtime"}
    container = {"name": "runtime", "image": "localhost/pause:3.2", "resources": {"limits": {"memory": "2Gi"}}}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {"containers": [container], "schedulerName": "nobody"},
    }
    api.create("Pod", body)
    api.merge("Pod", name, {"status": status}, "/status")


def container_status(state, last=None, restarts=0, ready=False):
    return {
        "name": "runtime",
        "image": "localhost/pause:3.2",
        "imageID": "",
        "containerID": f"containerd://{restarts}",
        "ready": ready,
        "restartCount": restarts,
        "state": state,
        "lastState": last or {},
    }


def ended(code, reason="Error", message=""):
    times = {"startedAt": "2030-01-01T00:00:00Z", "finishedAt": "2030-01-01T00:00:01Z"}
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, **times}}


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
PODS = {
    "image": ({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, {}, 0, "ImagePull", "no such image"),
    "model": (
        BACK_OFF,
        ended(2, message="starting\nerror: model file /x.gguf doesn't exist"),
        2,
        "ModelNotFound",
        "/x.gguf",
    ),
    "memory": (BACK_OFF, ended(137, "OOMKilled"), 1, "OutOfMemory", "2Gi"),
    "crash": (BACK_OFF, ended(139), 1, "Crashed", "139"),
}


@pytest.mark.parametrize("fault", sorted(PODS))
def test_a_fault_of_a_pod_is_told_in_words(api, operator, fault):
    state, last, restarts, reason, words = PODS[fault]
    name = f"pod-{fault}"
    api.service(name)
    api.complete(name)
    pod(api, name, name, {"phase": "Pending", "containerStatuses": [container_status(state, last, restarts)]})
    condition = eventually(
        lambda: c if (c := api.condition(name, "ModelReady")).get("reason") == reason else None, f"{reason} is told"
    )
    assert condition["status"] == "False"
    assert words in condition["message"]
    assert api.condition(name, "Ready")["status"] == "False"
    api.delete("Pod", name)
    eventually(lambda: api.condition(name, "ModelReady").get("reason") == "NoPods", "the status follows")


def test_a_pod_that_fits_no_node_is_told(api, operator):
    api.service("nowhere")
    api.complete("nowhere")
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod(api, "nowhere", "nowhere", {"phase": "Pending", "conditions": [unschedulable]})
    condition = eventually(
        lambda: c if (c := api.condition("nowhere", "Scheduled")).get("status") == "False" else None, "it is told"
    )
    assert message in condition["message"]


class FakePod(ThreadingHTTPServer):
    """The admin port of one pod, on an address of its own."""

    def __init__(self, address, token):
        super().__init__((address, 9000), FakeAdmin)
        self.knobs, self.revision, self.token, self.patches = Knobs(), 1, token, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class FakeAdmin(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            self.send_error(401)
            return
        wire = knobs_to_wire(self.server.knobs)
        document = {"revision": self.server.revision, "epoch": self.server.revision - 1, "knobs": wire}
        text = dumps({**document, "status": dict.fromkeys(wire, "applied"), "schemaVersion": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_PATCH(self):
        patch = loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] == f"Bearer {self.server.token}":
            self.server.knobs = self.server.knobs.updated(patch["knobs"])
            self.server.revision += 1
            self.server.patches += 1
        self.do_GET()

    def log_message(self, *args):
        pass


@pytest.fixture
def fleet(api, operator):
    """A service with two pods whose admin ports are in this process."""
    owner = api.service("fleet", batching={"maxNumSeqs": 16})
    hash_now = spec_of(api.complete("fleet")["Deployment"])["metadata"]["annotations"][RESTART_HASH]
    token = admin_token(KEY.encode(), owner["metadata"]["uid"])
    pods = [FakePod(address, token) for address in ("127.77.0.1", "127.77.0.2")]
    for i, server in enumerate(pods):
        status = {
            "phase": "Running",
            "podIP": server.server_address[0],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [container_status({"running": {"startedAt": "2030-01-01T00:00:00Z"}}, ready=True)],
        }
        pod(api, f"fleet-{i}", "fleet", status, **{RESTART_HASH: hash_now})
    yield pods
    for i, server in enumerate(pods):
        api.delete("Pod", f"fleet-{i}")
        server.shutdown()
        server.server_close()
    api.delete("InferenceService", "fleet")


def test_knobs_reach_running_pods_and_are_kept_there(api, operator, fleet):
    eventually(lambda: all(p.knobs.max_num_seqs == 16 for p in fleet), "new pods get the spec's knobs")
    eventually(lambda: api.condition("fleet", "KnobsSynced").get("status") == "True", "the status says so")
    template = spec_of(api.get("Deployment", "fleet"))
    api.merge("InferenceService", "fleet", {"spec": {"batching": {"strategy": "static", "maxNumSeqs": 4}}})
    eventually(lambda: {p.knobs.strategy.value for p in fleet} == {"static"}, "an edit reaches every pod")
    assert {p.knobs.max_num_seqs for p in fleet} == {4}
    assert spec_of(api.get("Deployment", "fleet")) == template
    eventually(lambda: api.get("InferenceService", "fleet")["status"]["pods"]["fleet-0"]["state"] == "Synced", "per pod too")
    fleet[0].knobs = fleet[0].knobs.updated({"maxNumSeqs": 2})  # behind the operator's back
    eventually(lambda: fleet[0].knobs.max_num_seqs == 4, "the next look puts it right")
    patches = [p.patches for p in fleet]
    time.sleep(6)
    assert [p.patches for p in fleet] == patches
    fleet[1].token = "changed"
    eventually(lambda: api.condition("fleet", "KnobsSynced").get("reason") == "Refused", "a pod that refuses is told")
    assert "fleet-1" in api.condition("fleet", "KnobsSynced")["message"]
    eventually(lambda: any(e["reason"] == "KnobsRefused" for e in api.events("fleet")), "an event tells it")


def test_the_api_server_may_go_away_and_come_back(api, operator, tmp_path):
    """A proxy drops every connection: watches and calls reconnect, and what happened meanwhile is made up for."""
    operator.kill()
    document = yaml.safe_load(Path(api.kubeconfig).read_text())
    server = urlparse(document["clusters"][0]["cluster"]["server"])
    proxy = Proxy(server.hostname, server.port or 443)
    document["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    behind = Operator(api, tmp_path / "behind.log", kubeconfig)
    try:
        api.service("outage")
        api.complete("outage")
        proxy.down()
        api.merge("InferenceService", "outage", {"spec": {"batching": {"strategy": "dynamic"}}})
        api.delete("Service", "outage")
        time.sleep(3)
        assert behind.running
        proxy.up()
        eventually(lambda: knobs_of(api, "outage")["strategy"] == "dynamic", "the edit is seen")
        eventually(lambda: api.get("Service", "outage"), "the Service is back")
        assert behind.running
        assert behind.stop() == 0
    finally:
        if behind.running:
            behind.kill()
        proxy.down()
        operator.start()


WRITING = ["get", "list", "watch", "create", "patch"]
# exactly what the operator needs in a namespace that it serves; Secrets are written and never read
RULES = [
    {"apiGroups": ["paceline.io"], "resources": ["inferenceservices"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["paceline.io"], "resources": ["inferenceservices/status"], "verbs": ["patch"]},
    *(
        {"apiGroups": [group], "resources": resources, "verbs": WRITING}
        for group, resources in (
            ("", ["serviceaccounts", "configmaps", "services"]),
            ("apps", ["deployments"]),
        )
    ),
    *(
        {"apiGroups": [group], "resources": resources, "verbs": ["get", "list", "watch", "create", "patch", "delete"]}
        for group, resources in (
            ("", ["persistentvolumeclaims"]),
            ("policy", ["poddisruptionbudgets"]),
            ("networking.k8s.io", ["networkpolicies"]),
            ("autoscaling", ["horizontalpodautoscalers"]),
            ("batch", ["jobs"]),
            ("keda.sh", ["scaledobjects"]),
            ("monitoring.coreos.com", ["podmonitors", "prometheusrules"]),
            ("inference.networking.k8s.io", ["inferencepools"]),
            ("gateway.networking.k8s.io", ["httproutes"]),
        )
    ),
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "get", "patch"]},
]


# in its own namespace: the Lease, and the Secret of the webhook's certificates (no rule can name what isn't there yet)
OWN_RULES = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["paceline-webhook"], "verbs": ["get", "patch"]},
]
# on the whole cluster, by the name of the webhook's configuration
CLUSTER_RULES = [
    {"apiGroups": ["paceline.io"], "resources": ["inferenceclasses"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["paceline.io"], "resources": ["inferenceclasses/status"], "verbs": ["patch"]},
    {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": ["validatingwebhookconfigurations"],
        "verbs": ["get", "patch"],
    },
]
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def _rights(rules):
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_the_chart_grants_these_rights_and_no_others():
    text = (CHART / "templates" / "rbac.yaml").read_text()
    rules = text.partition("\nrules:\n")[2].partition("{{-")[0]
    assert _rights(yaml.safe_load(rules)) == _rights(RULES)


@pytest.fixture
def limited(api, tmp_path):
    """A kubeconfig of an account that has these rights and nothing else; everything of it has the namespace's name."""
    api.create("ServiceAccount", {"metadata": {"name": "limited"}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = api.call("POST", api.path("ServiceAccount", "limited") + "/token", request)
    group, name = "/apis/rbac.authorization.k8s.io/v1", api.namespace
    roles, meta = f"{group}/namespaces/{name}", {"metadata": {"name": name}}
    if answer is None or api.call("POST", f"{roles}/roles", meta | {"rules": RULES + OWN_RULES}) is None:
        pytest.skip("this API server has no RBAC")
    bound = {"subjects": [{"kind": "ServiceAccount", "name": "limited", "namespace": name}]} | meta
    reference = {"apiGroup": "rbac.authorization.k8s.io", "name": name}
    named = [*CLUSTER_RULES[:2], CLUSTER_RULES[2] | {"resourceNames": [name]}]
    api.call("POST", f"{roles}/rolebindings", bound | {"roleRef": reference | {"kind": "Role"}})
    api.call("POST", f"{group}/clusterroles", meta | {"rules": named})
    api.call("POST", f"{group}/clusterrolebindings", bound | {"roleRef": reference | {"kind": "ClusterRole"}})
    api.call("POST", HOOKS, meta | {"webhooks": []})
    document = yaml.safe_load(Path(api.kubeconfig).read_text())
    document["users"] = [{"name": user["name"], "user": {"token": answer["status"]["token"]}} for user in document["users"]]
    path = tmp_path / "limited.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    yield path
    for collection in (f"{group}/clusterroles", f"{group}/clusterrolebindings", HOOKS):
        api.call("DELETE", f"{collection}/{name}")


def test_exactly_these_rights_are_enough(api, operator, limited, tmp_path):
    """With an election, the webhook and its certificates, and classes."""
    operator.kill()
    log = tmp_path / "limited.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    webhook = {"PORT": port, "HOST": "127.0.0.1", "NAMES": "127.0.0.1", "CONFIG": api.namespace}
    settings = {f"PACELINE_WEBHOOK_{name}": value for name, value in webhook.items()}
    own = {"PACELINE_LEADER_ELECTION": "true", "PACELINE_OPERATOR_NAMESPACE": api.namespace}
    modest = Operator(api, log, limited, **settings, **own)
    try:
        api.service("modest", unknown=1)
        eventually(lambda: any(e["reason"] == "InvalidSpec" for e in api.events("modest")), "events are written")
        api.merge("InferenceService", "modest", {"spec": {"unknown": None}})
        api.complete("modest")
        api.delete("Service", "modest")
        eventually(lambda: api.get("Service", "modest"), "drift is corrected")
        eventually(lambda: modest.answers("/readyz"), "it is ready")
        assert "leads as" in log.read_text()
        assert "the webhook shows a certificate" in log.read_text()
        assert "orbidden" not in log.read_text()
        assert modest.stop() == 0
    finally:
        if modest.running:
            modest.kill()
        operator.start()


def test_deletion_leaves_nothing_even_without_the_operator(api, operator, collects_garbage):
    for name in ("gone", "gone-alone"):
        api.service(name)
        api.complete(name)
    api.delete("InferenceService", "gone")
    eventually(lambda: api.children("gone") == {}, "nothing is left")
    operator.kill()
    api.delete("InferenceService", "gone-alone")
    eventually(lambda: api.get("InferenceService", "gone-alone") is None, "deletion doesn't wait for the operator")
    eventually(lambda: api.children("gone-alone") == {}, "nothing is left")
    operator.start()


def test_a_service_made_again_at_once_gets_children_of_its_own(api, operator, collects_garbage):
    api.service("again")
    api.complete("again")
    api.delete("InferenceService", "again")
    owner = eventually(lambda: _try(lambda: api.service("again")), "it can be made again")

    def owned():
        found = api.children("again")
        uids = {c["metadata"]["ownerReferences"][0]["uid"] for c in found.values()}
        return len(found) == len(CHILDREN) and uids == {owner["metadata"]["uid"]}

    eventually(owned, "the new service has children of its own")


def _try(action):
    try:
        return action()
    except client.ApiException:
        return None


def test_names_at_the_limit_work(api, operator):
    for name in ("a" * 63, "a" * 200, "3b.model"):
        api.service(name)
        eventually(lambda name=name: api.condition(name, "SpecValid").get("status") == "True", f"{name[:20]}… is taken")
        assert api.condition(name, "Ready").get("reason") != "Rejected", api.condition(name, "Ready")


def test_sigterm_ends_it_cleanly(api, operator):
    assert operator.stop() == 0
    operator.start()


def test_a_watch_that_ends_for_good_ends_the_operator_with_one_line(tmp_path):
    """The CRD goes while the operator runs: whoever started it starts it again, and it waits for the CRD then."""
    log = tmp_path / "operator.log"
    with embedded_server(tmp_path / "api") as server:
        alone = Api(server.kubeconfig)
        alone.prepare()
        operator = Operator(alone, log)
        try:
            eventually(operator.ready, "the operator has started")
            alone.service("chat")
            alone.complete("chat")
            alone.call("DELETE", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}")
            assert operator.wait() == 2
        finally:
            operator.kill()
    *_, last = log.read_text().splitlines()
    assert last.startswith("error: a watch has ended for good: ")
    assert "Traceback" not in log.read_text()
