"""InferenceClass: defaults give way, limits don't, allow-lists start closed, and each value has an origin."""

import copy

import pytest
from operator_kit import MINIMAL, body, set_at, settings

from paceline_operator.acceptance import Acceptor, accept
from paceline_operator.class_spec import parse_class
from paceline_operator.classes import ClassBook
from paceline_operator.effective import Override, effective, spec_hash
from paceline_operator.errors import SpecError
from paceline_operator.store import Key

FULL_CLASS = {
    "defaults": {
        "batching": {"maxNumSeqs": 64, "maxNumSeqsLimit": 128, "maxNumBatchedTokens": 4096, "strategy": "iteration"},
        "slo": {"preset": "interactive"},
        "tuning": {"mode": "Auto"},
        "accelerator": {"resource": "nvidia.com/gpu", "product": "NVIDIA-L4", "count": 1},
        "resources": {"limits": {"cpu": "8", "memory": "32Gi"}},
        "image": "registry/class:1",
        "env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}, {"name": "A", "value": "class"}],
    },
    "sloPresets": {"interactive": {"ttft": "500ms", "tpot": "50ms", "percentile": 90}, "batch": {"ttft": "1m"}},
    "limits": {
        "knobs": {"maxNumSeqs": {"min": 2, "max": 256}, "kvMemoryFraction": {"max": 0.8}},
        "strategies": ["continuous", "iteration"],
        "maxReplicas": 4,
        "maxModelLen": 8192,
        "maxAccelerators": 2,
        "resources": {"memory": "64Gi"},
    },
    "allowed": {
        "models": ["hf://org/*", "pvc://*"],
        "images": ["registry/*:2"],
        "accelerators": ["nvidia.com/gpu=NVIDIA-L4*"],
    },
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "pool", "operator": "Exists"}],
}


def cls(spec=None, *, name="gpu", default=False, created="2030-01-01T00:00:00Z", version="1"):
    annotations = {"paceline.io/default-class": "true"} if default else {}
    meta = {"name": name, "generation": 1, "creationTimestamp": created, "annotations": annotations}
    return {
        "apiVersion": "paceline.io/v1alpha1",
        "kind": "InferenceClass",
        "metadata": meta | {"resourceVersion": version},
        "spec": copy.deepcopy(FULL_CLASS if spec is None else spec),
    }


def under(spec=None, class_spec=None, **environment):
    named = {"className": "gpu", **MINIMAL, **(spec or {})}
    return accept(body(named), ClassBook([cls(class_spec)]), settings(**environment))


def refused(spec=None, class_spec=None, **environment):
    with pytest.raises(SpecError) as caught:
        under(spec, class_spec, **environment)
    return {problem.field: str(problem) for problem in caught.value.problems}


def test_a_service_that_says_nothing_gets_what_the_class_says():
    found = under()
    assert (found.knobs.max_num_seqs, found.knobs.max_num_seqs_limit, found.knobs.strategy) == (64, 128, "iteration")
    assert (found.slo.ttft, found.slo.tpot, found.slo.percentile) == ("500ms", "50ms", 90)
    assert found.tuning.mode == "Auto"
    assert found.spec.accelerator.product == "NVIDIA-L4"
    assert found.spec.image == "registry/class:1"
    assert found.spec.node_selector == {"pool": "gpu"}
    assert [toleration.key for toleration in found.spec.tolerations] == ["pool"]
    assert found.class_name == "gpu"


def test_what_the_service_states_wins_field_by_field():
    spec = {
        "batching": {"maxNumSeqs": 16},
        "slo": {"ttft": "1s"},
        "accelerator": {"count": 2},
        "resources": {"limits": {"cpu": "4"}},
        "env": [{"name": "A", "value": "spec"}],
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "mine"}],
        "image": "registry/x:2",
    }
    found = under(spec)
    assert (found.knobs.max_num_seqs, found.knobs.strategy) == (16, "iteration")
    assert (found.slo.ttft, found.slo.tpot) == ("1s", "50ms")
    assert (found.spec.accelerator.count, found.spec.accelerator.product) == (2, "NVIDIA-L4")
    assert found.spec.resources.limits == {"cpu": "4", "memory": "32Gi"}
    assert [(v.name, v.value) for v in found.spec.env] == [("A", "spec"), ("HF_ENDPOINT", "https://mirror")]
    assert found.spec.node_selector == {"zone": "a", "pool": "gpu"}
    assert [toleration.key for toleration in found.spec.tolerations] == ["mine", "pool"]
    assert found.spec.image == "registry/x:2"


def test_every_value_has_its_origin():
    found = under({"batching": {"maxNumSeqs": 16}, "slo": {"ttft": "1s"}, "accelerator": {"count": 2}})
    origins = effective(found, None).origins
    assert {name: origins[name] for name in ("maxNumSeqs", "strategy", "sloTtft", "sloTpot", "blockSize")} == {
        "maxNumSeqs": "spec", "strategy": "class", "sloTtft": "spec", "sloTpot": "class", "blockSize": "default",
    }  # fmt: skip
    assert found.stated["accelerator.count"] == (2, "spec")
    assert found.stated["accelerator.product"] == ("NVIDIA-L4", "class")
    assert found.stated["slo.percentile"] == (90, "class")
    assert found.stated["nodeSelector.pool"] == ("gpu", "class")
    assert not any(path.startswith(("env", "slo.ttft")) for path in found.stated)


def test_a_presets_name_stands_for_its_objectives():
    found = under({"slo": {"preset": "batch", "tpot": "2s"}})
    assert (found.slo.ttft, found.slo.tpot, found.slo.percentile) == ("1m", "2s", 95)
    assert "interactive, batch" not in str(found)


def test_an_unknown_preset_is_refused_with_those_there_are():
    assert "batch, interactive" in refused({"slo": {"preset": "fast"}})["spec.slo.preset"]
    with pytest.raises(SpecError, match="has no class"):
        accept(body(MINIMAL | {"slo": {"preset": "fast"}}), ClassBook(), settings())


@pytest.mark.parametrize(
    ("batching", "seqs", "limit", "budget"),
    [
        ({"maxNumSeqs": 200}, 200, 200, 4096),
        ({"maxNumSeqsLimit": 32}, 32, 32, 4096),
        ({"maxNumBatchedTokens": 48}, 48, 128, 48),
        ({"maxNumSeqsLimit": 512}, 64, 512, 4096),
    ],
)
def test_a_default_gives_way_to_what_is_stated(batching, seqs, limit, budget):
    knobs = under({"batching": batching}).knobs
    assert (knobs.max_num_seqs, knobs.max_num_seqs_limit, knobs.max_num_batched_tokens) == (seqs, limit, budget)


def test_the_operators_default_outside_a_limit_becomes_the_limit():
    found = under(class_spec={"limits": {"knobs": {"maxNumSeqs": {"max": 32}, "kvMemoryFraction": {"max": 0.5}}}})
    assert (found.knobs.max_num_seqs, found.knobs.kv_memory_fraction) == (32, 0.5)
    assert effective(found, None).origins["kvMemoryFraction"] == "class"


def test_a_device_of_another_vendor_drops_the_classs():
    open_class = {key: value for key, value in FULL_CLASS.items() if key != "allowed"}
    assert under({"accelerator": {"resource": "amd.com/gpu"}}, open_class).spec.accelerator.product is None


VIOLATIONS = [
    ({"batching": {"maxNumSeqs": 300}}, "spec.batching.maxNumSeqs", "2 ≤ value ≤ 256"),
    ({"batching": {"maxNumSeqs": 1}}, "spec.batching.maxNumSeqs", "class gpu"),
    ({"batching": {"kvMemoryFraction": 0.9}}, "spec.batching.kvMemoryFraction", "0.8"),
    ({"batching": {"strategy": "static"}}, "spec.batching.strategy", "continuous, iteration"),
    ({"replicas": 5}, "spec.replicas", "at most 4"),
    ({"tuning": {"bounds": {"maxNumSeqs": {"min": 500}}}}, "spec.tuning.bounds.maxNumSeqs", "2 ≤ value ≤ 256"),
    ({"scaling": {"maxReplicas": 5, "waitingRequests": 1}}, "spec.scaling.maxReplicas", "at most 4"),
    ({"model": {"uri": "hf://org/m", "maxModelLen": 9000}}, "spec.model.maxModelLen", "at most 8192"),
    ({"accelerator": {"count": 3}}, "spec.accelerator.count", "at most 2"),
    ({"resources": {"limits": {"memory": "65Gi"}}}, "spec.resources.limits.memory", "at most 64Gi"),
    ({"resources": {"requests": {"memory": "1Ti"}}}, "spec.resources.requests.memory", "at most 64Gi"),
    ({"model": {"uri": "hf://other/m"}}, "spec.model.uri", "hf://org/*"),
    ({"model": {"uri": "pkg://wheel/x"}}, "spec.model.uri", "scheme pkg"),
    ({"image": "evil/x:2"}, "spec.image", "the class gpu"),
    ({"accelerator": {"product": "NVIDIA-H100"}}, "spec.accelerator", "NVIDIA-L4*"),
    ({"nodeSelector": {"pool": "cpu"}}, "spec.nodeSelector[pool]", "sets gpu"),
    ({"env": [{"name": "HTTPS_PROXY", "value": "http://x"}]}, "spec.env[0].name", "where models come from"),
    ({"env": [{"name": "All_proxy", "value": "http://x"}]}, "spec.env[0].name", "where models come from"),
    ({"template": {"spec": {}}}, "spec.template", "aren't allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "field", "words"), VIOLATIONS, ids=[field for _, field, _ in VIOLATIONS])
def test_a_violation_names_field_value_bound_and_remedy(spec, field, words):
    found = refused(spec)
    assert list(found) == [field]
    assert words in found[field]
    assert found[field].count(":") >= 2


def test_all_violations_are_told_at_once():
    spec = {"replicas": 9, "image": "evil", "batching": {"maxNumSeqs": 999, "maxNumSeqsLimit": 999}}
    assert set(refused(spec)) == {"spec.replicas", "spec.image", "spec.batching.maxNumSeqs"}


@pytest.mark.parametrize("key", ["args", "command", "envFrom"])
def test_a_restricted_template_gets_no_way_around_the_models_of_the_class(key):
    rules = {"allowed": {"template": "Restricted", "models": ["hf://org/*"]}}
    template = {"spec": {"containers": [{"name": "runtime", key: [{}]}, {"name": "proxy", key: [{}]}]}}
    assert list(refused({"template": template}, rules)) == [f"spec.template.spec.containers[0].{key}"]
    assert under({"template": template}, {"allowed": {"template": "Restricted"}})


def test_a_limit_on_a_resource_wants_a_limit():
    assert (
        "must be stated" in refused(class_spec={"limits": {"resources": {"memory": "1Gi"}}})["spec.resources.limits.memory"]
    )


ONE_HOST_PATH = {"allowed": {"template": "Restricted", "hostPaths": ["/mnt/models"]}}


def mounting(path, read_only=True, volume=None):
    mount = {"name": "m", "mountPath": "/m", **({"readOnly": True} if read_only else {})}
    pod = {
        "volumes": [{"name": "m", "hostPath": volume or {"path": path}}],
        "containers": [{"name": "runtime", "volumeMounts": [mount]}],
    }
    return {"template": {"spec": pod}}


@pytest.mark.parametrize("path", ["/mnt/models", "/mnt/models/llama"])
def test_an_allowed_folder_of_the_node_may_be_mounted_read_only(path):
    assert under(mounting(path), ONE_HOST_PATH)
    assert list(refused(mounting(path, read_only=False), ONE_HOST_PATH)) == [
        "spec.template.spec.containers[0].volumeMounts[0]"
    ]


@pytest.mark.parametrize(
    "path", ["/", "/mnt", "/mnt/models2", "/mnt/models/../../etc", "mnt/models", "/mnt/models/", "/mnt//models"]
)
def test_any_other_folder_may_not(path):
    assert list(refused(mounting(path), ONE_HOST_PATH)) == ["spec.template.spec.volumes[0]"]


@pytest.mark.parametrize("template", ["Restricted", "Any"])
def test_a_class_decides_about_templates_whatever_the_operator_says(template):
    assert under({"template": {"spec": {"priorityClassName": "x"}}}, {"allowed": {"template": template}})
    assert "spec.template" in refused({"template": {"spec": {}}}, {"allowed": {"template": "None"}}, ALLOW_TEMPLATE="any")


def test_privileged_is_a_decision_of_the_class():
    spec = {"template": {"spec": {"containers": [{"name": "runtime", "securityContext": {"privileged": True}}]}}}
    assert refused(spec, {"allowed": {"template": "Restricted"}})
    assert under(spec, {"allowed": {"template": "Restricted", "privileged": True}})


def test_what_a_class_leaves_out_the_operator_decides():
    assert under({"image": "registry/y:3"}, {}, ALLOWED_IMAGES="registry/*")
    assert refused({"image": "registry/y:3"}, {})
    assert refused({"image": "registry/y:3"}, {"allowed": {"images": []}}, ALLOWED_IMAGES="registry/*")
    assert refused({"model": {"uri": "s3://x/y"}}, {})


def test_tuning_stays_inside_the_classs_limits():
    found = under({"batching": {"maxNumSeqs": 16, "maxNumSeqsLimit": 512}})
    assert effective(found, Override(spec_hash(found), {"maxNumSeqs": 256})).knobs.max_num_seqs == 256
    assert "outside" in effective(found, Override(spec_hash(found), {"maxNumSeqs": 300})).dropped


def test_an_edit_of_the_class_drops_what_was_tuned():
    old, new = under(), under(class_spec=set_at(FULL_CLASS, "defaults.batching.maxNumSeqs", 32))
    assert "of its class" in effective(new, Override(spec_hash(old), {"maxQueueDelay": "1s"})).dropped


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("limits.knobs.maxNumSeqs", {"min": 9, "max": 3}, "spec.limits.knobs.maxNumSeqs"),
        ("limits.strategies", [], "spec.limits.strategies"),
        ("limits.strategies", ["static"], "spec.defaults.batching.strategy"),
        ("limits.knobs.maxNumSeqs", {"max": 8}, "spec.defaults.batching.maxNumSeqs"),
        ("defaults.batching.maxNumSeqs", 500, "spec.defaults.batching.maxNumSeqs"),
        ("defaults.slo", {"preset": "x"}, "spec.defaults.slo.preset"),
        ("defaults.replicas", 2, "spec.defaults.replicas"),
        ("limits.maxReplica", 2, "spec.limits.maxReplica"),
        ("sloPresets.interactive", {"ttft": "x"}, "spec.sloPresets[interactive].ttft"),
        ("allowed.hostPaths", ["etc"], "spec.allowed.hostPaths[0]"),
    ],
)
def test_a_class_that_contradicts_itself_is_refused(path, value, field):
    with pytest.raises(SpecError) as caught:
        parse_class(cls(set_at(FULL_CLASS, path, value)))
    assert field in {problem.field for problem in caught.value.problems}


def test_a_missing_class_has_its_own_reason():
    with pytest.raises(SpecError, match="no such InferenceClass") as caught:
        accept(body(MINIMAL | {"className": "gone"}), ClassBook(), settings())
    assert caught.value.reason == "ClassNotFound"


def test_a_broken_class_has_its_own_reason_also_as_the_default():
    book = ClassBook([cls({"limits": {"strategies": []}}, default=True)])
    for spec in (MINIMAL, MINIMAL | {"className": "gpu"}):
        with pytest.raises(SpecError, match="at least one") as caught:
            accept(body(spec), book, settings())
        assert caught.value.reason == "ClassInvalid"


def test_the_newest_default_class_counts_for_services_that_name_none():
    book = ClassBook([cls({}, name="old", default=True), cls({}, name="new", default=True, created="2030-02-01T00:00:00Z")])
    assert accept(body(), book, settings()).class_name == "new"
    assert accept(body(MINIMAL | {"className": "old"}), book, settings()).class_name == "old"
    book.remove("new")
    assert accept(body(), book, settings()).class_name == "old"
    book.put(cls({}, name="old", version="2"))
    assert accept(body(), book, settings()).class_name == ""


def test_the_book_says_what_is_news():
    book = ClassBook()
    assert book.put(cls({}))
    assert not book.put(cls({}))
    assert not book.put(cls({}, version="2"))
    assert book.put(cls({}, version="3", default=True))
    assert book.put(cls({"limits": {"maxReplicas": 1}}, version="4"))
    assert not book.replace([cls({"limits": {"maxReplicas": 1}}, version="4")])
    assert book.replace([])
    assert not book.remove("gpu")


@pytest.mark.parametrize(
    "spec", [{"batching": 3}, {"slo": []}, {"env": "x"}, {"accelerator": None}, {"tolerations": 5}, {"nodeSelector": 1}]
)
def test_a_malformed_service_is_refused_not_crashed_on(spec):
    assert refused(spec)


def test_a_spec_is_judged_anew_only_when_it_or_its_class_changes():
    book, key = ClassBook([cls({"defaults": {"batching": {"maxNumSeqs": 4}}})]), Key("team-a", "chat")
    acceptor = Acceptor(book, settings())
    first = acceptor.accept(key, body(MINIMAL | {"className": "gpu"}))
    assert acceptor.accept(key, body(MINIMAL | {"className": "gpu"}, status={"replicas": 1})) is first
    edited = acceptor.accept(key, body(MINIMAL | {"className": "gpu", "replicas": 3}, generation=2))
    assert (edited.spec.replicas, edited.knobs.max_num_seqs) == (3, 4)
    book.put(cls({"defaults": {"batching": {"maxNumSeqs": 8}}}, version="2"))
    assert acceptor.accept(key, body(MINIMAL | {"className": "gpu", "replicas": 3}, generation=2)).knobs.max_num_seqs == 8
    again = acceptor.accept(key, body(MINIMAL | {"className": "gpu"}, uid="uid-2"))  # made anew under the same name
    assert (again.uid, again.spec.replicas) == ("uid-2", first.spec.replicas)


def test_a_class_that_goes_takes_back_what_was_accepted():
    book, key = ClassBook([cls({})]), Key("team-a", "chat")
    acceptor = Acceptor(book, settings())
    acceptor.accept(key, body(MINIMAL | {"className": "gpu"}))
    book.remove("gpu")
    with pytest.raises(SpecError, match="no such InferenceClass"):
        acceptor.accept(key, body(MINIMAL | {"className": "gpu"}))
