"""Keys that cannot be confused, and the index from keys to blocks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.prefix_cache import KEY_BYTES, PrefixCache, block_key, root_key
from tests.core.builders import build_request

ROOT = root_key([])


@pytest.mark.case("B23")
def test_token_ids_that_are_written_with_the_same_digits_have_different_keys():
    assert block_key(ROOT, [1, 23, 4, 5]) != block_key(ROOT, [12, 3, 4, 5])


@pytest.mark.case("B23")
def test_parts_that_concatenate_to_the_same_text_have_different_keys():
    splits = [
        root_key([("salt", "ab"), ("user", "c")]),
        root_key([("salt", "a"), ("user", "bc")]),
        root_key([("salt", "abc")]),
        root_key([("user", "abc")]),
        root_key([("saltuser", "abc")]),
        root_key([("salt", ""), ("user", "abc")]),
        root_key([]),
    ]
    assert len(set(splits)) == len(splits)


@pytest.mark.case("B23")
def test_equal_tokens_behind_different_blocks_have_different_keys():
    one, other = build_request("one", [1, 2, 3, 4, 9, 9, 9, 9]), build_request("other", [1, 2, 3, 5, 9, 9, 9, 9])
    assert one.token_ids(4, 8) == other.token_ids(4, 8)
    assert one.block_key(1, 4) != other.block_key(1, 4)


@pytest.mark.case("B23")
def test_equal_prompts_share_keys_within_one_salt_only():
    plain, salted, same, other = (
        build_request("r", 8, salt=salt).block_key(1, 4) for salt in ("", "team-a", "team-a", "team-b")
    )
    assert salted == same
    assert len({plain, salted, other}) == 3


@settings(deadline=None)
@given(st.lists(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3), min_size=2, max_size=5))
def test_root_keys_are_equal_only_for_equal_parts(lists_of_parts):
    for one, other in itertools.combinations(lists_of_parts, 2):
        assert (root_key(one) == root_key(other)) == (one == other)


def test_a_key_is_32_bytes_and_depends_on_every_token_and_its_place():
    token_ids = [7, 0, 2**32 - 1, 5]
    keys = {block_key(ROOT, list(order)) for order in itertools.permutations(token_ids)}
    assert len(keys) == 24
    assert {len(key) for key in keys} == {KEY_BYTES} == {32}


def test_keys_of_output_blocks_are_those_of_the_same_tokens_in_a_prompt():
    answered = build_request("answered", [1, 2, 3], outputs=[4, 5, 6, 7, 8])
    asked = build_request("asked", [1, 2, 3, 4, 5, 6, 7, 8])
    assert [answered.block_key(i, 4) for i in (0, 1)] == [asked.block_key(i, 4) for i in (0, 1)]


def test_of_equal_blocks_the_one_published_first_is_offered_and_the_next_takes_its_place():
    cache = PrefixCache()
    for block_id in (5, 3, 4):
        cache.publish(block_id, b"k")
    assert cache.find(b"k") == 5
    cache.forget(5)
    assert cache.find(b"k") == 3
    cache.forget(4)
    assert cache.find(b"k") == 3
    cache.forget(3)
    assert cache.find(b"k") is None
    assert len(cache) == 0
    assert cache._copies == {}


def test_a_copy_published_again_stands_behind_the_others():
    cache = PrefixCache()
    cache.publish(1, b"k")
    cache.publish(2, b"k")
    cache.forget(1)
    cache.publish(1, b"k")
    assert cache.find(b"k") == 2
    assert 1 in cache


def test_a_block_is_published_once():
    cache = PrefixCache()
    cache.publish(1, b"k")
    with pytest.raises(ValueError, match="block 1 is already published"):
        cache.publish(1, b"other")
    cache.forget(2)
    cache.clear()
    assert cache.find(b"k") is None
    assert 1 not in cache


def test_counts_stay_when_the_content_goes():
    cache = PrefixCache()
    cache.count_query(10, 8)
    cache.clear()
    assert (cache.queries, cache.hits) == (10, 8)
