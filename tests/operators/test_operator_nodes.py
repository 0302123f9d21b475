"""Rollouts with real pods on the cluster that KUBECONFIG names: a bad revision, memory, an HPA, an operator that is killed.

The pods run a stand-in that answers probes; what is tested is what the operator makes of the cluster's own controllers.
"""

import contextlib
import os
import time

import pytest
from operator_process import Api, Operator, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="needs a cluster with nodes"),
]

# the host's files, read-only: a container image with a Python in it, where no registry is
IMAGE = "localhost/hostfs:1"
SERVER = (
    "import http.server as h\n"
    "class A(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(s):\n"
    "        s.send_response(200); s.end_headers()\n"
    "    def log_message(s, *a): pass\n"
    "h.HTTPServer(('', 8000), A).serve_forever()\n"
)
HUNGRY = "x = []\nwhile True: x.append(bytearray(8 * 2**20))\n"
MOUNTS = ["/usr", "/lib", "/lib64", "/bin"]


def overlay(code=SERVER, image=IMAGE, **variables):
    """A template whose runtime container is a small Python program."""
    volumes = [{"name": f"host{i}", "hostPath": {"path": path}} for i, path in enumerate(MOUNTS)]
    mounts = [{"name": f"host{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(MOUNTS)]
    container = {
        "name": "runtime",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["/usr/bin/python3", "-c", code],
        "args": [],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": mounts,
    }
    spec = {"terminationGracePeriodSeconds": 1, "volumes": volumes, "containers": [container]}
    return {"spec": spec}


@pytest.fixture(scope="module")
def api():
    found = Api(os.environ["KUBECONFIG"])
    found.prepare()
    yield found
    found.close()


@pytest.fixture(scope="module")
def operator(api, tmp_path_factory):
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    found = Operator(api, log, PACELINE_ALLOW_TEMPLATE="any", PACELINE_RUNTIME_IMAGE=IMAGE)
    eventually(found.ready, "the operator has started")
    yield found
    found.stop()
    print(log.read_text()[-8000:])


@contextlib.contextmanager
def service(api, name, **spec):
    small = {"limits": {"cpu": "200m", "memory": "64Mi"}, "requests": {"cpu": "10m", "memory": "16Mi"}}
    api.service(name, **({"nodeSelector": {}, "template": overlay(), "resources": small} | spec))
    yield
    api.delete("InferenceService", name)


def is_ready(api, name):
    item = api.get("InferenceService", name)
    ready = api.condition(name, "Ready")
    return ready.get("status") == "True" and ready["observedGeneration"] == item["metadata"]["generation"]


def reason(api, name, kind):
    return api.condition(name, kind).get("reason")


def pods(api, name):
    return [p for p in api.items("Pod") if p["metadata"]["labels"].get("paceline.io/service") == name]


def test_a_bad_revision_stops_and_the_old_pods_serve(api, operator):
    with service(api, "revision", replicas=2):
        eventually(lambda: is_ready(api, "revision"), "it is ready", 90)
        before = {pod["metadata"]["name"] for pod in pods(api, "revision")}
        api.merge("InferenceService", "revision", {"spec": {"template": overlay(image="localhost/nowhere:1")}})
        eventually(lambda: reason(api, "revision", "Progressing") == "Blocked", "the rollout is blocked", 60)
        told = api.condition("revision", "Progressing")["message"]
        assert "2 pods of the earlier template keep serving" in told
        assert "ImagePull" in told
        assert "localhost/nowhere:1" in told
        assert before <= {pod["metadata"]["name"] for pod in pods(api, "revision")}
        assert any(e["reason"] == "RolloutBlocked" and e["type"] == "Warning" for e in api.events("revision"))
        api.merge("InferenceService", "revision", {"spec": {"template": overlay(MENDED="1")}})
        eventually(lambda: is_ready(api, "revision"), "a mended spec goes on", 90)
        eventually(lambda: reason(api, "revision", "Progressing") == "Complete", "to the end", 90)


def test_memory_that_runs_out_is_told_in_bytes_and_never_ready(api, operator):
    with service(api, "hungry", replicas=1, template=overlay(HUNGRY)):
        eventually(lambda: reason(api, "hungry", "Ready") == "OutOfMemory", "it is told", 90)
        assert "64Mi (67108864 bytes)" in api.condition("hungry", "Ready")["message"]
        for _ in range(20):
            assert api.condition("hungry", "Ready")["status"] == "False"
            time.sleep(0.5)
        assert sum(e["reason"] == "OutOfMemory" for e in api.events("hungry")) == 1


def test_a_device_that_no_node_has_is_told(api, operator):
    accelerator = {"resource": "nvidia.com/gpu", "count": 2, "product": "NVIDIA-H100-80GB-HBM3"}
    with service(api, "device", replicas=1, accelerator=accelerator):
        eventually(lambda: reason(api, "device", "Scheduled") == "Unschedulable", "it is told", 60)
        told = api.condition("device", "Scheduled")["message"]
        assert "NVIDIA-H100-80GB-HBM3" in told
        assert "spec.accelerator" in told
        assert api.get("Deployment", "device")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_real_autoscaler_scales_the_service_and_nobody_fights(api, operator):
    group = api.call("GET", "/apis/autoscaling")
    version = next(v["version"] for v in group["versions"] if v["version"] in ("v2", "v2beta2"))
    scaling = {"minReplicas": 2, "maxReplicas": 3, "cpuUtilization": 80}
    with service(api, "auto", replicas=1, scaling=scaling):
        path = f"/apis/autoscaling/{version}/namespaces/{api.namespace}/horizontalpodautoscalers/auto"
        eventually(lambda: api.call("GET", path), "the autoscaler is there")
        # below its minimum it scales without any metric
        eventually(lambda: api.get("InferenceService", "auto")["spec"]["replicas"] == 2, "it scales the service", 90)
        eventually(lambda: api.get("Deployment", "auto")["spec"]["replicas"] == 2, "the Deployment follows")
        generation = api.get("Deployment", "auto")["metadata"]["generation"]
        time.sleep(20)  # longer than the autoscaler's own period
        assert api.get("Deployment", "auto")["metadata"]["generation"] == generation
        assert api.get("InferenceService", "auto")["spec"]["replicas"] == 2
        assert reason(api, "auto", "ChildrenApplied") == "Applied"
        api.merge("InferenceService", "auto", {"spec": {"scaling": None}})
        eventually(lambda: api.call("GET", path) is None, "it goes when it is switched off")


def test_a_rollout_goes_on_after_the_operator_was_killed(api, operator):
    with service(api, "killed", replicas=2):
        eventually(lambda: is_ready(api, "killed"), "it is ready", 90)
        api.merge("InferenceService", "killed", {"spec": {"template": overlay(ROLLED="1"), "batching": {"maxNumSeqs": 9}}})
        eventually(lambda: "ROLLED" in str(api.get("Deployment", "killed")["spec"]), "the rollout has begun")
        operator.kill()
        time.sleep(2)
        operator.start()
        eventually(lambda: reason(api, "killed", "Progressing") == "Complete" and is_ready(api, "killed"), "it ends", 120)
        assert all("ROLLED" in str(pod["spec"]) for pod in pods(api, "killed") if "deletionTimestamp" not in pod["metadata"])
        assert '"maxNumSeqs": 9' in api.get("ConfigMap", "killed-knobs")["data"]["knobs.json"]
        assert api.get("Deployment", "killed")["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "2"


def test_the_kubelet_takes_the_whole_pod_as_it_is(api, operator):
    """Restricted security, shared memory, spread: the pod as rendered runs."""
    with service(api, "whole", replicas=1, sharedMemory="8Mi"):
        eventually(lambda: is_ready(api, "whole"), "it is ready", 90)
        (pod,) = pods(api, "whole")
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsUser"] == 10_001
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/dev/shm", "/var/cache/paceline"}
        assert len(pod["spec"]["topologySpreadConstraints"]) == 2
