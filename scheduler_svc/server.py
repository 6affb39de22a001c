"""The scheduler process: one gRPC server for executors, gateways and people, and a health server beside it."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from typing import Any

import grpc.aio
import structlog

from holdback import rpc
from holdback.errors import HoldbackError, InternalError, InvalidArgumentError
from holdback.health import HealthServer
from holdback.malformed import MalformedRequests, check_well_formed
from holdback.metrics import Exposition, MetricsServer
from holdback.ports import write_ports_file
from holdback.tracing import create_tracer
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc import state
from scheduler_svc.clock import Clock
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.executors import ExecutorRegistry
from scheduler_svc.gateways import Gateways
from scheduler_svc.metrics import METRICS, SchedulerMetrics
from scheduler_svc.pool import Pool
from scheduler_svc.request_traces import RequestTraces

log = structlog.get_logger(__name__)

STOP_GRACE_S = 2.0
"""How long streams may take to end once the process stops."""

STATUS_TIMEOUT_S = 1.0


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The service on the wire; every method hands over to the part that does it."""

    def __init__(self, registry: ExecutorRegistry, gateways: Gateways, pool: Pool, dispatcher: Dispatcher) -> None:
        self._registry = registry
        self._gateways = gateways
        self._pool = pool
        self._dispatcher = dispatcher

    async def Register(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await _serve_stream("Register", context, self._registry.register(context))

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await _serve_stream("Connect", context, self._gateways.connect(context))

    async def GetLoad(  # noqa: N802
        self, request: scheduler_pb2.GetLoadRequest, context: Any
    ) -> scheduler_pb2.GetLoadResponse:
        await _refuse_malformed(context)
        return state.load(self._pool, self._dispatcher)

    async def GetState(  # noqa: N802
        self, request: scheduler_pb2.GetStateRequest, context: Any
    ) -> scheduler_pb2.GetStateResponse:
        await _refuse_malformed(context)
        return await state.state(self._pool, self._dispatcher, request)


async def _refuse_malformed(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    try:
        check_well_formed()
    except InvalidArgumentError as error:
        await _abort(context, error)


async def _serve_stream(
    method: str, context: grpc.aio.ServicerContext[Any, Any], stream: Coroutine[Any, Any, None]
) -> None:
    """Runs one stream and ends it with the status of what ended it."""
    try:
        await stream
        return
    except HoldbackError as error:
        log.info("stream_ended", method=method, peer=context.peer(), reason=error.reason.value, message=error.message)
        failure = error
    except Exception as error:
        log.exception("stream_failed", method=method, peer=context.peer())
        failure = InternalError(f"{method} failed: {error!r}")
    await _abort(context, failure)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: HoldbackError) -> None:
    """A status waits behind what a peer has not read; it is not waited for."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            await rpc.abort(context, error)
    except grpc.aio.AbortError:
        raise
    except (TimeoutError, grpc.aio.BaseError):
        log.warning("status_not_delivered", peer=context.peer(), reason=error.reason.value)


class SchedulerServer:
    """All parts of one scheduler, wired together.

    Attributes:
        pool: the pool's model and readiness.
        dispatcher: requests and lanes.
        port: of `SchedulerService`, once started.
        health_port: of `grpc.health.v1`, once started.
        metrics_port: of the metrics, once started; None without.
    """

    def __init__(self, config: SchedulerServiceConfig, clock: Clock | None = None) -> None:
        clock = Clock() if clock is None else clock
        self._config = config
        self.pool = Pool(config, clock)
        self._tracer = create_tracer(config.process, config.trace_endpoint)
        self.dispatcher = Dispatcher(config, self.pool, clock, RequestTraces(self._tracer, clock))
        self._registry = ExecutorRegistry(config, self.pool, self.dispatcher, clock)
        self._gateways = Gateways(config, self.pool, self.dispatcher)
        self._health = HealthServer(config.host, config.health_port)
        metrics = SchedulerMetrics(config, self.pool, self.dispatcher)
        self._metrics = MetricsServer(Exposition(METRICS, metrics).text, config.tls)
        self._server = rpc.create_server([MalformedRequests()])
        self._readiness = asyncio.Event()
        self._readiness_task: asyncio.Task[None] | None = None
        self.port = 0
        self.health_port = 0
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Listens, health first. Raises ConfigError when a port is in use."""
        self.health_port = await self._health.start()
        if self._config.metrics_port is not None:
            self.metrics_port = await self._metrics.start(self._config.host, self._config.metrics_port)
        servicer = SchedulerServicer(self._registry, self._gateways, self.pool, self.dispatcher)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, self._server)
        self.port = rpc.bind(self._server, self._config.host, self._config.port, self._config.tls)
        await self._server.start()
        self.pool.on_change(self._readiness.set)
        self._readiness_task = asyncio.create_task(self._report_readiness())
        if self._config.ports_file is not None:
            write_ports_file(self._config.ports_file, self.port, self.health_port, metrics_port=self.metrics_port)
        ports = {"port": self.port, "health_port": self.health_port, "metrics_port": self.metrics_port}
        log.info("scheduler_listens", host=self._config.host, **ports)

    async def stop(self) -> None:
        """Ends every stream with UNAVAILABLE (SHUTTING_DOWN), then the servers."""
        self.pool.stop()
        self._gateways.stop()
        self._registry.stop()
        await self._server.stop(STOP_GRACE_S)
        if self._readiness_task is not None:
            self._readiness_task.cancel()
        await self._health.stop()
        await self._metrics.stop()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        log.info("scheduler_stopped")

    async def _report_readiness(self) -> None:
        while True:
            await self._readiness.wait()
            self._readiness.clear()
            await self._health.set_ready(self.pool.is_ready)


async def serve(config: SchedulerServiceConfig) -> None:
    """Runs a scheduler until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config.warn()
    server = SchedulerServer(config)
    try:
        await server.start()
        # What is there by now stays: without it a full collection, which holds up every lane, is much shorter.
        gc.collect()
        gc.freeze()
        await stop.wait()
    finally:
        await server.stop()
