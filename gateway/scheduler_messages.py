"""What the messages of a scheduler say, checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc.aio

from gateway.submission import Ended
from holdback import codec, rpc
from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from holdback.types import PROTOCOL_VERSION, FinishReason, TokenLogprobs
from holdback.v1 import scheduler_pb2

MIN_SILENT_HEARTBEATS = 3
"""Heartbeats that a scheduler misses before its silence counts, whatever the gateway's timeout."""

Stream = grpc.aio.StreamStreamCall[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]


async def read_response(call: Stream, silence_timeout_s: float | None) -> scheduler_pb2.ConnectResponse | None:
    """The next message; None at the end of the stream.

    Raises:
        AioRpcError: the stream ended with another status than OK.
        UnavailableError: nothing came in `silence_timeout_s` (PEER_SILENT).
    """
    try:
        async with asyncio.timeout(silence_timeout_s):
            response = await call.read()
    except TimeoutError:
        raise UnavailableError(
            f"the scheduler was silent for {silence_timeout_s:g} s", reason=ErrorReason.PEER_SILENT
        ) from None
    return response if isinstance(response, scheduler_pb2.ConnectResponse) else None


def longest_silence_s(accepted: scheduler_pb2.GatewayAccepted, silence_timeout_s: float) -> float | None:
    """Of a scheduler that works; None where it sends no heartbeats."""
    if accepted.heartbeat_interval_ms == 0:
        return None
    return max(silence_timeout_s, MIN_SILENT_HEARTBEATS * accepted.heartbeat_interval_ms / 1000)


def check_accepted(response: scheduler_pb2.ConnectResponse | None) -> scheduler_pb2.GatewayAccepted:
    """The first message of a stream. Raises InvalidArgumentError or FailedPreconditionError."""
    kind = None if response is None else response.WhichOneof("response")
    if response is None or kind != "accepted":
        raise InvalidArgumentError.of("response", kind or "not set", "accepted, first")
    major = response.accepted.protocol_version.major
    if major != PROTOCOL_VERSION[0]:
        raise FailedPreconditionError(
            f"the scheduler speaks protocol {major}; allowed: {PROTOCOL_VERSION[0]}, that of this gateway",
            reason=ErrorReason.PROTOCOL_MISMATCH,
        )
    return response.accepted


def decode_ended(message: scheduler_pb2.RequestEnded) -> Ended:
    """How a request ended; one that ended with an error has one."""
    reason = codec.decode_finish_reason(message.finish_reason)
    error = rpc.decode_error(message.error) if message.HasField("error") else None
    if error is None and reason is FinishReason.ERROR:
        error = InternalError("the scheduler ended the request with an error that it did not name")
    return Ended(reason, message.stop_token_id if message.HasField("stop_token_id") else None, error)


class NewTokens(NamedTuple):
    """New outputs of one request; plain, for each token of each request is one.

    Attributes:
        handle: of the request on its stream.
        first_index: of these outputs.
        token_ids: the outputs.
        logprobs: parallel to them, None for those that have none; or empty.
    """

    handle: int
    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


def read_tokens(updates: scheduler_pb2.RequestUpdates) -> Iterator[NewTokens]:
    """The outputs in a message, request by request.

    Raises:
        InvalidArgumentError: its lists do not fit each other, or a token has log-probabilities twice.
    """
    counts: Sequence[int] = updates.num_new_tokens or [1] * len(updates.handles)
    token_ids = list(updates.token_ids)
    if not len(counts) == len(updates.handles) == len(updates.output_indices) or sum(counts) != len(token_ids):
        raise InvalidArgumentError.of("updates.num_new_tokens", len(counts), "lists that fit each other")
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids) if updates.logprobs else []
    for entry in updates.logprobs:
        if entry.token_index >= len(token_ids) or logprobs[entry.token_index] is not None:
            limit = f"[0, {len(token_ids)}), each once"
            raise InvalidArgumentError.of("updates.logprobs.token_index", entry.token_index, limit)
        logprobs[entry.token_index] = codec.decode_logprobs(entry.logprobs)
    start = 0
    for handle, index, count in zip(updates.handles, updates.output_indices, counts, strict=True):
        yield NewTokens(handle, index, token_ids[start : start + count], logprobs[start : start + count])
        start += count
