"""What every gRPC service of the gateway does with a call: who it is from, errors to statuses, deadline and trace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc.aio
import structlog

from gateway.access import ANYONE, Access, Caller
from gateway.generation import CallContext, GenerationRun
from gateway.generations import Generations
from holdback import rpc
from holdback.errors import HoldbackError, InternalError
from holdback.malformed import check_well_formed
from holdback.request_limits import MAX_TRACE_BYTES, num_bytes
from holdback.types import TraceContext
from holdback.v1 import inference_pb2

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


class Authentication(grpc.aio.ServerInterceptor):
    """Asks every call on the port for its API key, whatever the service."""

    def __init__(self, access: Access, counting: Callable[[], AbstractContextManager[None]]) -> None:
        """What refuses a call is raised in `counting()`."""
        self._access = access
        self._counting = counting

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of a call with the caller noted, or one that refuses it."""
        header = dict(details.invocation_metadata or ()).get("authorization")
        try:
            with self._counting():
                _CALLER.set(self._access.authenticate(None if header is None else str(header)))
        except HoldbackError as error:
            # of this kind whatever the method's own: such a handler is called before a message is waited for
            return grpc.stream_unary_rpc_method_handler(partial(_refuse, error))
        return await continuation(details)


async def _refuse(error: HoldbackError, requests: AsyncIterator[bytes], context: Context) -> None:
    await rpc.abort(context, error)


def current_caller() -> Caller:
    """Who the call is from that is being answered."""
    return _CALLER.get()


@contextlib.asynccontextmanager
async def answering(
    context: Context, counting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
) -> AsyncIterator[None]:
    """Turns exceptions into statuses; anything that is not ours becomes INTERNAL and a log line. A message that cannot
    be read is refused in `counting()`."""
    try:
        with counting():
            check_well_formed()
        yield
    except HoldbackError as error:
        await rpc.abort(context, error)
    except grpc.aio.AbortError:
        raise  # the call has its status
    except Exception:
        log.exception("call_failed")
        await rpc.abort(context, InternalError("the gateway failed; its log says why"))


@contextlib.asynccontextmanager
async def generating(
    generations: Generations, message: inference_pb2.Generation, context: Context, *, is_stream: bool
) -> AsyncIterator[GenerationRun]:
    """A generation that has been submitted, and is ended with the call, whatever ends that.

    Raises:
        HoldbackError: as `Generations.run`.
    """
    async with generations.run(message, call_context(context, is_stream=is_stream)) as run:
        # the call's end is told at once, also while a message to a slow client is under way
        context.add_done_callback(lambda _: run.close())  # type: ignore[arg-type]
        yield run


def call_context(context: Context, *, is_stream: bool) -> CallContext:
    """What comes with a call beside its message."""
    remaining_s = context.time_remaining()
    metadata = dict(context.invocation_metadata() or ())
    deadline = None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s
    trace = trace_context(str(metadata.get("traceparent", "")), str(metadata.get("tracestate", "")))
    return CallContext(deadline, trace, current_caller(), is_stream=is_stream)


def trace_context(traceparent: str, tracestate: str) -> TraceContext:
    """Of headers; one that is too long is left out."""
    values = (value if num_bytes(value) <= MAX_TRACE_BYTES else "" for value in (traceparent, tracestate))
    return TraceContext(*values)
