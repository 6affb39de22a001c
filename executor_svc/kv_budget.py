"""How many KV blocks a device gets: as told, or as many as a memory budget allows.

    budget     = min(total * fraction - used, total * cap_fraction), at least min_bytes
    num_blocks = budget / bytes of a block, rounded down, less the sink, at most 2**20

`used` is what is in use once the model is loaded: weights, and on a machine everything that other programs use. The cap
is there because one executor is seldom alone: with the default 0.30 three of them on one machine leave something over,
whatever the order in which they start, and memory that another one asked for but has not written yet counts for nothing
in `used`.

Whatever is chosen must hold one request of `max_model_len` (decision K1) and must be there: a device that finds out
later that it is not ends a stream in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from holdback.buckets import MAX_NUM_BLOCKS, blocks_for, check_kv_memory
from holdback.errors import ConfigError

log = structlog.get_logger(__name__)

DEFAULT_FRACTION = 0.9
DEFAULT_CAP_FRACTION = 0.30
DEFAULT_MIN_BYTES = 1 << 30
"""On an accelerator, whose memory is for nothing else."""
SMALLEST_MODEL_LEN = 2
"""One token of a prompt and one output."""
ROUNDED_FROM_BYTES = 1 << 30
ROUNDED_TO_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device once the model is on it, in bytes.

    Attributes:
        total: that there is.
        used: in use, by weights and whatever else.
        weights: of it, by weights; None where that is not known.
    """

    total: int
    used: int
    weights: int | None = None

    @property
    def free(self) -> int:
        return max(0, self.total - self.used)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides how much a block and a request need.

    Attributes:
        bytes_per_block: keys and values of all layers.
        block_size: tokens per block.
        max_model_len: tokens of the longest request.
    """

    bytes_per_block: int
    block_size: int
    max_model_len: int

    @property
    def blocks_of_one_request(self) -> int:
        return blocks_for(self.max_model_len, self.block_size)

    @property
    def smallest_num_blocks(self) -> int:
        """For one request, the null block included."""
        return 1 + self.blocks_of_one_request

    def num_bytes(self, num_blocks: int) -> int:
        """Of KV memory with so many blocks; the sink is one more."""
        return (num_blocks + 1) * self.bytes_per_block

    def num_blocks(self, num_bytes: int) -> int:
        """That fit so many bytes beside the sink, as far as a scheduler takes them."""
        return min(max(0, num_bytes // self.bytes_per_block - 1), MAX_NUM_BLOCKS)

    def tokens(self, num_blocks: int) -> int:
        """That so many blocks hold, the null block none."""
        return max(0, num_blocks - 1) * self.block_size


@dataclass(frozen=True, slots=True)
class KVMemorySettings:
    """How much KV memory is wanted. The first that is set of `num_blocks`, `kv_cache_bytes` and `fraction` decides.

    Attributes:
        num_blocks: the null block included.
        kv_cache_bytes: taken as it is.
        fraction: share of the device's memory that may be in use with KV memory, in (0, 1].
        cap_fraction: KV memory is at most this share of the device's memory, in (0, 1].
        min_bytes: KV memory of a budget is at least this.
        default_bytes: without any of the three: this, at most half of what is free, and at least one request's need.
    """

    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    fraction: float | None = None
    cap_fraction: float = DEFAULT_CAP_FRACTION
    min_bytes: int = 0
    default_bytes: int = 2 << 30


def choose_num_blocks(shape: KVShape, settings: KVMemorySettings, memory: DeviceMemory) -> int:
    """How many blocks to make, the null block included; the arithmetic is one log line.

    Raises:
        ConfigError: one request of `max_model_len` does not fit, or what was asked for is not there; with the numbers.
    """
    num_blocks, source = _wanted(shape, settings, memory)
    _check_one_request(shape, settings, memory, num_blocks, source)
    kv_bytes = shape.num_bytes(num_blocks)
    if kv_bytes > memory.free:
        raise ConfigError(
            f"{source} asks for {num_blocks} blocks, {kv_bytes} bytes of KV memory, and of {memory.total} bytes "
            f"{memory.used} are in use; allowed: {_what_fits(shape, memory, source)}"
        )
    log.info(
        "kv_memory",
        chosen_by=source,
        total_bytes=memory.total,
        used_bytes=memory.used,
        weights_bytes=memory.weights,
        fraction=settings.fraction,
        cap_fraction=settings.cap_fraction,
        min_bytes=settings.min_bytes,
        kv_bytes=kv_bytes,
        bytes_per_block=shape.bytes_per_block,
        num_blocks=num_blocks,
        num_tokens=shape.tokens(num_blocks),
        num_longest_requests=(num_blocks - 1) // shape.blocks_of_one_request,
    )
    return num_blocks


def _wanted(shape: KVShape, settings: KVMemorySettings, memory: DeviceMemory) -> tuple[int, str]:
    """A number of blocks, and what it comes from."""
    if settings.num_blocks is not None:
        if settings.kv_cache_bytes is not None:
            both = f"num_blocks is {settings.num_blocks} and kv_cache_bytes is {settings.kv_cache_bytes}"
            raise ConfigError(f"{both}; allowed: one of them")
        return settings.num_blocks, "num_blocks"
    if settings.kv_cache_bytes is not None:
        return shape.num_blocks(settings.kv_cache_bytes), "kv_cache_bytes"
    if settings.fraction is not None:
        budget = _budget(settings, settings.fraction, memory)
        if budget < settings.min_bytes:
            return shape.num_blocks(settings.min_bytes), "kv_memory_min_bytes"
        return shape.num_blocks(budget), "kv_memory_fraction"
    default = shape.num_blocks(min(settings.default_bytes, memory.free // 2))
    if default >= shape.smallest_num_blocks:
        return default, "the default"
    return shape.smallest_num_blocks, "one request of max_model_len"


def _budget(settings: KVMemorySettings, fraction: float, memory: DeviceMemory) -> int:
    """In bytes, before `min_bytes`.

    Rounded, so that starts which find a little more or less in use get the same shapes and graphs.
    """
    budget = min(int(memory.total * fraction) - memory.used, int(memory.total * settings.cap_fraction))
    rounded = budget - budget % ROUNDED_TO_BYTES if budget >= ROUNDED_FROM_BYTES else budget
    return max(rounded, 0)


def _check_one_request(
    shape: KVShape, settings: KVMemorySettings, memory: DeviceMemory, num_blocks: int, source: str
) -> None:
    if source == "num_blocks":
        check_kv_memory(num_blocks, shape.max_model_len, shape.block_size)
    if num_blocks >= shape.smallest_num_blocks:
        return
    needed = shape.num_bytes(shape.smallest_num_blocks)
    if source == "kv_cache_bytes":
        given, change = f"kv_cache_bytes is {settings.kv_cache_bytes}", f"kv_cache_bytes of at least {needed}"
    else:
        given = (
            f"{shape.num_bytes(num_blocks)} is what {memory.total} in all, {memory.used} in use, kv_memory_fraction "
            f"{settings.fraction}, kv_memory_cap_fraction {settings.cap_fraction} and kv_memory_min_bytes "
            f"{settings.min_bytes} give"
        )
        change = f"larger fractions, or kv_memory_min_bytes of at least {needed}"
    raise ConfigError(
        f"max_model_len is {shape.max_model_len}, which needs {needed} bytes of KV memory, {shape.smallest_num_blocks} "
        f"blocks and the sink, but {given}; allowed: "
        f"{_either(change, _shorter_requests(shape, num_blocks))}"
    )


def _shorter_requests(shape: KVShape, num_blocks: int) -> str:
    """The `max_model_len` that so many blocks hold; nothing where they hold none that there can be."""
    tokens = shape.tokens(num_blocks)
    return f"max_model_len of at most {tokens}" if tokens >= SMALLEST_MODEL_LEN else ""


def _either(*changes: str) -> str:
    return ", or ".join(change for change in changes if change)


def _what_fits(shape: KVShape, memory: DeviceMemory, source: str) -> str:
    num_blocks = shape.num_blocks(memory.free)
    if num_blocks < shape.smallest_num_blocks:
        return _either(_shorter_requests(shape, num_blocks), "more memory")
    if source in ("kv_cache_bytes", "kv_memory_min_bytes"):
        return f"{source} of at most {memory.free}, or more memory"
    return f"num_blocks of at most {num_blocks}, or more memory"
