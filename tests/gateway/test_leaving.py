"""Clients that read slowly, or go away, at each moment of a call."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2

from gateway.generations import Generations
from gateway.inference import InferenceService
from gateway.server import GatewayServer
from gateway.vllm_engine.service import ServedPool, VllmEngine
from gateway.vllm_engine.tokenizer_files import TokenizerFiles
from holdback import AsyncClient, rpc
from holdback.errors import DeadlineExceededError
from holdback.types import FinishReason
from holdback.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.gateway.conftest import client_of
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.texts import EOS, ids_of

pytestmark = pytest.mark.loopback

Make = Callable[..., Any]


class Reader:
    """The server's side of a call whose client reads, and goes away, when the test says so."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def go_away(self) -> None:
        for callback in self._callbacks:
            callback(self)

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", "00-trace"),)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)


async def test_a_slow_reader_gets_merged_pieces_and_slows_nobody(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    scheduler.model = dataclasses.replace(MODEL, max_model_len=5000)
    gateway = await make_gateway(scheduler=scheduler.target)
    message = inference_pb2.Generation(text="x", sampling=types_pb2.SamplingParams(max_tokens=1000))
    context: Any = Reader()
    slow = InferenceService(Generations(gateway.pools)).GenerateStream(
        inference_pb2.GenerateStreamRequest(generation=message), context
    )
    assert (await anext(slow)).HasField("started")
    add = await scheduler.next_add()
    assert add.spec.trace_context.traceparent == "00-trace"
    for index in range(1000):
        scheduler.tokens(add.handle, index, ids_of("a"))
    async with client_of(gateway) as client:
        # this one's answer is behind all of the slow one's on the gateway's stream
        scheduler.answer = [EOS]
        await client.generate("x")
    delta = (await anext(slow)).delta
    assert (delta.text, len(delta.token_ids)) == ("a" * 1000, 1000)
    assert (await anext(slow)).end.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (await anext(slow)).finished.usage.completion_tokens == 1000
    assert [event async for event in slow] == []


@pytest.mark.case("B56")
async def test_a_client_that_goes_away_ends_its_requests_at_once(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    stream = client.stream("x", request_id="gone", max_tokens=20)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("a"))
    assert (await anext(stream)).text == "a"
    stream.close()
    assert await scheduler.next_abort() == ("gone", 0)
    waiting = asyncio.create_task(client.generate("x", request_id="queued", max_tokens=20))
    await scheduler.next_add()
    waiting.cancel()
    assert await scheduler.next_abort() == ("queued", 0)


@pytest.mark.case("B56")
async def test_a_deadline_is_told_to_the_scheduler_and_ends_the_request(
    gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=2) as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("x", request_id="late", max_tokens=20)
    add = await scheduler.next_add()
    assert 1 <= add.spec.deadline_ms <= 2000
    assert await scheduler.next_abort() == ("late", 0)


# ---- each moment ----


Leave = Callable[[grpc.aio.Channel, Any], Awaitable[None]]


async def cancel(channel: grpc.aio.Channel, call: Any) -> None:
    call.cancel()


async def disconnect(channel: grpc.aio.Channel, call: Any) -> None:
    await channel.close()


@pytest.fixture(params=[cancel, disconnect])
def leave(request: pytest.FixtureRequest) -> Leave:
    """How a client goes away."""
    found: Leave = request.param
    return found


@pytest.fixture
async def channel(gateway: GatewayServer) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        yield channel


def start_stream(channel: grpc.aio.Channel) -> Any:
    stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
    message = inference_pb2.Generation(text="x", request_id="gone", sampling=types_pb2.SamplingParams(max_tokens=20))
    return stub.GenerateStream(inference_pb2.GenerateStreamRequest(generation=message))


async def assert_nothing_is_left(gateway: GatewayServer, scheduler: ScriptedScheduler) -> None:
    """Nothing runs, nothing more was said of it, and the next call, which follows on the same stream, is served."""
    await asyncio.wait_for(gateway._generations.wait_idle(), 60)
    scheduler.answer = [EOS]
    async with client_of(gateway) as client:
        assert (await client.generate("x", request_id="next")).finish_reason is FinishReason.STOP
    assert (await scheduler.next_add()).spec.request_id == "next"
    assert scheduler.adds.empty()
    while not scheduler.aborts.empty():
        assert scheduler.aborts.get_nowait() == ("next", 0)


@pytest.mark.case("B56")
async def test_who_leaves_while_the_text_is_tokenized_leaves_nothing_to_submit(
    gateway: GatewayServer,
    scheduler: ScriptedScheduler,
    channel: grpc.aio.Channel,
    leave: Leave,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (pool,) = gateway.pools
    encode, has_begun, may_go_on = pool.tokenizer.encode, asyncio.Event(), asyncio.Event()

    async def encode_slowly(text: str) -> list[int]:
        has_begun.set()
        await may_go_on.wait()
        return await encode(text)

    monkeypatch.setattr(pool.tokenizer, "encode", encode_slowly)
    call = start_stream(channel)
    await asyncio.wait_for(has_begun.wait(), 60)
    await leave(channel, call)
    await asyncio.wait_for(gateway._generations.wait_idle(), 60)
    may_go_on.set()
    await assert_nothing_is_left(gateway, scheduler)


@pytest.mark.case("B56")
async def test_who_leaves_while_no_model_is_known_leaves_nothing_to_submit(
    make_gateway: Make, scheduler: ScriptedScheduler, leave: Leave
) -> None:
    scheduler.model = None
    gateway = await make_gateway(scheduler=scheduler.target)
    await asyncio.wait_for(scheduler.connected.wait(), 60)
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        call = start_stream(channel)
        async with asyncio.timeout(60):
            while not gateway._generations.num_running:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        await leave(channel, call)
        await asyncio.wait_for(gateway._generations.wait_idle(), 60)
    (pool,) = gateway.pools
    assert pool.counts.num_ended[FinishReason.ABORT] == 1
    scheduler.set_model(MODEL)
    await assert_nothing_is_left(gateway, scheduler)


@pytest.mark.case("B56")
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_who_leaves_while_it_waits_or_runs_is_aborted(
    gateway: GatewayServer, scheduler: ScriptedScheduler, channel: grpc.aio.Channel, leave: Leave, num_tokens: int
) -> None:
    call = start_stream(channel)
    add = await scheduler.next_add()
    if num_tokens:
        scheduler.tokens(add.handle, 0, ids_of("a" * num_tokens))
    for _ in range(1 + num_tokens):
        await call.read()
    await leave(channel, call)
    assert await scheduler.next_abort() == ("gone", 0)
    await assert_nothing_is_left(gateway, scheduler)


@pytest.mark.case("B56")
async def test_who_leaves_after_the_end_is_not_aborted(
    gateway: GatewayServer, scheduler: ScriptedScheduler, channel: grpc.aio.Channel, leave: Leave
) -> None:
    call = start_stream(channel)
    add = await scheduler.next_add()
    await call.read()
    (run,) = gateway._generations.runs
    scheduler.ended(add.handle)
    async with asyncio.timeout(60):
        while run.choices[0].end is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    await leave(channel, call)
    await assert_nothing_is_left(gateway, scheduler)


@pytest.mark.case("B56")
@pytest.mark.parametrize("protocol", ["inference", "engine"])
async def test_who_leaves_while_a_message_to_it_is_under_way_is_aborted_at_once(
    gateway: GatewayServer, scheduler: ScriptedScheduler, directory: pathlib.Path, protocol: str
) -> None:
    context: Any = Reader()
    stream: Any
    if protocol == "inference":
        sampling = types_pb2.SamplingParams(max_tokens=20)
        message = inference_pb2.Generation(text="x", request_id="gone", sampling=sampling)
        request = inference_pb2.GenerateStreamRequest(generation=message)
        stream = InferenceService(gateway._generations).GenerateStream(request, context)
    else:
        params = vllm_engine_pb2.SamplingParams(max_tokens=20)
        asked = vllm_engine_pb2.GenerateRequest(text="x", request_id="gone", stream=True, sampling_params=params)
        (pool,) = gateway.pools
        served = ServedPool(pool, TokenizerFiles(directory))
        stream = VllmEngine(gateway._generations, served).Generate(asked, context)
    first = asyncio.ensure_future(anext(stream))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("a"))
    await first  # here the library sends what it was given, and takes the next when that has gone out
    context.go_away()
    assert await scheduler.next_abort() == ("gone", 0)
    await stream.aclose()
    await assert_nothing_is_left(gateway, scheduler)
