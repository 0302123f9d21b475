"""The GPU path's parts by themselves: sizes of graphs, block tables, packing, padding, memory, over a fake device."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kernels.triton_ops.attention_plan import SplitPolicy, decode_capacity, plan_tiles
from paceline_runtime.gpu_device import device_for
from paceline_runtime.gpu_graphs import DecodeGraphs, bucket_sizes
from paceline_runtime.gpu_inputs import PackedViews, StepArrays, pack, words_of
from paceline_runtime.gpu_layout import LayoutShape, Span, lay_out, pad_decodes, padding_step
from paceline_runtime.gpu_memory import largest_step, memory_advice
from paceline_runtime.gpu_tables import SlotTables
from paceline_runtime.model_errors import MemoryBudgetError

SHAPE = LayoutShape(block_size=4, group=2, policy=SplitPolicy(programs=6, num_kv_heads=2))


# -- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 16, 17, 64, 100, 256, 1000])
def test_bucket_sizes_rise_to_the_limit_and_waste_little(limit):
    sizes = bucket_sizes(limit)
    assert sizes[-1] == limit
    assert sorted(set(sizes)) == list(sizes)
    assert len(sizes) <= 21
    for below, above in itertools.pairwise(sizes):
        assert above <= 2 * below or above - below <= 128


class FakeDevice:
    """Records what is asked of it, in order."""

    def __init__(self):
        self.log = []

    def record(self, compute):
        output = compute()
        self.log.append(f"record {int(output)}")
        return FakeGraph(output, self.log)

    def forget_graphs(self):
        self.log.append("forget")


class FakeGraph:
    def __init__(self, output, log):
        self.output = output
        self._log = log

    def replay(self):
        self._log.append(f"replay {int(self.output)}")


def test_graphs_are_recorded_largest_first_and_forgotten_together():
    device = FakeDevice()
    graphs = DecodeGraphs(device, (1, 2, 4), torch.tensor)
    graphs.record()
    assert device.log == ["record 4", "record 2", "record 1"]
    graphs.replay(2)
    graphs.forget()
    graphs.forget()
    assert device.log[3:] == ["replay 2", "forget"]
    assert graphs.recorded == ()
    assert int(graphs.replay(4)) == 4
    assert device.log[5:] == ["record 4", "replay 4"], "what wasn't recorded is, when it is needed"


def test_the_smallest_graph_that_holds_a_step_is_taken():
    graphs = DecodeGraphs(FakeDevice(), (1, 2, 4, 8), torch.tensor)
    assert [graphs.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    assert DecodeGraphs(FakeDevice(), (), torch.tensor).bucket(1) is None


# -- tables ---------------------------------------------------------------------------------------------------------


def changes(tables):
    found = tables.take_changes()
    return list(zip(found.rows.tolist(), found.columns.tolist(), found.blocks.tolist(), strict=True))


def test_only_what_was_appended_changes():
    tables = SlotTables(2, 8)
    table = [7, 3]
    row = tables.row(11, table, 2)
    assert changes(tables) == [(row, 0, 7), (row, 1, 3)]
    table.append(5)
    assert tables.row(11, table, 2) == row
    assert changes(tables) == []
    assert tables.row(11, table, 3) == row
    assert changes(tables) == [(row, 2, 5)]


def test_a_row_that_was_released_is_filled_anew():
    tables = SlotTables(1, 8)
    tables.row(1, [4, 5, 6], 3)
    tables.take_changes()
    tables.release([1, 99])
    tables.row(2, [9], 1)
    assert changes(tables) == [(0, 0, 9)]
    with pytest.raises(AssertionError, match="more than 1 sequences"):
        tables.row(3, [1], 1)
    tables.release_all()
    assert tables.row(3, [1], 1) == 0


# -- layout ---------------------------------------------------------------------------------------------------------


def test_a_mixed_step():
    tables = SlotTables(3, 8)
    spans = [Span(5, 6, [42], [2, 9]), Span(8, 3, [1, 2, 3], [0, 4])]
    step = lay_out(spans, tables, SHAPE)
    assert step.ids.tolist() == [42, 1, 2, 3]
    assert step.positions.tolist() == [6, 3, 4, 5]
    assert step.slots.tolist() == [9 * 4 + 2, 0 * 4 + 3, 4 * 4, 4 * 4 + 1]
    assert step.query_starts.tolist() == [0, 1, 4]
    assert step.contexts.tolist() == [7, 6]
    assert tables.host[step.table_rows[0], :2].tolist() == [2, 9]
    assert len(step.extra["changed_blocks"]) == 4


def test_padding_writes_nothing_and_attends_to_nothing():
    tables = SlotTables(4, 300)
    step = lay_out([Span(5, 1000, [42], list(range(251)))], tables, SHAPE)
    padded = pad_decodes(step, 4, SHAPE)
    assert padded.slots.tolist() == [250 * 4, -1, -1, -1]
    assert padded.query_starts.tolist() == [0, 1, 2, 3, 4]
    (tiles,) = padded.tiles
    items, reductions = decode_capacity(4, SHAPE.policy)
    assert tiles.items.shape == (items, 5) and tiles.reductions.shape == (reductions, 4) and tiles.num_parts == items
    busy = tiles.items[tiles.items[:, 3] > tiles.items[:, 2]]
    assert set(busy[:, 0]) == {0}, "only the real sequence reads KV"
    assert {1, 2, 3} <= set(tiles.items[:, 0]), "the rows of the others are zeroed"


@settings(max_examples=200, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    programs=st.integers(1, 600),
    kv_heads=st.sampled_from([1, 2, 3, 8, 16]),
)
def test_decodes_never_exceed_their_capacity(contexts, programs, kv_heads):
    policy = SplitPolicy(programs, kv_heads)
    ends = np.array(contexts)
    (tiles,) = plan_tiles(np.ones_like(ends), ends, group=4, policy=policy)
    items, reductions = decode_capacity(len(contexts), policy)
    assert len(tiles.items) <= items
    assert len(tiles.reductions) <= reductions
    assert tiles.num_parts <= items


def test_a_graph_s_inputs_stay_in_place_whatever_the_step():
    tables = SlotTables(8, 300)
    empty = padding_step(4, SHAPE)
    steps = [lay_out([Span(n, start, [1], list(range(300)))], tables, SHAPE) for n, start in enumerate((0, 17, 1100))]
    buffer = torch.empty(10_000, dtype=torch.int32)
    fixed = pack(empty, buffer).parts
    for step in steps:
        parts = pack(pad_decodes(step, 4, SHAPE), buffer).parts
        assert parts[: len(fixed)] == fixed
    assert all(at % 4 == 0 for _, _, at, _ in fixed), "16 bytes"


def test_what_is_packed_comes_out_again():
    empty = padding_step(2, SHAPE)
    seeds = np.array([2**40 + 7, -5], dtype=np.int64)
    shares = np.array([0.25, 1.0, 0.5], dtype=np.float32)
    arrays = StepArrays(
        *(getattr(empty, n) for n in ("ids", "positions", "slots", "query_starts", "contexts", "table_rows")),
        tiles=empty.tiles, extra={"seeds": seeds, "top_ps": shares},
    )  # fmt: skip
    buffer = torch.empty(words_of(arrays), dtype=torch.int32)
    views = PackedViews(pack(arrays, buffer), buffer)
    assert views["seeds"].tolist() == seeds.tolist()
    assert views["top_ps"].tolist() == shares.tolist()
    assert views["slots"].tolist() == [-1, -1]
    assert views.get("min_ps") is None
    assert views.items(0).shape == (decode_capacity(2, SHAPE.policy)[0], 5)


# -- memory ---------------------------------------------------------------------------------------------------------


class Executor:
    shape = SHAPE
    max_seqs = 3


def test_the_largest_step_holds_all_tokens_within_the_longest_text():
    step = largest_step(Executor(), 25, 10)
    assert np.diff(step.query_starts).tolist() == [10, 10, 5]
    assert step.positions[9:12].tolist() == [9, 0, 1]
    assert (step.slots == -1).all(), "nothing is written"
    assert (step.table_rows == 0).all()


def test_out_of_memory_says_what_to_do():
    class Full:
        def free_memory(self):
            return 3 << 20, 80 << 20

    advice = r"the weights: 3 of 80 MiB are free; .*--quantization.*--tensor-parallel"
    with pytest.raises(MemoryBudgetError, match=advice), memory_advice(Full(), "the weights"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_host_marks_tell_the_time_between_them():
    device = device_for(torch.device("cpu"))
    first = device.mark()
    second = device.mark()
    assert second.passed() and second.seconds_since(first) >= 0
