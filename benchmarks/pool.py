"""A pool for a benchmark: a real scheduler process, executors that note arrivals (executors.py), a counting gateway.

The gateway is this process: it speaks `SchedulerService.Connect` over real gRPC and counts what it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc.aio
from executors import Records
from steady import VERSION

from holdback import codec, rpc
from holdback.cli.local import LocalProcess
from holdback.types import RequestSpec
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc

EXECUTORS = pathlib.Path(__file__).parent / "executors.py"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
RECORDS_LIMIT_BYTES = 2**28


class CountingGateway:
    """One gateway's stream.

    Attributes:
        num_tokens: received, of all requests.
        num_messages: that brought tokens.
        num_started, num_executors: requests that run or ran; executors that serve.
        on_end: called with the handle of each request that ends.
    """

    def __init__(self, target: str) -> None:
        self.num_tokens = 0
        self.num_messages = 0
        self.num_started = 0
        self.num_executors = 0
        self.on_end: Callable[[int], None] = lambda handle: None
        self._changed = asyncio.Event()
        self._channel = rpc.create_channel(target)
        self._call: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Connect()
        self._to_send: asyncio.Queue[scheduler_pb2.ConnectRequest] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        hello = scheduler_pb2.GatewayHello(protocol_version=VERSION, session=secrets.token_hex(16), gateway_id="count")
        self._to_send.put_nowait(scheduler_pb2.ConnectRequest(hello=hello))
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._changed.set())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    def add(self, handle: int, spec: RequestSpec) -> None:
        add = scheduler_pb2.AddRequest(handle=handle, spec=codec.encode_spec(spec))
        self._to_send.put_nowait(scheduler_pb2.ConnectRequest(add=add))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that messages bring about. Raises what ended the stream instead."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()
                        raise RuntimeError("the scheduler closed the gateway's stream")
                self._changed.clear()
                await self._changed.wait()

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._to_send.get())

    async def _read(self) -> None:
        while (response := await self._call.read()) is not grpc.aio.EOF:
            self._count(response)
            self._changed.set()

    def _count(self, response: scheduler_pb2.ConnectResponse) -> None:
        if response.HasField("pool"):
            self.num_executors = response.pool.num_executors
        updates = response.updates
        self.num_started += len(updates.started)
        if updates.token_ids:
            self.num_tokens += len(updates.token_ids)
            self.num_messages += 1
        for ended in updates.ended:
            if ended.HasField("error"):
                raise RuntimeError(f"request {ended.handle} ended: {ended.error.message}")
            self.on_end(ended.handle)


@dataclass
class Pool:
    """What runs, and how to ask it."""

    gateway: CountingGateway
    scheduler: LocalProcess
    hosts: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def records(self) -> list[Records]:
        """Arrivals so far, a list for each executor."""
        found: list[Records] = []
        for host in self.hosts:
            assert host.stdin is not None
            assert host.stdout is not None
            host.stdin.write(b"\n")
            found += json.loads(await host.stdout.readline())
        return found

    def scheduler_cpu_s(self) -> float | None:
        """Processor time of the scheduler so far; None where there is no /proc."""
        stat = pathlib.Path(f"/proc/{self.scheduler.child.pid}/stat")
        if not stat.exists():
            return None
        fields = stat.read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def start_pool(
    *,
    num_executors: int,
    num_hosts: int = 1,
    scheduler_program: Sequence[str] = ("-m", "holdback.cli", "scheduler"),
    scheduler_flags: Sequence[str] = (),
    host_flags: Sequence[str] = (),
) -> AsyncIterator[Pool]:
    """Starts everything and waits until all executors serve; stops it at the end.

    Args:
        num_executors: in all.
        num_hosts: processes that they share.
        scheduler_program: what the interpreter is to run as the scheduler.
        scheduler_flags: for it, as `holdback scheduler` takes them.
        host_flags: for executors.py.
    """
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await _start_scheduler(stack, *scheduler_program, *scheduler_flags)
        target = f"127.0.0.1:{scheduler.port}"
        gateway = await stack.enter_async_context(CountingGateway(target))
        pool = Pool(gateway, scheduler)
        counts = [num_executors // num_hosts + (host < num_executors % num_hosts) for host in range(num_hosts)]
        for number, count in enumerate(counts):
            numbers = ("--count", str(count), "--first", str(sum(counts[:number])))
            pool.hosts.append(await _start_host(stack, "--scheduler", target, *numbers, *host_flags))
        await gateway.until(lambda: gateway.num_executors == num_executors)
        yield pool


async def _start_scheduler(stack: contextlib.AsyncExitStack, *command: str) -> LocalProcess:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdback-"))
    ports_file = pathlib.Path(folder) / "ports.json"
    flags = ("--log-level", "error", "--ports-file", str(ports_file))
    child = await asyncio.create_subprocess_exec(sys.executable, *command, *flags)
    scheduler = LocalProcess("scheduler", child, ports_file)
    stack.push_async_callback(scheduler.stop)
    await scheduler.wait_for_ports()
    return scheduler


async def _start_host(stack: contextlib.AsyncExitStack, *flags: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    host = await asyncio.create_subprocess_exec(
        sys.executable, str(EXECUTORS), *flags, stdin=pipe, stdout=pipe, limit=RECORDS_LIMIT_BYTES
    )

    async def stop() -> None:
        assert host.stdin is not None
        host.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await host.wait()
        except TimeoutError:
            host.kill()
            await host.wait()

    stack.push_async_callback(stop)
    return host
