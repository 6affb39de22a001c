"""Requests whose bytes are no message of their method: INVALID_ARGUMENT, where gRPC itself would say UNKNOWN.

gRPC would log each with a traceback, too. A deserializer cannot refuse a call, so it notes what it could not read and
hands on an empty message; every service asks `check_well_formed` before it looks at one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from holdback.errors import InvalidArgumentError

_PROBLEM: ContextVar[str] = ContextVar("problem", default="")  # of the call that is being answered


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Lets every unary request through to its service, also one that cannot be read."""

    def __init__(self, find_fault: Callable[[bytes, Descriptor], str | None] = lambda data, kind: None) -> None:
        """`find_fault`: why the bytes of a message of this kind are not to be read, if so; may raise DecodeError."""
        self._find_fault = find_fault

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
                fault = self._find_fault(data, descriptor)
                if fault is None:
                    return deserialize(data)
            except DecodeError as error:
                fault = str(error) or "not a message"
            _PROBLEM.set(fault)
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
