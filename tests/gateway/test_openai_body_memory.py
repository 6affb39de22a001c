"""Memory for bodies that are being read: who takes much of it keeps nobody out but itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gateway.openai import body as body_module
from gateway.server import GatewayServer
from tests.gateway.conftest import http_url
from tests.gateway.scripted_scheduler import ScriptedScheduler

pytestmark = pytest.mark.loopback

EOS = 2
Make = Callable[..., Any]


@pytest.mark.parametrize("limit", ["MAX_BUFFERED_BYTES", "MAX_HELD_BYTES"])
async def test_long_bodies_are_bounded_together_and_short_ones_always_pass(
    limit: str,
    http_gateway: GatewayServer,
    http: httpx.AsyncClient,
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_module, limit, 300_000)
    scheduler.answer = [EOS]
    async with unfinished_body(http_gateway, 250_000):
        long = {"prompt": "x", "user": "u" * 100_000}
        await until_refused(http, long)
        response = await http.post("/v1/completions", json=long)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "bodies_full")
        assert response.headers["retry-after"] == "1"
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    async with asyncio.timeout(60):
        while (await http.post("/v1/completions", json=long)).status_code != 400:  # read whole: `user` is too long
            pass


async def test_a_key_holds_no_memory_of_another(
    make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("one", "two")]
    (tmp_path / "keys").write_text(json.dumps({"keys": keys}), encoding="utf-8")
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0, api_keys=tmp_path / "keys")
    monkeypatch.setattr(body_module, "MAX_HELD_BYTES", 300_000)
    long = {"prompt": "x", "user": "u" * 100_000}
    one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
    async with unfinished_body(gateway, 250_000, "Authorization: Bearer one\r\n"):
        async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False, headers=one) as http:
            await until_refused(http, long)
        async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False, headers=two) as http:
            assert (await http.post("/v1/completions", json=long)).status_code == 400  # read whole


@contextlib.asynccontextmanager
async def unfinished_body(gateway: GatewayServer, num_bytes: int, headers: str = "") -> AsyncIterator[None]:
    """A client that has sent so much of a longer body and sends no more."""
    assert gateway.http is not None
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.http.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    writer.write(f"{head}Content-Length: 1000000\r\n\r\n".encode() + b" " * num_bytes)
    await writer.drain()
    try:
        yield
    finally:
        writer.close()
        await writer.wait_closed()


async def until_refused(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Returns once the server has read what fills its memory."""
    async with asyncio.timeout(60):
        while (await http.post("/v1/completions", json=body)).status_code != 503:
            pass
