"""Paged attention over ragged batches, against float64 token by token."""

from array import array

import kernel_references as expected
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kernels import MASK_ROWS, AttentionPlanner, Gather, SequenceSpan, paged_attention

OPS = [paged_attention, paged_attention.reference]


def make_case(contexts, *, block_size, heads=4, kv_heads=2, size=8, dtype=torch.float32, seed=0):
    """`contexts` are (start, num_tokens); blocks are scattered and unused ones are poisoned with large numbers."""
    generator = np.random.default_rng(seed)
    needs = [-(-(start + count) // block_size) for start, count in contexts]
    blocks = iter(generator.permutation(sum(needs) + 3))
    spans = [
        SequenceSpan(start, count, [int(next(blocks)) for _ in range(n)])
        for (start, count), n in zip(contexts, needs, strict=True)
    ]
    tokens = sum(count for _, count in contexts)
    cache = torch.from_numpy(generator.standard_normal((sum(needs) + 3, block_size, 2, kv_heads, size))).to(dtype)
    for unused in blocks:
        cache[int(unused)] = 1e4
    queries = torch.from_numpy(generator.standard_normal((tokens, heads, size))).to(dtype)
    return spans, cache, queries


def check(op, spans, cache, queries, block_size, gather=None, *, window=None, soft_cap=None):
    batch = AttentionPlanner(block_size, queries.dtype, window=window).plan(spans)
    got = op(queries, cache, batch, gather or Gather(), 0.3, window=window, soft_cap=soft_cap)
    wide = expected.wide(queries), expected.wide(cache)
    expected.assert_close(got, expected.paged_attention(*wide, spans, block_size, 0.3, window, soft_cap))
    return batch


@pytest.mark.parametrize("op", OPS, ids=["cpu", "reference"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(1, 1, 2), (4, 2, 8), (9, 3, 64), (6, 1, 10), (3, 3, 5)])
def test_mixed_batch(op, block_size, heads, kv_heads, size):
    contexts = [(70, 1), (16, 1), (15, 1), (0, 1), (0, 5), (3, 2), (31, 17), (0, 33)]
    spans, cache, queries = make_case(contexts, block_size=block_size, heads=heads, kv_heads=kv_heads, size=size)
    check(op, spans, cache, queries, block_size)


@pytest.mark.parametrize("op", OPS, ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(op, dtype):
    spans, cache, queries = make_case([(20, 1), (3, 1), (5, 9)], block_size=4, dtype=dtype)
    check(op, spans, cache, queries, 4)


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(st.integers(0, 150), max_size=12),
    prefills=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 24)), max_size=3),
    block_size=st.sampled_from([1, 2, 5, 16]),
    seed=st.integers(0, 99),
)
def test_any_ragged_batch(decodes, prefills, block_size, seed):
    contexts = [(start, 1) for start in decodes] + prefills
    if contexts:
        spans, cache, queries = make_case(contexts, block_size=block_size, heads=2, kv_heads=1, size=4, seed=seed)
        check(paged_attention, spans, cache, queries, block_size)


def test_a_chunk_longer_than_its_mask_is_cut():
    rows = MASK_ROWS + 9
    spans, cache, queries = make_case([(20, rows)], block_size=16, heads=1, kv_heads=1, size=2)
    batch = AttentionPlanner(16, torch.float32).plan(spans)
    assert [(part.first, part.last) for part in batch.prefills] == [(0, MASK_ROWS), (MASK_ROWS, rows)]
    check(paged_attention, spans, cache, queries, 16)


@pytest.mark.parametrize("op", OPS, ids=["cpu", "reference"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 40])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_sliding_windows_and_soft_caps(op, block_size, window, soft_cap):
    contexts = [(70, 1), (40, 1), (39, 1), (3, 1), (0, 1), (0, 5), (0, 60), (31, 17), (64, 20)]
    spans, cache, queries = make_case(contexts, block_size=block_size, heads=2, kv_heads=1, size=4)
    check(op, spans, cache, queries, block_size, window=window, soft_cap=soft_cap)


def test_a_window_reads_only_its_own_blocks():
    spans, cache, queries = make_case([(99, 1), (90, 10), (0, 30)], block_size=4, heads=1, kv_heads=1, size=2)
    batch = check(paged_attention, spans, cache, queries, 4, window=10)
    assert [len(group.blocks) for group in batch.windowed.decodes] == [3]
    assert [len(part.blocks) for part in batch.windowed.prefills] == [5, 8]
    assert len(batch.decodes[0].blocks) == 25


def test_a_long_chunk_in_a_window_is_cut():
    spans, cache, queries = make_case([(0, MASK_ROWS + 70)], block_size=16, heads=1, kv_heads=1, size=2)
    batch = check(paged_attention, spans, cache, queries, 16, window=20)
    assert [part.context for part in batch.windowed.prefills] == [MASK_ROWS, 70 + 32]


def test_short_contexts_need_no_windowed_layout():
    spans, _, _ = make_case([(9, 1), (0, 10)], block_size=4)
    assert AttentionPlanner(4, torch.float32, window=10).plan(spans).windowed is None


def test_a_window_that_was_not_planned_for_is_refused():
    spans, cache, queries = make_case([(9, 1)], block_size=4)
    with pytest.raises(AssertionError, match="planned for the window None, not 5"):
        paged_attention(queries, cache, AttentionPlanner(4, torch.float32).plan(spans), Gather(), 1.0, window=5)


def test_padding_is_bounded_by_grouping():
    lengths = [500, 498, 490, 20, 19, 3, 1]
    spans, _, _ = make_case([(length - 1, 1) for length in lengths], block_size=16)
    groups = AttentionPlanner(16, torch.float32).plan(spans).decodes
    assert [(group.first, group.last) for group in groups] == [(0, 3), (3, 7)]


def test_the_gather_buffer_is_reused_and_grows():
    gather = Gather()
    for contexts in ([(10, 1)], [(200, 1), (30, 1)], [(5, 1)]):
        spans, cache, queries = make_case(contexts, block_size=16)
        check(paged_attention, spans, cache, queries, 16, gather)
    wide, narrow = gather.blocks(cache, torch.tensor([0])), gather.blocks(cache, torch.tensor([0]))
    assert wide.data_ptr() == narrow.data_ptr()


def test_tables_in_arrays_are_those_in_lists():
    spans = [SequenceSpan(20, 1, [4, 9, 7]), SequenceSpan(3, 17, [1, 2, 8])]
    listed = AttentionPlanner(16, torch.float32).plan(spans)
    arrays = AttentionPlanner(16, torch.float32).plan([span._replace(blocks=array("i", span.blocks)) for span in spans])
    for name in ("positions", "slots", "spans", "tables"):
        assert getattr(arrays, name).tolist() == getattr(listed, name).tolist()
    assert arrays.tables.tolist() == [4, 9, 1, 2], "what the positions need"
    assert arrays.prefills[0].blocks.tolist() == listed.prefills[0].blocks.tolist()


def test_single_tokens_must_come_first():
    with pytest.raises(AssertionError, match="one token come first"):
        AttentionPlanner(16, torch.float32).plan([SequenceSpan(0, 4, [0]), SequenceSpan(5, 1, [1])])
