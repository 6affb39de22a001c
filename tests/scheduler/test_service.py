"""Requests over real streams: through executors that die, for gateways that come and go, and for people who look."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from holdback import codec, rpc
from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InvalidArgumentError,
    UnavailableError,
)
from holdback.health import READINESS
from holdback.types import FinishReason, RequestSpec
from holdback.v1 import scheduler_pb2, types_pb2
from scheduler_svc.gateways import Gateways
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import Simulation, answer_of, build_spec, until
from tests.scheduler.stubs import VERSION, WAIT_S, StubExecutor, StubGateway

pytestmark = pytest.mark.loopback

Serve = Callable[..., Awaitable[SchedulerServer]]
PROMPT = [20, 21, 22]


async def readiness(server: SchedulerServer) -> bool:
    async with rpc.create_channel(f"127.0.0.1:{server.health_port}") as channel:
        request = health_pb2.HealthCheckRequest(service=READINESS)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_request_goes_through_scheduler_and_executor(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port), StubGateway(server.port) as gateway:
        await gateway.add(7, build_spec(prompt=PROMPT, max_tokens=5))
        answers = await gateway.until_ended(7)
    assert answers[7].tokens == answer_of(PROMPT, 5)
    assert answers[7].finish_reason == "length"
    assert answers[7].started[0].executor_id == "executor-0"


@pytest.mark.parametrize("method", ["Register", "Connect"])
async def test_bytes_that_are_no_message_end_their_stream_with_a_sentence(serve: Serve, method: str) -> None:
    server = await serve()
    with capture_logs() as logs:
        async with rpc.create_channel(f"127.0.0.1:{server.port}") as channel:
            call: Any = channel.stream_stream(f"/holdback.v1.SchedulerService/{method}")()
            await call.write(b"\xff\xff\xff\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "a message cannot be read" in await call.details()
    assert not [line for line in logs if line["log_level"] == "error"]


@pytest.mark.case("B59")
async def test_a_gateway_that_is_told_nothing_is_sent_heartbeats(serve: Serve) -> None:
    server = await serve(heartbeat_interval_s=0.05, lease_timeout_s=60)
    async with StubGateway(server.port, reads=False) as gateway:
        kinds: list[str | None] = []
        numbers: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while len(numbers) < 3:
                response: Any = await gateway.call.read()
                kinds.append(response.WhichOneof("response"))
                if kinds[-1] == "heartbeat":
                    numbers.append(response.heartbeat.number)
    assert kinds[0] == "pool"
    assert numbers == [0, 1, 2]
    assert gateway.accepted.heartbeat_interval_ms == 50


@pytest.mark.case("B09")
async def test_two_executors_share_what_comes_and_lose_nothing(serve: Serve) -> None:
    server = await serve()
    async with (
        StubExecutor(server.port, "executor-0", max_num_seqs=2) as first,
        StubExecutor(server.port, "executor-1", max_num_seqs=2) as second,
        StubGateway(server.port) as gateway,
    ):
        await first.joined()
        await second.joined()
        for handle in range(12):
            await gateway.add(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=4 + handle))
        answers = await gateway.until_ended(*range(12))
        assert first.num_steps > 0
        assert second.num_steps > 0
    assert answers.started_order == list(range(12))
    for handle in range(12):
        assert answers[handle].tokens == answer_of([20 + handle], 4 + handle)


@pytest.mark.case("B60")
async def test_when_an_executor_dies_its_requests_continue_on_the_other(serve: Serve) -> None:
    server = await serve()
    first = StubExecutor(server.port, "first", max_num_seqs=2)
    async with first, StubGateway(server.port) as gateway:
        first.hangs_after = 12
        await first.joined()
        for handle in range(6):
            await gateway.add(handle, build_spec(f"r{handle}", [20 + handle] * 9, max_tokens=40))
        await gateway.until(lambda answers: len(answers[1].tokens) >= 5)
        await first.die()
        async with StubExecutor(server.port, "second", max_num_seqs=2):
            answers = await gateway.until_ended(*range(6))
    for handle in range(6):
        assert answers[handle].tokens == answer_of([20 + handle] * 9, 40)
        assert answers[handle].finish_reason == "length"
    assert [started.executor_id for started in answers[0].started] == ["first", "second"]


@pytest.mark.case("B60")
async def test_without_another_executor_waiting_requests_end_within_the_bound(serve: Serve) -> None:
    server = await serve(executor_loss_timeout_s=0.1)
    async with StubGateway(server.port) as gateway:
        async with StubExecutor(server.port, max_num_seqs=2) as executor:
            await executor.joined()
            executor.may_step.clear()
            for handle in range(6):
                await gateway.add(handle, build_spec(f"r{handle}", [20 + handle]))
            await gateway.until(lambda answers: bool(answers[0].started))
        answers = await gateway.until_ended(*range(6))
        assert {answers[handle].error_reason for handle in range(6)} == {"NO_EXECUTOR"}
        await gateway.until(lambda answers: not answers.pools[-1].ready)
        assert not await readiness(server)


async def test_the_gateway_is_told_what_the_pool_is_and_of_every_change(serve: Serve) -> None:
    server = await serve(default_max_tokens=100)
    assert not await readiness(server)
    async with StubGateway(server.port) as gateway:
        answers = await gateway.until(lambda answers: bool(answers.pools))
        assert not answers.pools[0].ready
        assert not answers.pools[0].HasField("model")
        assert answers.pools[0].default_max_tokens == 100
        assert answers.pools[0].not_ready_reason
        async with StubExecutor(server.port) as executor:
            await gateway.until(lambda answers: answers.pools[-1].ready)
            assert answers.pools[-1].num_executors == 1
            assert answers.pools[-1].model.max_model_len == 64
            assert await readiness(server)
            assert executor.accepted is not None
            assert executor.accepted.lease_timeout_ms == 5000
        await gateway.until(lambda answers: answers.pools[-1].num_executors == 0)
        assert answers.pools[-1].ready  # for as long as executor_loss_timeout_s


async def test_a_request_without_max_tokens_gets_the_default_of_the_pool(serve: Serve) -> None:
    server = await serve(default_max_tokens=6)
    async with StubExecutor(server.port), StubGateway(server.port) as gateway:
        spec = codec.encode_spec(build_spec(prompt=PROMPT))
        spec.sampling.ClearField("max_tokens")
        add = scheduler_pb2.AddRequest(handle=0, spec=spec)
        await gateway.call.write(scheduler_pb2.ConnectRequest(add=add))
        answers = await gateway.until_ended(0)
    assert answers[0].tokens == answer_of(PROMPT, 6)


async def test_without_a_default_it_gets_what_fits(serve: Serve) -> None:
    server = await serve(default_max_tokens=None)
    async with StubExecutor(server.port, max_model_len=16), StubGateway(server.port) as gateway:
        spec = codec.encode_spec(build_spec(prompt=PROMPT))
        spec.sampling.ClearField("max_tokens")
        add = scheduler_pb2.AddRequest(handle=0, spec=spec)
        await gateway.call.write(scheduler_pb2.ConnectRequest(add=add))
        answers = await gateway.until_ended(0)
    assert answers[0].tokens == answer_of(PROMPT, 13)
    assert answers[0].finish_reason == "length"


# ---- gateways ----


@pytest.mark.case("B56")
async def test_when_a_gateway_goes_all_its_requests_end_at_once(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port, max_num_seqs=1) as executor, StubGateway(server.port, "x" * 16) as watcher:
        executor.hangs_after = 4
        async with StubGateway(server.port) as gateway:
            for handle in range(3):
                await gateway.add(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=60))
            await gateway.until(lambda answers: len(answers[0].tokens) >= 3)
            await executor.hangs()
            await watcher.until_load(lambda load: load.num_running + load.num_waiting == 3)
        await watcher.until_load(lambda load: sum(entry.count for entry in load.finished) == 3)
        await watcher.add(0, build_spec(prompt=PROMPT))
        executor.may_step.set()
        assert (await watcher.until_ended(0))[0].tokens == answer_of(PROMPT, 3)
        load = await watcher.stub.GetLoad(scheduler_pb2.GetLoadRequest())
        assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 0, 0)
        assert {(entry.finish_reason, entry.count) for entry in load.finished} == {(3, 3), (2, 1)}


async def test_a_gateway_that_comes_back_supersedes_its_old_stream(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port) as executor, StubGateway(server.port) as old:
        executor.hangs_after = 4
        await executor.joined()
        await old.add(0, build_spec("r", PROMPT, max_tokens=30))
        await old.until(lambda answers: len(answers[0].tokens) >= 2)
        await executor.hangs()
        known = list(old.answers[0].tokens)
        async with StubGateway(server.port) as new:
            error = await old.stream_ended()
            assert isinstance(error, UnavailableError)
            assert "another stream" in error.message
            assert error.reason is ErrorReason.STREAM_REPLACED
            again = build_spec("r", PROMPT, max_tokens=30, generation=1, outputs=known)
            await new.add(0, again, scheduler_pb2.Resubmission(has_started=True))
            executor.may_step.set()
            answers = await new.until_ended(0)
    assert known + answers[0].tokens == answer_of(PROMPT, 30)


@pytest.mark.parametrize(
    ("hello", "kind", "message"),
    [
        (
            scheduler_pb2.GatewayHello(protocol_version=VERSION, session="short"),
            InvalidArgumentError,
            "hello.session is '5 bytes'; allowed: 16 to 64 bytes",
        ),
        (
            scheduler_pb2.GatewayHello(protocol_version=VERSION, session="s" * 16, gateway_id="g" * 129),
            InvalidArgumentError,
            "hello.gateway_id is '129 bytes'",
        ),
        (
            scheduler_pb2.GatewayHello(session="s" * 16),
            FailedPreconditionError,
            "protocol_version of the gateway is 0.0",
        ),
        (None, InvalidArgumentError, "`hello` first"),
    ],
)
async def test_a_gateway_that_does_not_introduce_itself_is_refused(
    serve: Serve, hello: scheduler_pb2.GatewayHello | None, kind: type[HoldbackError], message: str
) -> None:
    server = await serve()
    gateway = StubGateway(server.port)
    first = scheduler_pb2.ConnectRequest(abort=scheduler_pb2.AbortSubmission(request_id="r"))
    await gateway.call.write(first if hello is None else scheduler_pb2.ConnectRequest(hello=hello))
    gateway.read()
    error = await gateway.stream_ended()
    await gateway.__aexit__(None, None, None)
    assert isinstance(error, kind)
    assert message in error.message


async def test_a_second_hello_ends_the_stream(serve: Serve) -> None:
    server = await serve()
    async with StubGateway(server.port) as gateway:
        hello = scheduler_pb2.GatewayHello(protocol_version=VERSION, session="s" * 16)
        await gateway.call.write(scheduler_pb2.ConnectRequest(hello=hello))
        error = await gateway.stream_ended()
    assert isinstance(error, InvalidArgumentError)


async def test_what_only_newer_peers_know_is_ignored(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port) as executor, StubGateway(server.port) as gateway:
        executor.says_more = True
        await gateway.call.write(scheduler_pb2.ConnectRequest())
        await gateway.add(0, build_spec(prompt=PROMPT))
        assert (await gateway.until_ended(0))[0].tokens == answer_of(PROMPT, 3)


async def test_a_bad_request_ends_its_handle_and_not_the_stream(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port), StubGateway(server.port) as gateway:
        await gateway.call.write(scheduler_pb2.ConnectRequest(add=scheduler_pb2.AddRequest(handle=0)))
        await gateway.add(1, build_spec("bad", [500]))
        await gateway.abort("nobody")
        await gateway.add(2, build_spec(prompt=PROMPT))
        answers = await gateway.until_ended(0, 1, 2)
    assert answers[0].error_reason == "INVALID_FIELD"
    assert answers[2].tokens == answer_of(PROMPT, 3)


class ContextThatStalls:
    """A gateway's side of `Connect` that sends some requests, takes in the answer to its hello, and reads no more."""

    def __init__(self, *requests: scheduler_pb2.ConnectRequest) -> None:
        self._requests = list(requests)
        self._has_room = True

    async def read(self) -> scheduler_pb2.ConnectRequest:
        if not self._requests:
            await asyncio.Event().wait()
        return self._requests.pop(0)

    async def write(self, response: scheduler_pb2.ConnectResponse) -> None:
        if not self._has_room:
            await asyncio.Event().wait()
        self._has_room = False


async def test_a_gateway_that_does_not_read_is_closed_and_holds_up_nobody(simulate: Callable[..., Simulation]) -> None:
    simulation = simulate(gateway_stall_timeout_s=0.05)
    gateways = Gateways(simulation.config, simulation.pool, simulation.dispatcher)
    simulation.add_lane(max_num_seqs=1, max_model_len=40_000, num_blocks=10_001)
    hello = scheduler_pb2.GatewayHello(protocol_version=VERSION, session="the stalled gateway", gateway_id="stalled")
    spec = codec.encode_spec(build_spec("has the only slot", PROMPT, max_tokens=39_000))
    context: Any = ContextThatStalls(
        scheduler_pb2.ConnectRequest(hello=hello),
        scheduler_pb2.ConnectRequest(add=scheduler_pb2.AddRequest(handle=0, spec=spec)),
    )
    connection = asyncio.create_task(gateways.connect(context))
    await until(lambda: any(lane.core.running for lane in simulation.dispatcher.lanes))
    simulation.submit(0, build_spec(prompt=PROMPT, max_tokens=30))
    assert (await simulation.until_ended(0)).tokens == answer_of(PROMPT, 30)
    with pytest.raises(UnavailableError, match="gateway_stall_timeout_s") as ended:
        await connection
    assert ended.value.reason is ErrorReason.PEER_STALLED
    assert simulation.dispatcher.num_finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}


async def test_a_request_that_is_too_long_is_refused_without_being_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve()
    decoded: list[str] = []
    decode = codec.decode_spec

    def count(message: types_pb2.RequestSpec) -> RequestSpec:
        decoded.append(message.request_id)
        return decode(message)

    async with StubExecutor(server.port), StubGateway(server.port) as gateway:
        await gateway.until(lambda answers: bool(answers.pools) and answers.pools[-1].ready)
        monkeypatch.setattr(codec, "decode_spec", count)
        await gateway.add(0, build_spec("prompt", [20] * 64))
        await gateway.add(1, build_spec("outputs", [20] * 60, max_tokens=9, outputs=[20] * 4))
        await gateway.add(2, build_spec("stop ids", [20], stop=[20] * 65_537))
        await gateway.add(3, build_spec("long ago", [20]), scheduler_pb2.Resubmission(age_ms=2**64 - 1))
        answers = await gateway.until_ended(0, 1, 2, 3)
    assert [answers[handle].error_reason for handle in range(4)] == ["PROMPT_TOO_LONG"] * 2 + ["INVALID_FIELD"] * 2
    assert [ended.usage.prompt_tokens for ended in (answers[0].ended, answers[1].ended) if ended is not None] == [
        64,
        60,
    ]
    assert decoded == ["long ago"]


# ---- people ----


async def test_the_state_shows_the_last_steps_of_a_request(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port), StubGateway(server.port) as gateway:
        await gateway.add(0, build_spec("chat-1", list(range(20, 43)), max_tokens=3))  # 23 tokens: chunks of 16 and 7
        await gateway.until_ended(0)
        await gateway.add(1, build_spec("other", [20], max_tokens=1))
        await gateway.until_ended(1)
        reply = await gateway.stub.GetState(scheduler_pb2.GetStateRequest(request_id="chat-1"))
        latest = await gateway.stub.GetState(scheduler_pb2.GetStateRequest(request_id="chat-1", max_steps=1))
    [lane] = reply.lanes
    assert lane.executor.executor_id == "executor-0"
    assert lane.executor.lease == ""
    assert [
        (
            step.state,
            step.rows[0].num_computed_tokens,
            step.rows[0].num_scheduled_tokens,
            step.rows[0].num_scheduled_tokens_padded,
        )
        for step in lane.steps
    ] == [(2, 0, 16, 16), (2, 16, 7, 8), (3, 23, 1, 1), (3, 24, 1, 1)]  # prefill, prefill, decode, decode
    assert all(step.HasField("duration_us") and step.sent_unix_us > 0 for step in lane.steps)
    assert lane.num_usable_blocks == 64
    assert lane.max_kv_concurrent == 4
    assert lane.total_padding_tokens == 1 + 7
    assert [step.rows[0].num_computed_tokens for step in latest.lanes[0].steps] == [24]


async def test_a_scheduler_that_stops_says_so_to_gateways_and_executors_and_finds_nothing_wrong(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port) as executor, StubGateway(server.port) as gateway:
        await executor.joined()
        executor.may_step.clear()
        await gateway.add(0, build_spec(prompt=PROMPT))
        await gateway.until(lambda answers: bool(answers[0].started))
        with capture_logs() as logs:
            async with asyncio.timeout(WAIT_S):
                await server.stop()
        assert {entry["event"] for entry in logs if entry["log_level"] not in ("info", "debug")} == set()
        assert "executor_released" in [entry["event"] for entry in logs]
        for error in (await gateway.stream_ended(), await executor.registration_ended()):
            assert isinstance(error, UnavailableError)
            assert error.reason is ErrorReason.SHUTTING_DOWN
