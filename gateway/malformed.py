"""Requests whose bytes are no message of their method: INVALID_ARGUMENT, where gRPC itself would say UNKNOWN.

So are those of very many fields. An empty field is two bytes on the wire and thirty in memory, and reading 64 MiB of
them takes seconds in which nothing else is done, so the fields of a long request are counted before it is read.

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

from gateway.wire import has_more_fields
from holdback.errors import InvalidArgumentError

MAX_FIELDS = 16_384
"""More than any request has that the limits of its fields allow; those of messages within it count, too."""

MAX_UNCOUNTED_BYTES = 256 * 1024
"""Of a request that is read as it comes: whatever is in it costs little."""

_PROBLEM: ContextVar[str] = ContextVar("problem", default="")  # of the call that is being answered


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Lets every unary request through to its service, also one that cannot be read."""

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
            if len(data) > MAX_UNCOUNTED_BYTES and has_more_fields(data, descriptor, MAX_FIELDS):
                _PROBLEM.set(f"it has more than {MAX_FIELDS} fields")
                return deserialize(b"")
            try:
                return deserialize(data)
            except DecodeError as error:
                _PROBLEM.set(str(error) or "not a message")
                return deserialize(b"")

        return handler._replace(request_deserializer=deserialize_or_note)


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
