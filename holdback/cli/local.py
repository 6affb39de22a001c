"""All processes of one pool on this machine, as real processes on loopback.

Each process is started with the same command line that a person would type, takes free ports unless told otherwise,
and reports them in a file of its own. Readiness is what the gateway's health service says. When one process ends
before it is asked to, all are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from holdback import rpc
from holdback.errors import ConfigError, InternalError
from holdback.health import READINESS
from holdback.parent import PARENT_VARIABLE

POLL_S = 0.05  # how often to look whether a starting process has written its ports
GRACE_S = 15.0  # for each process between the request to stop and the kill
DRAIN_S = 10.0  # for streams at the gateway; below the grace, so that what is left of them ends with a status


@dataclass
class LocalProcess:
    """One started process.

    Attributes:
        name: `scheduler`, `executor-0`, `gateway`.
        port: of its service, once known.
        health_port: of its health service, once known.
        http_port: of the gateway's HTTP API, once known; None where there is none.
        metrics_port: of its metrics, once known; None where there are none.
    """

    name: str
    child: asyncio.subprocess.Process
    ports_file: pathlib.Path
    port: int = 0
    health_port: int = 0
    http_port: int | None = None
    metrics_port: int | None = None
    exited: asyncio.Task[int] = field(init=False)

    def __post_init__(self) -> None:
        self.exited = asyncio.create_task(self.child.wait(), name=f"wait for {self.name}")

    async def wait_for_ports(self) -> None:
        """Returns when the process listens. Raises ConfigError (exit 2) or InternalError when it ended instead."""
        while not self.ports_file.exists():
            await asyncio.wait({self.exited}, timeout=POLL_S)
            if self.exited.done():
                raise self.failure()
        ports = json.loads(self.ports_file.read_text(encoding="utf-8"))
        self.port, self.health_port = ports["port"], ports["health_port"]
        self.http_port, self.metrics_port = ports.get("http_port"), ports.get("metrics_port")

    def failure(self) -> ConfigError | InternalError:
        """Why a process that should run does not; its own last lines, on standard error, say more."""
        status = self.exited.result()
        if status == 2:
            return ConfigError(f"{self.name} cannot start as configured; its message is above")
        return InternalError(f"{self.name} ended with status {status}; its last log lines say why")

    async def stop(self) -> int:
        """Asks the process to stop, kills it after a grace time, and returns its exit status."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(signal.SIGTERM)
            await asyncio.wait({self.exited}, timeout=GRACE_S)
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self.child.kill()
        return await self.exited


class LocalStack:
    """A scheduler, executors and a gateway. Use it as an async context manager: leaving stops all of them.

    Args:
        arguments: command-line arguments for each kind of process: `scheduler`, `executor`, `gateway`.
        num_executors: executors of the pool.
        host: loopback address of all processes.
        log: where the processes write their logs; None leaves them on standard error.
    """

    def __init__(
        self,
        arguments: Mapping[str, Sequence[str]],
        *,
        num_executors: int = 1,
        host: str = "127.0.0.1",
        log: IO[bytes] | None = None,
    ) -> None:
        self._arguments = arguments
        self._num_executors = num_executors
        self._host = host
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="holdback-")
        self.processes: list[LocalProcess] = []

    @property
    def scheduler(self) -> LocalProcess:
        return self.processes[0]

    @property
    def gateway(self) -> LocalProcess:
        return self.processes[1]

    @property
    def gateway_address(self) -> str:
        return rpc.format_address(self._host, self.gateway.port)

    @property
    def http_address(self) -> str | None:
        """Of the gateway's HTTP API; None where there is none."""
        port = self.gateway.http_port
        return None if port is None else rpc.format_address(self._host, port)

    @property
    def scheduler_address(self) -> str:
        return rpc.format_address(self._host, self.scheduler.port)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        # Executors and gateway dial the scheduler, so its port must be known first; the others start together, and
        # a gateway that is refused (a wrong tokenizer, a port in use) is told before any model has been loaded.
        await (await self.spawn("scheduler", "scheduler")).wait_for_ports()
        address = ["--scheduler", self.scheduler_address]
        drain = ["--drain-timeout-s", str(DRAIN_S)]
        await (await self.spawn("gateway", "gateway", [*address, *drain])).wait_for_ports()
        for number in range(self._num_executors):
            name = f"executor-{number}"
            await self.spawn(name, "executor", [*address, "--executor-id", name])

    async def spawn(self, name: str, command: str, extra: Sequence[str] = ()) -> LocalProcess:
        """Starts one process with its kind's arguments and `extra`; it is stopped with all others."""
        ports_file = pathlib.Path(self._folder.name) / f"{name}.json"
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P"),  # what lies in the working directory is no module of ours
            *("-m", "holdback.cli", command, "--host", self._host, "--ports-file", str(ports_file)),
            *extra,
            *self._arguments.get(command, ()),
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops them in order
        )
        process = LocalProcess(name, child, ports_file)
        self.processes.append(process)
        return process

    async def wait_until_ready(self) -> None:
        """Returns when the gateway is ready. Raises when a process ends before that."""
        ready = asyncio.create_task(self._watch_readiness())
        died = asyncio.create_task(self.wait_until_one_ends())
        try:
            await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise died.result().failure()
            await ready
        finally:
            for task in (ready, died):
                task.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)

    async def _watch_readiness(self) -> None:
        async with rpc.create_channel(rpc.format_address(self._host, self.gateway.health_port)) as channel:
            request = health_pb2.HealthCheckRequest(service=READINESS)
            replies: grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
            replies = health_pb2_grpc.HealthStub(channel).Watch(request)
            async for reply in replies:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    async def wait_until_one_ends(self) -> LocalProcess:
        """Returns the first process that ends."""
        exits = [process.exited for process in self.processes]
        await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        return next(process for process in self.processes if process.exited.done())

    def kill(self) -> None:
        """Ends all processes at once, as a last resort."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.child.kill()

    async def stop(self) -> list[int]:
        """Stops gateway, executors and scheduler in this order; returns their exit statuses."""
        in_order = [*self.processes[1:], *self.processes[:1]]
        statuses = [await process.stop() for process in in_order]
        self._folder.cleanup()
        return statuses


async def run_until_signal(stack: LocalStack, work: Callable[[LocalStack], Awaitable[None]]) -> bool:
    """Starts the stack, runs `work` on it, and stops it: after `work`, after its error, or on a signal.

    A first SIGINT, SIGTERM or SIGHUP stops in an orderly way, a second one at once.

    Returns:
        False when a signal ended it.
    """
    stopped = asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            stack.kill()
        else:
            print("stopping; once more to stop at once", file=sys.stderr, flush=True)
            stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)

    async def run() -> None:
        async with stack:
            await stack.wait_until_ready()
            await work(stack)

    running, stopping = asyncio.create_task(run()), asyncio.create_task(stopped.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return False
    await running
    return True
