"""What a scheduler is configured with, and K1 and K2: what it refuses to start with."""

from __future__ import annotations

from dataclasses import dataclass

from holdback.errors import ConfigError
from scheduler_svc.core.buckets import (
    check_buckets,
    get_default_num_batched_tokens_buckets,
    get_default_num_seqs_buckets,
)


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

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _check_at_least(field, getattr(self, field), 1)
        _check_at_least("max_model_len", self.max_model_len, 2, "a prompt token and an output token")
        self._check_kv_memory()
        self._check_step_sizes()

    @property
    def effective_max_num_batched_tokens(self) -> int:
        """What the largest prefill bucket must hold."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """`num_batched_tokens_buckets`, or its defaults."""
        if self.num_batched_tokens_buckets is not None:
            return tuple(self.num_batched_tokens_buckets)
        return tuple(get_default_num_batched_tokens_buckets(self.effective_max_num_batched_tokens))

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """`num_seqs_buckets`, or its defaults."""
        if self.num_seqs_buckets is not None:
            return tuple(self.num_seqs_buckets)
        return tuple(get_default_num_seqs_buckets(self.max_num_seqs))

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request that grows to `max_model_len`."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_kv_concurrent(self) -> int:
        """K1: how many such requests KV memory holds; block 0 is never usable."""
        return (self.num_blocks - 1) // self.blocks_per_request

    def _check_kv_memory(self) -> None:
        needed = self.blocks_per_request + 1
        why = f"the null block and {needed - 1} blocks of {self.block_size} for max_model_len {self.max_model_len}"
        _check_at_least("num_blocks", self.num_blocks, needed, why)

    def _check_step_sizes(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            why = f"max_num_seqs is {self.max_num_seqs} and a decode step holds a token of each"
            _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs, why)
        if self.num_batched_tokens_buckets is not None:
            maximum = self.effective_max_num_batched_tokens
            name = "min(max_num_batched_tokens, max_model_len)"
            check_buckets("num_batched_tokens_buckets", self.num_batched_tokens_buckets, maximum, name)
        if self.num_seqs_buckets is not None:
            check_buckets("num_seqs_buckets", self.num_seqs_buckets, self.max_num_seqs, "max_num_seqs")


def _check_at_least(field: str, value: int, minimum: int, why: str = "") -> None:
    if value < minimum:
        raise ConfigError(f"{field} is {value}; allowed: at least {minimum}" + (f" ({why})" if why else ""))
