"""What a spec may ask for is closed by default, and opened by the operator's settings only as far as they say."""

import pytest
from operator_kit import FULL, MINIMAL, service, set_at, settings

from paceline_operator.policy import policy_problems, rules_of


def refused(spec, **environment):
    found = policy_problems(service(spec), rules_of(settings(**environment)))
    return {problem.field: str(problem) for problem in found}


def with_pod(**pod):
    return MINIMAL | {"template": {"spec": pod}}


def with_container(**container):
    return with_pod(containers=[{"name": "runtime", **container}])


@pytest.mark.parametrize("uri", ["hf://a/b", "pkg://wheel/file.gguf", "pvc://claim/dir/file.gguf"])
def test_the_usual_sources_are_allowed(uri):
    assert refused({"model": {"uri": uri}}) == {}


@pytest.mark.parametrize("uri", ["file:///etc/passwd", "ftp://host/model", "s3://bucket/model"])
def test_another_scheme_is_refused_with_those_that_are_allowed(uri):
    message = refused({"model": {"uri": uri}})["spec.model.uri"]
    assert uri.partition(":")[0] in message
    assert "hf://" in message


def test_a_scheme_can_be_allowed():
    assert refused({"model": {"uri": "file:///models/x"}}, ALLOWED_MODEL_SCHEMES="file") == {}
    assert refused(MINIMAL, ALLOWED_MODEL_SCHEMES="file")


@pytest.mark.parametrize(
    "uri", ["pkg://wheel/../secret", "pvc://claim/../../etc", "pvc://claim", "pvc:///x", "pvc://Claim/x"]
)
def test_a_path_that_leaves_its_place_is_refused(uri):
    assert "spec.model.uri" in refused({"model": {"uri": uri}})


def test_another_image_needs_a_pattern():
    spec = MINIMAL | {"image": "registry/runtime:2"}
    assert "PACELINE_ALLOW" in refused(spec)["spec.image"]
    assert refused(spec, ALLOWED_IMAGES="registry/runtime:*") == {}
    assert refused(spec, ALLOWED_IMAGES="registry/runtime") != {}
    assert refused(MINIMAL | {"image": "registry/runtime:1"}) == {}


def test_the_pods_own_variables_are_reserved():
    for name in ("POD_IP", "PACELINE_HOST", "PACELINE_MEMORY_LIMIT"):
        assert "set by the operator" in refused(MINIMAL | {"env": [{"name": name, "value": "x"}]})["spec.env[0].name"]


def test_a_product_needs_a_vendor_whose_label_is_known():
    spec = MINIMAL | {"accelerator": {"resource": "example.com/npu", "product": "X1"}}
    assert "nodeSelector" in refused(spec)["spec.accelerator.product"]
    assert refused(set_at(spec, "accelerator.resource", "amd.com/gpu")) == {}


def test_a_template_is_refused_by_default():
    assert "PACELINE_ALLOW" in refused(FULL)["spec.template"]
    assert refused(FULL, ALLOW_TEMPLATE="restricted") == {}
    assert refused(FULL, ALLOW_TEMPLATE="true") == {}


HARMLESS = [
    with_pod(priorityClassName="high", topologySpreadConstraints=[], securityContext={"runAsUser": None}),
    with_pod(volumes=[{"name": "x", "emptyDir": {"medium": "Memory"}}], securityContext={"runAsUser": 5}),
    with_container(env=[{"name": "A", "value": "b"}], image="registry/runtime:1", resources={"limits": {"cpu": "1"}}),
    with_container(securityContext={"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}, "runAsNonRoot": True}),
    MINIMAL | {"template": {"metadata": {"annotations": {"team": "a"}, "labels": {"x": "y"}}}},
]


@pytest.mark.parametrize("spec", HARMLESS)
def test_a_restricted_template_may_do_what_stays_in_the_pod(spec):
    assert refused(spec, ALLOW_TEMPLATE="restricted") == {}


APPARMOR = "apparmor.security.beta.kubernetes.io"
ESCAPES = [
    (with_pod(hostNetwork=True), "hostNetwork"),
    (with_pod(hostPID=True), "hostPID"),
    (with_pod(aFieldOfTheFuture=1), "aFieldOfTheFuture"),
    (with_pod(nodeName="master"), "nodeName"),
    (with_pod(automountServiceAccountToken=True), "automountServiceAccountToken"),
    (with_pod(serviceAccountName="admin"), "serviceAccountName"),
    (with_pod(volumes=[{"name": "x", "hostPath": {"path": "/"}}]), "volumes[0]"),
    (with_pod(volumes=[{"name": "x", "projected": {"sources": [{"serviceAccountToken": {}}]}}]), "volumes[0].projected"),
    (with_pod(securityContext=None), "spec.securityContext"),
    (with_pod(securityContext={"runAsUser": 0}), "securityContext.runAsUser"),
    (with_pod(securityContext={"runAsNonRoot": False}), "securityContext.runAsNonRoot"),
    (with_pod(securityContext={"runAsNonRoot": None}), "securityContext.runAsNonRoot"),
    (with_pod(securityContext={"seccompProfile": {"type": "Unconfined"}}), "securityContext.seccompProfile"),
    (with_pod(securityContext={"sysctls": []}), "securityContext.sysctls"),
    (with_pod(securityContext={"fsGroup": True}), "securityContext.fsGroup"),
    (with_container(securityContext={"privileged": True}), "containers[0].securityContext.privileged"),
    (with_container(securityContext={"privileged": 1}), "containers[0].securityContext.privileged"),
    (with_container(securityContext=None), "containers[0].securityContext"),
    (with_container(securityContext={"allowPrivilegeEscalation": None}), "allowPrivilegeEscalation"),
    (with_container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), "securityContext.capabilities"),
    (with_container(securityContext={"capabilities": {"drop": []}}), "securityContext.capabilities"),
    (with_container(securityContext={"capabilities": None}), "securityContext.capabilities"),
    (with_container(image="evil"), "containers[0].image"),
    (with_container(ports=[{"containerPort": 1, "hostPort": 1}]), "ports[0].hostPort"),
    (with_pod(initContainers=[{"name": "x", "image": "evil"}]), "initContainers[0].image"),
    (
        MINIMAL | {"template": {"metadata": {"annotations": {f"container.{APPARMOR}/runtime": "unconfined"}}}},
        "annotations[container.apparmor",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "field"), ESCAPES, ids=[field for _, field in ESCAPES])
def test_a_restricted_template_may_not_reach_beyond_the_pod(spec, field):
    found = refused(spec, ALLOW_TEMPLATE="restricted")
    assert len(found) == 1
    assert field in next(iter(found))
    assert refused(spec, ALLOW_TEMPLATE="any") == {}


def test_a_service_account_can_be_allowed():
    spec = with_pod(serviceAccountName="reader")
    assert refused(spec, ALLOW_TEMPLATE="restricted", ALLOWED_SERVICE_ACCOUNTS="reader,writer") == {}


@pytest.mark.parametrize(
    "template", [{"spec": []}, {"metadata": "x"}, {"metadata": {"labels": []}}, {"metadata": {"annotations": 3}}]
)
def test_a_template_of_the_wrong_shape_is_refused(template):
    assert len(refused(MINIMAL | {"template": template}, ALLOW_TEMPLATE="any")) == 1
