"""Requests whose bytes are no message of their method: INVALID_ARGUMENT, where gRPC itself would say UNKNOWN.

So are those of very many fields or numbers. An empty field is two bytes on the wire and thirty in memory, and to read
megabytes of them takes seconds in which nothing else is done; so what a long request has is counted before it is read.

A deserializer cannot refuse a call, so it notes what it could not read and hands on an empty message; every service
asks `check_well_formed` before it looks at one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from gateway.limits import MAX_TOKEN_IDS
from gateway.wire import fault_of
from holdback.errors import InvalidArgumentError

MAX_FIELDS = 16_384
"""More than any request has that the limits of its fields allow; those of messages within it count, too."""

MIN_NUMBER_LIMIT = 256 * 1024
NUMBERS_PER_TOKEN = 2
"""In the lists of a request, for each token of the longest served model, though never fewer than the number above."""

MAX_UNCOUNTED_BYTES = 256 * 1024
"""Of a request that is read as it comes: whatever is in it costs little. Its fields are not counted, and groups are
passed over as unknown fields are."""

_PROBLEM: ContextVar[str] = ContextVar("problem", default="")  # of the call that is being answered


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Lets every unary request through to its service, also one that cannot be read."""

    def __init__(self, longest_model_len: Callable[[], int]) -> None:
        """`longest_model_len`: of the served models; 0 while none is known, when any request may be a right one."""
        self._longest_model_len = longest_model_len

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call, with a deserializer that notes what it cannot read."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        deserialize = handler.request_deserializer
        descriptor: Descriptor = deserialize.__self__.DESCRIPTOR  # it is `FromString` of the message's class

        def deserialize_or_note(data: bytes) -> Any:
            try:
                fault = self._fault_of(data, descriptor)
                if fault is None:
                    return deserialize(data)
            except DecodeError as error:
                fault = str(error) or "not a message"
            _PROBLEM.set(fault)
            return deserialize(b"")

        return handler._replace(request_deserializer=deserialize_or_note)

    def _fault_of(self, data: bytes, descriptor: Descriptor) -> str | None:
        if len(data) <= MAX_UNCOUNTED_BYTES:
            return None
        return fault_of(data, descriptor, max_fields=MAX_FIELDS, max_numbers=max_numbers(self._longest_model_len()))


def max_numbers(longest_model_len: int) -> int:
    """How many numbers the lists of one request may have. 0 is a length that is not known."""
    longest = min(longest_model_len, MAX_TOKEN_IDS) or MAX_TOKEN_IDS
    return max(MIN_NUMBER_LIMIT, NUMBERS_PER_TOKEN * longest)


def check_well_formed() -> None:
    """Raises InvalidArgumentError when the request that is being answered could not be read."""
    problem = _PROBLEM.get()
    if problem:
        raise InvalidArgumentError(
            f"request is no message of this method: {problem}",
            field="request",
            value="bytes",
            limit="a message of this method",
        )
