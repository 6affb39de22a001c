"""The gateway as a process: what it needs to start, when it is ready, how it stops."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.generations import Generations
from gateway.inference import InferenceService
from gateway.server import GatewayServer
from holdback import AsyncClient, GenerationStream, rpc
from holdback.cli.local import LocalProcess
from holdback.errors import (
    ConfigError,
    ErrorReason,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    RequestAbortedError,
    UnavailableError,
)
from holdback.health import LIVENESS, READINESS
from holdback.types import FinishReason
from holdback.v1 import inference_pb2, types_pb2
from tests.gateway.conftest import wait_until_ready
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer, save_directory

pytestmark = pytest.mark.loopback

EOS = 2
Make = Callable[..., Any]


def ids_of(text: str) -> list[int]:
    return byte_ids(make_tokenizer("byte_level"), text.encode())


def client_of(server: GatewayServer) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{server.port}", timeout_s=60, max_retries=0, max_resumes=0)


async def collect(stream: GenerationStream) -> str:
    return "".join([piece.text async for piece in stream])


async def watch(health_port: int, service: str = READINESS) -> AsyncIterator[bool]:
    """Every change of one health service, the present state first."""
    async with rpc.create_channel(f"127.0.0.1:{health_port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        replies: grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
        replies = health_pb2_grpc.HealthStub(channel).Watch(request)
        async for reply in replies:
            yield reply.status == health_pb2.HealthCheckResponse.SERVING


async def wait_for(states: AsyncIterator[bool], expected: bool) -> None:
    async with asyncio.timeout(60):
        async for state in states:
            if state is expected:
                return


async def test_a_gateway_starts_without_a_scheduler_and_serves_once_there_is_one(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    await scheduler.stop()
    gateway = await make_gateway(scheduler=scheduler.target)
    readiness, liveness = watch(gateway.health_port), watch(gateway.health_port, LIVENESS)
    assert await anext(liveness) is True
    assert await anext(readiness) is False
    async with client_of(gateway) as client:
        (model,) = await client.models()
        assert (model.info, model.is_ready) == (None, False)
        pending = asyncio.create_task(client.generate("x"))
        scheduler.answer = [*ids_of("y"), EOS]
        await scheduler.start(scheduler.port)
        assert (await pending).text == "y"
    await wait_for(readiness, expected=True)


async def test_requests_wait_for_the_first_executor_and_wrong_ones_do_not(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    scheduler.model = None
    gateway = await make_gateway(scheduler=scheduler.target)
    await asyncio.wait_for(scheduler.connected.wait(), 60)
    scheduler.answer = [EOS]
    async with client_of(gateway) as client:
        with pytest.raises(InvalidArgumentError, match="top_p"):
            await client.generate("x", top_p=2.0)
        pending = asyncio.create_task(client.generate("x", request_id="early"))
        aborted = asyncio.create_task(client.generate("x", request_id="aborted"))
        await until_alive(client, "aborted")
        with pytest.raises(RequestAbortedError, match="aborted before it began"):
            await aborted
        scheduler.set_model(MODEL)
        assert (await pending).finish_reason is FinishReason.STOP


async def until_alive(client: AsyncClient, request_id: str) -> None:
    """Aborts a request as soon as the gateway knows it."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await client.abort(request_id)
            except NotFoundError:
                continue


async def test_readiness_follows_the_pool(make_gateway: Make, scheduler: ScriptedScheduler) -> None:
    gateway = await make_gateway(scheduler=scheduler.target)
    readiness = watch(gateway.health_port)
    await wait_for(readiness, expected=True)
    scheduler.set_model(MODEL, ready=False)
    await wait_for(readiness, expected=False)
    scheduler.set_model(MODEL)
    await wait_for(readiness, expected=True)


async def test_readiness_ends_when_the_scheduler_stays_away(make_gateway: Make, scheduler: ScriptedScheduler) -> None:
    gateway = await make_gateway(scheduler=scheduler.target, scheduler_loss_timeout_s=0.2)
    readiness = watch(gateway.health_port)
    await wait_for(readiness, expected=True)
    await scheduler.stop()
    await wait_for(readiness, expected=False)
    async with client_of(gateway) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.generate("x")
        assert caught.value.reason is ErrorReason.NO_SCHEDULER
    await scheduler.start(scheduler.port)
    await wait_for(readiness, expected=True)


async def test_a_model_that_does_not_fit_the_tokenizer_is_refused_and_not_ready(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    scheduler.model = dataclasses.replace(MODEL, vocab_size=300)
    gateway = await make_gateway(scheduler=scheduler.target)
    await asyncio.wait_for(scheduler.connected.wait(), 60)
    async with client_of(gateway) as client:
        with pytest.raises(
            FailedPreconditionError, match="largest token id is 392; allowed: below vocab_size"
        ) as caught:
            await client.generate("x")
        assert caught.value.reason is ErrorReason.MODEL_MISMATCH
        assert [model.is_ready for model in await client.models()] == [False]
    assert not gateway.pools.is_ready
    assert scheduler.adds.empty()


async def test_a_request_goes_to_the_pool_of_its_model(make_gateway: Make, directory: pathlib.Path) -> None:
    schedulers = [ScriptedScheduler(answer=[*ids_of(text), EOS]) for text in "ab"]
    for scheduler in schedulers:
        await scheduler.start()
    pools = [
        {"served_model_names": names, "scheduler": scheduler.target, "tokenizer": directory}
        for names, scheduler in zip((["one", "uno"], ["two"]), schedulers, strict=True)
    ]
    gateway = await make_gateway(pools=pools)
    async with client_of(gateway) as client:
        assert (await client.generate("x", model="uno")).text == "a"
        answer = await client.generate("x", model="two")
        assert (answer.text, answer.model) == ("b", "two")
        assert [model.name for model in await client.models()] == ["one", "two"]
        with pytest.raises(NotFoundError, match="model is '', which is not served; allowed: one, two"):
            await client.generate("x")
    for scheduler in schedulers:
        await scheduler.stop()


async def test_one_pool_that_serves_is_ready(
    make_gateway: Make, directory: pathlib.Path, scheduler: ScriptedScheduler
) -> None:
    targets = {"away": "127.0.0.1:1", "here": scheduler.target}
    pools = [
        {"served_model_names": [name], "scheduler": target, "tokenizer": directory} for name, target in targets.items()
    ]
    gateway = await make_gateway(pools=pools)
    await wait_for(watch(gateway.health_port), expected=True)


async def test_a_scheduler_that_restarts_is_a_pause_for_the_client(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    gateway = await make_gateway(scheduler=scheduler.target)
    async with client_of(gateway) as client:
        stream = client.stream("x", max_tokens=20, stop=["never"])
        add = await scheduler.next_add()
        scheduler.tokens(add.handle, 0, ids_of("one ne"))
        assert (await anext(stream)).text == "one "
        await scheduler.stop()
        await scheduler.start(scheduler.port)
        again = await scheduler.next_add()
        assert list(again.spec.output_token_ids) == ids_of("one ne")
        scheduler.tokens(again.handle, 6, [*ids_of("xt"), EOS])
        scheduler.ended(again.handle)
        assert await collect(stream) == "next"
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 9


class Reader:
    """The server's side of a call whose client reads when the test says so."""

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", "00-trace"),)

    def add_done_callback(self, callback: Any) -> None:
        pass


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


@pytest.mark.case("B62")
async def test_a_drain_lets_running_streams_end_and_refuses_new_calls(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    gateway = await make_gateway(scheduler=scheduler.target)
    await wait_until_ready(gateway)
    readiness = watch(gateway.health_port)
    async with client_of(gateway) as client:
        stream = client.stream("x")
        add = await scheduler.next_add()
        draining = asyncio.create_task(gateway.drain())
        await wait_for(readiness, expected=False)
        for call in (client.generate("x"), client.models(), client.tokenize("x")):
            with pytest.raises(UnavailableError) as caught:
                await call
            assert caught.value.reason is ErrorReason.SHUTTING_DOWN
        assert not draining.done()
        scheduler.tokens(add.handle, 0, [*ids_of("end"), EOS])
        assert await collect(stream) == "end"
        await asyncio.wait_for(draining, 60)


@pytest.mark.case("B62")
async def test_what_does_not_end_within_the_drain_time_fails_as_unavailable(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    gateway = await make_gateway(scheduler=scheduler.target, drain_timeout_s=0.1)
    async with client_of(gateway) as client:
        pending = asyncio.create_task(client.generate("x", request_id="long"))
        await scheduler.next_add()
        await gateway.drain()
        stopping = asyncio.create_task(gateway.stop())
        with pytest.raises(UnavailableError) as caught:
            await pending
        assert caught.value.reason is ErrorReason.SHUTTING_DOWN
        assert await scheduler.next_abort() == ("long", 0)
        await stopping


@pytest.mark.parametrize("field", ["port", "health_port"])
async def test_a_port_in_use_is_named_also_by_another_gateway(
    make_gateway: Make, scheduler: ScriptedScheduler, field: str
) -> None:
    first = await make_gateway(scheduler=scheduler.target)
    taken = getattr(first, field)
    with pytest.raises(ConfigError, match=f"port is {taken}, which cannot be bound"):
        await make_gateway(scheduler=scheduler.target, **{field: taken})
    async with client_of(first) as client:
        assert len(await client.models()) == 1


async def test_a_name_of_two_pools_is_refused(make_gateway: Make, directory: pathlib.Path) -> None:
    pool = {"served_model_names": ["same"], "scheduler": "127.0.0.1:1", "tokenizer": directory}
    with pytest.raises(ConfigError, match="served_model_names has 'same' twice"):
        await make_gateway(pools=[pool, pool])


async def start_process(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "holdback.cli", "gateway", *arguments)
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)


@pytest.mark.case("B62")
async def test_the_process_reports_its_ports_drains_on_sigterm_and_exits_with_zero(
    directory: pathlib.Path, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    ports_file = tmp_path / "ports.json"
    flags = ("--scheduler", scheduler.target, "--tokenizer", str(directory), "--ports-file", str(ports_file))
    child = await start_process(*flags)
    process = LocalProcess("gateway", child, ports_file)
    await asyncio.wait_for(process.wait_for_ports(), 60)
    readiness = watch(process.health_port)
    await wait_for(readiness, expected=True)
    async with AsyncClient(f"127.0.0.1:{process.port}", timeout_s=60, max_retries=0, max_resumes=0) as client:
        assert [model.name for model in await client.models()] == ["toy"]
        stream = client.stream("x")
        add = await scheduler.next_add()
        child.send_signal(signal.SIGTERM)
        await wait_for(readiness, expected=False)
        scheduler.tokens(add.handle, 0, [*ids_of("end"), EOS])
        assert await collect(stream) == "end"
    assert child.stderr is not None
    log = (await asyncio.wait_for(child.stderr.read(), 60)).decode()
    assert await process.exited == 0
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    assert events[0] == "gateway_listens"
    assert events[-2:] == ["gateway_drains", "gateway_stopped"]


@pytest.mark.case("B62")
async def test_a_second_signal_ends_the_drain(
    directory: pathlib.Path, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    ports_file = tmp_path / "ports.json"
    flags = ("--scheduler", scheduler.target, "--tokenizer", str(directory), "--ports-file", str(ports_file))
    process = LocalProcess("gateway", await start_process(*flags), ports_file)
    await asyncio.wait_for(process.wait_for_ports(), 60)
    readiness = watch(process.health_port)
    await wait_for(readiness, expected=True)
    async with AsyncClient(f"127.0.0.1:{process.port}", timeout_s=60, max_retries=0, max_resumes=0) as client:
        pending = asyncio.create_task(client.generate("x"))
        await scheduler.next_add()
        process.child.send_signal(signal.SIGTERM)
        await wait_for(readiness, expected=False)
        process.child.send_signal(signal.SIGINT)
        with pytest.raises(UnavailableError) as caught:
            await pending
        assert caught.value.reason is ErrorReason.SHUTTING_DOWN
    assert await asyncio.wait_for(process.exited, 60) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tokenizer", "DIRECTORY"], "scheduler is not set; allowed: scheduler and tokenizer, or pools"),
        (["--scheduler", "x:1"], "tokenizer is not set; allowed: scheduler and tokenizer, or pools"),
        (
            ["--scheduler", "x:1", "--tokenizer", "/nonexistent"],
            "tokenizer is '/nonexistent'; allowed: a model directory",
        ),
        (["--scheduler", "x:1", "--tokenizer", "DIRECTORY", "--port", "TAKEN"], "port is TAKEN, which cannot be bound"),
        (["--scheduler", "x:1", "--tokenizer", "DIRECTORY", "--host", "0.0.0.0"], "allowed: with tls_cert and tls_key"),  # noqa: S104
        (["--drain-timeout-s", "-1"], "drain_timeout_s is '-1'"),
        (
            ["--scheduler", "x:1", "--pools", '[{"served_model_names":["a"],"scheduler":"x:1","tokenizer":"y"}]'],
            "both set",
        ),
    ],
)
async def test_a_process_that_cannot_start_says_why_and_exits_with_two(
    directory: pathlib.Path, flags: list[str], says: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        filled = [flag.replace("DIRECTORY", str(directory)).replace("TAKEN", port) for flag in flags]
        child = await start_process(*filled)
        _, message = await asyncio.wait_for(child.communicate(), 60)
    assert says.replace("TAKEN", port) in message.decode()
    assert child.returncode == 2


async def test_the_default_name_of_a_model_is_that_of_its_directory(
    make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    directory = save_directory(tmp_path / "some-model", make_tokenizer("byte_level"))
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory, served_model_name="")
    assert [pool.names for pool in gateway.pools] == [("some-model",)]
