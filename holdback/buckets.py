"""Buckets, and the numbers that must fit each other before anything starts (decisions K1 and K2).

A compiled graph has a fixed shape, so each shape that may ever run is declared as a bucket beforehand. The executor
that owns the buckets and the scheduler that pads to them check the same rules, with the functions of this file.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from holdback.errors import ConfigError
from holdback.types import ExecutorLimits

SMALLEST_DEFAULT_PREFILL_BUCKET = 128
SMALLEST_DEFAULT_CONTEXT_BUCKET = 256

MAX_NUM_BLOCKS = 2**20
"""Of one executor: the scheduler looks at all of them when a lane comes and when it checks that all adds up."""


def get_default_num_batched_tokens_buckets(
    max_num_batched_tokens: int, smallest: int = SMALLEST_DEFAULT_PREFILL_BUCKET
) -> list[int]:
    """Powers of two from 128 to `max_num_batched_tokens`, which is appended when it is none; it alone below 128.

    Args:
        max_num_batched_tokens: the effective one, `min(max_num_batched_tokens, max_model_len)`, >= 1.
        smallest: instead of 128, for a device that takes none so small.
    """
    return _powers_of_two(smallest, max_num_batched_tokens)


def get_default_num_seqs_buckets(max_num_seqs: int) -> list[int]:
    """Powers of two from 1 to `max_num_seqs` (>= 1), which is appended when it is none."""
    return _powers_of_two(1, max_num_seqs)


def get_default_decode_context_length_buckets(max_model_len: int) -> list[int]:
    """Powers of two from 256 below `max_model_len` (>= 1), and that; it alone up to 256.

    For a device whose graphs have a fixed context: a short conversation then does not pay for the longest one.
    """
    return _powers_of_two(SMALLEST_DEFAULT_CONTEXT_BUCKET, max_model_len)


def _powers_of_two(smallest: int, largest: int) -> list[int]:
    buckets = []
    current = smallest
    while current < largest:
        buckets.append(current)
        current *= 2
    return [*buckets, largest]


def get_bucket_for_count(count: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `count`. Raises ValueError beyond the largest."""
    index = bisect.bisect_left(buckets, count)
    if index == len(buckets):
        raise ValueError(f"count is {count}; allowed: at most {buckets[-1]}, the largest bucket")
    return buckets[index]


def validate_buckets(name: str, buckets: Sequence[int], largest: int, largest_is: str) -> None:
    """K2 for one list of buckets. Raises ConfigError.

    Args:
        name: of the setting, for the message.
        buckets: must be positive, strictly ascending, and end in `largest`.
        largest: the value that the last bucket must have.
        largest_is: what that value is called, for the message.
    """
    shown = list(buckets)
    if not shown or shown[0] < 1 or any(low >= high for low, high in itertools.pairwise(shown)):
        raise ConfigError(f"{name} is {shown}; allowed: positive numbers, strictly ascending, at least one")
    if shown[-1] != largest:
        raise ConfigError(f"{name} is {shown}; allowed: the last one is {largest} ({largest_is}), not {shown[-1]}")


def max_kv_concurrent(num_blocks: int, max_model_len: int, block_size: int) -> int:
    """K1: requests that may run at once if each grows to `max_model_len`; block 0, the null block, holds nothing."""
    return max(num_blocks - 1, 0) // blocks_for(max_model_len, block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def check_kv_memory(num_blocks: int, max_model_len: int, block_size: int) -> None:
    """K1. Raises ConfigError with both numbers when not even one request of `max_model_len` fits."""
    if max_kv_concurrent(num_blocks, max_model_len, block_size) == 0:
        needed, usable = blocks_for(max_model_len, block_size), max(num_blocks - 1, 0)
        shorter = f", or max_model_len of at most {usable * block_size}" if usable else ""
        raise ConfigError(
            f"max_model_len is {max_model_len}, which needs {needed} blocks of {block_size} tokens, but num_blocks is "
            f"{num_blocks}, of which {usable} are usable (block 0 is not); allowed: num_blocks of at least "
            f"{needed + 1}{shorter}"
        )


def check_limits(limits: ExecutorLimits, max_model_len: int) -> None:
    """K1 and K2 for everything that one executor declares. Raises ConfigError."""
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(limits, name) < 1:
            raise ConfigError(f"{name} is {getattr(limits, name)}; allowed: at least 1")
    if max_model_len < 2:
        raise ConfigError(f"max_model_len is {max_model_len}; allowed: at least 2, one prompt token and one output")
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {limits.max_num_batched_tokens}; allowed: at least max_num_seqs, "
            f"which is {limits.max_num_seqs}"
        )
    validate_buckets(
        "num_batched_tokens_buckets",
        limits.num_batched_tokens_buckets,
        min(limits.max_num_batched_tokens, max_model_len),
        "min(max_num_batched_tokens, max_model_len)",
    )
    validate_buckets("num_seqs_buckets", limits.num_seqs_buckets, limits.max_num_seqs, "max_num_seqs")
    if limits.decode_context_length_buckets:
        validate_buckets(
            "decode_context_length_buckets", limits.decode_context_length_buckets, max_model_len, "max_model_len"
        )
    if not 1 <= limits.max_steps_in_flight <= 2:
        raise ConfigError(f"max_steps_in_flight is {limits.max_steps_in_flight}; allowed: 1 or 2")
    check_kv_memory(limits.num_blocks, max_model_len, limits.block_size)
