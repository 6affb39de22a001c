"""Registration with the scheduler: the `Register` stream, whose life is the life of the lease.

1. Dial the scheduler and say what this executor is, with a fresh lease that is valid from then on.
2. Accepted: exchange heartbeats both ways; the scheduler opens its `Execute` stream with the lease.
3. `Register` ends or is silent for the lease timeout, or `Execute` ends for whatever reason: the lease ends. Its stream
   is dropped, KV memory is voided, and after a pause all begins again with a new lease.

A scheduler that refuses what this executor is (another model, a configuration that cannot work) would refuse it again,
so that ends the process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc.aio
import structlog

from executor_svc.lease import Lease, LeaseHolder, lease_lost
from holdback import rpc
from holdback.codec import encode_executor_info
from holdback.errors import ErrorReason, FailedPreconditionError, HoldbackError, InvalidArgumentError, UnavailableError
from holdback.tls import NO_TLS, Tls
from holdback.types import PROTOCOL_VERSION, ExecutorInfo
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc

log = structlog.get_logger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""How long a scheduler may take to accept or refuse a registration."""

RegisterCall = grpc.aio.StreamStreamCall[scheduler_pb2.RegisterRequest, scheduler_pb2.RegisterResponse]


@dataclass(slots=True)
class Backoff:
    """Growing pauses between attempts, each of them random so that a pool's executors do not come all at once."""

    first_s: float = 0.2
    longest_s: float = 5.0
    attempts: int = 0

    def next_s(self) -> float:
        longest = min(self.longest_s, self.first_s * float(2**self.attempts))
        self.attempts = min(self.attempts + 1, 16)
        return longest * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.attempts = 0


class Registration:
    """Keeps this executor registered.

    Args:
        target: of the scheduler, `host:port`.
        make_info: what this executor is, given the lease.
        holder: where the current lease is found by `Execute`.
        set_ready: told whether the executor is accepted.
        void: forgets all requests and voids KV memory; called after each lease.
    """

    def __init__(
        self,
        target: str,
        make_info: Callable[[str], ExecutorInfo],
        holder: LeaseHolder,
        set_ready: Callable[[bool], Awaitable[None]],
        void: Callable[[], Awaitable[None]],
        backoff: Backoff | None = None,
        tls: Tls = NO_TLS,
    ) -> None:
        self._target = target
        self._tls = tls
        self._make_info = make_info
        self._holder = holder
        self._set_ready = set_ready
        self._void = void
        self._backoff = backoff or Backoff()
        self._call: RegisterCall | None = None
        self._write_lock = asyncio.Lock()
        self._drains = False

    async def run(self) -> None:
        """Registers, again and again, until `drain`. Raises what a scheduler refuses for good."""
        while not self._drains:
            error = await self._hold_one_lease()
            if self._drains:
                return
            if isinstance(error, (FailedPreconditionError, InvalidArgumentError)):
                log.error("registration_refused", reason=error.message, scheduler=self._target)
                raise error
            pause_s = self._backoff.next_s()
            log.warning("lease_ended", reason=error.message, scheduler=self._target, retry_in_s=round(pause_s, 2))
            await asyncio.sleep(pause_s)

    async def drain(self, reason: str) -> None:
        """Tells the scheduler on both streams that this executor stops, and waits for the steps it has been sent."""
        self._drains = True
        await self._set_ready(False)
        lease = self._holder.current
        if lease is None:
            return
        await self._send(
            scheduler_pb2.RegisterRequest(draining=scheduler_pb2.ExecutorDraining(reason=reason)), best_effort=True
        )
        if lease.execution is not None:
            lease.execution.drain(reason)
            await lease.wait_for_end()

    async def _hold_one_lease(self) -> HoldbackError:
        """One registration from its first to its last message. Returns why it ended, when nothing of it is left."""
        lease = self._holder.current = Lease()
        error: HoldbackError = lease_lost("the registration was cancelled")
        try:
            async with rpc.create_channel(self._target, self._tls) as channel:
                error = await self._exchange(channel, lease)
        except grpc.aio.AioRpcError as failure:
            error = rpc.error_from_rpc(failure)
        except HoldbackError as raised:
            error = raised
        finally:
            self._holder.current = self._call = None
            lease.end(error)
            await self._set_ready(False)
            if lease.execution is not None:
                # Accepted alone is not enough: a scheduler that cannot dial back would be asked for ever in a hurry.
                self._backoff.reset()
                await self._void()
        return error

    async def _exchange(self, channel: grpc.aio.Channel, lease: Lease) -> HoldbackError:
        self._call = call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Register()
        info = encode_executor_info(self._make_info(lease.text))
        await self._send(scheduler_pb2.RegisterRequest(executor=info))
        accepted = _checked(await _read(call, ANSWER_TIMEOUT_S))
        log.info("registered", scheduler=self._target, lease_timeout_ms=accepted.lease_timeout_ms)
        await self._set_ready(not self._drains)
        try:
            return await _first_of(
                self._send_heartbeats(accepted.heartbeat_interval_ms / 1000),
                _watch(call, accepted.lease_timeout_ms / 1000),
                lease.wait_for_end(),
            )
        finally:
            call.cancel()

    async def _send_heartbeats(self, interval_s: float) -> HoldbackError:
        number = 0
        while True:
            await self._send(scheduler_pb2.RegisterRequest(heartbeat=scheduler_pb2.Heartbeat(number=number)))
            number += 1
            await asyncio.sleep(interval_s)

    async def _send(self, message: scheduler_pb2.RegisterRequest, *, best_effort: bool = False) -> None:
        """One message at a time, for a stream takes no two at once."""
        if self._call is None:
            return
        try:
            async with self._write_lock:
                await self._call.write(message)
        except asyncio.InvalidStateError:
            if not best_effort:
                raise lease_lost("the registration ended") from None
        except asyncio.CancelledError:
            _raise_if_task_cancelled()
            if not best_effort:
                raise lease_lost("the registration was cancelled") from None
        except grpc.aio.AioRpcError:
            if not best_effort:
                raise


async def _read(call: RegisterCall, timeout_s: float) -> scheduler_pb2.RegisterResponse:
    """The next message. Raises UnavailableError when there is none in time or none any more."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await call.read()
    except TimeoutError:
        raise lease_lost(f"the scheduler was silent for {timeout_s:g} s") from None
    except asyncio.CancelledError:
        _raise_if_task_cancelled()
        raise lease_lost("the registration was cancelled") from None
    if isinstance(response, scheduler_pb2.RegisterResponse):
        return response
    raise lease_lost("the scheduler ended the registration")


def _raise_if_task_cancelled() -> None:
    """Inside `except CancelledError`: passes it on, unless it is only how grpc says that the call was cancelled."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise


def _checked(response: scheduler_pb2.RegisterResponse) -> scheduler_pb2.ExecutorAccepted:
    kind = response.WhichOneof("response")
    if kind != "accepted":
        raise UnavailableError(f"the scheduler's first message is {kind}; allowed: accepted")
    accepted = response.accepted
    if accepted.protocol_version.major != PROTOCOL_VERSION[0]:
        raise FailedPreconditionError(
            f"protocol_version.major is {accepted.protocol_version.major} at the scheduler; allowed: "
            f"{PROTOCOL_VERSION[0]}, that of this executor",
            reason=ErrorReason.PROTOCOL_MISMATCH,
        )
    for name in ("lease_timeout_ms", "heartbeat_interval_ms"):
        if getattr(accepted, name) < 1:
            raise UnavailableError(f"{name} is 0 at the scheduler; allowed: at least 1")
    return accepted


async def _watch(call: RegisterCall, timeout_s: float) -> HoldbackError:
    """Reads heartbeats until there is none for `timeout_s`, which it raises."""
    while True:
        await _read(call, timeout_s)


async def _first_of(*runs: Coroutine[Any, Any, HoldbackError]) -> HoldbackError:
    """The result of whichever ends first; the others are cancelled."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
