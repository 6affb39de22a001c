"""The gateway process: pools, the services in front of them, health, and an orderly end.

It starts and listens without any scheduler; until one serves, it is unready and requests wait. On SIGTERM or SIGINT it
becomes unready and refuses new calls, lets those that run end within `drain_timeout_s`, and exits with 0; a second
signal ends the wait.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from typing import TYPE_CHECKING

import structlog

from gateway.access import create_access
from gateway.calls import Authentication
from gateway.config import GatewayConfig, PoolConfig
from gateway.counts import HttpCounts
from gateway.engine_client import EngineClient
from gateway.generations import Generations
from gateway.limits import MAX_REQUEST_BYTES
from gateway.malformed import fault_finder
from gateway.metrics import METRICS, GatewayMetrics
from gateway.pool import Pool, Pools
from gateway.services import GrpcServices
from gateway.template_workers import TemplateSource, TemplateWorkers
from gateway.tokenizer import Tokenizer, TokenizerThreads
from holdback import rpc
from holdback.errors import ErrorReason, UnavailableError
from holdback.health import HealthServer
from holdback.malformed import MalformedRequests
from holdback.metrics import Exposition, MetricsServer
from holdback.ports import write_ports_file
from holdback.tracing import create_tracer

if TYPE_CHECKING:
    from gateway.openai.server import HttpServer

log = structlog.get_logger(__name__)

SESSION_BYTES = 16
STOP_GRACE_S = 2.0  # for calls to end with their status once they were made to


class GatewayServer:
    """All parts of one gateway. `start`, then `drain` and `stop`, on one event loop.

    Attributes:
        port: of the services, once started.
        health_port: of `grpc.health.v1`, once started.
        http: the OpenAI HTTP API, once started; None without `http_port`.
        metrics_port: of the metrics, once started; None without.
        pools: what is served, once started.
        templates: where chat templates run; a process is started for the first one, unless one is there.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.port = 0
        self.health_port = 0
        self.http: HttpServer | None = None
        self.metrics_port: int | None = None
        self.pools = Pools(())
        self._config = config
        self._health = HealthServer(config.host, config.health_port)
        self._access = create_access(config.api_keys)
        authentication = Authentication(self._access, lambda: self._generations.counting_refusals())
        self._server = rpc.create_server(
            [authentication, MalformedRequests(fault_finder(lambda: self.pools.longest_model_len))],
            max_connection_age_s=config.max_connection_age_s,
            max_receive_bytes=MAX_REQUEST_BYTES,
        )
        self._tokenizer_threads = TokenizerThreads()
        self._tracer = create_tracer(config.process, config.trace_endpoint)
        self._generations = Generations(self.pools)
        self._services: GrpcServices
        self._http_counts = HttpCounts()
        self._metrics = MetricsServer(self._metrics_text, config.tls)
        self.templates = TemplateWorkers(config.template_timeout_s)
        self._has_started = False
        self._is_draining = False
        self._readiness_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Loads and listens. Templates are compiled for the first conversation, unless they were before.

        Raises:
            ConfigError: as `load` and `listen`.
        """
        await self.load()
        await self.listen()

    async def load(self) -> None:
        """Serves health, and loads what every pool needs.

        Raises:
            ConfigError: a tokenizer directory is none, a name is taken twice, or the health port is in use.
        """
        self.health_port = await self._health.start()
        self.pools = Pools([await self._load_pool(pool) for pool in self._config.all_pools()])
        self._generations = Generations(self.pools, self._tracer)
        self._services = GrpcServices(self._config, self._generations, self._health)
        self._services.add_to(self._server)
        await self._services.report_health(is_draining=False)  # none of them is unknown, however early it is asked for

    async def listen(self) -> None:
        """Listens, and begins to connect to the schedulers. Raises ConfigError when a port is in use."""
        self.port = rpc.bind(self._server, self._config.host, self._config.port, self._config.tls)
        self.http = self._bind_http()
        self._exposition = Exposition(METRICS, GatewayMetrics(self._generations, self._http_counts))
        if self._config.metrics_port is not None:
            self.metrics_port = await self._metrics.start(self._config.host, self._config.metrics_port)
        await self._server.start()
        self._has_started = True
        if self.http is not None:
            await self.http.start()
        for pool in self.pools:
            pool.engine.start()
            self._readiness_tasks.append(asyncio.create_task(self._report_readiness(pool)))
        http_port = None if self.http is None else self.http.port
        if self._config.ports_file is not None:
            write_ports_file(self._config.ports_file, self.port, self.health_port, http_port, self.metrics_port)
        ports = {"port": self.port, "health_port": self.health_port, "http_port": http_port}
        log.info("gateway_listens", host=self._config.host, **ports, metrics_port=self.metrics_port)

    async def drain(self) -> None:
        """Refuses new calls and returns when those that run have ended; after `drain_timeout_s` `stop` ends them."""
        self._is_draining = True
        self._generations.drain()
        await self._services.report_health(is_draining=True)
        log.info("gateway_drains", timeout_s=self._config.drain_timeout_s)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._generations.wait_idle()
        except TimeoutError:
            log.warning("gateway_drain_timed_out", timeout_s=self._config.drain_timeout_s)

    async def stop(self) -> None:
        """Ends what still runs with UNAVAILABLE (SHUTTING_DOWN), then the streams and servers."""
        self._is_draining = True
        self._generations.drain()
        self._generations.fail_all(UnavailableError("the gateway stopped", reason=ErrorReason.SHUTTING_DOWN))
        if not self._has_started:
            # gRPC lets go of a port with the end of its server, and ends no server that has not started.
            await self._server.start()
        await asyncio.gather(self._server.stop(STOP_GRACE_S), self._stop_http())
        for task in self._readiness_tasks:
            task.cancel()
        for pool in self.pools:
            await pool.engine.close()
        self._tokenizer_threads.close()
        await self.templates.close()
        await self._health.stop()
        await self._metrics.stop()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        log.info("gateway_stopped")

    def _metrics_text(self) -> bytes:
        return self._exposition.text()

    def _bind_http(self) -> HttpServer | None:
        """The HTTP server with its port taken. Its libraries are loaded only where it is wanted."""
        if self._config.http_port is None:
            return None
        from gateway.openai.server import HttpServer

        def is_ready() -> bool:
            return self.pools.is_ready and not self._is_draining

        server = HttpServer(
            self._generations, self._access, is_ready, self._http_counts, self._metrics_text, self._config.tls
        )
        server.bind(self._config.host, self._config.http_port)
        return server

    async def _stop_http(self) -> None:
        if self.http is not None:
            await self.http.stop(STOP_GRACE_S)

    async def _load_pool(self, config: PoolConfig) -> Pool:
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.tokenizer, self._tokenizer_threads)
        engine = EngineClient(
            config.scheduler,
            model_name=config.served_model_names[0],
            session=secrets.token_hex(SESSION_BYTES),  # each its own: pools may have one scheduler under several names
            gateway_id=self._config.gateway_id,
            loss_timeout_s=self._config.scheduler_loss_timeout_s,
            silence_timeout_s=self._config.scheduler_silence_timeout_s,
            tls=self._config.tls,
        )
        owner = f"model {config.served_model_names[0]!r} in {str(config.tokenizer)!r}"
        template = self.templates.add(TemplateSource(owner, tokenizer.chat_template, tokenizer.special_tokens))
        return Pool(config.served_model_names, tokenizer, template, engine)

    async def _report_readiness(self, pool: Pool) -> None:
        while True:
            next_change = pool.engine.next_change
            await self._services.report_health(is_draining=self._is_draining)
            await next_change.wait()


async def serve(config: GatewayConfig) -> None:
    """Runs a gateway until a signal. Raises ConfigError when it cannot start."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    server = GatewayServer(config)
    try:
        if await _start_unless(stop, server):
            await stop.wait()
            await _drain_unless(hurry, server)
    finally:
        await server.stop()


async def _start_unless(stop: asyncio.Event, server: GatewayServer) -> bool:
    """Starts all of it, until a signal comes; whether it serves. Raises what made it fail."""

    async def start() -> None:
        await server.load()
        await server.templates.start()  # a template that cannot be compiled ends nothing that serves already
        await server.listen()

    return await _done_before(stop, asyncio.create_task(start()))


async def _done_before(stop: asyncio.Event, task: asyncio.Task[None]) -> bool:
    """Waits for a task, which is cancelled when the signal comes first. Raises what the task raises."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def _drain_unless(hurry: asyncio.Event, server: GatewayServer) -> None:
    draining, hurrying = asyncio.create_task(server.drain()), asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurrying):
        task.cancel()
    await asyncio.gather(draining, hurrying, return_exceptions=True)
