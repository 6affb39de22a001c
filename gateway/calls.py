"""What every gRPC service of the gateway does with a call: errors to statuses, and what comes beside the message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import structlog

from gateway.generation import CallContext, GenerationRun
from gateway.generations import Generations
from holdback import rpc
from holdback.errors import HoldbackError, InternalError
from holdback.types import TraceContext
from holdback.v1 import inference_pb2

log = structlog.get_logger(__name__)

MAX_TRACE_BYTES = 512
Context = grpc.aio.ServicerContext[Any, Any]


@contextlib.asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """Turns exceptions into statuses; anything that is not ours becomes INTERNAL and a log line."""
    try:
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
    generations: Generations, message: inference_pb2.Generation, context: Context
) -> AsyncIterator[GenerationRun]:
    """A generation that has been submitted, and is ended with the call, whatever ends that.

    Raises:
        HoldbackError: as `Generations.run`.
    """
    async with generations.run(message, call_context(context)) as run:
        # the call's end is told at once, also while a message to a slow client is under way
        context.add_done_callback(lambda _: run.close())  # type: ignore[arg-type]
        yield run


def call_context(context: Context) -> CallContext:
    """Deadline and trace of a call."""
    remaining_s = context.time_remaining()
    metadata = dict(context.invocation_metadata() or ())
    values = [metadata.get(name, "") for name in ("traceparent", "tracestate")]
    traceparent, tracestate = (str(value) if len(value) <= MAX_TRACE_BYTES else "" for value in values)
    deadline = None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s
    return CallContext(deadline, TraceContext(traceparent, tracestate))
