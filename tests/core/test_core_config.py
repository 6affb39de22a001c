"""What a scheduler refuses to start with."""

import dataclasses

import pytest

from holdback.errors import ConfigError
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from tests.core.builders import build_config


@pytest.mark.case("B02")
def test_kv_memory_below_one_request_of_max_model_len_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match="max_model_len is 512, which needs 32 blocks of 16 tokens, but num_blocks is 17"
    ):
        build_config(block_size=16, num_blocks=17, max_model_len=512, max_num_batched_tokens=128)


@pytest.mark.parametrize(("num_blocks", "expected"), [(17, 1), (32, 1), (33, 2), (65, 4), (641, 40)])
def test_the_null_block_does_not_count_and_the_bound_is_not_cut_to_max_num_seqs(num_blocks, expected):
    assert build_config(num_blocks=num_blocks).max_kv_concurrent == expected


def test_a_step_must_hold_a_token_of_every_request():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 3; allowed: at least max_num_seqs, which is 4"):
        build_config(max_num_batched_tokens=3)


@pytest.mark.parametrize(
    ("field", "buckets"),
    [
        ("num_batched_tokens_buckets", (8, 16)),
        ("num_batched_tokens_buckets", (16, 8, 32)),
        ("num_batched_tokens_buckets", (8, 8, 32)),
        ("num_batched_tokens_buckets", (0, 32)),
        ("num_batched_tokens_buckets", ()),
        ("num_seqs_buckets", (1, 2)),
        ("num_seqs_buckets", (2, 1, 4)),
    ],
)
def test_buckets_must_ascend_to_the_maximum(field, buckets):
    with pytest.raises(ConfigError, match=f"{field} is "):
        dataclasses.replace(build_config(), **{field: buckets})


def test_default_buckets_end_in_what_a_step_can_hold():
    config = build_config(max_num_batched_tokens=3000, max_model_len=1000, num_blocks=251)
    assert config.prefill_buckets == (128, 256, 512, 1000)
    assert build_config(max_num_batched_tokens=64).prefill_buckets == (64,)
    assert build_config(max_num_seqs=6).decode_buckets == (1, 2, 4, 6)
    assert NeuronScheduler(config).num_batched_tokens_buckets == (128, 256, 512, 1000)


@pytest.mark.parametrize(
    "field", ["max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "num_blocks"]
)
def test_sizes_are_positive(field):
    with pytest.raises(ConfigError, match=rf"{field} is 0"):
        build_config(**{field: 0, "num_batched_tokens_buckets": (32,)})
