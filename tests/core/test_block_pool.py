"""Which block is handed out next, and who holds which."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdback.errors import InternalError
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_cache import PrefixCache


def build_pool(num_blocks=7, cached=()):
    pool = BlockPool(num_blocks, PrefixCache())
    for block_id in cached:
        pool.prefix_cache.publish(block_id, bytes([block_id]) * 32)
    return pool


def test_the_null_block_is_never_handed_out():
    pool = build_pool(num_blocks=4)
    assert pool.num_usable == pool.num_free == 3
    assert pool.allocate(3) == [1, 2, 3]


def test_never_used_blocks_come_by_id():
    assert build_pool().allocate(2) == [1, 2]


def test_of_released_blocks_the_last_block_of_the_request_released_last_comes_first():
    pool = build_pool()
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(6) == [4, 3, 2, 1, 5, 6]


def test_cached_blocks_come_after_all_others_the_one_released_longest_ago_first():
    pool = build_pool()
    first, second = pool.allocate(2), pool.allocate(3)
    for block_id in (1, 2, 3):
        pool.prefix_cache.publish(block_id, bytes([block_id]) * 32)
    pool.release(second)
    pool.release(first)
    # 4 and 5 have no content, 6 was never used; then 3 of the first release, then 2 before 1 of the second.
    assert pool.allocate(6) == [5, 4, 6, 3, 2, 1]
    assert len(pool.prefix_cache) == 0


def test_a_cached_block_that_is_handed_out_loses_its_content():
    pool = build_pool(num_blocks=2)
    pool.allocate(1)
    pool.prefix_cache.publish(1, b"k" * 32)
    pool.release([1])
    assert pool.prefix_cache.find(b"k" * 32) == 1
    assert pool.allocate(1) == [1]
    assert pool.prefix_cache.find(b"k" * 32) is None


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    pool = build_pool()
    blocks = pool.allocate(2)
    pool.hold(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 5
    assert pool.is_held(1)
    assert not pool.is_held(2)
    pool.release(blocks[:1])
    assert pool.num_free == 6


def test_a_free_cached_block_that_is_hit_is_not_free_any_more():
    pool = build_pool()
    blocks = pool.allocate(1)
    pool.prefix_cache.publish(1, b"k" * 32)
    pool.release(blocks)
    assert pool.num_free == 6
    pool.hold([1])
    assert pool.num_free == 5
    assert 1 not in pool.allocate(5)


def test_forgetting_a_free_cached_block_makes_it_the_next_one():
    pool = build_pool()
    blocks = pool.allocate(3)
    pool.prefix_cache.publish(2, b"k" * 32)
    pool.release(blocks)
    pool.forget(2)
    assert pool.take() == 2
    pool.check_integrity([[2]])


def test_too_many_blocks_are_refused_with_both_numbers_and_nothing_is_taken():
    pool = build_pool(num_blocks=4)
    pool.allocate(1)
    with pytest.raises(InternalError, match=r"allocate\(3\) with 2 of 3 blocks free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.allocate(2)
    with pytest.raises(InternalError, match="no block is free; all 3 are held"):
        pool.take()


def test_a_block_that_nobody_holds_cannot_be_released():
    pool = build_pool()
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(InternalError, match="block 1 is released but nobody holds it"):
        pool.release(blocks)


@pytest.mark.parametrize("holders", [[], [[1]], [[1, 2], [2]], [[1, 3]]], ids=str)
def test_check_integrity_sees_a_block_table_that_differs(holders):
    pool = build_pool()
    pool.allocate(2)
    pool.check_integrity([[1, 2]])
    with pytest.raises(InternalError, match="block tables say"):
        pool.check_integrity(holders)


def test_check_integrity_sees_a_block_in_the_wrong_free_list():
    pool = build_pool()
    pool.prefix_cache.publish(3, b"k" * 32)
    with pytest.raises(InternalError, match=r"\[3\] are in the wrong free list"):
        pool.check_integrity([])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "release", "share", "publish", "forget"]), st.integers(0, 99))))
def test_no_block_is_lost_or_held_twice_by_any_sequence_of_operations(operations):
    pool = build_pool(num_blocks=6)
    tables: list[list[int]] = []
    next_key = 0
    for name, number in operations:
        if name == "take" and pool.num_free:
            tables.append(pool.allocate(1 + number % pool.num_free))
        elif name == "release" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif name == "share" and tables:
            shared = tables[number % len(tables)][:1]
            pool.hold(shared)
            tables.append(shared)
        elif name == "publish" and tables:
            block_id = tables[number % len(tables)][0]
            if block_id not in pool.prefix_cache:
                next_key += 1
                pool.prefix_cache.publish(block_id, next_key.to_bytes(32, "little"))
        elif name == "forget":
            pool.forget(1 + number % 5)
        pool.check_integrity(tables)
        assert pool.num_free + len({block_id for table in tables for block_id in table}) == 5
