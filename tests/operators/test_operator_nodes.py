"""Rollouts with real pods on the cluster that KUBECONFIG names: a bad revision, memory, an HPA, an operator that is killed.

The pods run a stand-in that answers probes; what is tested is what the operator makes of the cluster's own controllers.
"""

import contextlib
import os
import sys
import time
import uuid
from pathlib import Path

import pytest
from operator_process import REAL, operating

from patience import eventually

SERVERS = REAL
pytestmark = pytest.mark.nodes

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
def operator(api, tmp_path_factory):
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    with operating(api, log, PACELINE_ALLOW_TEMPLATE="any", PACELINE_RUNTIME_IMAGE=IMAGE) as found:
        yield found


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
        eventually(lambda: is_ready(api, "revision"), "it is ready")
        before = {pod["metadata"]["name"] for pod in pods(api, "revision")}
        api.merge("InferenceService", "revision", {"spec": {"template": overlay(image="localhost/nowhere:1")}})
        eventually(lambda: reason(api, "revision", "Progressing") == "Blocked", "the rollout is blocked")
        told = api.condition("revision", "Progressing")["message"]
        assert "2 pods of the earlier template keep serving" in told
        assert "ImagePull" in told
        assert "localhost/nowhere:1" in told
        assert before <= {pod["metadata"]["name"] for pod in pods(api, "revision")}
        assert any(e["reason"] == "RolloutBlocked" and e["type"] == "Warning" for e in api.events("revision"))
        api.merge("InferenceService", "revision", {"spec": {"template": overlay(MENDED="1")}})
        eventually(lambda: is_ready(api, "revision"), "a mended spec goes on")
        eventually(lambda: reason(api, "revision", "Progressing") == "Complete", "to the end")


def test_memory_that_runs_out_is_told_in_bytes_and_never_ready(api, operator):
    with service(api, "hungry", replicas=1, template=overlay(HUNGRY)):
        eventually(lambda: reason(api, "hungry", "Ready") == "OutOfMemory", "it is told")
        assert "64Mi (67108864 bytes)" in api.condition("hungry", "Ready")["message"]
        for _ in range(20):
            assert api.condition("hungry", "Ready")["status"] == "False"
            time.sleep(0.5)
        assert sum(e["reason"] == "OutOfMemory" for e in api.events("hungry")) == 1


def test_a_device_that_no_node_has_is_told(api, operator):
    accelerator = {"resource": "nvidia.com/gpu", "count": 2, "product": "NVIDIA-H100-80GB-HBM3"}
    with service(api, "device", replicas=1, accelerator=accelerator):
        eventually(lambda: reason(api, "device", "Scheduled") == "Unschedulable", "it is told")
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
        eventually(lambda: api.get("InferenceService", "auto")["spec"]["replicas"] == 2, "it scales the service")
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
        eventually(lambda: is_ready(api, "killed"), "it is ready")
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
        eventually(lambda: is_ready(api, "whole"), "it is ready")
        (pod,) = pods(api, "whole")
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsUser"] == 10_001
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/dev/shm", "/var/cache/paceline"}
        assert len(pod["spec"]["topologySpreadConstraints"]) == 2


ROOT = Path(__file__).parents[2]


def whole_runtime():
    """A template that runs this very checkout's runtime."""
    wanted = [*MOUNTS, "/etc/ssl", sys.base_prefix, sys.prefix, str(ROOT)]
    paths = [p for p in dict.fromkeys(wanted) if Path(p).exists() and not any(Path(o) in Path(p).parents for o in wanted)]
    container = {
        "name": "runtime",
        "imagePullPolicy": "Never",
        "command": [sys.executable, "-m", "paceline_runtime"],
        "env": [
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
            {"name": "PYTHONPATH", "value": os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "kernels"))},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
        ],
        "volumeMounts": [{"name": f"host{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(paths)],
    }
    volumes = [{"name": f"host{i}", "hostPath": {"path": path}} for i, path in enumerate(paths)]
    root = {"runAsNonRoot": False, "runAsUser": 0}  # this machine's Python may lie under root's home
    return {"spec": {"securityContext": root, "containers": [container], "volumes": volumes}}


@pytest.fixture
def claim(api, tmp_path):
    """A claim on a folder of this machine that holds one model in the hub's layout."""
    commit = "a" * 40
    model = tmp_path / "hub" / "models--org--tiny"
    files = {"refs/main": commit, f"snapshots/{commit}/config.json": "{}", f"snapshots/{commit}/model.safetensors": "w" * 64}
    for name, text in files.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(text)
    name = f"opcore-{uuid.uuid4().hex[:8]}"
    size = {"storage": "1Gi"}
    volume = {
        "capacity": size,
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(tmp_path)},
        "storageClassName": "",
    }
    api.call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume})
    wanted = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name, "resources": {"requests": size}}
    claims = f"/api/v1/namespaces/{api.namespace}/persistentvolumeclaims"
    api.call("POST", claims, {"metadata": {"name": name}, "spec": wanted})
    yield name
    api.call("DELETE", f"{claims}/{name}")
    api.call("DELETE", f"/api/v1/persistentvolumes/{name}")


def test_a_model_is_fetched_before_any_pod_starts(api, operator, claim):
    big = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "10m", "memory": "64Mi"}}
    cache, missing = {"claim": claim, "preload": True}, {"uri": "hf://org/missing"}
    with service(api, "fetched", replicas=1, template=whole_runtime(), resources=big, cache=cache, model=missing):
        eventually(lambda: reason(api, "fetched", "Ready") == "ModelNotFound", "a model that isn't there is told", 120)
        assert "spec.model.uri" in api.condition("fetched", "Ready")["message"]
        assert api.get("Deployment", "fetched")["spec"]["replicas"] == 0
        api.merge("InferenceService", "fetched", {"spec": {"model": {"uri": "hf://org/tiny"}}})

        def is_there():
            return api.get("InferenceService", "fetched")["status"].get("cache") == {"state": "Ready"}

        eventually(is_there, "the model is in the cache", 120)
        eventually(lambda: api.get("Deployment", "fetched")["spec"]["replicas"] == 1, "then pods start")
        jobs = api.call("GET", f"/apis/batch/v1/namespaces/{api.namespace}/jobs")["items"]
        assert len([job for job in jobs if "deletionTimestamp" not in job["metadata"]]) == 1  # the earlier one is gone
