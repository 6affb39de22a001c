"""An executor and a gateway over real gRPC, as thin as the protocol allows."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from holdback import codec, rpc
from holdback.errors import HoldbackError
from holdback.types import PROTOCOL_VERSION, ModelRunnerOutput, RequestSpec
from holdback.v1 import executor_pb2, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests.scheduler.parts import Answers, ArithmeticExecutor, build_info

WAIT_S = 60.0
"""Longest wait for something that must happen; a test that reaches it has failed."""

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
"""What a peer that does not read takes in all the same; by default it is 4 MB."""

VERSION = types_pb2.ProtocolVersion(major=PROTOCOL_VERSION[0], minor=PROTOCOL_VERSION[1])


class Condition:
    """Waits for what callbacks change, without polling."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def _to_bytes(response: executor_pb2.ExecuteResponse | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


class StubExecutor:
    """Registers with a scheduler and runs its steps by arithmetic.

    Attributes:
        may_step: steps are answered while this is set.
        hangs_after: answers so many steps and no more.
        tamper: changes each output before it is sent.
        fails_with: ends the stream at the next step, or once `fails_after` steps are answered.
        ends_with: the status with which it ends the stream instead of an answer.
        leaves_too: ends its registration in the moment in which a step fails.
        says_bytes: answers the next step with these, which are no message, and goes on.
        says_more: sends messages of a kind that is not known yet.
        num_steps: answered so far.
        ended: how its registration ended, once it has; None after a plain end.
    """

    def __init__(
        self,
        port: int,
        executor_id: str = "executor-0",
        *,
        info: Callable[[int, str], scheduler_pb2.ExecutorInfo] | None = None,
        is_silent: bool = False,
        accepts: bool = True,
        refuses_with: HoldbackError | None = None,
        **sizes: Any,
    ) -> None:
        self.executor_id = executor_id
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.hangs_after: int | None = None
        self.tamper: Callable[[ModelRunnerOutput], ModelRunnerOutput] = lambda output: output
        self.fails_with: HoldbackError | None = None
        self.fails_after = 0
        self.ends_with: HoldbackError | None = None
        self.leaves_too = False
        self.says_bytes = b""
        self.says_more = False
        self.condition = Condition()
        self.num_steps = 0
        self.accepted: scheduler_pb2.ExecutorAccepted | None = None
        self.num_heartbeats = 0
        self.opened_with: executor_pb2.OpenExecution | None = None
        self.ended: asyncio.Future[HoldbackError | None] = asyncio.get_running_loop().create_future()
        self._info = info
        self._sizes = sizes
        self._is_silent = is_silent
        self._accepts = accepts
        self._refuses_with = refuses_with
        self._channel = rpc.create_channel(f"127.0.0.1:{port}")
        self._register = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Register()
        self._server = rpc.create_server()
        handler = grpc.stream_stream_rpc_method_handler(self.Execute, executor_pb2.ExecuteRequest.FromString, _to_bytes)
        service = grpc.method_handlers_generic_handler("holdback.v1.ExecutorService", {"Execute": handler})
        self._server.add_generic_rpc_handlers((service,))
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        own_port = rpc.bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        lease = secrets.token_hex(16)
        if self._info is not None:
            message = self._info(own_port, lease)
        else:
            message = codec.encode_executor_info(
                build_info(self.executor_id, lease=lease, port=own_port, **self._sizes)
            )
        self._tasks = [asyncio.create_task(self._registration(message))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """Ends everything without a word."""
        self._register.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(None)
        await self._channel.close()

    def leave(self) -> None:
        """Ends its registration, and nothing else."""
        self._register.cancel()

    async def joined(self) -> None:
        await self.condition.until(lambda: self.opened_with is not None)

    async def hangs(self) -> None:
        """Waits for the step that `hangs_after` leaves unanswered."""
        await self.condition.until(lambda: not self.may_step.is_set())

    async def drain(self) -> None:
        await self._register.write(
            scheduler_pb2.RegisterRequest(draining=scheduler_pb2.ExecutorDraining(reason="scale-down"))
        )

    async def register_again(self) -> None:
        """Says on the same stream who it is, as if it had not."""
        await self._register.write(scheduler_pb2.RegisterRequest(executor=scheduler_pb2.ExecutorInfo()))

    async def registration_ended(self) -> HoldbackError | None:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.ended)

    async def _registration(self, message: scheduler_pb2.ExecutorInfo) -> None:
        try:
            await self._register.write(scheduler_pb2.RegisterRequest(executor=message))
            async for response in self._register:
                if response.HasField("accepted"):
                    self.accepted = response.accepted
                    self._tasks.append(asyncio.create_task(self._beat(response.accepted.heartbeat_interval_ms / 1000)))
                else:
                    assert response.heartbeat.number == self.num_heartbeats
                    self.num_heartbeats += 1
                self.condition.changed()
            self.ended.set_result(None)
        except grpc.aio.AioRpcError as error:
            self.ended.set_result(rpc.error_from_rpc(error))

    async def _beat(self, interval_s: float) -> None:
        """Not by `write`, which would replace the status of a stream that ends meanwhile by one of its own."""
        call: Any = self._register._cython_call  # type: ignore[attr-defined]
        for number in itertools.count():
            if self._is_silent:
                return
            message = scheduler_pb2.RegisterRequest(heartbeat=scheduler_pb2.Heartbeat(number=number))
            try:
                await call.send_serialized_message(message.SerializeToString())
            except cygrpc.InternalError:
                return
            await asyncio.sleep(interval_s)

    async def Execute(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        opening = await context.read()
        self.opened_with = opening.open
        if self._refuses_with is not None:
            await rpc.abort(context, self._refuses_with)
        if not self._accepts:
            await asyncio.Event().wait()
        accepted = executor_pb2.ExecutionAccepted(protocol_version=VERSION)
        await context.write(executor_pb2.ExecuteResponse(accepted=accepted))
        self.condition.changed()
        decoder, executor = codec.StepDecoder(), ArithmeticExecutor()
        while (request := await context.read()) is not grpc.aio.EOF:
            output = executor.execute(decoder.decode(request.step))
            if self.num_steps == self.hangs_after:
                self.may_step.clear()
                self.condition.changed()
            await self.may_step.wait()
            if self.fails_with is not None and self.num_steps >= self.fails_after:
                failed = codec.encode_execution_failed(self.fails_with)
                await context.write(executor_pb2.ExecuteResponse(failed=failed))
                if self.leaves_too:
                    self.leave()
                await rpc.abort(context, self.fails_with)
            if self.ends_with is not None:
                await rpc.abort(context, self.ends_with)
            if self.says_bytes:
                await context.write(self.says_bytes)
                continue
            if self.says_more:
                await context.write(executor_pb2.ExecuteResponse())
            message = codec.encode_runner_output(self.tamper(output))
            await context.write(executor_pb2.ExecuteResponse(output=message))
            self.num_steps += 1
            self.condition.changed()


class StubGateway:
    """A gateway's stream. What it is told is in `answers`.

    Attributes:
        accepted: how it was greeted.
        ended: how the stream ended, once it has; None after a plain end.
    """

    def __init__(self, port: int, session: str = "a session of 16 to 64 bytes", *, reads: bool = True) -> None:
        self.answers = Answers()
        self.condition = Condition()
        self.ended: asyncio.Future[HoldbackError | None] = asyncio.get_running_loop().create_future()
        self._session = session
        options = [] if reads else SMALL_WINDOW
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self.call = self.stub.Connect()
        self._reads = reads
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        hello = scheduler_pb2.GatewayHello(protocol_version=VERSION, session=self._session, gateway_id="stub")
        await self.call.write(scheduler_pb2.ConnectRequest(hello=hello))
        response: Any = await self.call.read()
        self.accepted: scheduler_pb2.GatewayAccepted = response.accepted
        assert self.accepted.protocol_version.major == PROTOCOL_VERSION[0]
        if self._reads:
            self.read()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    def read(self) -> None:
        """Starts to read, where that was put off."""
        self._reader = asyncio.create_task(self._read())

    async def add(self, handle: int, spec: RequestSpec, resubmission: scheduler_pb2.Resubmission | None = None) -> None:
        self.answers.num_known[handle] = len(spec.output_token_ids)
        add = scheduler_pb2.AddRequest(handle=handle, spec=codec.encode_spec(spec), resubmission=resubmission)
        await self.call.write(scheduler_pb2.ConnectRequest(add=add))

    async def abort(self, request_id: str, generation: int = 0) -> None:
        abort = scheduler_pb2.AbortSubmission(request_id=request_id, generation=generation)
        await self.call.write(scheduler_pb2.ConnectRequest(abort=abort))

    async def until(self, condition: Callable[[Answers], bool]) -> Answers:
        await self.condition.until(lambda: condition(self.answers))
        return self.answers

    async def until_ended(self, *handles: int) -> Answers:
        return await self.until(lambda answers: all(answers[handle].ended is not None for handle in handles))

    async def until_load(self, condition: Callable[[scheduler_pb2.GetLoadResponse], bool]) -> None:
        """Asks for the load until it is so: nobody is told what other gateways have added, and what has ended."""
        async with asyncio.timeout(WAIT_S):
            while not condition(await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())):
                pass

    async def stream_ended(self) -> HoldbackError | None:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.ended)

    async def _read(self) -> None:
        response: Any
        try:
            while (response := await self.call.read()) is not grpc.aio.EOF:
                self.answers.read(response)
                self.condition.changed()
            self.ended.set_result(None)
        except grpc.aio.AioRpcError as error:
            self.ended.set_result(rpc.error_from_rpc(error))
