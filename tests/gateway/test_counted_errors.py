"""Errors are counted once for each call, and tokens whatever ends their call, over each protocol."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import grpc.aio
import httpx
import pytest

from gateway.pool import Pool
from gateway.server import GatewayServer
from holdback import rpc
from holdback.errors import ErrorReason, InternalError
from holdback.types import FinishReason
from tests.gateway.conftest import client_of, http_url, wait_until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import make_tokenizer
from tests.gateway.test_access import Caller, entry, write
from tests.gateway.vllm_calls import failure, ids_of, request

pytestmark = pytest.mark.loopback

TOO_LONG = "x" * 64


def errors(gateway: GatewayServer) -> dict[tuple[str, ErrorReason], int]:
    """Those that were counted, by model and reason."""
    return {key: count for key, count in gateway._generations.num_errors.items() if count}


@pytest.mark.parametrize("prompts", [["a", "b", TOO_LONG], [TOO_LONG, "a"], [TOO_LONG]])
async def test_a_refused_prompt_of_a_list_counts_once(
    http_gateway: GatewayServer, http: httpx.AsyncClient, prompts: list[str]
) -> None:
    for stream in (False, True):
        response = await http.post("/v1/completions", json={"prompt": prompts, "n": 2, "stream": stream})
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert errors(http_gateway) == {("toy", ErrorReason.PROMPT_TOO_LONG): 2}
    (pool,) = http_gateway.pools
    assert pool.counts.num_ended[FinishReason.ABORT] == 2 * 2 * prompts.index(TOO_LONG)


async def test_an_error_in_a_stream_of_several_prompts_counts_once(
    http_gateway: GatewayServer, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "stream": True}))
    adds = [await scheduler.next_add() for _ in range(3)]
    scheduler.tokens(adds[0].handle, 0, ids_of("y"))
    error = InternalError("lost", reason=ErrorReason.TOO_MANY_MOVES)
    for add in adds[1:]:
        scheduler.ended(add.handle, FinishReason.ERROR, error=error)
    assert (await asking).text.count("too_many_moves") == 1
    assert errors(http_gateway) == {("toy", ErrorReason.TOO_MANY_MOVES): 1}


async def test_a_fault_of_ours_counts_once(
    http_gateway: GatewayServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(pool: Pool, message: Any) -> list[int]:
        raise ZeroDivisionError("the inside")

    monkeypatch.setattr(Pool, "tokenize", broken)
    assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 500
    async with client_of(http_gateway) as client:
        with pytest.raises(InternalError):
            await client.generate("x")
    assert errors(http_gateway) == {("toy", ErrorReason.INTERNAL): 2}


@pytest.mark.case("B56")
async def test_tokens_of_prompts_that_ran_before_the_last_was_submitted_count(
    http_gateway: GatewayServer,
    http: httpx.AsyncClient,
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenize = Pool.tokenize
    reached = asyncio.Event()

    async def tokenize_or_wait(pool: Pool, message: Any) -> list[int]:
        if message.text == "never":
            reached.set()
            await asyncio.Event().wait()
        return await tokenize(pool, message)

    monkeypatch.setattr(Pool, "tokenize", tokenize_or_wait)
    asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["hello", "c", "never"], "n": 2}))
    adds = [await scheduler.next_add() for _ in range(4)]
    scheduler.started(adds[0].handle, num_cached_tokens=1)
    scheduler.tokens(adds[0].handle, 0, ids_of("xyz"))
    scheduler.tokens(adds[1].handle, 0, ids_of("x"))
    (pool,) = http_gateway.pools
    async with asyncio.timeout(60):
        await reached.wait()
        while pool.counts.time_to_first_token_s.count != 2:
            await http.get("/health/live")
    asking.cancel()
    for _ in adds:
        await scheduler.next_abort()
    counts = pool.counts
    num_prompt = len(make_tokenizer("byte_level").encode("hello").ids)  # of the one that has outputs
    assert (counts.num_generation_tokens, counts.num_prompt_tokens, counts.num_cached_tokens) == (4, num_prompt, 1)
    assert counts.num_ended[FinishReason.ABORT] == 6


async def test_what_a_key_refuses_counts_over_http_as_over_grpc(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path / "keys", entry("one", "a", max_requests=4, max_streams=2))
    gateway = await make_gateway(scheduler=scheduler.target, api_keys=path, http_port=0)
    await wait_until_ready(gateway)
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http:
        for target in ("/v1/models", "/v1/models/toy"):
            assert (await http.get(target)).status_code == 401
        assert (await http.post("/v1/completions", json={})).status_code == 401
        assert errors(gateway) == {("", ErrorReason.UNAUTHENTICATED): 3}
        http.headers["Authorization"] = "Bearer one"
        assert (await http.post("/v1/completions", json={"prompt": "x", "n": 5})).status_code == 400
        assert gateway._generations.num_errors["toy", ErrorReason.INVALID_FIELD] == 1
        assert (await http.post("/v1/completions", json={"prompt": ["x"] * 3, "stream": True})).status_code == 400
    assert gateway._generations.num_errors["", ErrorReason.INVALID_FIELD] == 1
    async with Caller(gateway, "one") as caller:
        with pytest.raises(Exception, match="n is 5"):
            await caller.generate(n=5)
    assert gateway._generations.num_errors["toy", ErrorReason.INVALID_FIELD] == 2
    assert sum(errors(gateway).values()) == 6


@pytest.mark.parametrize(
    "method", ["holdback.v1.InferenceService/Generate", "holdback.v1.InferenceService/GenerateStream"]
)
async def test_a_generation_whose_message_cannot_be_read_counts(gateway: GatewayServer, method: str) -> None:
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        call: Any = channel.unary_unary(f"/{method}")
        assert (await failure(call(b"\xff", timeout=60))).code() is grpc.StatusCode.INVALID_ARGUMENT
        other: Any = channel.unary_unary("/holdback.v1.InferenceService/ListModels")
        assert (await failure(other(b"\xff", timeout=60))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert errors(gateway) == {("", ErrorReason.INVALID_FIELD): 1}


async def test_what_the_engine_protocol_refuses_counts_once(gateway: GatewayServer, stub: Any) -> None:
    await failure(stub.Generate(request(regex="a"), timeout=60))
    assert errors(gateway) == {("", ErrorReason.INVALID_FIELD): 1}
    await failure(stub.Generate(request(temperature=-1), timeout=60))
    assert errors(gateway) == {("", ErrorReason.INVALID_FIELD): 2}
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        call: Any = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        assert (await failure(call(b"\xff", timeout=60))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert errors(gateway) == {("", ErrorReason.INVALID_FIELD): 3}
