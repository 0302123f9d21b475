"""Wire documents: what goes out comes back, what is wrong is named, what is newer is let through."""

from __future__ import annotations

import json

import pytest

from paceline_core.errors import FormatError
from paceline_core.wire import (
    SCHEMA_VERSION,
    Gauges,
    KnobsDocument,
    KnobsPatch,
    ObserveDocument,
    RequestRecord,
    StepModelDocument,
    StepRecord,
    from_json,
    to_json,
)

RECORD = RequestRecord(
    request_id="r1", arrival=1.5, prompt_tokens=10, output_tokens=3, outcome="finished", epoch=1, end_epoch=2,
    first_scheduled=1.6, first_token=1.7, end=2.0, cached_tokens=8, preemptions=1, priority=-1, max_tokens=4,
    prefix_hashes=(2**63 - 1, 5),
)  # fmt: skip
DOCUMENTS = [
    KnobsDocument(3, 2, {"maxNumSeqs": 4}, {"maxNumSeqs": "applied"}, {"blockSize": 32}, "pod-1"),
    KnobsPatch({"strategy": "static"}, fencing=7),
    RECORD,
    RequestRecord("r2", 0, 1, 0, "refused", 0, 0),
    StepRecord(5.0, 0.01, 1, 4, 100, 400, 10_000, 4, 2),
    Gauges(running=1, slot_steps=10, slot_steps_busy=7),
    StepModelDocument(0.1, 0.2, 0.3, 0.4, 0.5, 0.06, 7, {"decode_tokens": (0.0, 64.0)}),
    ObserveDocument("i", 9, 100.0, 1, 3, Gauges(), (RECORD,), (StepRecord(5.0, 0.01, 1, 4, 0, 400, 0, 4, 2),),
                    StepModelDocument(0.1, 0, 0, 0, 0), True),
]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_documents_survive_json(document):
    assert from_json(type(document), json.loads(json.dumps(to_json(document)))) == document


def test_names_are_camel_case():
    assert to_json(Gauges(slot_steps_busy=3))["slotStepsBusy"] == 3


def test_a_newer_pod_may_say_more():
    data = {**to_json(Gauges()), "temperatureOfTheMoon": 3}
    assert from_json(Gauges, data) == Gauges()


def test_fields_with_defaults_may_be_left_out():
    assert from_json(KnobsPatch, {"knobs": {}}) == KnobsPatch({})


@pytest.mark.parametrize(
    ("kind", "data", "says"),
    [
        (KnobsPatch, [], "must be a JSON object, got list"),
        (KnobsPatch, {}, "lacks the field knobs"),
        (
            StepModelDocument,
            {"constant": 1.0, "decodeTokens": 0.1, "prefillTokens": 0},
            "fields contextTokens, prefillAttention",
        ),
        (KnobsPatch, {"knobs": 3}, "KnobsPatch.knobs must be an object"),
        (KnobsPatch, {"knobs": {}, "fencing": "7"}, "KnobsPatch.fencing must be int, got '7'"),
        (KnobsPatch, {"knobs": {}, "fencing": True}, "KnobsPatch.fencing must be int, got True"),
        (KnobsPatch, {"knobs": {}, "schemaVersion": SCHEMA_VERSION + 1}, "schema version 2"),
        (RequestRecord, {**to_json(RECORD), "prefixHashes": 5}, "prefixHashes must be a list"),
        (RequestRecord, {**to_json(RECORD), "prefixHashes": [1, "x"]}, r"prefixHashes\[1\] must be int"),
        (RequestRecord, {**to_json(RECORD), "end": "late"}, "end must be float"),
        (StepModelDocument, {**to_json(DOCUMENTS[6]), "seen": {"decode_tokens": [1]}}, "must have 2 items, got 1"),
        (ObserveDocument, {**to_json(DOCUMENTS[7]), "requests": [{}]}, "RequestRecord lacks the fields requestId, arrival"),
    ],
)
def test_what_is_wrong_is_named(kind, data, says):
    with pytest.raises(FormatError, match=says):
        from_json(kind, data)
