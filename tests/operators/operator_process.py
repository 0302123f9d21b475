"""What the cluster tests share: the real operator as a process, a plain client, and a proxy that can go down."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config
from operator_kit import KEY

from patience import eventually

GROUP, VERSION, PLURAL = "paceline.io", "v1alpha1", "inferenceservices"
CHILDREN = ["ServiceAccount", "Secret", "ConfigMap", "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment"]
CRDS = sorted((Path(__file__).parents[2] / "crds").glob("*.yaml"))
_READERS = {
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Secret": ("/api/v1", "secrets"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Pod": ("/api/v1", "pods"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Event": ("/api/v1", "events"),
    "InferenceService": (f"/apis/{GROUP}/{VERSION}", PLURAL),
}

# what a module's SERVERS may be, other than the embedded one: each of its tests with an `api` runs once on each
_NAMED = "KUBECONFIG" in os.environ
_REAL = pytest.param("real", marks=[pytest.mark.cluster, pytest.mark.skipif(not _NAMED, reason="needs a cluster")])
BOTH, REAL = ["embedded", *([_REAL] if _NAMED else [])], [_REAL]


class Api:
    """JSON in, JSON out, for one namespace of the cluster that a kubeconfig names."""

    def __init__(self, kubeconfig):
        self.kubeconfig = kubeconfig
        self._client = config.new_client_from_config(config_file=str(kubeconfig))
        self.namespace = f"paceline-op-{uuid.uuid4().hex[:8]}"
        versions = [v["groupVersion"] for v in self.call("GET", "/apis/policy")["versions"]]
        served = "policy/v1" if "policy/v1" in versions else "policy/v1beta1"
        self._readers = _READERS | {"PodDisruptionBudget": (f"/apis/{served}", "poddisruptionbudgets")}

    def call(self, verb, path, body=None, content_type="application/json", missing=None):
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = self._client.param_serialize(verb, path, {}, [], headers, body, auth_settings=["BearerToken"])
        answer = self._client.call_api(*request, _request_timeout=60)
        text = answer.read()
        if answer.status == 404:
            return missing
        if answer.status >= 300:
            raise client.ApiException(status=answer.status, reason=text.decode())
        return yaml.safe_load(text)

    def path(self, kind, name=""):
        root, plural = self._readers[kind]
        return f"{root}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def prepare(self):
        """Install the CRDs, make the namespace."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for crd in map(yaml.safe_load, (file.read_text() for file in CRDS)):
            name = crd["metadata"]["name"]
            if self.call("GET", f"{path}/{name}") is None:
                self.call("POST", path, crd)
            else:
                self.call("PATCH", f"{path}/{name}", crd, "application/merge-patch+json")
            plural = crd["spec"]["names"]["plural"]
            eventually(lambda at=plural: self.call("GET", f"/apis/{GROUP}/{VERSION}/{at}"), f"{name} is served")
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})

    def close(self):
        for item in self.items("InferenceService"):
            self.delete("InferenceService", item["metadata"]["name"])
        self.call("DELETE", f"/api/v1/namespaces/{self.namespace}")
        self._client.close()

    def items(self, kind):
        return self.call("GET", self.path(kind), missing={"items": []})["items"]

    def get(self, kind, name):
        return self.call("GET", self.path(kind, name))

    def create(self, kind, body):
        return self.call("POST", self.path(kind), body)

    def delete(self, kind, name):
        return self.call("DELETE", self.path(kind, name))

    def merge(self, kind, name, patch, subresource=""):
        return self.call("PATCH", self.path(kind, name) + subresource, patch, "application/merge-patch+json")

    def service(self, name, **spec):
        """Create an InferenceService whose pods never run: no replicas, and no node that would fit."""
        base = {"model": {"uri": "hf://org/model"}, "replicas": 0, "nodeSelector": {"paceline.io/nowhere": "true"}}
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": base | spec,
        }
        return self.create("InferenceService", body)

    def condition(self, name, kind):
        conditions = (self.get("InferenceService", name).get("status") or {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def children(self, name):
        """Return the children of a service that exist, by kind."""
        names = {"Secret": f"{name}-admin", "ConfigMap": f"{name}-knobs"}
        found = {kind: self.get(kind, names.get(kind, name)) for kind in CHILDREN}
        return {kind: item for kind, item in found.items() if item is not None}

    def complete(self, name):
        """Wait until all children are there and the status is about the newest spec."""

        def done():
            item = self.get("InferenceService", name)
            observed = (item.get("status") or {}).get("observedGeneration")
            return len(self.children(name)) == len(CHILDREN) and observed == item["metadata"]["generation"]

        eventually(done, f"{name} has all children and a status")
        return self.children(name)

    def events(self, name):
        return [e for e in self.items("Event") if e["involvedObject"].get("name") == name]


class Operator:
    """The operator as a process that serves one namespace."""

    def __init__(self, api, log, kubeconfig=None, program=("-m", "paceline_operator"), **environment):
        self._program = program
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.metrics_port = probe.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        self._env = clean | {
            "KUBECONFIG": str(kubeconfig or api.kubeconfig),
            "PACELINE_OPERATOR_KEY": KEY,
            "PACELINE_RUNTIME_IMAGE": "localhost/pause:3.2",
            "PACELINE_WATCH_NAMESPACES": api.namespace,
            "PACELINE_METRICS_PORT": str(self.metrics_port),
            "PACELINE_METRICS_HOST": "127.0.0.1",
            "PACELINE_RESYNC_INTERVAL": "5",
            "PACELINE_OPERATOR_NAMESPACE": "paceline-system",
            **environment,
        }
        self._log = log
        self.start()

    def start(self):
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, *self._program], env=self._env, stdout=log, stderr=log)

    def signal(self, number):
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self):
        """End it as the kernel would, in the middle of whatever it does."""
        self._process.kill()
        self._process.wait()

    def stop(self):
        """Ask it to end, once it can hear that; return the exit code."""
        eventually(self.answers, "the operator answers")
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(120)

    def wait(self):
        """Return the exit code once it has ended by itself."""
        return self._process.wait(120)

    @property
    def running(self):
        return self._process.poll() is None

    def calls(self, kind=""):
        """Return the calls to the API server so far, by verb; of one kind or of all."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = {}
        pattern = r'^paceline_operator_api_calls_total\{.*kind="(\w+)",verb="(\w+)"\} (\S+)$'
        for of, verb, value in re.findall(pattern, text, re.MULTILINE):
            if kind in ("", of):
                found[verb] = found.get(verb, 0) + float(value)
        return found

    def answers(self, path="/healthz"):
        """Return whether its health port says that all is well."""
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status == 200
        return False

    def ready(self):
        """Wait until it has listed everything."""
        with contextlib.suppress(OSError):
            return self.calls("Pod").get("GET", 0) >= 1  # the last kind that it lists
        return False


@contextlib.contextmanager
def operating(api, log, kubeconfig=None, **environment):
    """Run an operator until it has listed everything and then as long as it is needed; what it said is the test's output."""
    found = Operator(api, log, kubeconfig, **environment)
    try:
        eventually(found.ready, "the operator has started", 120)
        yield found
    finally:
        if found.running:
            found.stop()
        print(log.read_text()[-8000:])


class Proxy:
    """A TCP proxy before the API server; `down` drops every connection and refuses new ones."""

    def __init__(self, host, port):
        self._target = (host, port)
        self._open = set()
        self._listener = None
        self.port = 0
        self.up()

    def up(self):
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self):
        listener, self._listener = self._listener, None
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener):
        while True:
            try:
                incoming, _ = listener.accept()
                outgoing = socket.create_connection(self._target)
            except OSError:
                return
            for source, sink in ((incoming, outgoing), (outgoing, incoming)):
                self._open.add(source)
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()
        self._open.discard(source)
