"""Streams that do not end well: errors, clients that leave or do not read, a gateway that stops."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai as openai_package
import pytest
import structlog
from openai import AsyncOpenAI

from gateway import server as server_module
from gateway.generation import SEED_BITS, seed_of_choice
from gateway.limits import MAX_N
from gateway.openai.shapes import ErrorAnswer
from gateway.server import GatewayServer
from holdback.errors import ErrorReason, InternalError, UnavailableError
from holdback.types import FinishReason
from tests.gateway.conftest import http_url, wait_until_ready
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, known_id, make_tokenizer
from tests.prometheus import Scrape

pytestmark = pytest.mark.loopback

EOS = 2
LONG = dataclasses.replace(MODEL, max_model_len=4_000_000)


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return byte_ids(make_tokenizer("byte_level"), text.encode())


async def events_of(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


async def metric(http: httpx.AsyncClient, name: str) -> float:
    return Scrape((await http.get("/metrics")).text).of(name)


@pytest.mark.case("B58")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_that_fails_ends_with_an_error_and_neither_reason_nor_done(
    path: str, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "x"}
    async with asyncio.timeout(60):
        asked = asyncio.create_task(http.post(path, json=body | {"stream": True}))
        add = await scheduler.next_add()
        scheduler.tokens(add.handle, 0, ids_of("abcde"))
        scheduler.ended(add.handle, FinishReason.ERROR, error=InternalError("lost", reason=ErrorReason.NUMERIC_ERROR))
        response = await asked
    *events, last = [json.loads(event) async for event in events_of(response)]
    assert response.status_code == 200
    assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
    assert last == {"error": {"message": "lost", "type": "server_error", "param": None, "code": "numeric_error"}}
    ErrorAnswer.model_validate(last)


@pytest.mark.case("B58")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_output_is_a_plain_status(
    stream: bool, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "stream": stream}))
    add = await scheduler.next_add()
    scheduler.ended(
        add.handle, FinishReason.ERROR, error=UnavailableError("no executor", reason=ErrorReason.NO_EXECUTOR)
    )
    response = await asked
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "no_executor"


async def test_openais_client_raises_what_a_stream_ends_with(openai: AsyncOpenAI, scheduler: ScriptedScheduler) -> None:
    asking = asyncio.create_task(openai.completions.create(model="toy", prompt="x", stream=True))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("a"))
    stream = await asking
    assert (await anext(aiter(stream))).choices[0].text == "a"
    scheduler.ended(add.handle, FinishReason.ERROR, error=InternalError("lost"))
    with pytest.raises(openai_package.APIError, match="lost"):
        async for _ in stream:
            pass


@pytest.mark.case("B56")
async def test_a_client_that_leaves_a_stream_ends_its_requests_at_once(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "stream": True}
    asking = asyncio.create_task(http.send(http.build_request("POST", "/v1/completions", json=body), stream=True))
    adds = [await scheduler.next_add() for _ in range(4)]
    scheduler.tokens(adds[0].handle, 0, ids_of("abc"))
    response = await asking
    assert json.loads(await anext(events_of(response)))["choices"][0]["text"] == "abc"
    with structlog.testing.capture_logs() as lines:
        await response.aclose()
        aborted = {(await scheduler.next_abort())[0] for _ in adds}
        assert aborted == {add.spec.request_id for add in adds}
        while not (found := [line for line in lines if line.get("path") == "/v1/completions"]):
            await http.get("/health/live")  # the line is written when all has ended
    assert (found[0]["status"], found[0]["error"]) == (499, "CLIENT_LEFT")
    counted = [line for line in (await http.get("/metrics")).text.splitlines() if 'route="/v1/completions"' in line]
    assert counted == ['holdback:http_requests_total{method="POST",route="/v1/completions",status="499"} 1.0']


@pytest.mark.case("B56")
async def test_a_client_that_does_not_wait_for_its_answer_ends_its_request(
    http_gateway: GatewayServer, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    for stream in (False, True):
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "stream": stream}))
        add = await scheduler.next_add()
        asked.cancel()
        assert (await scheduler.next_abort())[0] == add.spec.request_id
        await asyncio.gather(asked, return_exceptions=True)
    assert 'route="/v1/completions",status="499"} 2.0' in (await http.get("/metrics")).text


async def test_a_client_that_leaves_while_its_body_is_read_leaves_nothing(http_gateway: GatewayServer) -> None:
    assert http_gateway.http is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", http_gateway.http.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b'{"prompt":')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=http_url(http_gateway), trust_env=False) as http, asyncio.timeout(60):
        while 'status="499"' not in (await http.get("/metrics")).text:
            pass
    assert reader.at_eof()


async def test_a_slow_reader_gets_merged_pieces_and_slows_nobody(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler
) -> None:
    scheduler.model = LONG
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0)
    await wait_until_ready(gateway)
    word = "wörd with space"
    num_pieces, piece = 300, [known_id(make_tokenizer("byte_level"), word)] * 1000
    reader, writer = await open_with_small_window(gateway)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": num_pieces * len(piece)})
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
    add = await scheduler.next_add()
    for number in range(num_pieces):
        scheduler.tokens(add.handle, number * len(piece), piece)
    scheduler.answer = [*ids_of("z"), EOS]
    async with httpx.AsyncClient(base_url=http_url(gateway), timeout=60, trust_env=False) as http:
        other = await http.post("/v1/completions", json={"prompt": "x"})  # the slow one has read nothing yet
    assert other.json()["choices"][0]["text"] == "z"
    scheduler.ended(add.handle, FinishReason.LENGTH)
    lines = (await reader.read()).split(b"\n")
    writer.close()
    events = [line.removeprefix(b"data: ").strip() for line in lines if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert "".join(texts) == word * (num_pieces * len(piece))
    assert max(map(len, texts)) > len(word) * len(piece)


@pytest.mark.case("B62")
async def test_a_reader_that_never_reads_does_not_keep_the_gateway_from_stopping_and_is_no_fault_in_the_log(
    make_gateway: Callable[..., Any],
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.1)
    scheduler.model = LONG
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0)
    await wait_until_ready(gateway)
    _, writer = await open_with_small_window(gateway)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 1_000_000})
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
    add = await scheduler.next_add()
    piece = [known_id(make_tokenizer("byte_level"), "wörd with space")] * 1000
    for number in range(300):
        scheduler.tokens(add.handle, number * len(piece), piece)
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http, asyncio.timeout(60):
        while not is_held_up(gateway):
            await http.get("/health/live")
    await asyncio.wait_for(gateway.stop(), 60)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    writer.close()


def is_held_up(gateway: GatewayServer) -> bool:
    """Some connection waits for its reader."""
    assert gateway.http is not None
    connections: Any = gateway.http._server.server_state.connections
    return any(connection.flow.write_paused for connection in connections)


async def open_with_small_window(gateway: GatewayServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of which the system buffers little for the reader, who reads nothing until asked to."""
    assert gateway.http is not None
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", gateway.http.port))
    return await asyncio.open_connection(sock=connection, limit=1024)


@pytest.mark.case("B62")
async def test_a_gateway_that_drains_lets_streams_end_and_refuses_what_is_new(
    http_gateway: GatewayServer, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "stream": True}))
    add = await scheduler.next_add()
    draining = asyncio.create_task(http_gateway.drain())
    await asyncio.sleep(0)
    ready = await http.get("/health/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "unready"})
    assert (await http.get("/health/live")).status_code == 200
    late = await http.post("/v1/completions", json={"prompt": "x"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
    scheduler.tokens(add.handle, 0, [*ids_of("y"), EOS])
    scheduler.ended(add.handle)
    response = await asked
    assert response.text.endswith("data: [DONE]\n\n")
    await draining


def test_drawn_seeds_come_through_javascript_unchanged() -> None:
    largest = seed_of_choice(2**SEED_BITS - 1, MAX_N - 1)
    assert largest <= 2**53 - 1  # Number.MAX_SAFE_INTEGER


@pytest.mark.case("B62")
async def test_what_still_runs_when_the_gateway_stops_is_told_how_to_go_on_elsewhere(
    http_gateway: GatewayServer, http: httpx.AsyncClient, scheduler: ScriptedScheduler, make_gateway: Callable[..., Any]
) -> None:
    body = {"prompt": "x", "n": 2, "seed": 7, "max_tokens": 10, "echo": True}
    asking = asyncio.create_task(
        http.send(http.build_request("POST", "/v1/completions", json=body | {"stream": True}), stream=True)
    )
    adds = [await scheduler.next_add() for _ in range(2)]
    scheduler.tokens(adds[0].handle, 0, ids_of("ab"))
    scheduler.tokens(adds[1].handle, 0, ids_of("c"))
    response = await asking
    events = events_of(response)
    texts = [json.loads(await anext(events))["choices"][0]["text"] for _ in range(4)]
    assert sorted(texts) == ["ab", "c", "x", "x"]
    await http_gateway.stop()
    (last,) = [json.loads(event) async for event in events]
    error = ErrorAnswer.model_validate(last).error
    assert (error.type, error.code) == ("server_error", "shutting_down")
    assert error.resume is not None
    assert [(choice.index, choice.seed, choice.output_token_ids) for choice in error.resume.choices] == [
        (0, 7, ids_of("ab")),
        (1, 8, ids_of("c")),
    ]
    choice = error.resume.choices[0]
    other = await make_gateway(scheduler=scheduler.target, http_port=0)
    await wait_until_ready(other)
    resumed = body | {"n": 1, "seed": choice.seed, "output_token_ids": choice.output_token_ids}
    async with httpx.AsyncClient(base_url=http_url(other), trust_env=False) as again:
        asked = asyncio.create_task(again.post("/v1/completions", json=resumed))
        add = await scheduler.next_add()
        assert list(add.spec.output_token_ids) == ids_of("ab")
        scheduler.tokens(add.handle, 2, [*ids_of("d"), EOS])
        scheduler.ended(add.handle)
        answer = (await asked).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("d", 4)


async def test_what_was_withheld_when_a_stream_broke_comes_once_after_it_was_resumed(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    body = {"prompt": "x", "seed": 7, "stop": "bcd", "stream": True}
    asked = asyncio.create_task(http.post("/v1/completions", json=body))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("ab"))
    scheduler.ended(add.handle, FinishReason.ERROR, error=UnavailableError("no executor"))
    first, last = [json.loads(event) async for event in events_of(await asked)]
    assert first["choices"][0]["text"] == "a"
    (choice,) = last["error"]["resume"]["choices"]
    assert choice == {"index": 0, "seed": 7, "output_token_ids": ids_of("ab")}
    asked = asyncio.create_task(
        http.post("/v1/completions", json=body | {"output_token_ids": choice["output_token_ids"]})
    )
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 2, [*ids_of("x"), EOS])
    scheduler.ended(add.handle)
    events = [event async for event in events_of(await asked)]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "bx"


async def test_running_streams_are_counted_while_they_run(
    openai: AsyncOpenAI, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    asking = asyncio.create_task(openai.completions.create(model="toy", prompt="x", stream=True))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("a"))
    stream = await asking
    assert await metric(http, "holdback:http_running_streams") == 1
    assert await metric(http, "vllm:time_to_first_token_seconds_count") == 1
    scheduler.ended(add.handle)
    assert [chunk async for chunk in stream]
    assert await metric(http, "holdback:http_running_streams") == 0
