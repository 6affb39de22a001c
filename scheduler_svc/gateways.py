"""The gateways' streams: requests and aborts in, updates out.

Each stream has a reader, which hands everything to the dispatcher at once, and a writer, which sends what the outbox
holds. Neither waits for the other, and the dispatcher waits for neither: a gateway that does not read delays only
itself, until its stream is closed. Whatever ends a stream, its requests end at once. A writer with nothing to say sends
heartbeats, by which a gateway tells a scheduler that hangs from one that has nothing to do.
"""

from __future__ import annotations

import asyncio
import itertools

import grpc.aio
import structlog

from holdback import codec
from holdback.errors import ErrorReason, HoldbackError, InvalidArgumentError, UnavailableError
from holdback.types import Usage
from holdback.v1 import scheduler_pb2
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.limits import MAX_QUEUED_MS, check_message
from scheduler_svc.pool import Pool
from scheduler_svc.requests import Resubmission, Session
from scheduler_svc.streams import check_protocol, protocol_version, race, read, write

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]

MAX_MAX_TOKENS = 2**31 - 1
"""For a request that names no `max_tokens` where the pool has no default; the core cuts it to what fits."""


class Gateways:
    """Serves `Connect`. A session has one stream at a time; a newer one ends it."""

    def __init__(self, config: SchedulerServiceConfig, pool: Pool, dispatcher: Dispatcher) -> None:
        self._config = config
        self._pool = pool
        self._dispatcher = dispatcher
        self._streams: dict[str, _Stream] = {}

    def stop(self) -> None:
        """Ends every stream with UNAVAILABLE (SHUTTING_DOWN)."""
        for stream in list(self._streams.values()):
            stream.end(UnavailableError("the scheduler is stopping", reason=ErrorReason.SHUTTING_DOWN))

    async def connect(self, context: Context) -> None:
        """One stream, from its hello to its end. Returns when the gateway closes it.

        Raises:
            HoldbackError: why it was refused or ended otherwise.
        """
        hello = await self._read_hello(context)
        stream = _Stream(Session(hello.gateway_id), context, self._config, self._pool, self._dispatcher)
        older = self._streams.get(hello.session)
        if older is not None:
            replaced = "the gateway opened another stream for this session"
            older.end(UnavailableError(replaced, reason=ErrorReason.STREAM_REPLACED))
        self._streams[hello.session] = stream
        try:
            await stream.serve()
        finally:
            stream.end(None)
            if self._streams.get(hello.session) is stream:
                del self._streams[hello.session]

    async def _read_hello(self, context: Context) -> scheduler_pb2.GatewayHello:
        request = await read(context, self._config.gateway_stall_timeout_s)
        if request is None or request.WhichOneof("request") != "hello":
            raise InvalidArgumentError.of("request", "another message or none", "`hello` first")
        hello = request.hello
        check_protocol("gateway", hello.protocol_version)
        for field, value, smallest, largest in (
            ("session", hello.session, 16, 64),
            ("gateway_id", hello.gateway_id, 0, 128),
        ):
            length = len(value.encode())
            if not smallest <= length <= largest:
                raise InvalidArgumentError.of(f"hello.{field}", f"{length} bytes", f"{smallest} to {largest} bytes")
        self._pool.check_not_stopping()
        return hello


class _Stream:
    """One gateway's stream while it is open."""

    def __init__(
        self,
        session: Session,
        context: Context,
        config: SchedulerServiceConfig,
        pool: Pool,
        dispatcher: Dispatcher,
    ) -> None:
        self._session = session
        self._context = context
        self._config = config
        self._pool = pool
        self._dispatcher = dispatcher
        self._is_ended = False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Returns when the gateway closes its side; raises HoldbackError for any other end."""
        forget = self._pool.on_change(self._tell_pool)
        try:
            await write(self._context, scheduler_pb2.ConnectResponse(accepted=self._accepted()))
            self._tell_pool()
            log.info("gateway_connected", gateway=self._session.name)
            await race(self._wait_for_end(), self._read_requests(), self._write_updates())
        finally:
            forget()
            log.info("gateway_gone", gateway=self._session.name, num_requests=len(self._session.by_handle))

    def end(self, error: HoldbackError | None) -> None:
        """Ends the session's requests now, and the stream, with `error`, as soon as it can be.

        The gateway is told of the stream's end alone: its requests live on there, and it submits them again.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._session.outbox.close()
        self._dispatcher.end_session(self._session)
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    def _tell_pool(self) -> None:
        self._session.outbox.set_pool(self._pool.status())

    async def _wait_for_end(self) -> None:
        await self._end

    async def _read_requests(self) -> None:
        while (request := await read(self._context, None)) is not None:
            if self._is_ended:
                return
            self._handle(request)

    def _handle(self, request: scheduler_pb2.ConnectRequest) -> None:
        kind = request.WhichOneof("request")
        if kind == "add":
            self._add(request.add)
        elif kind == "abort":
            self._dispatcher.abort(self._session, request.abort.request_id, request.abort.generation)
        elif kind == "hello":
            raise InvalidArgumentError.of("request", kind, "`hello` first and only first")
        # Anything else is of a newer gateway, and means nothing here.

    def _add(self, add: scheduler_pb2.AddRequest) -> None:
        if not add.spec.sampling.HasField("max_tokens"):
            add.spec.sampling.max_tokens = self._config.default_max_tokens or MAX_MAX_TOKENS
        try:
            check_message(add.spec, self._pool.max_model_len)
            spec = codec.decode_spec(add.spec)
            resubmission = _decode_resubmission(add)
        except HoldbackError as error:
            usage = Usage(prompt_tokens=len(add.spec.prompt_token_ids))
            self._dispatcher.refuse(self._session, add.handle, add.spec.request_id, usage, error)
            return
        self._dispatcher.submit(self._session, add.handle, spec, resubmission)

    def _accepted(self) -> scheduler_pb2.GatewayAccepted:
        interval_ms = max(1, round(self._config.heartbeat_interval_s * 1000))
        return scheduler_pb2.GatewayAccepted(protocol_version=protocol_version(), heartbeat_interval_ms=interval_ms)

    async def _write_updates(self) -> None:
        outbox = self._session.outbox
        for number in itertools.count():
            while await self._has_something_within(self._config.heartbeat_interval_s):
                while (response := outbox.take()) is not None:
                    await self._write(response)
            heartbeat = scheduler_pb2.Heartbeat(number=number)
            await self._write(scheduler_pb2.ConnectResponse(heartbeat=heartbeat))

    async def _has_something_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._session.outbox.wait()
        except TimeoutError:
            return False
        return True

    async def _write(self, response: scheduler_pb2.ConnectResponse) -> None:
        timeout_s = self._config.gateway_stall_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await write(self._context, response)
        except TimeoutError:
            raise UnavailableError(
                f"the gateway left its stream unread for gateway_stall_timeout_s, {timeout_s:g} s",
                reason=ErrorReason.PEER_STALLED,
            ) from None


def _decode_resubmission(add: scheduler_pb2.AddRequest) -> Resubmission | None:
    """Raises InvalidArgumentError: an age of more than ten years."""
    if not add.HasField("resubmission"):
        return None
    if add.resubmission.age_ms > MAX_QUEUED_MS:
        raise InvalidArgumentError.of("resubmission.age_ms", add.resubmission.age_ms, f"[0, {MAX_QUEUED_MS}]")
    return Resubmission(add.resubmission.has_started, add.resubmission.age_ms / 1000)
