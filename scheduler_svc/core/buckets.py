"""Bucket sizes: the static shapes that graphs are compiled for, and which of them a count is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from holdback.errors import ConfigError

SMALLEST_DEFAULT_PREFILL_BUCKET = 128


def get_default_num_batched_tokens_buckets(max_num_batched_tokens: int) -> list[int]:
    """Prefill buckets in tokens: powers of two from 128, then the maximum where it is not one of them (K2).

    Args:
        max_num_batched_tokens: the effective one, min(max_num_batched_tokens, max_model_len); >= 1.
    """
    return _powers_of_two(SMALLEST_DEFAULT_PREFILL_BUCKET, max_num_batched_tokens)


def get_default_num_seqs_buckets(max_num_seqs: int) -> list[int]:
    """Decode batch sizes in rows: powers of two from 1, then the maximum where it is not one of them (K2)."""
    return _powers_of_two(1, max_num_seqs)


def _powers_of_two(smallest: int, maximum: int) -> list[int]:
    buckets = []
    bucket = smallest
    while bucket < maximum:
        buckets.append(bucket)
        bucket *= 2
    return [*buckets, maximum]


def get_bucket_for_count(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `count`.

    Raises:
        ValueError: the count is larger than the largest bucket.
    """
    index = bisect_left(buckets, count)
    if index == len(buckets):
        raise ValueError(f"count is {count}; allowed: at most the largest bucket, {buckets[-1]}")
    return buckets[index]


def check_buckets(field: str, buckets: Sequence[int], maximum: int, maximum_name: str) -> None:
    """K2: positive, strictly ascending, the last equal to `maximum`.

    Raises:
        ConfigError: they are not; names the field, its value and what is allowed.
    """
    shown = list(buckets)
    if not buckets or buckets[0] < 1 or any(a >= b for a, b in pairwise(buckets)):
        raise ConfigError(f"{field} is {shown}; allowed: at least one, each >= 1, strictly ascending")
    if buckets[-1] != maximum:
        raise ConfigError(f"{field} is {shown}; allowed: the last equal to {maximum_name}, which is {maximum}")
