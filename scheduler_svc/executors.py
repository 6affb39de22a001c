"""Registrations of executors: the lease, heartbeats both ways, and the lane that serves while the lease holds.

    executor ──Register(info)──> check ──accepted──> dial back, Execute(lease) ──> lane runs
             <────────── heartbeats ──────────>

The registration is the lease. It ends, and the lane with it, when the executor closes it or is silent for
`lease_timeout_s`, when the lane fails, when it is drained, or when the scheduler stops. A lease serves once: whatever
ended it, the executor comes back with a new one and empty KV memory.

An executor whose step failed says so on `Execute`, and its registration, another connection, may end before that is
read. What is left to read decides which requests are to blame, so it is read first.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc.aio
import structlog

from holdback import codec, rpc
from holdback.buckets import check_limits
from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from holdback.types import ExecutorInfo
from holdback.v1 import scheduler_pb2
from scheduler_svc.clock import Clock
from scheduler_svc.config import Network, SchedulerServiceConfig
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.lane import Lane, scheduler_config
from scheduler_svc.latency import LatencyTable
from scheduler_svc.pool import Pool
from scheduler_svc.registration_check import check_info, check_lengths
from scheduler_svc.step_stream import StepStream
from scheduler_svc.streams import check_protocol, protocol_version, race, read, write

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[scheduler_pb2.RegisterRequest, scheduler_pb2.RegisterResponse]

MAX_REMEMBERED_LEASES = 100_000
MAX_REASON_CHARS = 200  # why it drains, in the log

LAST_WORDS_S = 1.0
"""How long a lane whose registration has ended waits for the results and the error that are under way."""


class ExecutorRegistry:
    """Serves `Register`. One lane lives for each registration that was accepted."""

    def __init__(self, config: SchedulerServiceConfig, pool: Pool, dispatcher: Dispatcher, clock: Clock) -> None:
        self._config = config
        self._pool = pool
        self._dispatcher = dispatcher
        self._clock = clock
        self._leases: OrderedDict[str, None] = OrderedDict()
        self._stopping = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """The scheduler has let its executors go; they look for another one."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends every registration with UNAVAILABLE (SHUTTING_DOWN)."""
        self._stopping.set()

    async def register(self, context: Context) -> None:
        """One registration, from its first message to its end. Returns after a drain.

        Raises:
            HoldbackError: why it was refused or ended otherwise.
        """
        info = await self._read_info(context)
        target = self._check(info, context.peer())
        registration = _Registration(self, info, target, context)
        await registration.serve()

    async def _read_info(self, context: Context) -> ExecutorInfo:
        request = await read(context, self._config.lease_timeout_s)
        if request is None or request.WhichOneof("request") != "executor":
            raise InvalidArgumentError.of("request", "another message or none", "`executor` first")
        check_protocol("executor", request.executor.protocol_version)
        check_lengths(request.executor)
        return codec.decode_executor_info(request.executor)

    def _check(self, info: ExecutorInfo, peer: str) -> str:
        """Everything that can be said before dialling; returns where to dial. Uses up the lease."""
        check_info(info, self._config.max_step_timeout_s)
        check_limits(info.limits, info.model.max_model_len)
        scheduler_config(info, self._config)
        LatencyTable(info)
        self._pool.check_model(info.model)
        target = dial_target(info, peer, self._config.executor_allowed_cidrs)
        self._use_lease(info)
        return target

    def _use_lease(self, info: ExecutorInfo) -> None:
        if info.lease in self._leases:
            raise FailedPreconditionError(
                f"lease of executor {info.executor_id!r} was used before; allowed: a fresh one for every registration",
                reason=ErrorReason.LEASE_MISMATCH,
            )
        self._leases[info.lease] = None
        if len(self._leases) > MAX_REMEMBERED_LEASES:
            self._leases.popitem(last=False)


class _Registration:
    """One executor while its lease holds."""

    def __init__(self, registry: ExecutorRegistry, info: ExecutorInfo, target: str, context: Context) -> None:
        self._registry = registry
        self._config = registry._config
        self._dispatcher = registry._dispatcher
        self._info = info
        self._target = target
        self._context = context
        self._lane: Lane | None = None
        self._is_drained = False
        self._reset_because = ""
        self._stream_ended_because: Exception | None = None
        self._log = log.bind(executor=info.executor_id, address=target)

    async def serve(self) -> None:
        """Returns after a drain; raises HoldbackError for any other end."""
        try:
            await write(self._context, self._accepted())
            await race(self._drive(), self._send_heartbeats(), self._read_messages(), self._wait_for_stop())
        except HoldbackError as error:
            self._log_end(error.message)
            raise
        except asyncio.CancelledError:
            self._log_end(self._reset_because or self._cancelled_because())
            raise
        self._log_end("")

    def _cancelled_because(self) -> str:
        why = "its registration was cancelled"
        error = self._stream_ended_because
        return why if error is None else f"{why}, and its Execute stream ended: {error}"

    def _log_end(self, why: str) -> None:
        num_steps = 0 if self._lane is None else self._lane.num_steps
        if self._registry.is_stopping:
            self._log.info("executor_released", num_steps=num_steps)
        elif self._lane is None:
            self._log.warning("executor_never_joined", why=why)
        elif self._is_drained:
            self._log.info("executor_drained", num_steps=num_steps)
        else:
            self._log.warning("executor_lost", why=why, num_steps=num_steps)

    def _accepted(self) -> scheduler_pb2.RegisterResponse:
        return scheduler_pb2.RegisterResponse(
            accepted=scheduler_pb2.ExecutorAccepted(
                protocol_version=protocol_version(),
                lease_timeout_ms=round(self._config.lease_timeout_s * 1000),
                heartbeat_interval_ms=max(1, round(self._config.heartbeat_interval_s * 1000)),
            )
        )

    async def _send_heartbeats(self) -> None:
        number = 0
        while True:
            heartbeat = scheduler_pb2.Heartbeat(number=number)
            await write(self._context, scheduler_pb2.RegisterResponse(heartbeat=heartbeat))
            number += 1
            await asyncio.sleep(self._config.heartbeat_interval_s)

    async def _read_messages(self) -> None:
        """Raises when the executor closes its registration or is silent."""
        while (request := await read(self._context, self._config.lease_timeout_s)) is not None:
            kind = request.WhichOneof("request")
            if kind == "draining":
                self._drain(request.draining.reason[:MAX_REASON_CHARS])
            elif kind == "executor":
                raise InvalidArgumentError.of("request", kind, "`executor` first and only first")
        raise UnavailableError("the executor closed its registration")

    def _drain(self, reason: str) -> None:
        if self._lane is None:
            raise UnavailableError(f"the executor drains before it joined: {reason}", reason=ErrorReason.SHUTTING_DOWN)
        self._lane.drain(reason)

    async def _wait_for_stop(self) -> None:
        await self._registry._stopping.wait()
        raise UnavailableError("the scheduler is stopping", reason=ErrorReason.SHUTTING_DOWN)

    async def _drive(self) -> None:
        """Opens the `Execute` stream and runs the lane on it. Returns after a drain."""
        stream = StepStream(self._target, self._info, self._config.tls)
        try:
            with self._as_reset():
                await stream.open(self._info.lease, self._config.lease_timeout_s)
            await self._run_lane(stream)
        finally:
            await stream.close()

    async def _run_lane(self, stream: StepStream) -> None:
        dispatcher = self._dispatcher
        lane = Lane(self._info, dispatcher.new_lane_queue(), stream, dispatcher, self._config, self._registry._clock)
        dispatcher.add_lane(lane)
        self._lane = lane
        self._log.info("executor_joined", model=self._info.model.name, device=self._info.device)
        receiving = asyncio.ensure_future(stream.receive_into(lane))
        try:
            with self._as_reset():
                await self._run_to_its_end(lane)
        finally:
            receiving.cancel()
            dispatcher.remove_lane(lane, is_lost=not self._is_drained)

    async def _run_to_its_end(self, lane: Lane) -> None:
        """Runs a lane until it has drained or failed, and where its registration ends before, hears it out."""
        running = asyncio.ensure_future(lane.run())
        try:
            await asyncio.shield(running)
            self._is_drained = True
        except asyncio.CancelledError:
            self._is_drained = lane.is_draining
            await self._hear_out(lane, running)
            raise
        finally:
            if not running.done():  # else a cancellation that arrives here would hide what went wrong
                running.cancel()
                await asyncio.wait({running})

    async def _hear_out(self, lane: Lane, running: asyncio.Future[None]) -> None:
        """Applies the results that are under way. Raises the error that the executor reports behind them."""
        lane.stop_sending()
        clock = self._registry._clock
        until = clock.now() + LAST_WORDS_S
        while not (running.done() or self._registry.is_stopping) and (left_s := until - clock.now()) > 0:
            with suppress(asyncio.CancelledError):  # by gRPC, where `race` has cancelled it already
                await asyncio.wait({running}, timeout=left_s)
        self._stream_ended_because = lane.failure
        if running.done():
            self._is_drained = self._is_drained and running.exception() is None
            running.result()

    @contextmanager
    def _as_reset(self) -> Iterator[None]:
        """What goes wrong once an executor is accepted does not refuse it: the status asks it to register again."""
        try:
            yield
        except HoldbackError as error:
            self._reset_because = f"the lane was reset: {error.message}"
            raise InternalError(self._reset_because, reason=error.reason) from error
        except Exception as error:
            self._log.exception("lane_failed")
            self._reset_because = f"the lane was reset: {error!r}"
            raise InternalError(self._reset_because) from error


def dial_target(info: ExecutorInfo, peer: str, allowed: Sequence[Network]) -> str:
    """Where the executor's `ExecutorService` is: the address it dials from, or the one it advertises, if allowed.

    Args:
        peer: `ServicerContext.peer()` of its registration.
        allowed: networks that an advertised address may lie in.

    Raises:
        FailedPreconditionError: the address is none, or not allowed (ADDRESS_NOT_ALLOWED).
    """
    if not info.advertise_address:
        return rpc.format_address(rpc.peer_ip(peer), info.port)
    try:
        address: Any = ipaddress.ip_address(info.advertise_address)
    except ValueError:
        address = None
    if address is None or not any(address in network for network in allowed):
        networks = ", ".join(str(network) for network in allowed) or "none"
        raise FailedPreconditionError(
            f"advertise_address is {info.advertise_address[:100]!r}; allowed: a literal IP within "
            f"executor_allowed_cidrs ({networks})",
            reason=ErrorReason.ADDRESS_NOT_ALLOWED,
        )
    return rpc.format_address(str(address), info.port)
