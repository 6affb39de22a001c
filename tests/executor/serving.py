"""An executor process for the tests: on this loop, or as a child; and what they ask of its health."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.config import ExecutorConfig
from executor_svc.devices.base import StepInputs
from executor_svc.devices.simulated import SimulatedDevice
from executor_svc.server import ExecutorProcess
from holdback import rpc
from tests.executor.builders import VOCAB_SIZE

PROMPT = [20, 21, 22]
ANSWER = [52, 72, 52]  # worked out in test_simulated
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def build_config(target: str, **changes: Any) -> ExecutorConfig:
    return ExecutorConfig(scheduler=target, device="simulated", executor_id="under-test", **changes)


@contextlib.asynccontextmanager
async def running(
    target: str, device: SimulatedDevice | Callable[[], SimulatedDevice], **changes: Any
) -> AsyncIterator[tuple[ExecutorProcess, asyncio.Task[int]]]:
    """An executor process on this loop. Whatever it raised is the test's to look at."""
    make = device if callable(device) else lambda: device
    process = ExecutorProcess(build_config(target, **changes), lambda _config: make())
    task = asyncio.create_task(process.run())
    try:
        yield process, task
    finally:
        process.stop()
        if isinstance(device, SimulatedDevice):
            device.close()
        await asyncio.gather(task, return_exceptions=True)


def watch_launches(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """The number of real tokens of each step that the device is given, as it is given it."""
    loop = asyncio.get_running_loop()
    launches: asyncio.Queue[int] = asyncio.Queue()
    launch = device.launch

    def record(inputs: StepInputs) -> object:
        loop.call_soon_threadsafe(launches.put_nowait, inputs.num_tokens)
        return launch(inputs)

    monkeypatch.setattr(device, "launch", record)
    return launches


def drop_all(launches: asyncio.Queue[int]) -> None:
    """Forgets what was launched so far, the warm-up above all."""
    while not launches.empty():
        launches.get_nowait()


async def health_of(port: int, service: str, wanted: int | None = None) -> int:
    """The status of a health service; with `wanted`, waits until it is that."""
    async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async for reply in stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True):
            if wanted is None or reply.status == wanted:
                return int(reply.status)
    raise AssertionError("the health server ended")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def start_command(tmp_path: pathlib.Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdback.cli", "executor", "--device", "simulated"),
        *("--ports-file", str(tmp_path / "ports.json"), "--max-model-len", "64", "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "32", "--simulated-vocab-size", str(VOCAB_SIZE), *arguments),
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
