"""A scheduler that only does what a test tells it to: accepts registrations, sends heartbeats, drives an executor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NoReturn, Self

import grpc
import grpc.aio

from holdback import rpc
from holdback.codec import StepEncoder, encode_model_info
from holdback.errors import HoldbackError
from holdback.types import ModelInfo, SchedulerOutput
from holdback.v1 import executor_pb2, executor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2

VERSION = types_pb2.ProtocolVersion(major=1, minor=0)

Context = grpc.aio.ServicerContext[scheduler_pb2.RegisterRequest, scheduler_pb2.RegisterResponse]


class Registered:
    """One `Register` stream, as the scheduler sees it.

    Attributes:
        info: what the executor said it is.
        received: messages after the first.
        end: set it to end the stream with OK.
        is_cancelled: end it with CANCELLED instead.
        gone: set once the stream has ended.
    """

    def __init__(self, info: scheduler_pb2.ExecutorInfo) -> None:
        self.info = info
        self.received: asyncio.Queue[scheduler_pb2.RegisterRequest] = asyncio.Queue()
        self.end = asyncio.Event()
        self.is_cancelled = False
        self.gone = asyncio.Event()

    async def draining(self) -> str:
        """Waits for the announcement of a drain; its reason."""
        while True:
            message = await self.received.get()
            if message.HasField("draining"):
                return message.draining.reason


class StubScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Use it as an async context manager.

    Attributes:
        target: `host:port` once it listens.
        registrations: each accepted registration.
        refusal: what a registration is refused with.
        refused: set once one was.
        pool_model: that GetState tells.
        is_silent: accept, and then send no heartbeat.
        lease_timeout_ms, heartbeat_interval_ms: told to executors.
    """

    def __init__(self) -> None:
        self.target = ""
        self.registrations: asyncio.Queue[Registered] = asyncio.Queue()
        self.refusal: HoldbackError | None = None
        self.refused = asyncio.Event()
        self.pool_model: ModelInfo | None = None
        self.is_silent = False
        self.lease_timeout_ms = 60_000
        self.heartbeat_interval_ms = 50
        self.major = 1
        self._server = rpc.create_server()

    async def __aenter__(self) -> Self:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{rpc.bind(self._server, '127.0.0.1', 0)}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)

    async def Register(  # noqa: N802 - the name of the protocol
        self, request_iterator: AsyncIterator[scheduler_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        first = await anext(request_iterator)
        if self.refusal is not None:
            self.refused.set()
            await rpc.abort(context, self.refusal)
        registered = Registered(first.executor)
        accepted = scheduler_pb2.ExecutorAccepted(
            protocol_version=types_pb2.ProtocolVersion(major=self.major),
            lease_timeout_ms=self.lease_timeout_ms,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
        )
        reader = asyncio.create_task(self._read(registered, request_iterator))
        try:
            yield scheduler_pb2.RegisterResponse(accepted=accepted)
            self.registrations.put_nowait(registered)
            number = 0
            while not registered.end.is_set():
                if not self.is_silent:
                    yield scheduler_pb2.RegisterResponse(heartbeat=scheduler_pb2.Heartbeat(number=number))
                    number += 1
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(registered.end.wait(), self.heartbeat_interval_ms / 1000)
            if registered.is_cancelled:
                await context.abort(grpc.StatusCode.CANCELLED, "the scheduler stops")
        finally:
            reader.cancel()
            registered.gone.set()

    def Connect(  # noqa: N802
        self, request_iterator: object, context: object
    ) -> AsyncIterator[scheduler_pb2.ConnectResponse]:
        raise NotImplementedError("no gateway connects to this scheduler")

    async def GetLoad(self, request: object, context: object) -> NoReturn:  # noqa: N802
        raise NotImplementedError("nobody asks this scheduler for its load")

    async def GetState(  # noqa: N802
        self, request: scheduler_pb2.GetStateRequest, context: object
    ) -> scheduler_pb2.GetStateResponse:
        model = None if self.pool_model is None else encode_model_info(self.pool_model)
        return scheduler_pb2.GetStateResponse(pool=scheduler_pb2.PoolStatus(model=model))

    async def _read(self, registered: Registered, requests: AsyncIterator[scheduler_pb2.RegisterRequest]) -> None:
        async for request in requests:
            registered.received.put_nowait(request)


class Drive:
    """One `Execute` stream to an executor. Use it as an async context manager."""

    def __init__(self, info: scheduler_pb2.ExecutorInfo, *, lease: str | None = None, major: int = 1) -> None:
        self._channel = rpc.create_channel(f"127.0.0.1:{info.port}")
        self._encoder = StepEncoder()
        self._open = executor_pb2.OpenExecution(
            lease=info.lease if lease is None else lease, protocol_version=types_pb2.ProtocolVersion(major=major)
        )
        self.call: grpc.aio.StreamStreamCall[executor_pb2.ExecuteRequest, executor_pb2.ExecuteResponse]

    async def __aenter__(self) -> Self:
        self.call = executor_pb2_grpc.ExecutorServiceStub(self._channel).Execute()
        await self.call.write(executor_pb2.ExecuteRequest(open=self._open))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()
        await self._channel.close()

    async def accepted(self) -> Self:
        response = await self.next()
        assert response.accepted.protocol_version.major == 1
        return self

    async def send(self, output: SchedulerOutput, *, step: int | None = None) -> None:
        message = self._encoder.encode(output)
        if step is not None:
            message.step = step
        await self.call.write(executor_pb2.ExecuteRequest(step=message))

    async def next(self) -> executor_pb2.ExecuteResponse:
        """The next message. Raises the error that the stream ended with, or EOFError when it ended well."""
        try:
            response = await self.call.read()
            if isinstance(response, executor_pb2.ExecuteResponse) and response.HasField("failed"):
                await self.call.done_writing()
                response = await self.call.read()  # the status, which says the same
        except grpc.aio.AioRpcError as failure:
            raise rpc.error_from_rpc(failure) from None
        if not isinstance(response, executor_pb2.ExecuteResponse):
            raise EOFError
        return response

    async def rest(self) -> list[executor_pb2.ExecuteResponse]:
        """What comes until the stream ends well. Raises the error that it ended with otherwise."""
        responses = []
        with contextlib.suppress(EOFError):
            while True:
                responses.append(await self.next())
        return responses

    async def run(self, output: SchedulerOutput) -> list[int]:
        """Sends one step and waits for its tokens."""
        await self.send(output)
        return list((await self.next()).output.sampled_token_ids)
