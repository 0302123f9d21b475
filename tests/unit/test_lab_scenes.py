"""The Lab's scenes: the published figures, and pictures that can't contradict themselves."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_core.errors import FormatError, RequestRefused
from paceline_core.knobs import Strategy
from paceline_lab.presets import PRESETS
from paceline_lab.scenario import Scenario
from paceline_lab.scene import scene_of

BY_ID = {preset["id"]: preset for preset in PRESETS}


def scenes(preset_id):
    preset = BY_ID[preset_id]
    return [scene_of(Scenario.from_document(preset["scenario"] | changes)) for changes in ({}, preset["compare"])]


def rounded(scene):
    figures = scene["figures"]
    return figures["duration"], round(100 * figures["slotUtilisation"]), round(figures["meanLatency"])


def test_the_published_figures():
    assert [rounded(scene)[:2] for scene in scenes("varied")] == [(14, 57), (10, 80)]
    assert [rounded(scene) for scene in scenes("stream")] == [(560, 47, 402), (330, 80, 118)]
    assert rounded(scenes("stream-dynamic")[0]) == (665, 39, 418)
    even = scenes("even")
    assert rounded(even[0]) == rounded(even[1]) == (8, 100, 6)


def test_a_long_prompt_stalls_everybody_unless_it_is_chunked():
    whole, chunked = scenes("long-prompt")
    assert whole["figures"]["longestPause"] > 30  # 1600 tokens at 2 steps per 100
    assert chunked["figures"]["longestPause"] < 3
    stalled = whole["requests"][1]
    assert stalled["delayedBy"]["E"] == pytest.approx(32)  # what its 1600 tokens add to a step
    assert stalled["parts"]["delayed"] == pytest.approx(32 + 2 * 0.32 + 0.32)  # and the short prompts of C, D and F


def test_an_objective_bounds_the_pause():
    assert scenes("objective")[1]["figures"]["longestPause"] <= 3


def test_scarce_memory_leaves_slots_free():
    scarce, ample = scenes("scarce-memory")
    assert scarce["figures"]["kvPeak"] <= 14
    assert any(request["parts"].get("kv", 0) > 50 for request in scarce["requests"])
    assert scarce["figures"]["duration"] > 2 * ample["figures"]["duration"]


def test_who_took_whose_slot():
    static, continuous = scenes("varied")
    assert [request["slotOf"] for request in continuous["requests"]] == [None] * 4 + ["B", "C", "D", "F"]
    assert static["requests"][1]["parts"] == {"prefill": 1.0, "decode": 1.0, "held": 6.0}


SCENARIOS = st.builds(
    lambda strategy, requests, every, slots, chunk, cost, blocks, tpot: {
        "strategy": strategy,
        "lengths": [length for length, _ in requests],
        "prompts": [prompt for _, prompt in requests],
        "every": every,
        "slots": slots,
        "chunk": chunk,
        "prefillCost": cost,
        "kvBlocks": blocks,
        "tpot": tpot,
    },
    st.sampled_from(list(Strategy)),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=14),
    st.sampled_from([0, 1, 3.5, 20]),
    st.integers(1, 6),
    st.sampled_from([0, 7, 32]),
    st.sampled_from([0, 2, 10]),
    st.sampled_from([0, 9, 14]),
    st.sampled_from([0, 2]),
)


@settings(max_examples=120, deadline=None)
@given(SCENARIOS)
def test_a_slot_has_one_request_at_a_time_and_all_time_is_explained(document):
    scene = scene_of(Scenario.from_document(document))
    by_slot = {}
    for slot, request, kind, start, end in scene["stays"]:
        assert 0 <= slot < document["slots"]
        assert 0 <= start < end <= scene["duration"] + 1e-6
        assert kind in ("prefill", "decode", "recompute", "idle", "held")
        by_slot.setdefault(slot, []).append((start, end, request))
    for stays in by_slot.values():
        stays.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(stays))
    for index, request in enumerate(scene["requests"]):
        assert request["output"] == document["lengths"][index]
        assert sum(request["parts"].values()) == pytest.approx(request["released"] - request["arrival"], abs=1e-6)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "JSON object"),
        ({"slot": 3}, "slot: no such field"),
        ({"strategy": "fast"}, "strategy: 'fast' is unknown, expected static"),
        ({"strategy": ["static"]}, "strategy: ['static'] is unknown"),
        ({"lengths": "8,2"}, "lengths: expected a list"),
        ({"lengths": []}, "lengths: expected a list"),
        ({"lengths": [1.5]}, "lengths: 1.5 is no whole number"),
        ({"lengths": [0]}, "lengths: 0 is out of bounds"),
        ({"lengths": [1] * 121}, "lengths: 121 is out of bounds"),
        ({"lengths": [19_000, 19_000]}, "tokens together"),
        ({"lengths": [1, 2], "prompts": [1, 2, 3]}, "prompts: 3 numbers for 2 requests"),
        ({"prompts": [9_000]}, "prompts: 9000 is out of bounds"),
        ({"slots": 2.5}, "slots: 2.5 is no whole number"),
        ({"slots": math.inf}, "slots: inf is no whole number"),
        ({"slots": 33}, "slots: 33 is out of bounds, expected 1 to 32"),
        ({"every": math.nan}, "every: nan is out of bounds"),
        ({"every": -1}, "every: -1 is out of bounds"),
        ({"every": True}, "every: True is no number"),
        ({"maxWait": "long"}, "maxWait: 'long' is no number"),
    ],
)
def test_bad_scenarios_are_refused_by_the_name_of_the_field(document, words):
    with pytest.raises(FormatError) as caught:
        Scenario.from_document(document)
    assert words in str(caught.value)


def test_a_request_that_memory_can_never_hold_is_refused():
    with pytest.raises(RequestRefused, match="request 1"):
        scene_of(Scenario.from_document({"lengths": [100], "kvBlocks": 2}))
