"""What a manifest becomes: goldens for the whole, asserts for what must never change by accident."""

import os
from base64 import b64decode
from pathlib import Path

import pytest
import yaml
from operator_fakes import ALL_APIS
from operator_kit import FULL, KEY, MINIMAL, service, set_at, settings

from paceline_core.knobs import knobs_from_wire, knobs_to_wire
from paceline_operator.api_kinds import Apis
from paceline_operator.names import ADMIN_STAMP, APPLIED, RESTART_HASH, REVISION, SERVICE_LABEL, admin_token, base_name
from paceline_operator.render import render

GOLDENS = Path(__file__).parent / "goldens"


def children(spec=MINIMAL, *, apis=ALL_APIS, name="chat", **environment):
    found = render(service(spec, name=name), settings(**environment), apis)
    return {child["kind"]: child for child in found}


def pod(spec=MINIMAL, **options):
    return children(spec, **options)["Deployment"]["spec"]["template"]


def container(spec=MINIMAL, **options):
    return pod(spec, **options)["spec"]["containers"][0]


@pytest.mark.parametrize(("name", "spec"), [("minimal", MINIMAL), ("full", FULL)])
def test_golden(name, spec):
    """Run with UPDATE_GOLDENS=1 to write them anew, then read the diff."""
    text = yaml.safe_dump_all(render(service(spec), settings(), ALL_APIS), sort_keys=True)
    path = GOLDENS / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text()


def test_rendering_is_a_function_of_its_input():
    first, second = (render(service(FULL), settings(), ALL_APIS) for _ in range(2))
    assert first == second


def test_every_child_is_owned_labelled_and_stamped():
    for child in children(FULL).values():
        meta = child["metadata"]
        (owner,) = meta["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-1", True, False)
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "paceline"
        assert meta["labels"]["app.kubernetes.io/instance"] == "chat"
        assert len(meta["annotations"][APPLIED]) == 16
        assert meta["namespace"] == "team-a"


def test_the_secret_comes_first_and_the_deployment_last():
    kinds = [child["kind"] for child in render(service(), settings(), ALL_APIS)]
    assert (kinds[0], kinds[-1]) == ("Secret", "Deployment")


def test_the_admin_token_is_derived_and_differs_by_service():
    secret = children()["Secret"]
    token = b64decode(secret["data"]["token"]).decode()
    assert token == admin_token(KEY.encode(), "uid-1")
    assert (
        len(
            {
                token,
                admin_token(KEY.encode(), "uid-2"),
                admin_token(KEY.encode(), "uid-1", "salt"),
                admin_token(b"x", "uid-1"),
            }
        )
        == 4
    )
    assert secret["type"] == "paceline.io/admin-token"  # immutable: applying onto a foreign Secret fails
    stamp = children()["Deployment"]["metadata"]["annotations"][ADMIN_STAMP]
    assert stamp == secret["metadata"]["annotations"][APPLIED]
    assert token not in str(children()["Deployment"])


def test_the_config_map_holds_every_knob():
    text = children(FULL)["ConfigMap"]["data"]["knobs.json"]
    knobs = yaml.safe_load(text)["knobs"]
    assert knobs_from_wire(knobs) == service(FULL).knobs
    assert set(knobs) == set(knobs_to_wire(service().knobs))


def test_the_runtime_is_started_as_the_contract_says():
    arguments = container(FULL)["args"]
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert container()["command"] == ["paceline-runtime"]
    assert pairs["--model"] == "hf://org/model"
    assert pairs["--served-model-name"] == "org/model-7b"
    assert (pairs["--revision"], pairs["--max-model-len"], pairs["--quantization"]) == ("v1.2", "4096", "q4_1")
    assert pairs["--admin-token-file"] == "/etc/paceline/admin/token"
    assert [v for k, v in zip(arguments[::2], arguments[1::2], strict=True) if k == "--knobs-file"] == [
        "/etc/paceline/knobs/knobs.json",
        "/etc/paceline/tuned/knobs.json",
    ]
    drain = int(pairs["--drain-propagation"].rstrip("s")) + int(pairs["--drain-timeout"].rstrip("s"))
    assert pod()["spec"]["terminationGracePeriodSeconds"] > drain
    assert "lifecycle" not in container()


def test_the_downward_api_tells_the_limits():
    environment = {entry["name"]: entry for entry in container(FULL)["env"]}
    assert environment["PACELINE_CPU_LIMIT"]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    assert environment["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf-token", "key": "value"}
    assert environment["HF_ENDPOINT"]["value"] == "https://mirror"


def test_a_users_variable_wins_over_ours_of_the_same_name():
    environment = container(MINIMAL | {"env": [{"name": "HOME", "value": "/elsewhere"}]})["env"]
    assert [entry for entry in environment if entry["name"] == "HOME"] == [{"name": "HOME", "value": "/elsewhere"}]


def test_pods_are_confined():
    spec, security = pod()["spec"], container()["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def test_the_last_words_of_a_container_reach_the_status():
    assert container()["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_probes_forgive_a_long_load():
    probes = container()
    assert probes["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert probes["readinessProbe"]["httpGet"]["path"] == "/health/ready"


@pytest.mark.parametrize(("spec", "surge", "unavailable"), [(MINIMAL, 1, 0), (FULL, 0, 1)])
def test_a_rollout_never_needs_a_spare_accelerator(spec, surge, unavailable):
    pace = children(spec)["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert pace == {"maxSurge": surge, "maxUnavailable": unavailable}


def test_an_accelerator_becomes_resources_node_and_toleration():
    spec = pod(FULL)["spec"]
    resources = spec["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"
    assert spec["nodeSelector"] == {"pool": "gpu", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert "nodeSelector" not in pod()["spec"]


def test_a_claim_is_mounted_read_only_and_named_as_a_file():
    spec = MINIMAL | {"model": {"uri": "pvc://weights/smol/model.gguf"}}
    assert container(spec)["args"][1] == "file:///mnt/models/smol/model.gguf"
    assert {"name": "model", "mountPath": "/mnt/models", "readOnly": True} in container(spec)["volumeMounts"]
    volume = next(v for v in pod(spec)["spec"]["volumes"] if v["name"] == "model")
    assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}


LIVE = [
    ("batching.strategy", "static"), ("batching.maxNumSeqs", 8), ("batching.maxNumBatchedTokens", 64),
    ("batching.kvMemoryFraction", 0.5), ("batching.maxQueueDelay", "1s"), ("batching.preferredBatchSizes", [2]),
    ("batching.prefixCaching", True), ("slo.ttft", "9s"), ("slo.percentile", 50), ("tuning.mode", "Auto"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), LIVE, ids=[path for path, _ in LIVE])
def test_a_live_knob_never_changes_the_pod_template(path, value):
    assert pod(set_at(FULL, path, value)) == pod(FULL)


@pytest.mark.parametrize(
    ("path", "value"),
    [("batching.maxNumSeqsLimit", 128), ("batching.blockSize", 16), ("model.uri", "hf://a/b"), ("model.maxModelLen", 64)],
)
def test_what_only_a_new_process_can_take_changes_the_template(path, value):
    assert pod(set_at(FULL, path, value)) != pod(FULL)


def test_a_knob_edit_changes_only_the_config_map():
    before, after = children(FULL), children(set_at(FULL, "batching.maxNumSeqs", 8))
    assert [kind for kind in before if before[kind] != after[kind]] == ["ConfigMap"]


def test_the_disruption_budget_is_of_the_version_that_is_served():
    assert (
        children(apis=Apis.of({"policy/v1beta1": {"poddisruptionbudgets"}}))["PodDisruptionBudget"]["apiVersion"]
        == "policy/v1beta1"
    )


def test_the_template_is_an_overlay():
    template = {
        "metadata": {"labels": {"team": "a", SERVICE_LABEL: "another"}, "annotations": {"x": "y", RESTART_HASH: "0"}},
        "spec": {
            "securityContext": {"runAsNonRoot": False, "runAsUser": None},
            "volumes": [{"name": "host", "hostPath": {"path": "/srv"}}, {"name": "scratch", "hostPath": {"path": "/tmp"}}],
            "containers": [
                {
                    "name": "runtime",
                    "command": ["/venv/bin/paceline-runtime"],
                    "env": [{"name": "HOME", "value": "/tmp"}, {"name": "POD_IP", "value": "127.0.0.2"}],
                    "volumeMounts": [{"name": "host", "mountPath": "/srv", "readOnly": True}],
                },
                {"name": "sidecar", "image": "busybox"},
            ],
        },
    }
    found = pod(MINIMAL | {"template": template}, ALLOW_TEMPLATE="any")
    plain = pod()
    runtime, sidecar = found["spec"]["containers"]
    assert runtime["command"] == ["/venv/bin/paceline-runtime"]
    assert runtime["args"] == container()["args"]
    assert [m["mountPath"] for m in runtime["volumeMounts"]] == [m["mountPath"] for m in container()["volumeMounts"]] + [
        "/srv"
    ]
    environment = {entry["name"]: entry for entry in runtime["env"]}
    assert environment["POD_IP"] == {"name": "POD_IP", "value": "127.0.0.2"}
    assert environment["HOME"]["value"] == "/tmp"
    assert sidecar["securityContext"] == container()["securityContext"]
    assert "runAsUser" not in found["spec"]["securityContext"]
    volumes = {volume["name"]: volume for volume in found["spec"]["volumes"]}
    assert volumes["scratch"] == {"name": "scratch", "hostPath": {"path": "/tmp"}}
    # what identifies the pods is ours, whatever the template says
    assert found["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "a"}
    expected = plain["metadata"]["annotations"] | {"x": "y", REVISION: found["metadata"]["annotations"][REVISION]}
    assert found["metadata"]["annotations"] == expected


@pytest.mark.parametrize("template", [{"spec": None}, {"metadata": None, "spec": {}}, {}])
def test_an_empty_template_changes_nothing(template):
    assert pod(MINIMAL | {"template": template}) == pod()


@pytest.mark.parametrize(
    "name",
    ["a", "a" * 63, "a" * 64, "a" * 253, "3b-model", "llama.3.1-8b", "x" * 62 + ".y", "1" * 253, "a" + "-" * 61 + "b.c"],
)
def test_names_of_any_legal_length_give_legal_children(name):
    base = base_name(name)
    for child in children(MINIMAL, name=name).values():
        assert len(child["metadata"]["name"]) <= 253
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())
    service_name = children(MINIMAL, name=name)["Service"]["metadata"]["name"]
    assert service_name == base
    assert len(base) <= 63
    assert base[0].isalpha() and base[0].islower()
    assert base[-1].isalnum()
    assert all(c.isalnum() or c == "-" for c in base)


def test_cut_names_stay_apart():
    names = ["a" * 64, "a" * 65, "a" * 63, "a.b", "a-b", "3b", "s-3b"]
    assert len({base_name(name) for name in names}) == len(names)
