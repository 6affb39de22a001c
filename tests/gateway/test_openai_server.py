"""The HTTP server itself: bodies, headers, keys, health, metrics, log, the OpenAPI document, ports."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import structlog

from gateway.config import GatewayConfig
from gateway.openai import body as body_module
from gateway.openai.shapes import ErrorAnswer
from gateway.server import GatewayServer
from holdback.errors import ConfigError
from tests.gateway.conftest import http_url, wait_until_ready
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer

pytestmark = pytest.mark.loopback

EOS = 2
JSON = {"Content-Type": "application/json"}
Make = Callable[..., Any]


def error_of(response: httpx.Response) -> Any:
    """The error of a response, which must have its documented shape and no more."""
    return ErrorAnswer.model_validate_json(response.text).error


async def test_a_body_that_is_no_json_object_is_a_400_and_the_server_goes_on(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [EOS]
    for content in (
        b"",
        b"[]",
        b"{",
        b'{"a":NaN}',
        b'{"a":1,"a":1}',
        b'{"a":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b"\x00",
    ):
        response = await http.post("/v1/completions", content=content, headers=JSON)
        assert (response.status_code, error_of(response).code) == (400, "invalid_json")
    assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
async def test_a_body_of_another_kind_is_a_415(kind: str, http: httpx.AsyncClient) -> None:
    headers = {"Content-Type": kind} if kind else {}
    response = await http.post("/v1/chat/completions", content=b"{}", headers=headers)
    assert (response.status_code, error_of(response).code) == (415, "unsupported_media_type")


async def test_a_compressed_body_is_a_415(http: httpx.AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    content = b'{"prompt":"x"}'
    response = await http.post("/v1/completions", content=content, headers=JSON | {"Content-Encoding": "gzip"})
    assert (response.status_code, error_of(response).code) == (415, "unsupported_media_type")
    assert "Content-Encoding is 'gzip'" in error_of(response).message
    plain = await http.post("/v1/completions", content=content, headers=JSON | {"Content-Encoding": "identity"})
    assert plain.status_code == 200


async def test_a_body_in_utf_8_may_say_so(http: httpx.AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    kind = {"Content-Type": "Application/JSON; charset=UTF-8"}
    assert (await http.post("/v1/completions", content=b'{"prompt":"x"}', headers=kind)).status_code == 200


@pytest.mark.case("B70")
@pytest.mark.parametrize("in_chunks", [False, True])
async def test_a_body_that_is_too_long_is_a_413_before_it_is_read_to_its_end(
    in_chunks: bool, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 100_000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 10_000

    content: Any = chunks() if in_chunks else b" " * 10_000_000
    response = await http.post("/v1/completions", content=content, headers=JSON)
    assert (response.status_code, error_of(response).code) == (413, "body_too_long")
    assert "at most 100000 bytes" in error_of(response).message
    assert (await http.get("/health/live")).status_code == 200


@pytest.mark.case("B70")
async def test_a_body_without_end_is_cut_off(http_gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 100_000)
    monkeypatch.setattr(body_module, "LINGER_BYTES", 1_000_000)
    assert http_gateway.http is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", http_gateway.http.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: 99999999999\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 413 ")
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(write_without_end(writer), 60)


async def write_without_end(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b" " * 100_000)
        await writer.drain()


async def test_a_body_that_comes_too_slowly_is_a_408(
    http_gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.05)
    assert http_gateway.http is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", http_gateway.http.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer
    writer.close()


@pytest.mark.parametrize("headers", ["Content-Length: 5\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked"])
async def test_a_request_of_two_lengths_is_a_400_and_ends_its_connection(
    http_gateway: GatewayServer, scheduler: ScriptedScheduler, headers: str
) -> None:
    scheduler.answer = [EOS]
    assert http_gateway.http is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", http_gateway.http.port)
    body = b'{"prompt": "x"}'
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n\r\n".encode()
    )
    writer.write(
        b"%x\r\n%s\r\n0\r\n\r\nGET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % (len(body), body)
    )
    async with asyncio.timeout(60):
        answer = (await reader.read()).decode()
    writer.close()
    statuses = re.findall(r"HTTP/1.1 (\d+)", answer)
    if "Content-Length" in headers:
        assert (statuses, "both set" in answer, "invalid_header" in answer) == (["400"], True, True)
    else:
        assert statuses == ["200", "200"]


async def test_headers_are_bounded(http: httpx.AsyncClient, scheduler: ScriptedScheduler) -> None:
    response = await http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "i" * 257})
    assert (response.status_code, error_of(response).code) == (400, "invalid_header")
    response = await http.get("/v1/models", headers={"X-Long": "x" * 17_000})
    assert (response.status_code, error_of(response).code) == (431, "headers_too_long")
    assert scheduler.adds.empty()


async def test_unknown_paths_and_methods_are_errors_in_the_same_shape(http: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
    ):
        response = await http.request(method, path)
        assert response.status_code == status
        assert error_of(response).type == "invalid_request_error"
    assert 'method="GET",route="other",status="404"' in (await http.get("/metrics")).text


async def test_a_fault_of_ours_is_a_500_in_the_same_shape_and_says_nothing_of_the_inside(
    http_gateway: GatewayServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pool,) = http_gateway.pools

    async def broken(_: Any) -> list[int]:
        raise ZeroDivisionError("the inside")

    monkeypatch.setattr(type(pool), "tokenize", broken)
    for stream in (False, True):
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert (response.status_code, error_of(response).code) == (500, "internal")
        assert "inside" not in response.text


@pytest.mark.case("B59")
async def test_readiness_follows_the_pool_and_liveness_does_not(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0, scheduler_loss_timeout_s=0.2)
    await wait_until_ready(gateway)
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http:
        assert (await http.get("/health/ready")).status_code == 200
        await scheduler.stop()
        async with asyncio.timeout(60):
            while (await http.get("/health/ready")).status_code != 503:
                pass
        assert (await http.get("/health/live")).json() == {"status": "ok"}
        lost = await http.post("/v1/completions", json={"prompt": "x"})
        assert (lost.status_code, error_of(lost).code) == (503, "no_scheduler")
        await scheduler.start(scheduler.port)
        await wait_until_ready(gateway)
        assert (await http.get("/health/ready")).status_code == 200


async def test_a_model_is_listed_before_anything_is_known_of_it(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    scheduler.model = None
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0)
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http:
        assert [model["max_model_len"] for model in (await http.get("/v1/models")).json()["data"]] == [None, None]
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await asyncio.wait_for(scheduler.connected.wait(), 60)
        scheduler.answer = [EOS]
        scheduler.set_model(MODEL)
        assert (await asked).status_code == 200


async def test_keys_are_asked_for_before_a_body_is_read(
    make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    keys = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(json.dumps({"keys": [{"name": "ann", "sha256": digest, "max_requests": 1}]}))
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0, api_keys=keys)
    await wait_until_ready(gateway)
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/toy")):
                response = await http.request(method, path, headers=headers)
                assert (response.status_code, error_of(response).code) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/health/ready")).status_code == 200
        http.headers["Authorization"] = "Bearer secret"
        first = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        add = await scheduler.next_add()
        second = await http.post("/v1/completions", json={"prompt": "x"})
        assert (second.status_code, error_of(second).code) == (429, "key_limit")
        scheduler.tokens(add.handle, 0, [EOS])
        scheduler.ended(add.handle)
        assert (await first).status_code == 200


async def test_a_request_is_one_line_in_the_log_and_no_text_of_it(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*byte_ids(make_tokenizer("byte_level"), b"secret answer"), EOS]
    with structlog.testing.capture_logs() as lines:
        answer = (await http.post("/v1/completions?q=secret", json={"prompt": "secret", "request_id": "job"})).json()
        while not (found := [line for line in lines if line.get("path") == "/v1/completions"]):
            await http.get("/health/live")  # the line is written after the answer
    (line,) = found
    assert line.pop("seconds") >= 0
    assert line == {
        "event": "http_request",
        "log_level": "info",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": answer["id"],
        "client_request_id": "job",
    }


async def test_the_openapi_document_names_every_route_and_every_error(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health/live",
        "/health/ready",
        "/metrics",
    }
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = document["paths"][path]["post"]
        assert set(operation["responses"]) == {
            *("200", "400", "401", "404", "408", "413", "415", "429", "431", "499", "500", "503", "504")
        }
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        fields = resolve(document, schema)["properties"]
        assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1000}
    assert_references_resolve(document, document)


def resolve(document: Any, schema: Any) -> Any:
    return document["components"]["schemas"][schema["$ref"].removeprefix("#/components/schemas/")]


def assert_references_resolve(document: Any, part: Any) -> None:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            assert resolve(document, part)
        for value in part.values():
            assert_references_resolve(document, value)
    elif isinstance(part, list):
        for value in part:
            assert_references_resolve(document, value)


@pytest.mark.case("B70")
async def test_requests_for_much_work_are_refused_soon_and_others_are_served(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [EOS]
    hi = {"role": "user", "content": "hi"}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "n": 100_000}),
        ("/v1/completions", {"prompt": "x", "stop": ["s"] * 500_000}),
        ("/v1/completions", {"prompt": "x", "stop": "s" * 5_000_000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(100_000)}}),
        ("/v1/completions", {"prompt": ["x"] * 100_000}),
        ("/v1/chat/completions", {"messages": [hi] * 50_000}),
        ("/v1/chat/completions", {"messages": [hi], "logprobs": True, "top_logprobs": 100_000}),
    ):
        content = json.dumps(body).encode()
        began = time.process_time()
        response = await http.post(path, content=content, headers=JSON)
        assert time.process_time() - began < 1.0  # of client and server together; mostly 0.05 s
        assert response.status_code == (413 if len(content) > body_module.MAX_BODY_BYTES else 400)
        assert "allowed: " in error_of(response).message
    assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    (add,) = [await scheduler.next_add()]
    assert scheduler.adds.empty()
    assert add.spec.sampling.max_tokens == 16


async def test_a_port_that_is_taken_is_one_sentence(
    http_gateway: GatewayServer, make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    assert http_gateway.http is not None
    port = http_gateway.http.port
    with pytest.raises(ConfigError, match=f"http_port is {port}, which cannot be bound on 127.0.0.1: Address"):
        await make_gateway(scheduler=scheduler.target, http_port=port)


async def test_without_a_port_there_is_no_http(gateway: GatewayServer) -> None:
    assert gateway.http is None


async def test_the_ports_file_names_the_http_port(
    make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "ports.json"
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0, ports_file=path)
    ports = json.loads(path.read_text())
    assert ports == {"port": gateway.port, "health_port": gateway.health_port, "http_port": gateway.http.port}


async def test_one_port_for_two_things_is_refused_at_start(make_gateway: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError, match=f"metrics_port is {port}, which cannot be bound"):
            await make_gateway(scheduler="127.0.0.1:1", http_port=port, metrics_port=port)


async def test_a_gateway_that_could_not_start_lets_go_of_its_ports(directory: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings: dict[str, Any] = {"scheduler": "127.0.0.1:1", "tokenizer": directory, "http_port": 0}
        server = GatewayServer(GatewayConfig(**settings, metrics_port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="metrics_port"):
            await server.start()
        assert server.http is not None
        await server.stop()
    for port in (server.port, server.http.port, server.health_port):
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen()
