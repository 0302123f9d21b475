"""The operator's chart, rendered by real helm: what it must and must not make."""

import os
import re

import pytest
import yaml
from chart_kit import CHART, FULL_VALUES, IMAGES, environment, notes, one, operator_container, refusal, render, rendered

from kubetools import helm
from paceline_operator.api_kinds import KINDS
from paceline_operator.policy import check_policy
from paceline_operator.settings import Settings, load_settings
from paceline_operator.spec import parse_service
from paceline_operator.webhook import PATH

GOLDENS = FULL_VALUES.parent
ALL = ("-f", str(FULL_VALUES))
NAMESPACES = ("--set", "watchNamespaces={a,b}")


@pytest.mark.parametrize("options", [(), ALL])
def test_lint_is_clean(options):
    said = helm("lint", "--strict", CHART, *IMAGES, *options).stdout
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize(("name", "options"), [("default", ()), ("full", ALL)])
def test_golden(name, options):
    """Run with UPDATE_GOLDENS=1 to write them anew, then read the diff. CRDs and dashboards are compared elsewhere."""
    text = rendered(*IMAGES, *options, "--set", "crds.install=false,metrics.dashboards.enabled=false")
    text = re.sub(r"^  key: \w{40,}$", "  key: RANDOM", text, flags=re.MULTILINE)
    path = GOLDENS / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text()


def test_every_object_is_labelled_and_placed():
    cluster_scoped = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ValidatingWebhookConfiguration")
    for document in render(*ALL):
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "paceline"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert ("namespace" in document["metadata"]) != (document["kind"] in cluster_scoped), document["metadata"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "set imageRegistry"),
        (("--set", "image.repository=x"), "or runtime.image"),
        ((*IMAGES, "--set", "replica=2"), "replica"),
        ((*IMAGES, "--set", "policy.template=sometimes"), "template"),
        ((*IMAGES, "--set", "metrics.port=99999"), "port"),
        ((*IMAGES, "--set", "metrics.port=0,metrics.podMonitor.enabled=true"), "metrics.port"),
        ((*IMAGES, "--set", "metrics.podMonitor.interval=often"), "interval"),
        ((*IMAGES, "--set", "watchNamespaces={Team_A}"), "watchNamespaces"),
        ((*IMAGES, "--set", "image.digest=latest"), "digest"),
        ((*IMAGES, "--set", "policy.modelSchemes={ftp}"), "modelSchemes"),
    ],
)
def test_bad_values_are_refused_with_their_name(options, said):
    assert said in refusal(*options)


def test_the_operator_reads_the_environment_that_the_chart_gives():
    found = load_settings(environment(render(*ALL)))
    assert found.runtime_image == "mirror.example.com/paceline-runtime@sha256:" + "b" * 64
    assert found.image_pull_secrets == ("runtime-pull",)
    assert found.watch_namespaces == ("team-a", "team-b")
    assert found.allowed_model_schemes == ("file",)
    assert found.allowed_images == ("mirror.example.com/custom-*",)
    assert found.template_policy == "restricted"
    assert found.allowed_service_accounts == ("team-model-reader",)
    assert (found.admin_timeout, found.admin_concurrency) == (7, 17)
    assert (found.workers, found.resync_interval) == (13, 77)
    assert found.metrics_port == 9876
    assert found.log_level == "DEBUG"
    assert (found.lease_duration, found.tuning_interval, found.tuning_workers) == (29, 37, 3)
    assert (found.use_classes, found.class_rollouts) == (True, 23)
    assert (found.leader_election, found.lease_name, found.operator_namespace) == (True, "flotilla", "paceline-system")


def test_every_setting_of_the_operator_can_be_given_and_no_other():
    known = {f.metadata["variable"] for f in Settings.__dataclass_fields__.values() if "variable" in f.metadata}
    given = {e["name"] for e in operator_container(render())["env"]} - {"PACELINE_OPERATOR_KEY_FILE"}
    assert {name for name in given if name.startswith("PACELINE_")} <= known
    managed = {e["name"] for e in operator_container(render("--set", "webhook.certificates=cert-manager"))["env"]}
    # addresses that the pod binds to are its own affair; the tuner's log is for replays on a developer's machine
    own = {"PACELINE_METRICS_HOST", "PACELINE_WEBHOOK_HOST", "PACELINE_TUNING_LOG"}
    assert known - given - managed <= own


def test_defaults_are_the_operators_own():
    given = load_settings(environment(render("--set", "webhook.enabled=false")))
    default = load_settings({"PACELINE_OPERATOR_KEY": "k" * 48, "PACELINE_RUNTIME_IMAGE": "x"})
    chosen = {"runtime_image", "metrics_port", "operator_namespace", "leader_election", "lease_name"}
    for name in set(Settings.__dataclass_fields__) - chosen:
        assert getattr(given, name) == getattr(default, name), name


def rights(rules):
    return {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}


def test_the_role_covers_what_the_operator_touches():
    allowed = rights(one(render(), "ClusterRole", "paceline")["rules"])
    for name, kind in KINDS.items():
        own = () if name == "Pod" else ("get", "create", "patch")
        needed = ("list", "watch", *own, *(("delete",) if kind.optional else ()))
        assert {(kind.group, kind.plural, verb) for verb in needed} <= allowed, name


def test_no_role_reads_secrets_or_has_a_wildcard():
    roles = [d for d in render(*ALL) if d["kind"] in ("ClusterRole", "Role")]
    for group, resource, verb in set().union(*(rights(role["rules"]) for role in roles)):
        assert "*" not in (group, resource, verb)
        assert resource != "secrets" or verb not in ("list", "watch")


def test_namespaced_mode_grants_nothing_beyond_its_namespaces():
    documents = render(*NAMESPACES)
    bound = [
        d["metadata"]["namespace"] for d in documents if d["kind"] == "RoleBinding" and d["roleRef"]["name"] == "paceline"
    ]
    assert bound == ["a", "b"]
    wide = {d["roleRef"]["name"] for d in documents if d["kind"] == "ClusterRoleBinding"}
    assert wide == {"paceline-classes", "paceline-webhook"}
    classes = rights(one(documents, "ClusterRole", "paceline-classes")["rules"])
    assert {resource for _, resource, _ in classes} == {"inferenceclasses", "inferenceclasses/status"}
    without = render(*NAMESPACES, "--set", "classes.enabled=false,webhook.enabled=false")
    assert not [d for d in without if d["kind"] == "ClusterRoleBinding"]


def test_the_operators_own_objects_are_granted_in_the_releases_namespace_alone():
    role = one(render(), "Role")
    assert role["metadata"]["namespace"] == "paceline-system"
    named = [rule for rule in role["rules"] if "resourceNames" in rule]
    assert [(rule["resources"], rule["resourceNames"], rule["verbs"]) for rule in named] == [
        (["secrets"], ["paceline-webhook"], ["get", "patch"])
    ]
    leases = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")}
    assert rights(r for r in role["rules"] if r not in named) == leases | {("", "secrets", "create")}
    assert rights(one(render("--set", "webhook.enabled=false"), "Role")["rules"]) == leases


def test_the_webhook_is_reached_where_its_certificate_says():
    documents = render()
    hooks = one(documents, "ValidatingWebhookConfiguration")
    name = hooks["metadata"]["name"]
    settings = load_settings(environment(documents))
    assert settings.webhook_config == name == "paceline.paceline-system"
    target = one(documents, "Service")
    for hook in hooks["webhooks"]:
        where = hook["clientConfig"]["service"]
        assert (where["name"], where["path"]) == (target["metadata"]["name"], PATH)
        assert f"{where['name']}.{where['namespace']}.svc" in settings.webhook_names
        assert hook["failurePolicy"] == "Ignore"
    assert {resource for hook in hooks["webhooks"] for resource in hook["rules"][0]["resources"]} == {
        "inferenceservices",
        "inferenceclasses",
    }
    ports = {port["name"]: port["containerPort"] for port in operator_container(documents)["ports"]}
    assert ports["webhook"] == settings.webhook_port


def test_the_webhook_is_asked_about_served_namespaces_only():
    (services, classes) = one(render(*NAMESPACES), "ValidatingWebhookConfiguration")["webhooks"]
    (expression,) = services["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["a", "b"]
    assert "namespaceSelector" not in classes
    # before 1.21 namespaces don't carry their name as a label, and a selector would find none
    old = one(render(*NAMESPACES, "--kube-version", "1.20.2"), "ValidatingWebhookConfiguration")
    assert not [hook for hook in old["webhooks"] if "namespaceSelector" in hook]


def test_cert_manager_makes_the_certificate_instead():
    documents = render("--set", "webhook.certificates=cert-manager")
    settings = load_settings(environment(documents))
    assert settings.webhook_cert_dir == "/etc/paceline/webhook"
    assert settings.webhook_config == ""
    certificate = one(documents, "Certificate")
    assert certificate["spec"]["dnsNames"] == list(settings.webhook_names)
    assert certificate["spec"]["issuerRef"]["name"] == one(documents, "Issuer")["metadata"]["name"]
    volumes = {v["name"]: v for v in one(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]}
    assert volumes["webhook"]["secret"]["secretName"] == certificate["spec"]["secretName"]
    assert not [d for d in documents if d["kind"] == "ClusterRole" and d["metadata"]["name"] == "paceline-webhook"]


def test_the_pod_passes_the_restricted_standard():
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert operator_container(render())["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_crds_are_those_of_the_code_and_outlive_the_release():
    crds = {d["metadata"]["name"]: d for d in render() if d["kind"] == "CustomResourceDefinition"}
    generated = {p.stem: yaml.safe_load(p.read_text()) for p in (CHART.parents[1] / "crds").glob("*.yaml")}
    assert set(crds) == set(generated)
    for name, crd in crds.items():
        assert crd["spec"] == generated[name]["spec"]
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_crds_can_be_left_to_others_or_go_with_the_release():
    assert not [d for d in render("--set", "crds.install=false") if d["kind"] == "CustomResourceDefinition"]
    crds = [d for d in render("--set", "crds.keep=false") if d["kind"] == "CustomResourceDefinition"]
    assert crds
    assert not [c for c in crds if "helm.sh/resource-policy" in c["metadata"].get("annotations", {})]


def test_helm_would_never_upgrade_a_crds_folder():
    assert not (CHART / "crds").exists(), "CRDs belong into files/crds, which templates/crds.yaml reads"


def test_one_registry_serves_both_images():
    documents = render("--set", "imageRegistry=mirror.local:5000/ml/,image.tag=2.0")
    assert operator_container(documents)["image"] == "mirror.local:5000/ml/paceline-operator:2.0"
    assert environment(documents)["PACELINE_RUNTIME_IMAGE"] == "mirror.local:5000/ml/paceline-runtime:2.0"


def test_a_kept_key_is_not_made_again():
    documents = render("--set", "operatorKey.existingSecret=mine")
    assert not [d for d in documents if d["kind"] == "Secret"]
    (key, _) = one(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert key["secret"]["secretName"] == "mine"
    assert one(render(), "Secret")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_a_budget_only_where_a_drain_can_leave_one():
    assert not [d for d in render("--set", "replicas=1") if d["kind"] == "PodDisruptionBudget"]
    assert one(render("--set", "replicas=2"), "PodDisruptionBudget")["apiVersion"] == "policy/v1"


@pytest.mark.parametrize(("options", "namespace"), [((), "default"), (NAMESPACES, "a")])
def test_the_manifest_in_the_notes_is_one_that_the_operator_takes(options, namespace):
    text = notes(*options)
    manifest = yaml.safe_load(re.search(r"<<EOF\n(.*?)\n  EOF", text, re.DOTALL)[1])
    manifest["metadata"] |= {"namespace": namespace, "uid": "uid"}
    check_policy(parse_service(manifest), load_settings(environment(render(*options))))
    assert ("-n a apply" in text) == (namespace == "a")


def test_the_notes_warn_where_their_manifest_would_be_refused():
    assert "doesn't allow hf://" in notes("--set", "policy.modelSchemes={pvc,file}")
    assert "doesn't allow hf://" not in notes()
