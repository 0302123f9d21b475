"""The block pool alone: conservation, sharing, eviction order, double frees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_core.blocks import BlockPool, hash_block, prompt_hashes


def table(pool: BlockPool, hashes: list[int]) -> list[int]:
    """Allocate and register one block per hash."""
    blocks = [pool.allocate() for _ in hashes]
    for block, value in zip(blocks, hashes, strict=True):
        pool.register(block, value)
    return blocks


def test_hashes_chain_over_parent_tokens_and_salt():
    base = prompt_hashes([1, 2, 3, 4, 5, 6, 7], 2)
    assert len(base) == 3
    assert prompt_hashes([1, 2, 3, 4], 2) == base[:2]
    assert prompt_hashes([9, 2, 3, 4], 2)[1] != base[1], "the same tokens after others aren't the same block"
    assert prompt_hashes([1, 2, 3, 4], 2, salt=5)[0] != base[0]
    assert hash_block(0, [1, 23], 0) != hash_block(0, [12, 3], 0)
    assert prompt_hashes([1], 2) == ()


def test_a_released_prefix_is_found_and_shared():
    pool = BlockPool(8)
    first = table(pool, [11, 12, 13])
    pool.release(first)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (5, 3, 0)
    found = pool.find([11, 12, 99, 13], 4)
    assert found == first[:2], "a prefix ends at the first block that isn't there"
    assert pool.find([11, 12, 13], 1) == first[:1]
    assert pool.num_idle(found) == 2
    pool.share(found)
    pool.share(found)
    assert pool.num_idle(found) == 0
    pool.check([found, found])
    pool.release(found)
    assert pool.num_used == 2
    pool.release(found)
    pool.check([])


def test_the_oldest_prefix_goes_first_and_its_tail_before_its_head():
    pool = BlockPool(6)
    old, new = table(pool, [1, 2, 3]), table(pool, [4, 5, 6])
    pool.release(old)
    pool.release(new)
    assert [pool.allocate() for _ in range(6)] == [*reversed(old), *reversed(new)]
    assert pool.find([1], 1) == pool.find([4], 1) == []


def test_use_makes_a_prefix_young_again():
    pool = BlockPool(4)
    old, new = table(pool, [1, 2]), table(pool, [3, 4])
    pool.release(old)
    pool.release(new)
    pool.share(old)
    pool.release(old)
    assert [pool.allocate(), pool.allocate()] == [new[1], new[0]]
    assert pool.find([1, 2], 2) == old


def test_free_blocks_are_taken_before_cached_ones():
    pool = BlockPool(4)
    pool.release(table(pool, [1, 2]))
    pool.allocate()
    pool.allocate()
    assert pool.num_cached == 2
    assert pool.find([1, 2], 2)


def test_equal_blocks_that_were_computed_twice_keep_the_first():
    pool = BlockPool(4)
    first, second = table(pool, [7]), table(pool, [7])
    assert pool.find([7], 1) == first
    pool.release(second)
    assert pool.num_free == 3, "the duplicate isn't findable, so it is free"
    pool.check([first])


def test_forgetting_frees_what_is_cached_and_leaves_what_is_held():
    pool = BlockPool(5)
    held, idle = table(pool, [1]), table(pool, [2, 3])
    pool.release(idle)
    pool.forget_all()
    assert (pool.num_cached, pool.num_free, pool.num_used) == (0, 4, 1)
    assert pool.find([1], 1) == []
    pool.check([held])
    pool.release(held)
    assert pool.num_free == 5


def test_misuse_is_caught():
    pool = BlockPool(1)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="empty pool"):
        pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([block])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.register(block, 1)
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="1 refs, 0 tables"):
        pool.check([])


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 12),
    moves=st.lists(st.tuples(st.sampled_from(["take", "drop", "share", "forget"]), st.integers(0, 99)), max_size=60),
)
def test_blocks_are_conserved_under_any_use(size, moves):
    pool = BlockPool(size)
    tables: list[list[int]] = []
    families = [[100 * family + i for i in range(4)] for family in range(3)]
    for move, number in moves:
        family = families[number % 3]
        if move == "take" and pool.num_available >= 1 + number % 4:
            tables.append(table(pool, family[: 1 + number % 4]))
        elif move == "drop" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif move == "share":
            found = pool.find(family, 4)
            pool.share(found)
            tables.append(found)
        elif move == "forget":
            pool.forget_all()
        pool.check(tables)
    for held in tables:
        pool.release(held)
    pool.check([])
    assert pool.num_used == 0


@given(sizes=st.lists(st.integers(0, 7), max_size=8), cached=st.integers(0, 6))
def test_taking_several_blocks_equals_taking_them_one_by_one(sizes: list[int], cached: int) -> None:
    one, many = BlockPool(12), BlockPool(12)
    for pool in (one, many):
        pool.release(table(pool, list(range(100, 100 + cached))))
    tables: list[list[int]] = []
    for size in sizes:
        if size > many.num_available:
            released = tables.pop(0)
            one.release(released)
            many.release(released)
        if size <= many.num_available:
            tables.append(many.take(size))
            assert tables[-1] == [one.allocate() for _ in range(size)]
        many.check(tables)
        assert (many.num_free, many.num_cached) == (one.num_free, one.num_cached)
