"""Which block is handed out next, and who holds which."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdback.errors import InternalError
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_cache import PrefixCache


def build_pool(num_blocks=7, cached=()):
    pool: BlockPool[str | int] = BlockPool(num_blocks, PrefixCache())
    for block_id in cached:
        pool.prefix_cache.publish(block_id, bytes([block_id]) * 32)
    return pool


def test_the_null_block_is_never_handed_out():
    pool = build_pool(num_blocks=4)
    assert pool.num_usable == pool.num_free == 3
    assert pool.allocate(3, "a") == [1, 2, 3]


def test_never_used_blocks_come_by_id():
    assert build_pool().allocate(2, "a") == [1, 2]


def test_of_released_blocks_the_last_block_of_the_request_released_last_comes_first():
    pool = build_pool()
    first, second = pool.allocate(2, "a"), pool.allocate(2, "b")
    pool.release(first, "a")
    pool.release(second, "b")
    assert pool.allocate(6, "c") == [4, 3, 2, 1, 5, 6]


def test_cached_blocks_come_after_all_others_the_one_released_longest_ago_first():
    pool = build_pool()
    first, second = pool.allocate(2, "a"), pool.allocate(3, "b")
    for block_id in (1, 2, 3):
        pool.prefix_cache.publish(block_id, bytes([block_id]) * 32)
    pool.release(second, "b")
    pool.release(first, "a")
    # 4 and 5 have no content, 6 was never used; then 3 of the first release, then 2 before 1 of the second.
    assert pool.allocate(6, "c") == [5, 4, 6, 3, 2, 1]
    assert len(pool.prefix_cache) == 0


def test_a_cached_block_that_is_handed_out_loses_its_content():
    pool = build_pool(num_blocks=2)
    pool.allocate(1, "a")
    pool.prefix_cache.publish(1, b"k" * 32)
    pool.release([1], "a")
    assert pool.prefix_cache.find(b"k" * 32) == 1
    assert pool.allocate(1, "b") == [1]
    assert pool.prefix_cache.find(b"k" * 32) is None


def test_a_shared_block_is_free_when_its_last_holder_leaves():
    pool = build_pool()
    blocks = pool.allocate(2, "a")
    for sharer in ("b", "c"):
        pool.hold(blocks[:1], sharer)
    assert list(pool.holders(1)) == ["a", "b", "c"]
    pool.release(blocks, "a")
    assert pool.num_free == 5
    assert list(pool.holders(1)) == ["b", "c"]
    assert list(pool.holders(2)) == []
    pool.release(blocks[:1], "c")
    assert list(pool.holders(1)) == ["b"]
    assert pool.is_held(1)
    assert not pool.is_held(2)
    pool.release(blocks[:1], "b")
    assert pool.num_free == 6


def test_a_free_cached_block_that_is_hit_is_not_free_any_more():
    pool = build_pool()
    blocks = pool.allocate(1, "a")
    pool.prefix_cache.publish(1, b"k" * 32)
    pool.release(blocks, "a")
    assert pool.num_free == 6
    pool.hold([1], "b")
    assert pool.num_free == 5
    assert list(pool.holders(1)) == ["b"]
    assert 1 not in pool.allocate(5, "c")


def test_forgetting_a_free_cached_block_makes_it_the_next_one():
    pool = build_pool()
    blocks = pool.allocate(3, "a")
    pool.prefix_cache.publish(2, b"k" * 32)
    pool.release(blocks, "a")
    pool.forget(2)
    assert pool.take("b") == 2
    pool.check_integrity([("b", [2])])


def test_too_many_blocks_are_refused_with_both_numbers_and_nothing_is_taken():
    pool = build_pool(num_blocks=4)
    pool.allocate(1, "a")
    with pytest.raises(InternalError, match=r"allocate\(3\) with 2 of 3 blocks free"):
        pool.allocate(3, "b")
    assert pool.num_free == 2
    pool.allocate(2, "b")
    with pytest.raises(InternalError, match="no block is free; all 3 are held"):
        pool.take("a")


def test_only_a_holder_can_release_a_block():
    pool = build_pool()
    blocks = pool.allocate(1, "a")
    with pytest.raises(InternalError, match="block 1 is released by 'b', which does not hold it"):
        pool.release(blocks, "b")
    pool.hold(blocks, "b")
    with pytest.raises(InternalError, match="block 1 is released by 'c', which does not hold it"):
        pool.release(blocks, "c")
    pool.release(blocks, "a")
    pool.release(blocks, "b")
    with pytest.raises(InternalError, match="block 1 is released by 'b', which does not hold it"):
        pool.release(blocks, "b")


@pytest.mark.parametrize(
    "tables", [[], [("a", [1])], [("a", [1, 2]), ("b", [2])], [("a", [1, 3])], [("b", [1, 2])]], ids=str
)
def test_check_integrity_sees_a_block_table_that_differs(tables):
    pool = build_pool()
    pool.allocate(2, "a")
    pool.check_integrity([("a", [1, 2])])
    with pytest.raises(InternalError, match="block tables say"):
        pool.check_integrity(tables)


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ([5, 4], "hold 2 blocks, 2 different ones, for 3 without"),
        ([5, 4, 4], "hold 3 blocks, 2 different ones, for 3 without"),
        ([5, 4, 1], "held ones: 1"),
        ([5, 4, 0], "held ones: 0"),
    ],
)
def test_check_integrity_sees_a_free_list_that_lacks_or_repeats_a_block_or_has_a_held_one(free, words):
    pool = build_pool(num_blocks=6)
    pool.allocate(2, "a")
    assert pool._free_plain == [5, 4, 3]
    pool._free_plain = free
    with pytest.raises(InternalError, match=words):
        pool.check_integrity([("a", [1, 2])])


def test_check_integrity_sees_a_block_in_the_wrong_free_list():
    pool = build_pool()
    pool.prefix_cache.publish(3, b"k" * 32)
    with pytest.raises(InternalError, match="blocks 3 are in the wrong free list"):
        pool.check_integrity([])


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "release", "share", "publish", "forget"]), st.integers(0, 99))))
def test_no_block_is_lost_or_held_twice_by_any_sequence_of_operations(operations):
    pool = build_pool(num_blocks=6)
    tables: list[tuple[int, list[int]]] = []
    next_key = 0
    for holder, (name, number) in enumerate(operations):
        if name == "take" and pool.num_free:
            tables.append((holder, pool.allocate(1 + number % pool.num_free, holder)))
        elif name == "release" and tables:
            former, block_ids = tables.pop(number % len(tables))
            pool.release(block_ids, former)
        elif name == "share" and tables:
            shared = tables[number % len(tables)][1][:1]
            pool.hold(shared, holder)
            tables.append((holder, shared))
        elif name == "publish" and tables:
            block_id = tables[number % len(tables)][1][0]
            if block_id not in pool.prefix_cache:
                next_key += 1
                pool.prefix_cache.publish(block_id, next_key.to_bytes(32, "little"))
        elif name == "forget":
            pool.forget(1 + number % 5)
        pool.check_integrity(tables)
        assert pool.num_free + len({block_id for _, table in tables for block_id in table}) == 5
