"""The knob table, durations, and the board that puts changes in force."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_core.durations import format_duration, parse_duration
from paceline_core.errors import FormatError, KnobError, PacelineError, RequestRefused
from paceline_core.knob_board import KnobBoard
from paceline_core.knobs import KNOBS, CostClass, Knobs, Strategy, change_cost, knob, knobs_from_wire, knobs_to_wire


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("1.5s", 1.5),
        ("2m", 120),
        ("1m30s", 90),
        ("1h", 3600),
        ("250us", 0.00025),
        ("never", math.inf),
        ("0s", 0),
    ],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "5 s", "-1s", "s", "1d", "1e3s", "5ms ", "١s", None, 5, "1s" * 40])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(FormatError, match="50ms"):
        parse_duration(text)


@given(st.integers(0, 3_600_000_000))
def test_durations_survive_the_round_trip_to_the_microsecond(micros):
    assert parse_duration(format_duration(micros / 1e6)) == pytest.approx(micros / 1e6, abs=1e-9)


def test_defaults_are_valid_and_within_their_bounds():
    knobs = Knobs()
    for spec in KNOBS:
        assert spec.violations(getattr(knobs, spec.attribute)) == (), spec.name
        assert spec.default == getattr(knobs, spec.attribute)
        assert spec.description.endswith(".")
    assert {spec.attribute for spec in KNOBS} == set(Knobs.__dataclass_fields__)


def test_wire_form_round_trips():
    knobs = Knobs(
        strategy=Strategy.DYNAMIC, max_num_seqs=4, preferred_batch_sizes=(2, 4), static_flush=math.inf, slo_tpot=0.05
    )
    wire = knobs_to_wire(knobs)
    assert wire["strategy"] == "dynamic"
    assert wire["staticFlush"] == "never"
    assert wire["sloTpot"] == "50ms"
    assert wire["preferredBatchSizes"] == [2, 4]
    assert knobs_from_wire(wire) == knobs


@pytest.mark.parametrize("spec", [s for s in KNOBS if s.low is not None], ids=lambda s: s.name)
def test_a_value_past_its_bound_is_refused_with_field_value_bound_and_remedy(spec):
    for bad in (spec.high + 1, spec.low - 1, *([spec.low] if spec.low_exclusive else [])):
        value = (int(bad),) if spec.kind == "ints" else int(bad) if spec.kind == "int" else bad
        (violation,) = spec.violations(value)
        assert violation.field == spec.name
        assert violation.bound == spec.bound
        assert spec.name in str(violation) and spec.bound in str(violation) and violation.remedy
    for good in (spec.high, *([] if spec.low_exclusive else [spec.low])):
        assert spec.violations((int(good),) if spec.kind == "ints" else good) == ()


@pytest.mark.parametrize("name", ["maxNumSeqs", "kvMemoryFraction", "preferredBatchSizes"])
def test_a_number_that_no_float_holds_is_refused_and_not_a_crash(name):
    value = 10**400
    with pytest.raises(KnobError, match=name):
        Knobs().updated({name: [value] if name == "preferredBatchSizes" else value})


@given(st.sampled_from(["sloTpot", "maxQueueDelay"]), st.floats(0, 3600), st.sampled_from(["us", "ms", "s"]))
def test_a_duration_that_is_taken_can_be_told_again(name, number, unit):
    """Engines, ConfigMaps and answers are given what was taken: it must not turn into 0 on the way."""
    try:
        knobs = Knobs().updated({name: f"{number:.9f}{unit}"})
    except KnobError:
        return
    assert knobs_from_wire(knobs_to_wire(knobs)) == knobs


def test_nan_is_refused_and_not_a_crash():
    with pytest.raises(KnobError, match="maxQueueDelay=nan"):
        Knobs(max_queue_delay=math.nan)
    with pytest.raises(KnobError, match="kvMemoryFraction"):
        knobs_from_wire({"kvMemoryFraction": math.nan})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "magic"), ("strategy", 3), ("strategy", None), ("maxNumSeqs", "4"), ("maxNumSeqs", 4.0),
        ("maxNumSeqs", True), ("prefixCaching", 1), ("prefixCaching", "true"), ("maxQueueDelay", 5),
        ("maxQueueDelay", "5"), ("kvMemoryFraction", "0.5"), ("preferredBatchSizes", 4), ("preferredBatchSizes", ["4"]),
        ("maxNumSeqs", None), ("kvMemoryFraction", True),
    ],
)  # fmt: skip
def test_a_wrong_type_names_the_field_and_an_example(name, value):
    with pytest.raises(KnobError, match=name) as caught:
        knobs_from_wire({name: value})
    assert caught.value.violations[0].field == name


def test_every_violation_is_reported_at_once_and_nothing_is_applied():
    knobs = Knobs()
    with pytest.raises(KnobError) as caught:
        knobs.updated({"maxNumSeqs": 0, "nope": 1, "strategy": "magic", "sloTtft": "0s"})
    assert {v.field for v in caught.value.violations} == {"maxNumSeqs", "nope", "strategy", "sloTtft"}
    assert knobs == Knobs()


def test_rules_between_knobs():
    with pytest.raises(KnobError, match=r"maxNumSeqs ≤ maxNumSeqsLimit \(256\).*restarts"):
        Knobs(max_num_seqs=257)
    with pytest.raises(KnobError, match=r"maxNumBatchedTokens ≥ maxNumSeqs \(64\)"):
        Knobs(max_num_seqs=64, max_num_batched_tokens=63)
    assert Knobs(max_num_seqs=64, max_num_batched_tokens=64)


def test_a_lone_knob_carries_those_that_depend_on_it():
    knobs = knobs_from_wire({"maxNumSeqs": 10_000})
    assert (knobs.max_num_seqs_limit, knobs.max_num_batched_tokens) == (10_000, 10_000)
    assert knobs_from_wire({"maxNumSeqsLimit": 8}).max_num_seqs == 8


def test_nullable_knobs_switch_off():
    assert Knobs(slo_tpot=0.1).updated({"sloTpot": None}).slo_tpot is None


def test_the_cost_of_a_change_is_that_of_its_dearest_knob():
    base = Knobs()
    assert change_cost(base, base) is None
    assert change_cost(base, base.updated({"strategy": "static"})) is CostClass.STEP
    assert change_cost(base, base.updated({"strategy": "static", "kvMemoryFraction": 0.5})) is CostClass.PAUSE
    assert change_cost(base, base.updated({"kvMemoryFraction": 0.5, "blockSize": 32})) is CostClass.RESTART
    assert knob("blockSize").cost is CostClass.RESTART


def test_the_board_counts_epochs_and_applies_the_newest():
    board = KnobBoard(Knobs())
    assert board.apply() is None
    assert board.propose(Knobs(max_num_seqs=2)) == 1
    assert board.propose(Knobs(max_num_seqs=3)) == 2
    assert (board.epoch, board.knobs.max_num_seqs, board.is_pending) == (0, 256, True)
    assert board.apply() == Knobs()
    assert (board.epoch, board.knobs.max_num_seqs, board.is_pending) == (2, 3, False)


def test_a_rollback_is_a_change_of_its_own_and_can_be_undone():
    board = KnobBoard(Knobs())
    with pytest.raises(PacelineError, match="never changed"):
        board.rollback()
    board.propose(Knobs(max_num_seqs=2))
    board.apply()
    assert board.rollback() == 2
    board.apply()
    assert (board.epoch, board.knobs) == (2, Knobs())
    assert board.rollback() == 3
    board.apply()
    assert board.knobs == Knobs(max_num_seqs=2)


def test_a_change_that_changes_nothing_leaves_the_way_back():
    board = KnobBoard(Knobs())
    for seqs in (2, 2):
        board.propose(Knobs(max_num_seqs=seqs))
        board.apply()
    board.rollback()
    board.apply()
    assert board.knobs == Knobs()


def test_a_rollback_before_the_boundary_drops_the_change():
    board = KnobBoard(Knobs())
    board.propose(Knobs(max_num_seqs=2))
    board.rollback()
    board.apply()
    assert board.knobs == Knobs()


def test_restart_class_knobs_keep_what_was_built():
    board = KnobBoard(Knobs(max_num_seqs=4, max_num_seqs_limit=8, block_size=4))
    board.propose(Knobs(max_num_seqs=8, max_num_seqs_limit=16, block_size=32))
    board.apply()
    assert (board.knobs.max_num_seqs, board.knobs.max_num_seqs_limit, board.knobs.block_size) == (8, 8, 4)
    with pytest.raises(KnobError, match="maxNumSeqs"):
        board.propose(Knobs(max_num_seqs=9, max_num_seqs_limit=16))


def test_errors_survive_a_trip_between_processes():
    for error in (_error_of(lambda: Knobs(max_num_seqs=0)), RequestRefused("too_long", "the prompt is too long")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def _error_of(action):
    with pytest.raises(KnobError) as caught:
        action()
    return caught.value
