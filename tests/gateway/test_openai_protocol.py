"""What is no HTTP is answered and counted like everything else, whenever it comes, and is no fault in the log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway import server as server_module
from gateway.openai import server as http_module
from gateway.openai.shapes import ErrorAnswer
from gateway.server import GatewayServer
from tests.gateway.conftest import wait_until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler

pytestmark = pytest.mark.loopback

GET = b"GET /health/live HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HALF_A_BODY = POST + b'Content-Length: 100\r\n\r\n{"prompt":'
OURS = ("POST", "/v1/completions")
NONE = ("other", "other")


class Connection:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, str]:
        """Status and body of the next response."""
        async with asyncio.timeout(60):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head)
            assert length is not None
            body = await self._reader.readexactly(int(length[1]))
        return int(head.split()[1]), body.decode()

    async def ended(self) -> bool:
        """The server has closed it, with nothing more to read."""
        async with asyncio.timeout(60):
            return await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def connection(http_gateway: GatewayServer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Connection]:
    """A connection; nothing that is sent on it is a fault of the gateway's."""
    connection = await connect(http_gateway)
    yield connection
    connection.close()
    assert faults(caplog) == []


async def connect(gateway: GatewayServer) -> Connection:
    assert gateway.http is not None
    return Connection(*await asyncio.open_connection("127.0.0.1", gateway.http.port))


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as one while the test ran."""
    return [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


def counted(gateway: GatewayServer) -> dict[tuple[str, str, str], int]:
    """HTTP requests by method, route and status."""
    counts = gateway._http_counts.num_requests
    return {(method, route, status): count for (route, method, status), count in counts.items()}


async def until_counted(gateway: GatewayServer, expected: dict[tuple[str, str, str], int]) -> None:
    async with asyncio.timeout(60):
        while sum(counted(gateway).values()) < sum(expected.values()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert counted(gateway) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01garbage\r\n\r\n",
        b"GET /health/live\r\n\r\n",
        GET + b"\r\n",
        GET + b"Host: a\r\nHost: b\r\n\r\n",
        GET + b"Host: a\r\nA: b\x00c\r\n\r\n",
        POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
        POST + b"Transfer-Encoding: gzip\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_a_400_and_counted(
    data: bytes, http_gateway: GatewayServer, connection: Connection
) -> None:
    connection.send(data)
    status, body = await connection.answer()
    assert (status, ErrorAnswer.model_validate_json(body).error.code) == (400, "invalid_http")
    assert await connection.ended()
    assert counted(http_gateway) == {(*NONE, "400"): 1}


async def test_headers_that_do_not_end_are_a_431_however_they_are_cut(
    http_gateway: GatewayServer, connection: Connection
) -> None:
    connection.send(GET + b"Host: x\r\nA: " + b"b" * 20_000)
    status, body = await connection.answer()
    assert (status, ErrorAnswer.model_validate_json(body).error.code) == (431, "headers_too_long")
    assert counted(http_gateway) == {(*NONE, "431"): 1}


@pytest.mark.parametrize("bad", [b"zz\r\n", b"-1\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_body_in_bad_chunks_is_a_400_and_counted_as_one(
    bad: bytes, at_once: bool, http_gateway: GatewayServer, connection: Connection, scheduler: ScriptedScheduler
) -> None:
    head = POST + CHUNKED + b"1\r\n{\r\n"
    connection.send(head + bad if at_once else head)
    if not at_once:
        await until_a_body_is_waited_for(http_gateway)
        connection.send(bad)
    status, body = await connection.answer()
    assert (status, ErrorAnswer.model_validate_json(body).error.code) == (400, "invalid_http")
    assert await connection.ended()
    await until_counted(http_gateway, {(*OURS, "400"): 1})
    assert scheduler.adds.empty()


async def until_a_body_is_waited_for(gateway: GatewayServer) -> None:
    assert gateway.http is not None
    state: Any = gateway.http._server.server_state
    async with asyncio.timeout(60):
        while not any(one.cycle and not one.cycle.body for one in state.connections):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


async def test_bad_chunks_after_the_answer_end_the_connection(
    http_gateway: GatewayServer, connection: Connection
) -> None:
    connection.send(POST.replace(b"completions", b"nothing") + CHUNKED)
    assert (await connection.answer())[0] == 404
    connection.send(b"zz\r\n")
    assert await connection.ended()
    assert counted(http_gateway) == {("POST", "other", "404"): 1}


async def test_garbage_after_a_request_does_not_touch_its_answer(
    http_gateway: GatewayServer, connection: Connection
) -> None:
    connection.send(GET + b"Host: x\r\n\r\ngarbage\r\n\r\n")
    assert (await connection.answer())[0] == 200
    assert (await connection.answer())[0] == 400
    await until_counted(http_gateway, {("GET", "/health/live", "200"): 1, (*NONE, "400"): 1})


@pytest.mark.case("B62")
async def test_a_body_that_does_not_come_does_not_keep_the_gateway_from_stopping(
    make_gateway: Callable[..., Any],
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.1)
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0)
    await wait_until_ready(gateway)
    connection = await connect(gateway)
    connection.send(HALF_A_BODY)
    await until_a_body_is_waited_for(gateway)
    await asyncio.wait_for(gateway.stop(), 60)
    assert counted(gateway) == {(*OURS, "499"): 1}
    assert faults(caplog) == []
    connection.close()


async def test_what_does_not_end_with_its_connection_does_not_keep_the_gateway_from_stopping(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.1)
    monkeypatch.setattr(http_module, "CUT_S", 0.1)
    monkeypatch.setattr(http_module._Server, "cut", lambda _: None)
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0)
    connection = await connect(gateway)
    connection.send(HALF_A_BODY)
    await until_a_body_is_waited_for(gateway)
    await asyncio.wait_for(gateway.stop(), 60)
    assert counted(gateway) == {}
    connection.close()
    await until_counted(gateway, {(*OURS, "499"): 1})
