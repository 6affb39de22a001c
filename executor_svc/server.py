"""The executor process: listens, loads, warms up, registers, runs steps, and stops within seconds when asked to.

Health is served first, so that liveness answers while a model loads; the ports are bound next, so that one in use is
found before that. Model and device live on threads of their own; the event loop parses, answers and keeps the lease.

Exit status: 0 after a stop, 1 when the scheduler refuses this executor or a stop had to leave a step behind, 2 when it
cannot run as configured, 3 when a step hung (`watchdog`) or a rank was lost (`parallel.processes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from executor_svc.config import ExecutorConfig
from executor_svc.device_thread import DeviceThreads
from executor_svc.devices import create_device
from executor_svc.devices.base import Device
from executor_svc.execution import Execution
from executor_svc.graphs import warm_up
from executor_svc.lease import Lease, LeaseHolder, lease_lost
from executor_svc.metrics import METRICS, ExecutorMetrics
from executor_svc.pool_check import check_pool
from executor_svc.registration import Registration
from executor_svc.runner import NeuronModelRunner
from executor_svc.step_traces import StepTraces
from executor_svc.watchdog import StepWatchdog
from holdback import rpc
from holdback.codec import encode_execution_failed
from holdback.errors import (
    ConfigError,
    DeadlineExceededError,
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
)
from holdback.health import STARTUP, HealthServer
from holdback.metrics import Exposition, MetricsServer
from holdback.ports import write_ports_file
from holdback.tracing import create_tracer
from holdback.types import PROTOCOL_VERSION, ExecutorInfo, GraphLatency
from holdback.v1 import executor_pb2, executor_pb2_grpc, types_pb2

log = structlog.get_logger(__name__)

OPEN_TIMEOUT_S = 10.0
"""How long a caller of `Execute` may take to present a lease."""

FAILURE_TIMEOUT_S = 1.0
"""How long the scheduler may take to end a stream on which it was told of a failure."""

CLOSE_TIMEOUT_S = 5.0
"""How long a stop waits for the device to free what it holds."""

STOP_TIMEOUT_S = 0.5
"""How long a stop waits for threads that end by themselves once nothing is posted to them."""

Context = grpc.aio.ServicerContext[executor_pb2.ExecuteRequest, executor_pb2.ExecuteResponse]


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """`Execute`: one stream for the current lease, anything else is refused."""

    def __init__(self, holder: LeaseHolder, new_execution: Callable[[], Execution]) -> None:
        self._holder = holder
        self._new_execution = new_execution

    async def Execute(  # noqa: N802 - the name of the protocol
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest], context: Context
    ) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        try:
            execution, lease = await self._open(request_iterator)
        except HoldbackError as error:
            await rpc.abort(context, error)
        ended: HoldbackError = lease_lost("the scheduler ended the Execute stream")
        reader = asyncio.create_task(execution.read(request_iterator))
        try:
            version = types_pb2.ProtocolVersion(major=PROTOCOL_VERSION[0], minor=PROTOCOL_VERSION[1])
            yield executor_pb2.ExecuteResponse(accepted=executor_pb2.ExecutionAccepted(protocol_version=version))
            async for response in execution.responses():
                yield response
        except HoldbackError as error:
            ended = InternalError(f"the Execute stream ended: {error.message}")
            yield executor_pb2.ExecuteResponse(failed=encode_execution_failed(error))
            # A status, or the end of the registration, could be at the scheduler before the message: it ends the call.
            await asyncio.wait({reader}, timeout=FAILURE_TIMEOUT_S)
            await rpc.abort(context, error)
        finally:
            reader.cancel()
            execution.end(None)
            lease.end(ended)
            await asyncio.gather(reader, return_exceptions=True)

    async def _open(self, requests: AsyncIterator[executor_pb2.ExecuteRequest]) -> tuple[Execution, Lease]:
        """Checks the first message of a stream. Raises HoldbackError."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                request = await anext(requests, executor_pb2.ExecuteRequest())
        except TimeoutError:
            raise DeadlineExceededError(f"no open within {OPEN_TIMEOUT_S:g} s") from None
        except DecodeError as error:
            raise InvalidArgumentError(f"the first message cannot be read: {error}") from None
        if request.WhichOneof("request") != "open":
            raise FailedPreconditionError("the first message is not open", reason=ErrorReason.LEASE_MISMATCH)
        major = request.open.protocol_version.major
        if major != PROTOCOL_VERSION[0]:
            raise FailedPreconditionError(
                f"protocol_version.major is {major}; allowed: {PROTOCOL_VERSION[0]}, that of this executor",
                reason=ErrorReason.PROTOCOL_MISMATCH,
            )
        execution = self._new_execution()
        return execution, self._holder.open_execution(request.open.lease, execution)


class ExecutorProcess:
    """One executor from start to stop.

    Args:
        config: of the executor.
        create: makes the device, on the thread that launches its steps.

    Attributes:
        is_left_behind: after `run`, whether a thread still computes; native code cannot be told to stop.
    """

    def __init__(self, config: ExecutorConfig, create: Callable[[ExecutorConfig], Device] = create_device) -> None:
        self._config = config
        self._create = create
        self._threads = DeviceThreads()
        self._watchdog: StepWatchdog | None = None
        self._stop = asyncio.Event()
        self._stop_warm_up = threading.Event()
        self._health = HealthServer(config.host, config.health_port)
        self._server = rpc.create_server()
        self._holder = LeaseHolder()
        self._registration: Registration | None = None
        self._device: Device | None = None
        self._runner: NeuronModelRunner | None = None
        self._began_at = time.monotonic()
        self._tracer = create_tracer(config.process, config.trace_endpoint)
        self._metrics = ExecutorMetrics(config)
        self._metrics_server = MetricsServer(Exposition(METRICS, self._metrics).text, config.tls)
        self.is_left_behind = False

    def stop(self) -> None:
        """Asks the process to drain and end; may be called in a signal handler of the loop."""
        self._stop.set()
        self._stop_warm_up.set()

    async def run(self) -> int:
        """Runs until `stop`. Returns 0, or 1 when a step did not end within `drain_timeout_s`.

        Raises:
            ConfigError: a port, the model or the configuration cannot be used.
            HoldbackError: the scheduler refuses this executor.
        """
        self._threads.start()
        try:
            port = await self._listen()
            work = asyncio.create_task(self._work(port))
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not self._stop.is_set():
                await work
            return await self._drain(work)
        finally:
            await self._server.stop(0.5)
            await self._health.stop()
            await self._metrics_server.stop()
            if self._watchdog is not None:
                self._watchdog.stop()
            await self._close_device()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
            self.is_left_behind = not self._threads.stop(STOP_TIMEOUT_S)

    async def _listen(self) -> int:
        health_port = await self._health.start()
        await self._health.set_service(STARTUP, False)
        port = rpc.bind(self._server, self._config.host, self._config.port, self._config.tls)
        servicer = ExecutorServicer(self._holder, self._new_execution)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, self._server)
        metrics_port = None
        if self._config.metrics_port is not None:
            metrics_port = await self._metrics_server.start(self._config.host, self._config.metrics_port)
        await self._server.start()
        if self._config.ports_file is not None:
            write_ports_file(self._config.ports_file, port, health_port, metrics_port=metrics_port)
        ports = {"port": port, "health_port": health_port, "metrics_port": metrics_port}
        log.info("listening", host=self._config.host, **ports)
        return port

    async def _work(self, port: int) -> None:
        launching = self._threads.launching
        await check_pool(self._config)
        loading_at = time.monotonic()
        device = self._device = self._metrics.device = await launching.call(partial(self._create, self._config))
        start = self._metrics.start
        start.load_s = time.monotonic() - loading_at
        log.info("device_ready", device=device.kind, model=device.model.name, num_blocks=device.limits.num_blocks)
        latencies = await launching.call(partial(warm_up, device, self._stop_warm_up, build_s=start.build_s))
        self._runner = self._metrics.runner = runner = NeuronModelRunner(device)
        start.whole_s = time.monotonic() - self._began_at
        self._watch(runner, latencies)
        await self._health.set_service(STARTUP, True)

        async def void() -> None:
            await self._threads.call_when_idle(runner.reset)

        make_info = partial(self._info, device, latencies, port)
        self._registration = Registration(
            self._config.scheduler_target,
            make_info,
            self._holder,
            self._set_registered,
            void,
            tls=self._config.tls,
        )
        await self._registration.run()

    async def _set_registered(self, is_registered: bool) -> None:
        self._metrics.is_registered = is_registered
        await self._health.set_ready(is_registered)

    def _watch(self, runner: NeuronModelRunner, latencies: tuple[GraphLatency, ...]) -> None:
        slowest = max(latencies, key=lambda entry: entry.latency_us)
        if slowest.latency_us > self._config.max_step_timeout_s * 1e6:
            raise ConfigError(
                f"max_step_timeout_s is {self._config.max_step_timeout_s:g}; allowed: at least what the slowest graph "
                f"takes, {slowest.phase.value} of size {slowest.size}: {slowest.latency_us / 1e6:.1f} s"
            )
        self._watchdog = StepWatchdog(runner, latencies, timeout_s=self._config.step_timeout_s)
        self._watchdog.start()

    def _new_execution(self) -> Execution:
        if self._runner is None:
            raise FailedPreconditionError("this executor is not registered yet", reason=ErrorReason.LEASE_MISMATCH)
        traces = None if self._tracer is None else StepTraces(self._tracer)
        return Execution(self._runner, self._threads, traces)

    def _info(self, device: Device, latencies: tuple[GraphLatency, ...], port: int, lease: str) -> ExecutorInfo:
        return ExecutorInfo(
            executor_id=self._config.name,
            lease=lease,
            port=port,
            model=device.model,
            limits=device.limits,
            latencies=latencies,
            advertise_address=self._config.advertise_address,
            device=device.kind,
            compiled=device.compiled,
            kernels=device.kernels,
        )

    async def _close_device(self) -> None:
        """On the thread that made it: processes that a device started take that thread for their parent."""
        if self._device is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._threads.launching.call(self._device.close)

    async def _drain(self, work: asyncio.Task[None]) -> int:
        """Finishes the steps that were sent, within the time there is for it."""
        status = 0
        log.info("draining")
        if self._registration is not None:
            try:
                async with asyncio.timeout(self._config.drain_timeout_s):
                    await self._registration.drain("the executor was asked to stop")
            except TimeoutError:
                log.error("drain_timed_out", drain_timeout_s=self._config.drain_timeout_s)
                status = 1
        work.cancel()
        await asyncio.wait({work}, timeout=1.0)
        if work.done() and not work.cancelled() and work.exception() is not None:
            log.warning("ended_while_stopping", reason=str(work.exception()))
        log.info("stopped", status=status)
        return status


async def serve(config: ExecutorConfig) -> int:
    """Runs an executor until SIGTERM or SIGINT; a second signal ends it at once. Returns the exit status.

    Where a thread is still inside a model, this ends the process itself: an interpreter that shuts down around native
    code would abort it.
    """
    process = ExecutorProcess(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        process.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    status = await process.run()
    if process.is_left_behind:
        log.warning("left_a_computation_behind", status=status)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
