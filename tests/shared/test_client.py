"""The SDK against a gateway that does what the test says: what it sends, what it gives back, what it raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from holdback import AsyncClient, Choice, Client, Generation, Model, Piece, rpc
from holdback.errors import (
    DeadlineExceededError,
    ErrorReason,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestAbortedError,
    ResourceExhaustedError,
    UnavailableError,
)
from holdback.types import FinishReason, ModelInfo, TokenLogprobs, Usage
from holdback.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.shared.recording_gateway import STOP, Gateway, delta, end, finished, started

pytestmark = pytest.mark.loopback


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    server = rpc.create_server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    gateway.port = rpc.bind(server, "127.0.0.1", 0)  # type: ignore[attr-defined]
    await server.start()
    yield gateway
    await server.stop(None)


@pytest.fixture
async def client(gateway: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=60) as client:
        yield client


async def test_a_complete_answer_is_typed(gateway: Gateway, client: AsyncClient) -> None:
    gateway.response = inference_pb2.GenerateResponse(
        request_id="r",
        model="toy",
        seed=-5,
        choices=[
            inference_pb2.Choice(
                text="a",
                token_ids=[7],
                finish_reason=types_pb2.FINISH_REASON_LENGTH,
                logprobs=[types_pb2.TokenLogprobs(token_id=7, logprob=-0.5, top_token_ids=[7], top_logprobs=[-0.5])],
            ),
            inference_pb2.Choice(
                index=1, text="b", finish_reason=STOP, stop_reason=inference_pb2.StopReason(stop_string="x")
            ),
            inference_pb2.Choice(
                index=2, text="c", finish_reason=STOP, stop_reason=inference_pb2.StopReason(stop_token_id=0)
            ),
        ],
        usage=types_pb2.Usage(prompt_tokens=3, completion_tokens=1),
    )
    answer = await client.generate("Hi")
    assert answer == Generation(
        "r",
        "toy",
        -5,
        (
            Choice(0, "a", (7,), FinishReason.LENGTH, logprobs=(TokenLogprobs(7, -0.5, (7,), (-0.5,)),)),
            Choice(1, "b", (), FinishReason.STOP, stop_string="x"),
            Choice(2, "c", (), FinishReason.STOP, stop_token_id=0),
        ),
        Usage(3, 1, 0),
    )
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("a", (7,), FinishReason.LENGTH)


async def test_a_stream_is_pieces_and_tells_the_rest_on_itself(gateway: Gateway, client: AsyncClient) -> None:
    gateway.events = [started(), delta("He", [7]), delta("", [8]), end(stop_token_id=8), finished()]
    stream = client.stream("Hi")
    pieces = [piece async for piece in stream]
    assert pieces == [
        Piece("He", 0, (7,), (TokenLogprobs(7, -0.5),)),
        Piece("", 0, (8,), (TokenLogprobs(8, -0.5),)),
        Piece(finish_reason=FinishReason.STOP, stop_token_id=8),
    ]
    assert (stream.request_id, stream.model, stream.seed, stream.prompt_tokens) == ("r", "toy", -5, 3)
    assert stream.usage == Usage(3, 2, 1)


async def test_every_option_reaches_its_field(gateway: Gateway, client: AsyncClient) -> None:
    gateway.response = inference_pb2.GenerateResponse(
        choices=[inference_pb2.Choice(finish_reason=STOP)], usage=types_pb2.Usage()
    )
    await client.generate(
        messages=[{"role": "user", "content": "hi"}],
        model="toy",
        request_id="mine",
        n=1,
        stop=["a", "b"],
        keep_special_tokens=False,
        echo=True,
        priority=-3,
        cache_salt="salt",
        output_token_ids=[4],
        temperature=0.0,
        top_k=-1,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        seed=-1,
        max_tokens=9,
        min_tokens=0,
        ignore_eos=False,
        stop_token_ids=[5],
        allowed_token_ids=[],
        logit_bias={3: -1.5},
        num_logprobs=0,
    )
    assert gateway.request.generation == inference_pb2.Generation(
        chat=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        model="toy",
        request_id="mine",
        n=1,
        stop=["a", "b"],
        keep_special_tokens=False,
        echo=True,
        priority=-3,
        cache_salt="salt",
        output_token_ids=[4],
        sampling=types_pb2.SamplingParams(
            temperature=0,
            top_k=-1,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=0.5,
            seed=-1,
            max_tokens=9,
            min_tokens=0,
            ignore_eos=False,
            stop_token_ids=[5],
            allowed_token_ids=types_pb2.TokenIdSet(),
            logit_bias=[types_pb2.LogitBias(token_id=3, bias=-1.5)],
            num_logprobs=0,
        ),
    )


async def test_what_is_not_given_or_none_is_not_sent(gateway: Gateway, client: AsyncClient) -> None:
    gateway.events = [started(), end(), finished()]
    _ = [piece async for piece in client.stream("Hi", max_tokens=None, top_p=None, model=None, stop=None, n=None)]
    sent = gateway.request.generation
    assert sent.WhichOneof("input") == "text"
    assert [field.name for field, _ in sent.ListFields()] == ["text"]
    _ = [piece async for piece in client.stream(token_ids=[], stop="one string")]
    assert gateway.request.generation.WhichOneof("input") == "token_ids"
    assert list(gateway.request.generation.stop) == ["one string"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "sampling.max_tokens"),
        ({"seed": 2**70}, "sampling.seed"),
        ({"n": "two"}, "n"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ({"allowed_token_ids": [2**32]}, "sampling.allowed_token_ids"),
        ({"logit_bias": {-1: 5.0}}, "sampling.logit_bias"),
        ({"logit_bias": {"x": 1}}, "sampling.logit_bias"),
        ({"logit_bias": {3: "x"}}, "sampling.logit_bias[3]"),
        ({"logit_bias": [1]}, "sampling.logit_bias"),
        ({"stop": 5}, "stop"),
    ],
)
@pytest.mark.case("B35", "B30")
async def test_a_value_that_its_field_cannot_hold_is_named(
    client: AsyncClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate("Hi", **options)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field} is ")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt": "x", "token_ids": [1]}, "input"),
        ({"token_ids": [1], "messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"prompt": 5}, "prompt"),
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": None, "name": "x"}]},
            "messages[1]",
        ),
    ],
)
async def test_a_prompt_that_cannot_be_sent_is_named(client: AsyncClient, prompt: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.stream(**prompt)
    assert caught.value.field == field


@pytest.mark.parametrize("value", ["\ud800", 5])
async def test_a_field_of_a_short_call_that_cannot_be_sent_is_named(client: AsyncClient, value: Any) -> None:
    calls = [
        (client.tokenize(value), "text"),
        (client.tokenize("x", model=value), "model"),
        (client.detokenize([1], model=value), "model"),
        (client.detokenize([1], keep_special_tokens="x"), "keep_special_tokens"),  # type: ignore[arg-type]
        (client.abort(value), "request_id"),
        (client.model(value), "name"),
    ]
    for call, field in calls:
        with pytest.raises(InvalidArgumentError) as caught:
            await call
        assert caught.value.field == field


NO_ADDRESSES = [
    *("", "localhost", "127.0.0.1:99999", "127.0.0.1:0", ":80", "127.0.0.1:" + "9" * 5000),
    *("http://127.0.0.1:8000", "https://gateway:443", "gateway:80/v1:80", "user@gateway:80", "two names:80"),
    *("::1:50051", "[::1:50051", "[::1]]:50051", "[gateway]:80", "dns:///:80", "dns:///::1:80", "ipv4:127.0.0.1:80"),
    *(5, None, b"127.0.0.1:80", ["127.0.0.1:80", 5], {"127.0.0.1:80"}),
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
@pytest.mark.parametrize("client", [AsyncClient, Client])
async def test_what_is_no_address_is_refused_at_once(client: type[AsyncClient | Client], address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"address is .*\[1, 65535\]") as caught:
        client(address)
    assert caught.value.field == "address"


@pytest.mark.parametrize(
    "address",
    [
        *(
            "gateway:80",
            "127.0.0.1:80",
            "[::1]:80",
            "[fe80::1%eth0]:80",
            "dns:///gateway.pool.svc:80",
            "dns:gateway:80",
        ),
        *(["127.0.0.1:80", "[::1]:80"], ("a_b:1",), "dns://10.0.0.10/gateway:80", "dns:///[::1]:80"),
    ],
)
async def test_what_grpc_can_dial_is_an_address(address: Any) -> None:
    await AsyncClient(address).close()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "5"])
async def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s is "):
        AsyncClient("127.0.0.1:1", timeout_s=timeout_s)


async def test_an_unknown_option_is_a_mistake_of_the_program(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match="unknown options: temprature"):
        await client.generate("Hi", temprature=1.0)  # type: ignore[call-arg]


async def test_errors_of_the_gateway_are_raised_as_what_they_are(gateway: Gateway, client: AsyncClient) -> None:
    gateway.error = InvalidArgumentError.of("sampling.top_p", 1.5, "[0, 1]")
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate("Hi")
    error = caught.value
    assert (error.field, error.value, error.limit, error.reason) == (
        "sampling.top_p",
        "1.5",
        "[0, 1]",
        ErrorReason.INVALID_FIELD,
    )
    gateway.error = ResourceExhaustedError("full", retry_after_s=0.25)
    gateway.events = [started(), delta("a", [7])]
    pieces: list[Piece] = []
    with pytest.raises(ResourceExhaustedError) as refused:
        await extend(pieces, client.stream("Hi"))
    assert refused.value.retry_after_s == 0.25
    assert [piece.text for piece in pieces] == ["a"]
    gateway.error = NotFoundError("no such id", reason=ErrorReason.REQUEST_NOT_FOUND)
    with pytest.raises(NotFoundError):
        await client.abort("x")


async def extend(pieces: list[Piece], stream: AsyncIterator[Piece]) -> None:
    async for piece in stream:
        pieces.append(piece)


@pytest.mark.case("B58")
async def test_a_stream_that_stops_short_is_an_error_and_no_end(gateway: Gateway, client: AsyncClient) -> None:
    gateway.events = [started(), delta("a", [7]), end()]
    with pytest.raises(InternalError, match="without saying that it is complete"):
        await extend([], client.stream("Hi"))


async def test_an_address_where_nobody_listens_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.generate("Hi")


async def test_the_timeout_ends_the_call_on_both_sides(gateway: Any) -> None:
    gateway.hang = True
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("Hi")
    await asyncio.wait_for(gateway.cancelled.wait(), 60)


@pytest.mark.parametrize("leave", ["close", "async with", "break"])
async def test_a_stream_that_is_left_ends_at_the_gateway(gateway: Gateway, client: AsyncClient, leave: str) -> None:
    gateway.events = [started(), delta("a", [7])]
    gateway.hang = True
    if leave == "close":
        stream = client.stream("Hi")
        await anext(stream)
        stream.close()
    elif leave == "async with":
        async with client.stream("Hi") as stream:
            await anext(stream)
    else:
        async for _ in client.stream("Hi"):
            break
    await asyncio.wait_for(gateway.cancelled.wait(), 60)


async def wait_for_request(gateway: Gateway) -> None:
    await asyncio.wait_for(gateway.called.wait(), 60)


@pytest.mark.parametrize("call", ["generate", "stream"])
async def test_closing_the_client_raises_in_who_waits_instead_of_cancelling_it(
    gateway: Gateway, client: AsyncClient, call: str
) -> None:
    gateway.hang = True
    work: dict[str, Callable[[], Any]] = {
        "generate": lambda: client.generate("Hi"),
        "stream": lambda: extend([], client.stream("Hi")),
    }
    waiting = asyncio.create_task(work[call]())
    await wait_for_request(gateway)
    await client.close()
    with pytest.raises(RequestAbortedError):
        await waiting


async def test_cancelling_who_waits_is_a_cancellation(gateway: Gateway, client: AsyncClient) -> None:
    gateway.hang = True
    waiting = asyncio.create_task(client.generate("Hi"))
    await wait_for_request(gateway)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(gateway.cancelled.wait(), 60)


async def test_tokenizing_goes_there_and_back(gateway: Gateway, client: AsyncClient) -> None:
    gateway.response = inference_pb2.TokenizeResponse(token_ids=[1, 2])
    assert await client.tokenize("Hi", model="toy") == [1, 2]
    assert gateway.request == inference_pb2.TokenizeRequest(model="toy", text="Hi")
    await client.tokenize(messages=[{"role": "user", "content": "x"}])
    assert gateway.request.chat.messages[0].content == "x"
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        await client.tokenize("Hi", messages=[])
    gateway.response = inference_pb2.DetokenizeResponse(text="Hi")
    assert await client.detokenize([1, 2], keep_special_tokens=True) == "Hi"
    assert gateway.request == inference_pb2.DetokenizeRequest(token_ids=[1, 2], keep_special_tokens=True)


async def test_models_are_typed(gateway: Gateway, client: AsyncClient) -> None:
    info = types_pb2.ModelInfo(fingerprint="f", name="n", vocab_size=9, eos_token_ids=[2], max_model_len=64)
    known = inference_pb2.Model(name="a", aliases=["b"], info=info, default_max_tokens=4, ready=True)
    gateway.response = inference_pb2.ListModelsResponse(models=[known, inference_pb2.Model(name="c")])
    first = Model("a", ("b",), ModelInfo("f", "n", 9, (2,), 64), 4, True)
    assert await client.models() == [first, Model("c", (), None, 0, False)]
    gateway.response = inference_pb2.GetModelResponse(model=known)
    assert await client.model("b") == first
    assert gateway.request.model == "b"
