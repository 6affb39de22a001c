"""The bounds of a registration: whatever an executor says of itself, it costs the scheduler and its readers little.

What is accepted here is held for as long as the executor lives, logged, and shown in every `GetState`. Whether it can
work, and fits the pool, is asked elsewhere (`holdback.buckets`, `latency`, `pool`).
"""

from __future__ import annotations

from holdback import rpc
from holdback.buckets import MAX_NUM_BLOCKS, blocks_for
from holdback.errors import InvalidArgumentError
from holdback.types import ExecutorInfo
from holdback.v1 import scheduler_pb2

MAX_NUM_SEQS = 2**16
MAX_VOCAB_SIZE = 2**31
MAX_NUM_BUCKETS = 1024
MAX_NUM_LATENCIES = 2**12
MAX_NUM_EOS_TOKEN_IDS = 256
MAX_BUILD_S = 365 * 24 * 3600
MAX_NUM_COMPILED = 10**6
TEXT_BYTES = {
    "executor_id": (1, 128),
    "lease": (16, 64),
    "advertise_address": (0, 64),
    "model.name": (0, 256),
    "model.fingerprint": (1, 256),
    "device": (0, 64),
    "kernels": (0, 4096),
}
"""Fewest and most bytes of each text."""

SPARE_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of a message limit, for what a step says beside token and block ids: sampling parameters, and rows of a decode."""


def check_lengths(message: scheduler_pb2.ExecutorInfo) -> None:
    """Lengths of the lists, before they are decoded. Raises InvalidArgumentError."""
    limits = message.limits
    lists = {
        "latencies": (message.latencies, MAX_NUM_LATENCIES),
        "model.eos_token_ids": (message.model.eos_token_ids, MAX_NUM_EOS_TOKEN_IDS),
        "limits.num_batched_tokens_buckets": (limits.num_batched_tokens_buckets, MAX_NUM_BUCKETS),
        "limits.num_seqs_buckets": (limits.num_seqs_buckets, MAX_NUM_BUCKETS),
        "limits.decode_context_length_buckets": (limits.decode_context_length_buckets, MAX_NUM_BUCKETS),
    }
    for field, (entries, most) in lists.items():
        if len(entries) > most:
            raise InvalidArgumentError.of(field, f"{len(entries)} entries", f"at most {most}")


def check_info(info: ExecutorInfo, max_step_timeout_s: float) -> None:
    """Every other bound; a graph that takes longer than any step may run is refused. Raises InvalidArgumentError."""
    _check_texts(info)
    _check_numbers(info)
    _check_latencies(info, max_step_timeout_s)
    _check_message_size(info)


def _check_texts(info: ExecutorInfo) -> None:
    for field, (fewest, most) in TEXT_BYTES.items():
        owner = info.model if field.startswith("model.") else info
        length = len(getattr(owner, field.rpartition(".")[2]).encode())
        if not fewest <= length <= most:
            raise InvalidArgumentError.of(field, f"{length} bytes", f"{fewest} to {most} bytes")


def _check_numbers(info: ExecutorInfo) -> None:
    model, limits, compiled = info.model, info.limits, info.compiled
    ranges: dict[str, tuple[float, float, float]] = {
        "port": (info.port, 1, 65535),
        "model.vocab_size": (model.vocab_size, 1, MAX_VOCAB_SIZE),
        "limits.num_blocks": (limits.num_blocks, 0, MAX_NUM_BLOCKS),
        "limits.max_num_seqs": (limits.max_num_seqs, 0, MAX_NUM_SEQS),
        "model.eos_token_ids": (max(model.eos_token_ids, default=0), 0, model.vocab_size - 1),
    }
    if compiled is not None:
        ranges["compiled.num_hits"] = (compiled.num_hits, 0, MAX_NUM_COMPILED)
        ranges["compiled.num_misses"] = (compiled.num_misses, 0, MAX_NUM_COMPILED)
        ranges["compiled.build_ms"] = (compiled.build_s * 1000, 0, MAX_BUILD_S * 1000)
    for field, (value, smallest, largest) in ranges.items():
        if not smallest <= value <= largest:
            raise InvalidArgumentError.of(field, value, f"[{smallest}, {largest}]")


def _check_latencies(info: ExecutorInfo, max_step_timeout_s: float) -> None:
    """0 is refused by `LatencyTable`."""
    for entry in info.latencies:
        if entry.latency_us > max_step_timeout_s * 1e6:
            graph = f"the {entry.phase.value} graph of size {entry.size}, context {entry.context}"
            limit = f"at most max_step_timeout_s of the scheduler, which is {max_step_timeout_s:g} s"
            raise InvalidArgumentError(
                f"latency_us of {graph} is {entry.latency_us}; allowed: {limit}",
                field="latencies.latency_us",
                value=str(entry.latency_us),
                limit=limit,
            )


def _check_message_size(info: ExecutorInfo) -> None:
    """The largest step that the executor's sizes allow must fit a message: a prompt with its whole block table."""
    limits, length = info.limits, info.model.max_model_len
    token_bytes = length * _varint_bytes(info.model.vocab_size - 1)
    table_bytes = blocks_for(length, max(1, limits.block_size)) * _varint_bytes(limits.num_blocks - 1)
    if token_bytes + table_bytes + SPARE_MESSAGE_BYTES > rpc.MAX_MESSAGE_BYTES:
        raise InvalidArgumentError.of(
            "model.max_model_len",
            f"{length}, with {token_bytes + table_bytes} bytes of token and block ids in a step",
            f"at most {rpc.MAX_MESSAGE_BYTES - SPARE_MESSAGE_BYTES} bytes",
        )


def _varint_bytes(largest: int) -> int:
    """Bytes of a number up to `largest` in a packed field."""
    return max(1, -(-max(0, largest).bit_length() // 7))
