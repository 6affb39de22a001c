"""The scheduler as a process: its ports, its refusals, and how it stops."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from holdback.errors import ErrorReason, UnavailableError
from tests.scheduler.parts import build_spec
from tests.scheduler.stubs import WAIT_S, StubExecutor, StubGateway

COMMAND = (sys.executable, "-c", "import sys; from holdback.cli import main; sys.exit(main())", "scheduler")


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def read_ports(path: pathlib.Path, child: asyncio.subprocess.Process) -> dict[str, int]:
    """Waits for the line that says that the process listens; the file is there by then."""
    assert child.stderr is not None
    entry: dict[str, object] = {}
    async with asyncio.timeout(WAIT_S):
        while entry.get("event") != "scheduler_listens":
            entry = json.loads(await child.stderr.readline())
    ports = json.loads(path.read_text(encoding="utf-8"))  # noqa: ASYNC240 - a line of text
    assert ports == {"port": entry["port"], "health_port": entry["health_port"]}
    return {str(name): int(port) for name, port in ports.items()}


@pytest.mark.loopback
@pytest.mark.case("B60")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_with_0_while_requests_run(tmp_path: pathlib.Path, number: int) -> None:
    ports_file = tmp_path / "ports.json"
    async with process("--ports-file", str(ports_file)) as child:
        ports = await read_ports(ports_file, child)
        async with StubExecutor(ports["port"]) as executor, StubGateway(ports["port"]) as gateway:
            await executor.joined()
            executor.may_step.clear()
            for handle in range(6):
                await gateway.add(handle, build_spec(f"r{handle}"))
            await gateway.until(lambda answers: bool(answers[0].started))
            child.send_signal(number)
            error = await gateway.stream_ended()
            assert isinstance(error, UnavailableError)
            assert error.reason is ErrorReason.SHUTTING_DOWN
            async with asyncio.timeout(WAIT_S):
                assert await child.wait() == 0


@pytest.mark.loopback
async def test_a_port_in_use_ends_the_process_with_a_sentence(tmp_path: pathlib.Path) -> None:
    ports_file = tmp_path / "ports.json"
    async with process("--ports-file", str(ports_file)) as first:
        port = (await read_ports(ports_file, first))["port"]
        async with process("--port", str(port)) as second, asyncio.timeout(WAIT_S):
            _, errors = await second.communicate()
    assert second.returncode == 2
    assert f"port is {port}" in errors.decode()


async def test_an_unknown_setting_is_refused_by_name() -> None:
    async with process("--lease-timeout", "5") as child, asyncio.timeout(WAIT_S):
        _, errors = await child.communicate()
    assert child.returncode == 2
    assert "--lease-timeout" in errors.decode()
