"""How many KV blocks there are: as told, by default, or from a memory budget; and what is refused with its numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import structlog.testing

from executor_svc.kv_budget import DeviceMemory, KVMemorySettings, KVShape, choose_num_blocks
from holdback.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


def choose(
    *,
    total: int = 100 * GIB,
    used: int = 10 * GIB,
    bytes_per_block: int = MIB,
    max_model_len: int = 64,
    **settings: Any,
) -> int:
    """With blocks of 16 tokens and 1 MiB, of a device of 100 GiB of which 10 are in use."""
    shape = KVShape(bytes_per_block, 16, max_model_len)
    return choose_num_blocks(shape, KVMemorySettings(**settings), DeviceMemory(total, used))


# By default and as told


def test_the_default_is_2_gib_the_sink_included() -> None:
    assert choose() == 2047


def test_the_default_grows_to_what_one_request_needs() -> None:
    assert choose(max_model_len=16 * 3000) == 3001


def test_the_default_leaves_half_of_what_is_free() -> None:
    assert choose(total=12 * GIB, used=10 * GIB) == 1023


def test_there_are_no_more_blocks_than_a_scheduler_takes() -> None:
    assert choose(bytes_per_block=1024) == 2**20
    assert choose(bytes_per_block=1024, kv_cache_bytes=4 * GIB) == 2**20


def test_given_sizes_are_taken_as_they_are() -> None:
    assert choose(num_blocks=17) == 17
    assert choose(kv_cache_bytes=10 * MIB) == 9
    assert choose(kv_cache_bytes=11 * MIB - 1) == 9


# From a budget


def test_a_budget_is_the_fraction_less_what_is_in_use() -> None:
    # 100 * 0.35 - 10 = 25 GiB
    assert choose(fraction=0.35) == 25 * 1024 - 1


def test_a_budget_is_at_most_the_cap() -> None:
    assert choose(fraction=0.9) == 30 * 1024 - 1
    assert choose(fraction=0.9, cap_fraction=0.5) == 50 * 1024 - 1
    assert choose(fraction=0.9, cap_fraction=1.0) == 80 * 1024 - 1


def test_a_budget_is_at_least_the_minimum_where_that_is_free() -> None:
    assert choose(fraction=0.1, min_bytes=GIB) == 1023
    with pytest.raises(ConfigError, match=r"1073741824 bytes of KV memory, and of 10737418240 bytes 10200547328 are"):
        choose(total=10 * GIB, used=9728 * MIB, fraction=0.1, min_bytes=GIB)


def test_a_little_more_or_less_memory_in_use_gives_the_same_blocks() -> None:
    """Shapes of compiled graphs depend on their number."""
    found = {choose(used=10 * GIB + changed * MIB, fraction=0.355) for changed in (1, 50, 99, 200)}
    assert found == {25 * 1024 + 256 - 1}


def test_a_small_budget_is_used_up() -> None:
    assert choose(total=GIB, used=0, fraction=0.2) == 203  # of 204.8 MiB


def test_three_executors_of_one_machine_with_the_default_cap_leave_something_over() -> None:
    """Each starts after the one before it has its memory, asks for 90 % and gets less than a third."""
    used = 4 * GIB
    for _ in range(3):
        used += (choose(used=used, fraction=0.9) + 1) * MIB
    assert used == 90 * GIB  # the third gets what 90 % leave, 26 GiB and not 30


def test_a_budget_that_others_have_used_up_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as raised:
        choose(used=95 * GIB, fraction=0.9)
    assert raised.value.message == (
        "max_model_len is 64, which needs 6291456 bytes of KV memory, 5 blocks and the sink, but 1048576 is what "
        "107374182400 in all, 102005473280 in use, kv_memory_fraction 0.9, kv_memory_cap_fraction 0.3 and "
        "kv_memory_min_bytes 0 give; allowed: larger fractions, or kv_memory_min_bytes of at least 6291456"
    )


# What is refused


@pytest.mark.case("B02")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 4}, "max_model_len is 64, which needs 4 blocks of 16 tokens, but num_blocks is 4"),
        ({"num_blocks": 0}, "num_blocks is 0, of which 0 are usable"),
        (
            {"kv_cache_bytes": 6 * MIB - 1},
            "max_model_len is 64, which needs 6291456 bytes of KV memory, 5 blocks and the sink, but kv_cache_bytes is "
            "6291455; allowed: kv_cache_bytes of at least 6291456, or max_model_len of at most 48",
        ),
        ({"num_blocks": 4, "kv_cache_bytes": 4_000}, "num_blocks is 4 and kv_cache_bytes is 4000; allowed: one"),
        (
            {"num_blocks": 91 * 1024},
            "num_blocks asks for 93184 blocks, 97711554560 bytes of KV memory, and of 107374182400 bytes 10737418240 "
            "are in use; allowed: num_blocks of at most 92159, or more memory",
        ),
        (
            {"kv_cache_bytes": 91 * GIB},
            "kv_cache_bytes asks for 93183 blocks, 97710505984 bytes of KV memory, and of 107374182400 bytes "
            "10737418240 are in use; allowed: kv_cache_bytes of at most 96636764160, or more memory",
        ),
        (
            {"fraction": 0.5, "min_bytes": 91 * GIB},
            "kv_memory_min_bytes asks for 93183 blocks, 97710505984 bytes of KV memory, and of 107374182400 bytes "
            "10737418240 are in use; allowed: kv_memory_min_bytes of at most 96636764160, or more memory",
        ),
        (
            {"max_model_len": 16 * 100_000},
            "one request of max_model_len asks for 100001 blocks, 104859697152 bytes of KV memory, and of 107374182400 "
            "bytes 10737418240 are in use; allowed: max_model_len of at most 1474528, or more memory",
        ),
    ],
)
def test_memory_that_is_not_there_or_holds_no_request_is_refused_with_what_to_change(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose(**settings)


def test_no_length_is_offered_below_the_shortest_that_there_can_be() -> None:
    with pytest.raises(ConfigError, match=r"allowed: kv_cache_bytes of at least 6291456$"):
        choose(kv_cache_bytes=2 * MIB)
    with pytest.raises(ConfigError, match=r"allowed: more memory$"):
        choose(num_blocks=5, used=100 * GIB)


def test_what_is_said_to_be_enough_is_enough() -> None:
    assert choose(fraction=0.5, min_bytes=90 * GIB) == 92159
    assert choose(kv_cache_bytes=90 * GIB) == 92159
    assert choose(kv_cache_bytes=6 * MIB) == 5
    assert choose(kv_cache_bytes=6 * MIB - 1, max_model_len=48) == 4
    assert choose(num_blocks=92159) == 92159
    assert choose(max_model_len=1474528) == 92159


def test_the_arithmetic_is_one_log_line() -> None:
    with structlog.testing.capture_logs() as lines:
        choose(fraction=0.9, min_bytes=GIB)
    assert lines == [
        {
            "event": "kv_memory",
            "log_level": "info",
            "chosen_by": "kv_memory_fraction",
            "total_bytes": 100 * GIB,
            "used_bytes": 10 * GIB,
            "weights_bytes": None,
            "fraction": 0.9,
            "cap_fraction": 0.3,
            "min_bytes": GIB,
            "kv_bytes": 30 * GIB,
            "bytes_per_block": MIB,
            "num_blocks": 30719,
            "num_tokens": 491488,
            "num_longest_requests": 7679,
        }
    ]
