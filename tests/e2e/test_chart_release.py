"""The life of a release on a real API server: install, upgrade, rollback, uninstall, and install again, by real helm.

The API server is the test's own (KUBEBUILDER_ASSETS names its programs), so that CRDs can come and go.
"""

import contextlib
import os
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml
from bench.fleet_plane import ApiError, Client, RealPlane

from kubetools import helm, tools

pytestmark = [
    pytest.mark.realcontrolplane,
    pytest.mark.timeout(300),
    pytest.mark.skipif("KUBEBUILDER_ASSETS" not in os.environ, reason="KUBEBUILDER_ASSETS is not set"),
]
CHART = Path(__file__).parents[2] / "charts" / "paceline"
SPACE = "paceline-system"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SERVICES = "/apis/paceline.io/v1alpha1/namespaces/default/inferenceservices"
DEPLOYMENT = f"/apis/apps/v1/namespaces/{SPACE}/deployments/paceline"
KEY = f"/api/v1/namespaces/{SPACE}/secrets/paceline-key"


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    with RealPlane(tmp_path_factory.mktemp("plane"), Path(os.environ["KUBEBUILDER_ASSETS"])) as plane:
        yield plane


@pytest.fixture(scope="module")
def api(plane):
    with Client(plane.kubeconfig) as client:
        yield client


@pytest.fixture
def release(plane, api):
    """helm on that server; what a test leaves behind is removed, CRDs too."""

    def run(*args, check=True):
        old = ("--server-side=false",) if args[0] in ("install", "upgrade", "rollback") else ()  # before Kubernetes 1.25
        env = os.environ | {"KUBECONFIG": str(plane.kubeconfig)}
        return helm(*args, *old, "--namespace", SPACE, env=env, check=check)

    yield run
    run("uninstall", "paceline", check=False)
    for crd in api.call("GET", CRDS)["items"]:
        api.call("DELETE", f"{CRDS}/{crd['metadata']['name']}")
    with contextlib.suppress(ApiError):
        api.call("DELETE", KEY)


def install(release, *options):
    return release("install", "paceline", CHART, "--create-namespace", "--set", "imageRegistry=reg.example.com", *options)


def gone(api, path):
    try:
        api.call("GET", path)
    except ApiError as error:
        return "404" in str(error)
    return False


def service():
    meta = {"name": "chat", "namespace": "default"}
    return {
        "apiVersion": "paceline.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": meta,
        "spec": {"model": {"uri": "hf://a/b"}},
    }


def properties(api):
    crd = api.call("GET", f"{CRDS}/inferenceservices.paceline.io")
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]


def test_a_release_lives_and_its_services_outlive_it(release, api):
    said = install(release).stdout
    assert "kind: InferenceService" in said
    api.call("POST", SERVICES, service())
    key = api.call("GET", KEY)["data"]

    release("upgrade", "paceline", CHART, "--reuse-values", "--set", "replicas=3,logLevel=DEBUG")
    assert api.call("GET", DEPLOYMENT)["spec"]["replicas"] == 3
    assert api.call("GET", KEY)["data"] == key  # another key would be another token for every pod

    release("rollback", "paceline", "1")
    assert api.call("GET", DEPLOYMENT)["spec"]["replicas"] == 2
    assert api.call("GET", KEY)["data"] == key

    release("uninstall", "paceline")
    assert gone(api, DEPLOYMENT)
    assert gone(api, "/apis/rbac.authorization.k8s.io/v1/clusterroles/paceline")
    assert api.call("GET", f"{SERVICES}/chat")["spec"]["model"]["uri"] == "hf://a/b"

    install(release)  # takes over what was kept
    assert api.call("GET", KEY)["data"] == key
    assert api.call("GET", f"{SERVICES}/chat")


def test_an_upgrade_brings_new_fields_of_the_crds(release, api, tmp_path):
    old = tmp_path / "old"
    _older_chart(old)
    release("install", "paceline", old, "--create-namespace", "--set", "imageRegistry=reg.example.com")
    assert "batching" not in properties(api)
    release("upgrade", "paceline", CHART, "--reuse-values")
    assert "batching" in properties(api)


def _older_chart(folder):
    """Write the chart as it was before InferenceServices had a field."""
    for path in (p for p in CHART.rglob("*") if p.is_file()):
        target = folder / path.relative_to(CHART)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    path = folder / "files" / "crds" / "inferenceservices.paceline.io.yaml"
    crd = yaml.safe_load(path.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["batching"]
    path.write_text(yaml.safe_dump(crd))


def test_users_of_a_namespace_get_rights_on_its_services(release, api):
    install(release)
    for ours, theirs, verb in (("view", "view", "get"), ("edit", "edit", "patch"), ("edit", "admin", "delete")):
        role = api.call("GET", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/paceline-{ours}")
        assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{theirs}"] == "true"
        assert verb in role["rules"][0]["verbs"]


def test_the_rendered_install_works_without_helm(plane, api, release, tmp_path):
    path = tmp_path / "install.yaml"
    path.write_text(runpy.run_path(str(CHART.parent / "install_yaml.py"))["render"]("r", "--kube-version", "1.20.2"))

    def kubectl(*args):
        command = [tools() / "kubectl", "--kubeconfig", plane.kubeconfig, *args]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    kubectl("apply", "-f", path)
    assert api.call("GET", DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["image"].startswith(
        "r/paceline-operator:"
    )
    assert properties(api)["batching"]
    kubectl("apply", "-f", path)
    # without a namespace controller a namespace never goes
    kubectl("delete", "--wait=false", "-f", path)
    assert gone(api, DEPLOYMENT)
