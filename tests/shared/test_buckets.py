"""Buckets and the checks of decisions K1 and K2."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from holdback.buckets import (
    check_kv_memory,
    check_limits,
    get_bucket_for_count,
    get_default_decode_context_length_buckets,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
    max_kv_concurrent,
    validate_buckets,
)
from holdback.errors import ConfigError
from holdback.types import ExecutorLimits

LIMITS = ExecutorLimits(
    block_size=16,
    num_blocks=17,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    num_batched_tokens_buckets=(128,),
    num_seqs_buckets=(1, 2, 4),
)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (8192, [128, 256, 512, 1024, 2048, 4096, 8192]),
        (1000, [128, 256, 512, 1000]),
        (128, [128]),
        (129, [128, 129]),
        (100, [100]),
        (1, [1]),
    ],
)
def test_default_prefill_buckets_are_powers_of_two_from_128_and_the_maximum(largest: int, expected: list[int]) -> None:
    assert get_default_num_batched_tokens_buckets(largest) == expected


@pytest.mark.parametrize(("largest", "expected"), [(8, [1, 2, 4, 8]), (6, [1, 2, 4, 6]), (1, [1]), (3, [1, 2, 3])])
def test_default_decode_buckets_are_powers_of_two_from_1_and_the_maximum(largest: int, expected: list[int]) -> None:
    assert get_default_num_seqs_buckets(largest) == expected


@pytest.mark.parametrize(
    ("longest", "expected"), [(1024, [256, 512, 1024]), (1000, [256, 512, 1000]), (257, [256, 257]), (200, [200])]
)
def test_default_context_buckets_are_powers_of_two_from_256_and_the_longest(longest: int, expected: list[int]) -> None:
    assert get_default_decode_context_length_buckets(longest) == expected


def test_prefill_buckets_of_a_device_that_takes_none_so_small_begin_higher() -> None:
    assert get_default_num_batched_tokens_buckets(2048, 512) == [512, 1024, 2048]
    assert get_default_num_batched_tokens_buckets(300, 512) == [300]


@pytest.mark.parametrize(("count", "bucket"), [(1, 128), (127, 128), (128, 128), (129, 256), (1500, 2048)])
def test_the_smallest_bucket_that_holds_the_count_is_taken(count: int, bucket: int) -> None:
    assert get_bucket_for_count(count, [128, 256, 512, 1024, 2048]) == bucket


def test_a_count_beyond_the_largest_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 513; allowed: at most 512"):
        get_bucket_for_count(513, [128, 512])


@pytest.mark.parametrize("buckets", [[], [0, 128], [-1, 128], [128, 128], [256, 128]])
def test_buckets_that_do_not_ascend_from_1_are_refused(buckets: list[int]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"num_seqs_buckets is {buckets}; allowed: positive")):
        validate_buckets("num_seqs_buckets", buckets, 128, "max_num_seqs")


def test_buckets_that_do_not_end_in_the_maximum_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"is \[1, 2, 4\]; allowed: the last one is 8 \(max_num_seqs\), not 4"):
        validate_buckets("num_seqs_buckets", [1, 2, 4], 8, "max_num_seqs")


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "expected"),
    [(17, 256, 1), (17, 257, 0), (10, 128, 1), (33, 256, 2), (32, 256, 1), (1, 16, 0), (0, 16, 0)],
)
def test_the_null_block_does_not_count_for_concurrency(num_blocks: int, max_model_len: int, expected: int) -> None:
    assert max_kv_concurrent(num_blocks, max_model_len, 16) == expected


@pytest.mark.case("B02")
def test_kv_memory_that_cannot_hold_one_request_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 512, which needs 32 blocks .* num_blocks is 17"):
        check_kv_memory(num_blocks=17, max_model_len=512, block_size=16)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_no_usable_block_at_all_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"of which 0 are usable .* allowed: num_blocks of at least 2$"):
        check_kv_memory(num_blocks=num_blocks, max_model_len=16, block_size=16)


def test_limits_that_fit_are_accepted() -> None:
    check_limits(LIMITS, max_model_len=256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens is 3; allowed: at least max_num_seqs, which is 4"),
        ({"num_batched_tokens_buckets": (128, 256)}, "the last one is 128"),
        ({"num_seqs_buckets": (1, 2)}, "the last one is 4"),
        ({"num_blocks": 16}, "num_blocks is 16, of which 15 are usable"),
        ({"block_size": 0}, "block_size is 0; allowed: at least 1"),
        ({"decode_context_length_buckets": (64, 128)}, "the last one is 256 (max_model_len)"),
        ({"max_steps_in_flight": 3}, "max_steps_in_flight is 3; allowed: 1 or 2"),
    ],
)
def test_each_limit_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_limits(dataclasses.replace(LIMITS, **change), max_model_len=256)


def test_the_largest_prefill_bucket_is_the_context_when_that_is_smaller() -> None:
    limits = dataclasses.replace(LIMITS, max_num_batched_tokens=512, num_batched_tokens_buckets=(128, 200))
    check_limits(limits, max_model_len=200)
