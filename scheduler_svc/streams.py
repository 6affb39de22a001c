"""What both long-lived streams need: reads and writes that fail as ours, and tasks that end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from holdback.errors import ErrorReason, FailedPreconditionError, InvalidArgumentError, UnavailableError
from holdback.types import PROTOCOL_VERSION
from holdback.v1 import types_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")


async def read(context: grpc.aio.ServicerContext[Request, Response], timeout_s: float | None) -> Request | None:
    """The peer's next message; None when it has closed its side.

    Raises:
        UnavailableError: nothing came in `timeout_s` (PEER_SILENT).
        InvalidArgumentError: what came is no message.
    """
    try:
        async with asyncio.timeout(timeout_s):
            request: Any = await context.read()
    except TimeoutError:
        raise UnavailableError(
            f"the peer was silent for {timeout_s:g} s, which is the limit", reason=ErrorReason.PEER_SILENT
        ) from None
    except DecodeError as error:
        raise InvalidArgumentError(f"a message cannot be read: {error}") from None
    return None if request is grpc.aio.EOF else request


async def write(context: grpc.aio.ServicerContext[Request, Response], response: Response) -> None:
    """Sends one message. Raises UnavailableError (PEER_GONE)."""
    try:
        await context.write(response)
    except grpc.aio.BaseError as error:
        raise UnavailableError("the peer is gone") from error


async def race(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines that stand and fall together: when the first ends, the others are cancelled and waited for.

    Raises:
        Exception: what ended the first, or went wrong in another while it was cancelled; the first in the order given.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def protocol_version() -> types_pb2.ProtocolVersion:
    """Ours, for a first message."""
    major, minor = PROTOCOL_VERSION
    return types_pb2.ProtocolVersion(major=major, minor=minor)


def check_protocol(peer: str, version: types_pb2.ProtocolVersion) -> None:
    """Raises FailedPreconditionError when the peer's major version is another one; names both."""
    if version.major != PROTOCOL_VERSION[0]:
        raise FailedPreconditionError(
            f"protocol_version of the {peer} is {version.major}.{version.minor}; allowed: major {PROTOCOL_VERSION[0]}, "
            f"as this scheduler speaks {PROTOCOL_VERSION[0]}.{PROTOCOL_VERSION[1]}",
            reason=ErrorReason.PROTOCOL_MISMATCH,
        )
