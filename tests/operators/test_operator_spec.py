"""A manifest becomes typed data, or a list of everything that is wrong with it."""

import pytest
from operator_kit import FULL, MINIMAL, body, service, set_at

from paceline_core.durations import parse_duration
from paceline_core.knobs import Knobs, Strategy
from paceline_operator.errors import SpecError
from paceline_operator.spec import parse_service


def problems(spec):
    with pytest.raises(SpecError) as raised:
        parse_service(body(spec))
    return {problem.field: str(problem) for problem in raised.value.problems}


def test_a_minimal_manifest_takes_every_default():
    parsed = service(MINIMAL)
    assert parsed.knobs == Knobs()
    assert parsed.given == frozenset()
    assert parsed.spec.replicas == 1
    assert parsed.spec.accelerator is None
    assert parsed.model_name == "chat"
    assert parsed.slo.percentile == 95
    assert parsed.tuning.mode == "Off"


def test_a_full_manifest_reaches_the_knobs():
    parsed = service(FULL)
    assert parsed.knobs.strategy is Strategy.ITERATION
    assert (parsed.knobs.max_num_seqs, parsed.knobs.max_num_seqs_limit) == (32, 64)
    assert parsed.knobs.max_queue_delay == pytest.approx(0.01)
    assert parsed.knobs.static_flush == float("inf")
    assert (parsed.knobs.slo_ttft, parsed.knobs.slo_tpot) == (0.5, 0.05)
    assert {"sloTtft", "sloTpot", "prefixCaching"} <= parsed.given
    assert parsed.model_name == "org/model-7b"
    assert parsed.spec.accelerator.count == 2
    assert parsed.spec.env[1].value_from == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert parsed.spec.tolerations[0].toleration_seconds == 60


# path → bad value, words that the message must have
BAD = [
    ("model", "hf://a/b", ["spec.model", "object"]),
    ("model.uri", 7, ["spec.model.uri", "7"]),
    ("model.uri", "smollm2", ["spec.model.uri", "hf://"]),
    ("model.maxModelLen", 0, ["spec.model.maxModelLen", "1 ≤ value"]),
    ("model.maxModelLen", "4096", ["spec.model.maxModelLen", "whole number"]),
    ("model.secretRef.name", "UPPER", ["spec.model.secretRef.name"]),
    ("batching.strategy", "psychic", ["spec.batching.strategy", "psychic", "continuous"]),
    ("batching.maxNumSeqs", 0, ["spec.batching.maxNumSeqs", "1 ≤ value ≤ 65536"]),
    ("batching.maxNumSeqs", 10**6, ["spec.batching.maxNumSeqs", "65536"]),
    ("batching.maxNumSeqs", True, ["spec.batching.maxNumSeqs", "True"]),
    ("batching.maxNumSeqs", None, ["spec.batching.maxNumSeqs"]),
    ("batching.kvMemoryFraction", 0, ["spec.batching.kvMemoryFraction", "0 < value ≤ 1"]),
    ("batching.kvMemoryFraction", 1.01, ["spec.batching.kvMemoryFraction"]),
    ("batching.maxQueueDelay", "5", ["spec.batching.maxQueueDelay", "50ms"]),
    ("batching.maxQueueDelay", 5, ["spec.batching.maxQueueDelay", "50ms"]),
    ("batching.maxQueueDelay", "2h", ["spec.batching.maxQueueDelay", "1h"]),
    ("batching.maxQueueDelay", "never", ["spec.batching.maxQueueDelay"]),
    ("batching.preferredBatchSizes", 4, ["spec.batching.preferredBatchSizes", "list"]),
    ("batching.preferredBatchSizes", [0], ["spec.batching.preferredBatchSizes"]),
    ("batching.preferredBatchSizes", list(range(1, 70)), ["spec.batching.preferredBatchSizes"]),
    ("batching.prefixCaching", "yes", ["spec.batching.prefixCaching", "true or false"]),
    ("slo.ttft", "fast", ["spec.slo.ttft", "50ms"]),
    ("slo.ttft", "0s", ["spec.slo.ttft"]),
    ("slo.percentile", 100, ["spec.slo.percentile", "99"]),
    ("tuning.mode", "auto", ["spec.tuning.mode", "Off, Recommend, Auto"]),
    ("tuning.bounds.maxNumSeqs", {"min": 9, "max": 3}, ["spec.tuning.bounds.maxNumSeqs", "min ≤ max"]),
    ("tuning.bounds.blockSize", {"min": 9}, ["spec.tuning.bounds.blockSize", "unknown field"]),
    ("replicas", -1, ["spec.replicas", "-1", "0 ≤ value"]),
    ("replicas", "two", ["spec.replicas", "whole number"]),
    ("accelerator.count", 0, ["spec.accelerator.count"]),
    ("resources.limits.memory", "lots", ["spec.resources.limits[memory]", "4Gi"]),
    ("resources.limits.cpu", -1, ["spec.resources.limits[cpu]", "-1"]),
    ("env.0.name", "A B", ["spec.env[0].name"]),
    ("env.0.valueFrom", {"fieldRef": {}}, ["spec.env[0]", "either value or valueFrom"]),
    ("env.1.valueFrom", {"hostRef": {}}, ["spec.env[1].valueFrom.hostRef", "unknown field"]),
    ("env.1.name", "HF_ENDPOINT", ["spec.env", "HF_ENDPOINT", "one entry per name"]),
    ("env", "A=1", ["spec.env", "list"]),
    ("nodeSelector", ["a"], ["spec.nodeSelector"]),
    ("tolerations.0.effect", "Never", ["spec.tolerations[0].effect", "NoSchedule"]),
    ("template", [], ["spec.template", "object"]),
    ("template", {"spek": {}}, ["spec.template.spek", "unknown field"]),
    ("image", "", ["spec.image"]),
    ("model.name", "a\n", ["spec.model.name"]),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD, ids=[f"{path}={value!r:.30}" for path, value, _ in BAD])
def test_each_bad_value_is_named_with_its_rule(path, value, words):
    found = problems(set_at(FULL, path, value))
    assert len(found) == 1, found
    (message,) = found.values()
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("batchin", "did you mean 'batching'?"),
        ("batching.maxNumSeq", "did you mean 'maxNumSeqs'?"),
        ("model.url", "did you mean 'uri'?"),
        ("slo.xyz", "known here: ttft, tpot, preset, percentile"),
        ("accelerator.kind", "known here"),
        ("tolerations.0.keys", "did you mean 'key'?"),
    ],
)
def test_an_unknown_field_is_named_with_the_likely_one(path, hint):
    (message,) = problems(set_at(FULL, path, {})).values()
    assert "unknown field" in message
    assert hint in message


def test_an_unknown_field_beside_spec_is_named():
    with pytest.raises(SpecError, match=r"specs: \{\} \(unknown field\): did you mean 'spec'\?"):
        parse_service(body() | {"specs": {}})


def test_a_missing_model_is_named():
    assert "add it" in problems({})["spec.model"]
    assert "add it" in problems({"model": {}})["spec.model.uri"]


def test_every_mistake_is_told_at_once():
    spec = set_at(set_at(set_at(FULL, "replicas", -1), "batching.strategy", "x"), "model.typo", 1)
    assert set(problems(spec)) == {"spec.replicas", "spec.batching.strategy", "spec.model.typo"}


def test_a_budget_below_the_slots_names_both_bounds():
    found = problems(MINIMAL | {"batching": {"maxNumSeqs": 64, "maxNumBatchedTokens": 8}})
    assert "64" in found["spec.batching.maxNumBatchedTokens"]
    assert "raise maxNumBatchedTokens or lower maxNumSeqs" in found["spec.batching.maxNumBatchedTokens"]


def test_slots_above_the_limit_are_refused():
    found = problems(MINIMAL | {"batching": {"maxNumSeqs": 64, "maxNumSeqsLimit": 8}})
    assert "restarts the pods" in found["spec.batching.maxNumSeqs"]


def test_what_was_left_out_follows_what_was_given():
    parsed = service(MINIMAL | {"batching": {"maxNumSeqs": 512}})
    assert parsed.knobs.max_num_seqs_limit == 512
    assert parsed.given == {"maxNumSeqs"}


@pytest.mark.parametrize("text", ["50ms", "1.5s", "1m30s", "3us", "3µs"])
def test_durations_mean_what_the_core_reads(text):
    assert service(MINIMAL | {"slo": {"ttft": text}}).knobs.slo_ttft == parse_duration(text)


def test_a_duration_in_foreign_digits_is_refused():
    assert "spec.slo.ttft" in problems(MINIMAL | {"slo": {"ttft": "٣s"}})


def test_a_long_value_is_cut_in_the_message():
    (message,) = problems(MINIMAL | {"image": "x" * 600}).values()
    assert len(message) < 200


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_spec_that_is_no_object_is_refused(value):
    with pytest.raises(SpecError, match="spec"):
        parse_service(body() | {"spec": value})
