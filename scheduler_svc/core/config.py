"""What a scheduler is configured with, and K1 and K2: what it refuses to start with."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from holdback.buckets import (
    check_limits,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
    max_kv_concurrent,
)
from holdback.errors import ConfigError
from holdback.types import ExecutorLimits


class KvAdmission(enum.StrEnum):
    """By which worst case requests are let in; each admits all that the one before admits (`admission.py`)."""

    MAX_MODEL_LEN = "max_model_len"
    RESERVED = "reserved"
    PHASED = "phased"


class SchedulingPolicy(enum.StrEnum):
    """Who is served first: who came first, or the lowest `priority` and then who came first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of one lane. All are counts.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: most tokens of one step, so of one prefill chunk.
        max_model_len: most tokens of prompt and output together.
        block_size: tokens per KV block.
        num_blocks: KV blocks, the null block included.
        num_batched_tokens_buckets: prefill shapes in tokens; None for the defaults of K2.
        num_seqs_buckets: decode shapes in rows; None for the defaults of K2. The scheduler only checks them.
        enable_prefix_caching: share blocks of equal prefixes.
        kv_admission: the rule of admission by KV memory.
        max_decode_stall_ms: prefills hide decodes no longer than this at a time, by expected device times; None for
            as long as prefills come.
        scheduling_policy: the order of the scheduler's own queue; one that it is given has its own.

    Raises:
        ConfigError: K1 or K2 refuse it; the message names the field, its value and what is allowed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_batched_tokens_buckets: tuple[int, ...] | None = None
    num_seqs_buckets: tuple[int, ...] | None = None
    enable_prefix_caching: bool = True
    kv_admission: KvAdmission = KvAdmission.MAX_MODEL_LEN
    max_decode_stall_ms: float | None = None
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS

    def __post_init__(self) -> None:
        limits = ExecutorLimits(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_batched_tokens_buckets=self.prefill_buckets,
            num_seqs_buckets=self.decode_buckets,
        )
        check_limits(limits, self.max_model_len)
        if self.max_decode_stall_ms is not None and not 0 <= self.max_decode_stall_ms < float("inf"):
            raise ConfigError(f"max_decode_stall_ms is {self.max_decode_stall_ms}; allowed: at least 0, or null")

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """`num_batched_tokens_buckets`, or its defaults."""
        if self.num_batched_tokens_buckets is not None:
            return tuple(self.num_batched_tokens_buckets)
        return tuple(get_default_num_batched_tokens_buckets(min(self.max_num_batched_tokens, self.max_model_len)))

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """`num_seqs_buckets`, or its defaults."""
        if self.num_seqs_buckets is not None:
            return tuple(self.num_seqs_buckets)
        return tuple(get_default_num_seqs_buckets(self.max_num_seqs))

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def max_kv_concurrent(self) -> int:
        """K1: requests that KV memory holds if each grows to `max_model_len`; not cut to `max_num_seqs`."""
        return max_kv_concurrent(self.num_blocks, self.max_model_len, self.block_size)
