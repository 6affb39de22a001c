"""A gateway with its real server and client on loopback, before a scheduler that does what the test says."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from smg_grpc_proto import vllm_engine_pb2_grpc

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from holdback import rpc
from holdback.client import AsyncClient
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import make_tokenizer, save_directory


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    """A model directory with the byte-level tokenizer, which adds no BOS."""
    return save_directory(tmp_path / "toy", make_tokenizer("byte_level"))


@pytest.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    scheduler = ScriptedScheduler()
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


@pytest.fixture
async def make_gateway(directory: pathlib.Path) -> AsyncIterator[Callable[..., Any]]:
    """Starts gateways; settings are those of `GatewayConfig`."""
    servers: list[GatewayServer] = []

    async def make(**settings: Any) -> GatewayServer:
        if "pools" not in settings:
            settings = {"tokenizer": directory, "served_model_name": "toy,alias"} | settings
        server = GatewayServer(GatewayConfig(**settings))
        servers.append(server)
        await server.start()
        return server

    yield make
    for server in servers:
        await server.stop()


@pytest.fixture
async def gateway(make_gateway: Callable[..., Any], scheduler: ScriptedScheduler) -> GatewayServer:
    """A gateway that is connected to `scheduler` and ready."""
    server: GatewayServer = await make_gateway(scheduler=scheduler.target)
    await wait_until_ready(server)
    return server


@pytest.fixture
async def client(gateway: GatewayServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=60, max_retries=0, max_resumes=0) as client:
        yield client


@pytest.fixture
async def http_gateway(make_gateway: Callable[..., Any], scheduler: ScriptedScheduler) -> GatewayServer:
    """As `gateway`, with the OpenAI HTTP API."""
    server: GatewayServer = await make_gateway(scheduler=scheduler.target, http_port=0)
    await wait_until_ready(server)
    return server


@pytest.fixture
async def openai(http_gateway: GatewayServer) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's own client, which does not try again, so that a test sees each answer."""
    url = f"{http_url(http_gateway)}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def http(http_gateway: GatewayServer) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client."""
    async with httpx.AsyncClient(base_url=http_url(http_gateway), timeout=60, trust_env=False) as client:
        yield client


def http_url(server: GatewayServer) -> str:
    assert server.http is not None
    return f"http://127.0.0.1:{server.http.port}"


@pytest.fixture
async def stub(gateway: GatewayServer) -> AsyncIterator[Any]:
    """A stub of the engine protocol."""
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def wait_until_ready(server: GatewayServer) -> None:
    """Returns when every pool of a gateway serves."""
    async with asyncio.timeout(60):
        for pool in server.pools:
            while True:
                next_change = pool.engine.next_change
                if pool.is_ready:
                    break
                await next_change.wait()


def client_of(server: GatewayServer) -> AsyncClient:
    """A client that does not try again, so that a test sees each answer."""
    return AsyncClient(f"127.0.0.1:{server.port}", timeout_s=60, max_retries=0, max_resumes=0)
