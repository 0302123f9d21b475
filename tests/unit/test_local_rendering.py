"""Environment, arguments, volumes and placement of a local pod, as a kubelet would make them."""

from __future__ import annotations

import base64

import pytest

from paceline_local.environment import (
    Mounts,
    PodFacts,
    Sources,
    expand,
    field_value,
    parse_quantity,
    render_environment,
    resource_value,
)
from paceline_local.errors import ConfigMissing, LocalError
from paceline_local.resources import CONFIG_MAPS, SECRETS
from paceline_local.scheduling import unschedulable, unsupported
from paceline_local.volumes import PodVolumes, decode_object, mounts_for, referenced, write_content


def pod(**spec):
    meta = {"name": "web-1", "namespace": "default", "uid": "u1", "labels": {"app": "web"}, "annotations": {"note": 'a "b"'}}
    return {"metadata": meta, "spec": {"containers": [{"name": "c"}]} | spec}


def facts(of=None):
    return PodFacts(of or pod(), "127.64.0.16", "127.64.0.1", "local", {"cpu": "2", "memory": "8Gi"})


def sources(config=None, secret=None):
    return Sources((config or {}).get, (secret or {}).get)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5),
        ("1Gi", 2**30),
        ("2", 2),
        ("1.5k", 1500),
        ("1e3", 1000),
        ("100n", 1e-7),
        ("3E", 3e18),
        ("24683656Ki", 24683656 * 1024),
    ],
)
def test_quantities(text, value):
    assert float(parse_quantity(text)) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "five", "5Zi", "5 Gi", "1..2", "1i", "1ki", "1mi"])
def test_bad_quantities_are_refused(text):
    with pytest.raises(LocalError, match="not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "web-1"),
        ("metadata.labels['app']", "web"),
        ("metadata.labels['none']", ""),
        ("metadata.annotations", 'note="a \\"b\\""'),
        ("spec.nodeName", "local"),
        ("status.podIP", "127.64.0.16"),
        ("status.hostIP", "127.64.0.1"),
    ],
)
def test_field_references(path, value):
    assert field_value(facts(), path) == value


def test_unknown_field_reference_says_so():
    with pytest.raises(ConfigMissing, match=r"spec\.colour"):
        field_value(facts(), "spec.colour")


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ({"resource": "limits.cpu"}, "2"),  # 1500m, rounded up
        ({"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.memory", "divisor": "1Mi"}, "512"),
        ({"resource": "requests.cpu"}, "0"),
    ],
)
def test_resource_references(reference, value):
    container = {"resources": {"limits": {"cpu": "1500m", "memory": "512Mi"}}}
    assert resource_value(facts(), container, reference) == value


def test_a_missing_limit_means_what_the_node_has():
    assert resource_value(facts(), {}, {"resource": "limits.memory"}) == str(8 * 2**30)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)-$(B)", "1-$(B)"), ("$$(A)", "$(A)"), ("$A", "$A"), ("$(A", "$(A"), ("$$$(A)", "$1"), ("100%$", "100%$")],
)
def test_expansion(text, expanded):
    assert expand(text, {"A": "1"}) == expanded


def test_environment_in_kubernetes_order():
    container = {
        "envFrom": [{"configMapRef": {"name": "cm"}, "prefix": "P_"}, {"secretRef": {"name": "none", "optional": True}}],
        "env": [
            {"name": "GREETING", "value": "hello $(P_who) $(LATER)"},
            {"name": "LATER", "value": "x"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
            {"name": "GONE", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "none", "optional": True}}},
            {"name": "FILE", "value": "/etc/app/x"},
            {"name": "P_who", "value": "me"},
        ],
    }
    env = render_environment(
        facts(),
        container,
        sources({"cm": {"who": "you"}}, {"s": {"token": "t"}}),
        Mounts({"/etc/app": "/v/app"}),
        {"PATH": "/bin"},
    )
    assert env == {
        "PATH": "/bin", "GREETING": "hello you $(LATER)", "LATER": "x", "TOKEN": "t", "FILE": "/v/app/x", "P_who": "me",
    }  # fmt: skip


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "X", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}},
        {"name": "X", "valueFrom": {"secretKeyRef": {"name": "s", "key": "none"}}},
    ],
)
def test_missing_references_name_what_is_missing(entry):
    with pytest.raises(ConfigMissing, match="none"):
        render_environment(facts(), {"env": [entry]}, sources({}, {"s": {}}), Mounts({}), {})


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/models", "/v/m"),
        ("--path=/models/a.gguf", "--path=/v/m/a.gguf"),
        ("file:///models/a", "file:///v/m/a"),
        ("/models/sub/x", "/v/s/x"),  # the longest mount path wins
        ("/data/models", "/data/models"),
        ("/models-old/x", "/models-old/x"),
        ("/models.d", "/models.d"),
        ("a:/models:/models/b", "a:/v/m:/v/m/b"),
        ("https://host/models/x", "https://host/models/x"),
    ],
)
def test_mount_paths_are_rewritten_where_they_are_paths(text, rewritten):
    assert Mounts({"/models": "/v/m", "/models/sub/": "/v/s"}).rewrite(text) == rewritten


# volumes


def volumes(tmp_path, of):
    return PodVolumes(tmp_path / "pod", tmp_path / "scratch", tmp_path / "claims", facts(of))


def config_map(**data):
    return {"kind": "ConfigMap", "data": data}


def test_content_is_swapped_whole_and_removed_keys_disappear(tmp_path):
    folder = tmp_path / "cm"
    write_content(folder, {"a": b"1", "b": b"2"}, 0o640)
    first = (folder / "..data").readlink()
    write_content(folder, {"a": b"1", "b": b"2"}, 0o640)
    assert (folder / "..data").readlink() == first, "unchanged content must not be written again"
    handle = (folder / "a").open("rb")
    write_content(folder, {"a": b"3", "c/d": b"4"}, 0o640)
    assert (folder / "a").read_bytes() == b"3" and (folder / "c" / "d").read_bytes() == b"4"
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith("..")) == ["a", "c"]
    assert handle.read() == b"1", "who has the old file open keeps all of the old content"
    handle.close()
    assert len([p for p in folder.iterdir() if p.name.startswith("..")]) == 2
    assert (folder / "a").stat().st_mode & 0o777 == 0o640


def test_all_kinds_of_volumes(tmp_path):
    of = pod(
        volumes=[
            {"name": "cm", "configMap": {"name": "cm", "items": [{"key": "k", "path": "deep/k.json"}]}},
            {"name": "sec", "secret": {"secretName": "s", "defaultMode": 0o400}},
            {"name": "opt", "configMap": {"name": "none", "optional": True}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "info", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
            {"name": "all", "projected": {"sources": [{"configMap": {"name": "cm"}}, {"secret": {"name": "s"}}]}},
            {"name": "pvc", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "host", "hostPath": {"path": str(tmp_path)}},
        ]
    )
    found = volumes(tmp_path, of)
    secret = {"kind": "Secret", "data": {"token": base64.b64encode(b"\x00t").decode()}}
    found.write({("configmaps", "cm"): config_map(k="{}"), ("secrets", "s"): secret, ("configmaps", "none"): None})
    root = tmp_path / "pod"
    assert (root / "cm" / "deep" / "k.json").read_text() == "{}"
    assert (root / "sec" / "token").read_bytes() == b"\x00t" and (root / "sec" / "token").stat().st_mode & 0o777 == 0o400
    assert list((root / "opt").glob("[!.]*")) == [] and (tmp_path / "scratch" / "tmp").is_dir()
    assert (root / "info" / "labels").read_text() == 'app="web"'
    assert {p.name for p in (root / "all").glob("[!.]*")} == {"k", "token"}
    assert (tmp_path / "claims" / "default" / "data").is_dir()
    mounts = mounts_for({"name": "c", "volumeMounts": [{"name": "host", "mountPath": "/m"}]}, of, found)
    assert mounts.rewrite("/m/x") == f"{tmp_path}/x"


def test_an_optional_object_that_comes_later_appears(tmp_path):
    found = volumes(tmp_path, pod(volumes=[{"name": "v", "configMap": {"name": "later", "optional": True}}]))
    found.write({("configmaps", "later"): None})
    found.write({("configmaps", "later"): config_map(k="1")})
    assert (tmp_path / "pod" / "v" / "k").read_text() == "1"


@pytest.mark.parametrize(
    ("volume", "said"),
    [
        ({"name": "v", "configMap": {"name": "none"}}, 'configmap "none" not found'),
        ({"name": "v", "configMap": {"name": "cm", "items": [{"key": "x", "path": "x"}]}}, "non-existent key: x"),
        ({"name": "v", "hostPath": {"path": "/nowhere/at/all"}}, "/nowhere/at/all"),
        ({"name": "v", "configMap": {"name": "cm", "items": [{"key": "k", "path": "../../x"}]}}, "leaves the volume"),
    ],
)
def test_volumes_that_cannot_be_made_say_why(tmp_path, volume, said):
    with pytest.raises(LocalError, match=said):
        volumes(tmp_path, pod(volumes=[volume])).write(
            {("configmaps", "none"): None, ("configmaps", "cm"): config_map(k="1")}
        )


def test_a_mount_of_an_undeclared_volume_is_refused(tmp_path):
    with pytest.raises(LocalError, match="names no volume"):
        mounts_for({"name": "c", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}, pod(), volumes(tmp_path, pod()))


def test_sub_path_mounts_one_file(tmp_path):
    of = pod(volumes=[{"name": "cm", "configMap": {"name": "cm"}}])
    mount = {"name": "cm", "mountPath": "/etc/app.json", "subPath": "k"}
    mounts = mounts_for({"name": "c", "volumeMounts": [mount]}, of, volumes(tmp_path, of))
    assert mounts.rewrite("/etc/app.json") == str(tmp_path / "pod" / "cm" / "k")


def test_everything_that_a_pod_mentions_is_found():
    of = pod(
        volumes=[
            {"name": "a", "configMap": {"name": "v"}},
            {"name": "b", "projected": {"sources": [{"secret": {"name": "p"}}]}},
        ],
        initContainers=[{"name": "i", "envFrom": [{"secretRef": {"name": "e"}}]}],
        containers=[{"name": "c", "env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "k", "key": "x"}}}]}],
    )
    assert referenced(of) == {(CONFIG_MAPS, "v"), (SECRETS, "p"), (SECRETS, "e"), (CONFIG_MAPS, "k")}


def test_config_map_binary_data():
    assert decode_object({"kind": "ConfigMap", "data": {"a": "1"}, "binaryData": {"b": "AAE="}}) == {
        "a": b"1",
        "b": b"\x00\x01",
    }


# placement

LABELS = {"kubernetes.io/os": "linux", "size": "4"}
ALLOCATABLE = {"cpu": "2", "memory": "8Gi", "pods": "110"}


def affinity(*expressions):
    terms = [{"matchExpressions": list(expressions)}]
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}


@pytest.mark.parametrize(
    "of",
    [
        pod(containers=[{"name": "c", "resources": {"requests": {"cpu": "64", "memory": "1Ti"}}}]),
        pod(nodeSelector={"kubernetes.io/os": "linux"}),
        pod(**affinity({"key": "size", "operator": "Gt", "values": ["3"]}, {"key": "gpu", "operator": "DoesNotExist"})),
        pod(**affinity({"key": "gpu", "operator": "NotIn", "values": ["a100"]})),
    ],
)
def test_pods_that_fit(of):
    assert unschedulable(of, LABELS, ALLOCATABLE) is None


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (
            pod(containers=[{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]),
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
        ),
        (pod(nodeSelector={"gpu": "a100"}), "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."),
        (
            pod(**affinity({"key": "gpu", "operator": "Exists"})),
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        ),
    ],
)
def test_pods_that_do_not_fit_say_why(of, said):
    assert unschedulable(of, LABELS, ALLOCATABLE) == said


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (pod(volumes=[{"name": "v", "nfs": {"server": "x"}}]), "type nfs isn't available locally"),
        (pod(containers=[{"name": "c", "livenessProbe": {"grpc": {"port": 1}}}]), "livenessProbe of container 'c'"),
        (pod(volumes=[{"name": "v", "emptyDir": {}}, {"name": "w"}]), None),
    ],
)
def test_what_processes_cannot_have_is_refused(of, said):
    found = unsupported(of)
    assert found is None if said is None else said in found
