"""A scheduler that does what a test says: it records what a gateway sends and answers as told, or by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from holdback import codec, rpc
from holdback.errors import HoldbackError
from holdback.types import PROTOCOL_VERSION, FinishReason, ModelInfo, TokenLogprobs
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

MODEL = ModelInfo(fingerprint="toy-1", name="toy", vocab_size=512, eos_token_ids=(2,), max_model_len=64)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """One scheduler with one gateway.

    Attributes:
        answer: tokens that every request gets by itself, one message each, then its end; None answers nothing.
        finish_reason: of those ends.
        adds: submissions not looked at yet.
        aborts: aborts not looked at yet, as (request id, generation).
        hellos: of all streams so far.
        load: what it answers when it is asked for its load, while `may_answer_load` is set.
        num_load_questions: how often it was asked.
        heartbeat_interval_s: after which it sends heartbeats on a stream; 0 sends none.
        connected: set while a gateway's stream is open and was told the pool's status.
    """

    def __init__(self, model: ModelInfo | None = MODEL, *, answer: Sequence[int] | None = None) -> None:
        self.model = model
        self.answer = answer
        self.finish_reason = FinishReason.STOP
        self.protocol_major = PROTOCOL_VERSION[0]
        self.default_max_tokens = 16
        self.load = scheduler_pb2.GetLoadResponse()
        self.may_answer_load = asyncio.Event()
        self.may_answer_load.set()
        self.num_load_questions = 0
        self.port = 0
        self.adds: asyncio.Queue[scheduler_pb2.AddRequest] = asyncio.Queue()
        self.aborts: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.hellos: list[scheduler_pb2.GatewayHello] = []
        self.connected = asyncio.Event()
        self.heartbeat_interval_s = 0.0
        self._num_heartbeats = 0
        self._heartbeat_sent = asyncio.Event()
        self._is_thawed = asyncio.Event()
        self._is_thawed.set()
        self._outbox: asyncio.Queue[scheduler_pb2.ConnectResponse | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self._server = rpc.create_server()
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        self.port = rpc.bind(self._server, "127.0.0.1", port)
        await self._server.start()

    async def stop(self) -> None:
        """Breaks the stream as a scheduler that dies does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._is_thawed.wait()
        hello = await context.read()
        self.hellos.append(hello.hello)
        version = types_pb2.ProtocolVersion(major=self.protocol_major)
        accepted = scheduler_pb2.GatewayAccepted(
            protocol_version=version, heartbeat_interval_ms=round(self.heartbeat_interval_s * 1000)
        )
        await context.write(scheduler_pb2.ConnectResponse(accepted=accepted))
        await context.write(scheduler_pb2.ConnectResponse(pool=self._status()))
        self._outbox = asyncio.Queue()
        self.connected.set()
        tasks = [asyncio.create_task(self._read(context)), asyncio.create_task(self._beat(context))]
        try:
            while (response := await self._outbox.get()) is not None:
                await self._is_thawed.wait()
                await context.write(response)
        finally:
            self.connected.clear()
            for task in tasks:
                task.cancel()

    async def Register(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        raise NotImplementedError

    async def GetLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_load_questions += 1
        await self.may_answer_load.wait()
        return self.load

    async def GetState(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def next_add(self) -> scheduler_pb2.AddRequest:
        async with asyncio.timeout(60):
            return await self.adds.get()

    async def next_abort(self) -> tuple[str, int]:
        async with asyncio.timeout(60):
            return await self.aborts.get()

    def set_model(self, model: ModelInfo | None, *, ready: bool = True) -> None:
        """Tells the gateway of another pool status."""
        self.model = model
        status = self._status()
        status.ready = status.ready and ready
        self._outbox.put_nowait(scheduler_pb2.ConnectResponse(pool=status))

    def freeze(self) -> None:
        """Does nothing more, as a process that is stopped; its connections stay."""
        self._is_thawed.clear()

    def thaw(self) -> None:
        self._is_thawed.set()

    async def until_heartbeats(self, count: int) -> None:
        """Waits for `count` more."""
        async with asyncio.timeout(60):
            goal = self._num_heartbeats + count
            while self._num_heartbeats < goal:
                self._heartbeat_sent.clear()
                await self._heartbeat_sent.wait()

    def break_stream(self) -> None:
        """Ends the stream in an orderly way; the server stays."""
        self._outbox.put_nowait(None)

    def started(self, handle: int, *, num_cached_tokens: int = 0, queued_ms: int = 0) -> None:
        self.send(
            started=[
                scheduler_pb2.RequestStarted(handle=handle, num_cached_tokens=num_cached_tokens, queued_ms=queued_ms)
            ]
        )

    def tokens(self, handle: int, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """New outputs of one request, from output `index` on."""
        self.send(
            handles=[handle],
            output_indices=[index],
            num_new_tokens=[] if len(token_ids) == 1 else [len(token_ids)],
            token_ids=token_ids,
            logprobs=[
                scheduler_pb2.UpdateLogprobs(token_index=i, logprobs=codec.encode_logprobs(entry))
                for i, entry in enumerate(logprobs)
            ],
        )

    def ended(
        self,
        handle: int,
        finish_reason: FinishReason = FinishReason.STOP,
        *,
        stop_token_id: int | None = None,
        error: HoldbackError | None = None,
    ) -> None:
        message = scheduler_pb2.RequestEnded(
            handle=handle, finish_reason=codec.encode_finish_reason(finish_reason), stop_token_id=stop_token_id
        )
        if error is not None:
            message.error.CopyFrom(rpc.encode_error(error))
        self.send(ended=[message])

    def send(self, **fields: Any) -> None:
        """One message of updates."""
        updates = scheduler_pb2.RequestUpdates(**fields)
        self._outbox.put_nowait(scheduler_pb2.ConnectResponse(updates=updates))

    async def _beat(self, context: Any) -> None:
        while self.heartbeat_interval_s:
            await asyncio.sleep(self.heartbeat_interval_s)
            await self._is_thawed.wait()
            self._num_heartbeats += 1
            await context.write(scheduler_pb2.ConnectResponse(heartbeat=scheduler_pb2.Heartbeat()))
            self._heartbeat_sent.set()

    async def _read(self, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.WhichOneof("request") == "abort":
                self.aborts.put_nowait((request.abort.request_id, request.abort.generation))
            else:
                self._on_add(request.add)

    def _on_add(self, add: scheduler_pb2.AddRequest) -> None:
        self.adds.put_nowait(add)
        if self.answer is None:
            return
        self.started(add.handle)
        with_logprobs = add.spec.sampling.HasField("num_logprobs")
        for index, token_id in enumerate(self.answer):
            self.tokens(add.handle, index, [token_id], [TokenLogprobs(token_id, -0.5)] if with_logprobs else ())
        self.ended(add.handle, self.finish_reason)

    def _status(self) -> scheduler_pb2.PoolStatus:
        status = scheduler_pb2.PoolStatus(default_max_tokens=self.default_max_tokens, ready=self.model is not None)
        if self.model is not None:
            status.model.CopyFrom(codec.encode_model_info(self.model))
        else:
            status.not_ready_reason = "no executor has registered"
        return status
