"""What all services on the gateway's gRPC port have in common: health, load, reflection, limits, and wrong requests."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from gateway import limits
from gateway.load import LOAD_TIMEOUT_S
from gateway.server import GatewayServer
from gateway.services import INFERENCE
from gateway.vllm_engine.service import SERVICE_NAME as VLLM_ENGINE
from holdback import rpc
from holdback.errors import ErrorReason, InvalidArgumentError
from holdback.request_limits import MAX_TOKEN_ID_LIST
from holdback.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2, types_pb2
from tests.gateway.conftest import wait_until_ready
from tests.gateway.random_messages import messages
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler

pytestmark = pytest.mark.loopback

EOS = 2
Make = Callable[..., Any]
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
SERVED_METHODS = [
    method
    for module, name in ((inference_pb2, "InferenceService"), (vllm_engine_pb2, "VllmEngine"))
    for method in module.DESCRIPTOR.services_by_name[name].methods
]
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}


@pytest.fixture
async def channel(gateway: GatewayServer) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        yield channel


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def code_of(channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends; of a stream everything is read."""
    make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(path_of(method), None, None)(data, timeout=60)
    try:
        await (read_all(call) if method.server_streaming else call)
    except grpc.aio.AioRpcError as failure:
        return failure.code()
    return grpc.StatusCode.OK


async def read_all(call: Any) -> list[bytes]:
    return [response async for response in call]


# ---- health ----


async def statuses(channel: grpc.aio.Channel, service: str) -> AsyncIterator[int]:
    """Every change of one service's health, the present state first."""
    stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
    replies: Any = stub.Watch(health_pb2.HealthCheckRequest(service=service))
    async for reply in replies:
        yield reply.status


async def wait_for(states: AsyncIterator[int], expected: int) -> None:
    async with asyncio.timeout(60):
        async for state in states:
            if state == expected:
                return


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.case("B59")
@pytest.mark.parametrize("port", ["port", "health_port"])
@pytest.mark.parametrize("service", [INFERENCE, VLLM_ENGINE])
async def test_the_health_of_a_service_follows_its_pool(
    gateway: GatewayServer, scheduler: ScriptedScheduler, service: str, port: str
) -> None:
    async with rpc.create_channel(f"127.0.0.1:{getattr(gateway, port)}") as channel:
        states = statuses(channel, service)
        await wait_for(states, SERVING)
        scheduler.set_model(MODEL, ready=False)
        await wait_for(states, NOT_SERVING)
        scheduler.set_model(MODEL)
        await wait_for(states, SERVING)
        scheduler.set_model(dataclasses.replace(MODEL, vocab_size=300))
        await wait_for(states, NOT_SERVING)


@pytest.mark.case("B59")
async def test_the_services_are_unhealthy_once_the_gateway_drains(
    gateway: GatewayServer, channel: grpc.aio.Channel
) -> None:
    states = [statuses(channel, service) for service in (INFERENCE, VLLM_ENGINE)]
    for state in states:
        await wait_for(state, SERVING)
    await gateway.drain()
    for state in states:
        await wait_for(state, NOT_SERVING)


async def test_each_service_has_a_health_of_its_own(make_gateway: Make, directory: pathlib.Path) -> None:
    """One model of two is away: the one that the engine protocol serves."""
    here = ScriptedScheduler()
    await here.start()
    pools = [
        {"served_model_names": [name], "scheduler": target, "tokenizer": directory}
        for name, target in (("here", here.target), ("away", "127.0.0.1:1"))
    ]
    gateway = await make_gateway(pools=pools, vllm_engine_model="away")
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        await wait_for(statuses(channel, INFERENCE), SERVING)
        assert await anext(statuses(channel, VLLM_ENGINE)) == NOT_SERVING
    await here.stop()


async def test_a_service_that_is_not_there_has_no_health(channel: grpc.aio.Channel) -> None:
    stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# ---- load ----


async def ask_load(gateway: GatewayServer, model: str = "") -> inference_pb2.InferenceServiceGetLoadResponse:
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await stub.GetLoad(inference_pb2.InferenceServiceGetLoadRequest(model=model), timeout=60)


async def test_the_load_of_each_model_is_that_of_its_scheduler(make_gateway: Make, directory: pathlib.Path) -> None:
    schedulers = [ScriptedScheduler() for _ in range(2)]
    for number, scheduler in enumerate(schedulers):
        await scheduler.start()
        scheduler.load = scheduler_pb2.GetLoadResponse(
            num_running=number + 1, num_waiting=5, num_waiting_tokens=70, num_executors=2, num_slots=8, kv_usage=0.25
        )
    schedulers[1].load.queue_ms = 0
    pools = [
        {"served_model_names": names, "scheduler": scheduler.target, "tokenizer": directory}
        for names, scheduler in zip((["one", "uno"], ["two"]), schedulers, strict=True)
    ]
    gateway = await make_gateway(pools=pools)
    one, two = await ask_load(gateway, "uno"), await ask_load(gateway, "two")
    assert one == inference_pb2.InferenceServiceGetLoadResponse(
        model="one",
        num_running=1,
        num_waiting=5,
        num_waiting_tokens=70,
        num_slots=8,
        num_executors=2,
        kv_usage=0.25,
    )
    assert (two.model, two.num_running, two.HasField("queue_ms")) == ("two", 2, True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask_load(gateway)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for scheduler in schedulers:
        await scheduler.stop()


async def test_the_load_of_a_scheduler_that_is_away_or_silent_is_unavailable_in_bounded_time(
    gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    scheduler.may_answer_load.clear()
    started = asyncio.get_running_loop().time()
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask_load(gateway)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert rpc.error_from_rpc(caught.value).reason is ErrorReason.NO_SCHEDULER
        await scheduler.stop()
    assert asyncio.get_running_loop().time() - started < LOAD_TIMEOUT_S + 5


# ---- reflection ----


async def reflected(channel: grpc.aio.Channel, **question: Any) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    questions = iter([reflection_pb2.ServerReflectionRequest(**question)])
    (answer,) = [answer async for answer in stub.ServerReflectionInfo(questions, timeout=60)]
    return answer


async def test_reflection_is_off_unless_asked_for(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reflected(channel, list_services="")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_names_the_services_and_their_messages(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    gateway = await make_gateway(scheduler=scheduler.target, reflection=True)
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        services = (await reflected(channel, list_services="")).list_services_response.service
        assert {service.name for service in services} == {
            INFERENCE,
            VLLM_ENGINE,
            "grpc.health.v1.Health",
            REFLECTION,
        }
        for name in (INFERENCE, VLLM_ENGINE):
            answer = await reflected(channel, file_containing_symbol=name)
            (data,) = answer.file_descriptor_response.file_descriptor_proto[:1]
            assert name.rpartition(".")[2] in [
                service.name for service in descriptor_pb2.FileDescriptorProto.FromString(data).service
            ]


# ---- wrong and large requests ----


@pytest.mark.parametrize("method", SERVED_METHODS, ids=path_of)
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, scheduler: ScriptedScheduler, method: MethodDescriptor
) -> None:
    code = await code_of(channel, method, b"\xff\xff\xff")
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert scheduler.adds.empty()


async def test_text_that_is_no_utf_8_is_an_invalid_argument_and_the_next_call_is_served(
    channel: grpc.aio.Channel, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [EOS]
    method = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name["Generate"]
    good = inference_pb2.GenerateRequest(generation=inference_pb2.Generation(text="xx")).SerializeToString()
    assert await code_of(channel, method, good.replace(b"xx", b"\xff\xfe")) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(channel, method, good) is grpc.StatusCode.OK


async def test_bytes_that_are_no_message_are_a_violation_of_the_whole_request(channel: grpc.aio.Channel) -> None:
    call: Any = channel.unary_unary("/holdback.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff\xff")
    error = rpc.error_from_rpc(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.value, error.limit) == ("request", "bytes", "a message of this method")
    assert error.message.startswith("request is no message of this method")


def valid_request(kind: type[Message]) -> Message:
    """What a random request is changed from, so that some of them are served."""
    if kind is vllm_engine_pb2.GenerateRequest:
        return vllm_engine_pb2.GenerateRequest(text="x", stream=True)
    message = kind()
    if kind in (inference_pb2.GenerateRequest, inference_pb2.GenerateStreamRequest):
        message.generation.text = "x"  # type: ignore[attr-defined]
    return message


@pytest.mark.case("B30", "B35", "B70", "B73")
@pytest.mark.parametrize("method", SERVED_METHODS, ids=path_of)
@given(data=st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_whatever_a_client_sends_is_answered_or_refused_by_name(
    channel: grpc.aio.Channel, scheduler: ScriptedScheduler, method: MethodDescriptor, data: st.DataObject
) -> None:
    scheduler.answer = [70, EOS]
    kind = GetMessageClass(method.input_type)
    message = data.draw(messages(kind, base=valid_request(kind)))
    assert await code_of(channel, method, message.SerializeToString()) in ANSWERS


@pytest.mark.case("B54")
def test_the_longest_request_there_may_be_is_within_the_limit_of_a_message() -> None:
    token_id = 2**32 - 1
    few = [token_id] * MAX_TOKEN_ID_LIST
    sampling = types_pb2.SamplingParams(
        stop_token_ids=few,
        allowed_token_ids=types_pb2.TokenIdSet(token_ids=few),
        logit_bias=[types_pb2.LogitBias(token_id=token_id, bias=1.5)] * MAX_TOKEN_ID_LIST,
    )
    longest = inference_pb2.Generation(
        sampling=sampling,
        stop=["x" * limits.MAX_STOP_STRING_BYTES] * limits.MAX_STOP_STRINGS,
        output_token_ids=[token_id] * limits.MAX_TOKEN_IDS,
    )
    spare = limits.MAX_REQUEST_BYTES - longest.ByteSize() - 2**16
    assert inference_pb2.TokenIds(token_ids=[token_id] * limits.MAX_TOKEN_IDS).ByteSize() < spare
    message = inference_pb2.ChatMessage(role="x" * limits.MAX_ROLE_BYTES)
    assert limits.MAX_PROMPT_BYTES + 2 * message.ByteSize() * limits.MAX_MESSAGES < spare


@pytest.mark.case("B54")
async def test_a_message_longer_than_any_request_is_refused_by_grpc_and_the_next_one_served(
    channel: grpc.aio.Channel, scheduler: ScriptedScheduler
) -> None:
    call: Any = channel.unary_unary("/holdback.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(bytes(limits.MAX_REQUEST_BYTES + 1), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    scheduler.answer = [EOS]
    request = inference_pb2.GenerateRequest(generation=inference_pb2.Generation(text="x"))
    await call(request.SerializeToString(), timeout=60)


@pytest.mark.case("B54")
async def test_a_prompt_beyond_grpcs_own_limit_reaches_the_scheduler(
    make_gateway: Make, scheduler: ScriptedScheduler
) -> None:
    num_tokens = 1_500_000  # three bytes each: more than the 4 MiB that gRPC allows by itself
    scheduler.model = dataclasses.replace(MODEL, vocab_size=100_000, max_model_len=2_000_000)
    scheduler.answer = [EOS]
    gateway = await make_gateway(scheduler=scheduler.target)
    await wait_until_ready(gateway)
    message = inference_pb2.Generation(token_ids=inference_pb2.TokenIds(token_ids=[99_999] * num_tokens))
    request = inference_pb2.GenerateRequest(generation=message)
    assert request.ByteSize() > 4 * 1024 * 1024
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        response = await stub.Generate(request, timeout=60)
    assert response.usage.prompt_tokens == num_tokens
    assert response.choices[0].finish_reason == types_pb2.FINISH_REASON_STOP
    assert len((await scheduler.next_add()).spec.prompt_token_ids) == num_tokens
