"""The load of a pool, as its scheduler says it, whoever asks."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc.aio
import structlog

from gateway.submission import Clock
from holdback import rpc
from holdback.errors import ErrorReason, HoldbackError, UnavailableError
from holdback.v1 import scheduler_pb2, types_pb2

log = structlog.get_logger(__name__)

LOAD_TIMEOUT_S = 2.0
"""A scheduler that does not answer within this is away."""

RATE_WINDOW_S = 1.0
"""Tokens per second are counted over at least this time."""


class LoadStub(Protocol):
    """The part of the scheduler's stub that is needed."""

    def GetLoad(  # noqa: N802
        self, request: scheduler_pb2.GetLoadRequest, /, *, timeout: float | None = None
    ) -> grpc.aio.UnaryUnaryCall[scheduler_pb2.GetLoadRequest, scheduler_pb2.GetLoadResponse]:
        """As `SchedulerService.GetLoad`."""
        ...


class LoadReader:
    """Asks one scheduler for its load. Callers at the same time share one question, so that many cost it no more.

    Attributes:
        tokens_per_s: decoded by the whole pool between the last answers; 0 until there are two.
    """

    def __init__(self, stub: LoadStub, target: str, model_name: str, clock: Clock) -> None:
        self.tokens_per_s = 0.0
        self._stub = stub
        self._target = target
        self._model_name = model_name
        self._clock = clock
        self._counted_at: float | None = None
        self._num_decoded = 0
        self._asking: asyncio.Task[scheduler_pb2.GetLoadResponse] | None = None

    async def read(self) -> scheduler_pb2.GetLoadResponse:
        """The load now. Raises UnavailableError when the scheduler does not answer within `LOAD_TIMEOUT_S`."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name=f"load of {self._target}")
            # whoever asked may be gone when it fails
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> scheduler_pb2.GetLoadResponse:
        try:
            load = await self._stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=LOAD_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise self._error(failure) from failure
        except asyncio.CancelledError:  # nobody ends this task: the channel was closed, to be renewed or for good
            raise self._unavailable("its connection was closed") from None
        self._count(load)
        return load

    def _error(self, failure: grpc.aio.AioRpcError) -> HoldbackError:
        if failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            # What gRPC says of it has addresses, which are no client's business.
            log.warning("scheduler_gave_no_load", scheduler=self._target, details=failure.details())
            return self._unavailable(failure.code().name)
        return rpc.error_from_rpc(failure)

    def _unavailable(self, why: str) -> UnavailableError:
        message = f"the scheduler of model {self._model_name!r} does not answer: {why}"
        return UnavailableError(message, reason=ErrorReason.NO_SCHEDULER)

    def _count(self, load: scheduler_pb2.GetLoadResponse) -> None:
        """A scheduler counts from 0 when it starts again; that answer gives no rate."""
        now = self._clock()
        num_decoded = sum(graph.num_tokens for graph in load.graphs if graph.phase == types_pb2.PHASE_DECODE)
        passed_s = None if self._counted_at is None else now - self._counted_at
        if passed_s is not None and passed_s < RATE_WINDOW_S:
            return
        if passed_s is not None:
            self.tokens_per_s = max(0, num_decoded - self._num_decoded) / passed_s
        self._counted_at, self._num_decoded = now, num_decoded
