"""The operator's chart, rendered by real helm."""

from pathlib import Path

import pytest
import yaml

from kubetools import helm
from paceline_operator import cluster, handlers
from paceline_operator.settings import load_settings

CHART = Path(__file__).parents[2] / "charts" / "paceline"
IMAGES = ("--set", "image.repository=reg/operator", "--set", "runtime.image=reg/runtime:1")


def render(*options):
    text = helm("template", "paceline", CHART, "--namespace", "paceline-system", *IMAGES, *options).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def one(documents, kind, name=None):
    (found,) = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    return found


def test_lint_is_clean():
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, *IMAGES).stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "set image.repository"),
        (["--set", "image.repository=x"], "set runtime.image"),
        ([*IMAGES, "--set", "replica=2"], "replica"),
        ([*IMAGES, "--set", "policy.template=sometimes"], "template"),
        ([*IMAGES, "--set", "metrics.port=99999"], "port"),
    ],
)
def test_bad_values_are_refused_with_their_name(options, said):
    refused = helm("template", "paceline", CHART, *options, check=False)
    assert refused.returncode != 0
    assert said in refused.stderr


def test_the_operator_reads_the_environment_that_the_chart_gives():
    options = ("--set", "watchNamespaces={a,b}", "--set", "policy.template=restricted", "--set", "policy.images={reg/*}")
    container = one(render(*options), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    environment = {e["name"]: e["value"] for e in container["env"] if e["name"] != "PACELINE_OPERATOR_KEY_FILE"}
    settings = load_settings(environment | {"PACELINE_OPERATOR_KEY": "k" * 48})
    assert settings.runtime_image == "reg/runtime:1"
    assert settings.watch_namespaces == ("a", "b")
    assert settings.allowed_images == ("reg/*",)
    assert settings.template_policy == "restricted"
    assert settings.metrics_port == 9090


def test_defaults_are_the_operators_own():
    container = one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    environment = {e["name"]: e["value"] for e in container["env"] if e["name"] != "PACELINE_OPERATOR_KEY_FILE"}
    given = load_settings(environment | {"PACELINE_OPERATOR_KEY": "k" * 48})
    default = load_settings({"PACELINE_OPERATOR_KEY": "k" * 48, "PACELINE_RUNTIME_IMAGE": "x"})
    for name in (
        "watch_namespaces",
        "allowed_model_schemes",
        "allowed_images",
        "template_policy",
        "allowed_service_accounts",
    ):
        assert getattr(given, name) == getattr(default, name), name


def test_the_role_covers_what_the_operator_touches():
    rules = one(render(), "ClusterRole", "paceline")["rules"]
    allowed = {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    for kind in cluster.KINDS.values():
        group = kind.group_version.rpartition("/")[0]
        own = () if kind.plural == "pods" else ("get", "create", "patch")
        assert {(group, kind.plural, verb) for verb in ("list", "watch", *own)} <= allowed
    assert {plural for _, plural in handlers._CHILDREN} <= {r for _, r, v in allowed if v == "watch"}
    assert not [entry for entry in allowed if entry[1] == "secrets" and entry[2] in ("get", "list", "watch", "*")]


def test_namespaced_mode_grants_nothing_beyond_its_namespaces():
    documents = render("--set", "watchNamespaces={a,b}")
    assert [d["metadata"]["namespace"] for d in documents if d["kind"] == "RoleBinding"] == ["a", "b"]
    assert not [d for d in documents if d["kind"] == "ClusterRoleBinding"]


def test_the_pod_is_restricted():
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
