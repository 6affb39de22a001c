"""Broken streams go on, and calls are tried again, exactly where that is safe; against the mock gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from holdback import AsyncClient, GenerationStream, Piece, rpc
from holdback.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    ErrorReason,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestAbortedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from holdback.resumption import Progress
from holdback.testing import Answer, MockGateway
from holdback.types import FinishReason, Usage
from holdback.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.loopback

Response = inference_pb2.GenerateStreamResponse
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def gateway() -> Any:
    with MockGateway() as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: MockGateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.address, timeout_s=60) as client:
        yield client


async def collect(stream: GenerationStream) -> list[Piece]:
    return [piece async for piece in stream]


def stopping() -> UnavailableError:
    return UnavailableError("the gateway stopped", reason=ErrorReason.SHUTTING_DOWN)


# ---- streams ----


async def test_a_broken_stream_goes_on_at_the_last_token_that_came(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("Par", "is", "!", breaks_after=(1, 2)))
    stream = client.stream("Where?", max_tokens=50, stop="x", num_logprobs=0)
    pieces = await collect(stream)
    assert [piece.text for piece in pieces] == ["Par", "is", "!", ""]
    assert [len(piece.logprobs) for piece in pieces] == [3, 2, 1, 0]
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert stream.usage == Usage(prompt_tokens=6, completion_tokens=6, cached_tokens=0)
    assert stream.num_resumes == 2
    first, second, third = [call.request.generation for call in gateway.calls]
    assert (list(second.output_token_ids), second.sampling.seed) == ([80, 97, 114], stream.seed)
    assert list(third.output_token_ids) == [80, 97, 114, 105, 115]
    assert second.request_id == third.request_id == stream.request_id
    assert second.model == "mock"
    for rest in (second, third):  # all else is as it was
        for field in ("request_id", "model", "output_token_ids"):
            rest.ClearField(field)
        rest.sampling.ClearField("seed")
        assert rest == first


@pytest.mark.parametrize("breaks_after", [0, 1, 2, 3])
async def test_wherever_it_breaks_the_text_is_that_of_an_unbroken_stream(
    gateway: MockGateway, client: AsyncClient, breaks_after: int
) -> None:
    gateway.script(Answer("a", "bc", "d"), Answer("a", "bc", "d", breaks_after=breaks_after))
    whole, broken = client.stream("Hi", echo=True), client.stream("Hi", echo=True)
    pieces = [await collect(stream) for stream in (whole, broken)]
    assert [piece.text for piece in pieces[1]] == [piece.text for piece in pieces[0]] == ["Hi", "a", "bc", "d", ""]
    assert broken.usage == whole.usage == Usage(2, 4, 0)


async def test_outputs_that_the_caller_had_before_stay_in_front(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("a", "b", "c", breaks_after=2))
    stream = client.stream("Hi", output_token_ids=[ord("a")], seed=3)
    assert [piece.text for piece in await collect(stream)] == ["b", "c", ""]
    assert list(gateway.calls[1].request.generation.output_token_ids) == [ord("a"), ord("b")]
    assert stream.usage == Usage(2, 3, 0)


async def test_a_gateway_that_stops_hands_its_streams_over(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("a", error=stopping()), Answer("a", "b"))
    assert [piece.text for piece in await collect(client.stream("Hi"))] == ["a", "b", ""]


async def test_a_stream_goes_on_at_the_gateway_that_is_left() -> None:
    with MockGateway(Answer("a", "b", delay_s=0.05)) as first, MockGateway(Answer("a", "b")) as second:
        async with AsyncClient([first.address, second.address], timeout_s=60) as client:
            stream = client.stream("Hi")
            assert (await anext(stream)).text == "a"
            await asyncio.to_thread(first.stop)
            assert [piece.text for piece in await collect(stream)] == ["b", ""]
    assert list(second.calls[0].request.generation.output_token_ids) == [ord("a")]


async def test_an_answer_of_several_choices_cannot_go_on_and_says_so(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("a", "b", breaks_after=1))
    with pytest.raises(UnavailableError, match=r"broke.*n = 2 choices cannot be resumed"):
        await collect(client.stream("Hi", n=2))
    assert len(gateway.calls) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_whose_end_has_come_is_complete_without_its_last_message(
    gateway: MockGateway, client: AsyncClient, n: int
) -> None:
    gateway.script(Answer("ab", breaks_after=2))
    stream = client.stream("Hi", n=n)
    assert (await collect(stream))[-1].finish_reason is FinishReason.STOP
    assert stream.usage == Usage(2, 2 * n, 0)
    assert len(gateway.calls) == 1


async def test_usage_that_was_lost_counts_the_outputs_that_the_caller_had(
    gateway: MockGateway, client: AsyncClient
) -> None:
    gateway.script(Answer("abc", breaks_after=2))
    stream = client.stream("Hi", output_token_ids=[ord("a")], seed=3)
    assert [piece.text for piece in await collect(stream)] == ["bc", ""]
    assert stream.usage == Usage(2, 3, 0)


async def test_tries_are_counted_anew_when_something_has_come(gateway: MockGateway) -> None:
    gateway.script(Answer("a", "b", "c", "d", breaks_after=(1, 2, 3)))
    async with AsyncClient(gateway.address, timeout_s=20, max_retries=1) as client:
        assert [piece.text for piece in await collect(client.stream("Hi"))] == ["a", "b", "c", "d", ""]


async def test_a_stream_breaks_only_so_often(gateway: MockGateway) -> None:
    gateway.script(Answer("a", "b", "c", breaks_after=(1, 2)))
    async with AsyncClient(gateway.address, timeout_s=20, max_resumes=1) as client:
        with pytest.raises(UnavailableError, match="resumed 1 times, which is max_resumes"):
            await collect(client.stream("Hi"))


async def test_a_stream_that_makes_no_progress_is_given_up(gateway: MockGateway) -> None:
    gateway.script(Answer("a", "b", breaks_after=[1] * 100))
    async with AsyncClient(gateway.address, timeout_s=20, max_retries=0, max_resumes=5) as client:
        with pytest.raises(UnavailableError, match="broke"):
            await collect(client.stream("Hi"))


async def test_an_error_of_the_answer_is_raised_and_not_tried_again(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("a", error=InternalError("a fault")))
    with pytest.raises(InternalError, match="a fault"):
        await collect(client.stream("Hi"))
    gateway.script(Answer("a", error=ResourceExhaustedError("full", retry_after_s=0.01)))
    with pytest.raises(ResourceExhaustedError):
        await collect(client.stream("Hi"))
    assert len(gateway.calls) == 2


class Holding(inference_pb2_grpc.InferenceServiceServicer):
    """Breaks each first stream of an id, and holds on to the id."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        request_id = request.generation.request_id
        self.request_ids.append(request_id)
        if request_id and self.request_ids.count(request_id) > 1:
            await rpc.abort(context, AlreadyExistsError("that id is alive"))
        started = inference_pb2.GenerationStarted(request_id=request_id or "another", prompt_tokens=2)
        yield Response(started=started)
        if request_id:
            yield Response(delta=inference_pb2.ChoiceDelta(text="a", token_ids=[97]))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield Response(delta=inference_pb2.ChoiceDelta(text="b", token_ids=[98]))
        yield Response(finished=inference_pb2.GenerationFinished())


async def test_an_id_that_the_broken_call_still_holds_is_replaced() -> None:
    holding = Holding()  # type: ignore[abstract]  # it serves no more than this
    server = rpc.create_server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(holding, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", timeout_s=60) as client:
            stream = client.stream("Hi", request_id="mine")
            assert [piece.text for piece in await collect(stream)] == ["a", "b"]
            assert (holding.request_ids, stream.request_id) == (["mine", "mine", ""], "another")
            with pytest.raises(AlreadyExistsError):  # not ours: this stream has not begun
                await collect(client.stream("Hi", request_id="mine"))
    finally:
        await server.stop(None)


async def test_the_rest_of_an_answer_is_not_taken_from_a_gateway_that_reads_the_prompt_differently() -> None:
    progress = Progress(inference_pb2.Generation(text="Hi"))
    progress.take(Response(started=inference_pb2.GenerationStarted(request_id="r", prompt_tokens=2)))
    with pytest.raises(FailedPreconditionError, match="makes 3 tokens of its prompt, the first one made 2"):
        progress.take(Response(started=inference_pb2.GenerationStarted(request_id="r", prompt_tokens=3)))


@pytest.mark.parametrize("how", ["close the stream", "close the client", "cancel"])
async def test_a_stream_that_waits_to_go_on_can_be_left(how: str) -> None:
    with MockGateway(Answer("a", "b", delay_s=0.02)) as gateway:
        async with AsyncClient(gateway.address, timeout_s=20, max_retries=50) as client:
            stream = client.stream("Hi")
            await anext(stream)
            await asyncio.to_thread(gateway.stop)
            waiting = asyncio.create_task(collect(stream))
            await asyncio.wait({waiting}, timeout=0.05)
            assert not waiting.done()
            if how == "cancel":
                waiting.cancel()
            elif how == "close the stream":
                stream.close()
            else:
                await client.close()
            with pytest.raises(asyncio.CancelledError if how == "cancel" else RequestAbortedError):
                await waiting


# ---- calls with one answer ----


async def test_a_refusal_that_says_when_is_tried_again_then(gateway: MockGateway, client: AsyncClient) -> None:
    refused = Answer(error=ResourceExhaustedError("full", retry_after_s=0.05))
    gateway.script(refused, Answer("a"), refused, Answer("b"))
    began = asyncio.get_running_loop().time()
    assert (await client.generate("Hi")).text == "a"
    assert asyncio.get_running_loop().time() - began >= 0.05
    assert [piece.text for piece in await collect(client.stream("Hi"))] == ["b", ""]
    assert len(gateway.calls) == 4


async def test_a_refusal_for_longer_than_the_call_may_take_is_raised_at_once(gateway: MockGateway) -> None:
    gateway.script(*[Answer(error=ResourceExhaustedError("full", retry_after_s=3600))] * 2)
    async with AsyncClient(gateway.address, timeout_s=1800) as client:
        for call in (client.generate("Hi"), collect(client.stream("Hi"))):
            with pytest.raises(ResourceExhaustedError):
                await asyncio.wait_for(call, 60)


async def test_a_message_that_is_too_long_is_no_refusal_to_wait_for(client: AsyncClient, gateway: MockGateway) -> None:
    with pytest.raises(ResourceExhaustedError):
        await client.tokenize("x" * rpc.MAX_MESSAGE_BYTES)
    assert gateway.calls == []


async def test_a_generation_that_may_have_begun_is_not_made_twice(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("a", breaks_after=0))
    with pytest.raises(UnavailableError, match="may have begun, so it is not tried again"):
        await client.generate("Hi")
    assert len(gateway.calls) == 1


async def test_a_gateway_that_stops_is_left_for_another() -> None:
    stops = Answer(error=stopping())
    with MockGateway(stops, stops) as first, MockGateway(Answer("a"), Answer("b"), Answer("c")) as second:
        async with AsyncClient([first.address, second.address], timeout_s=60) as client:
            assert [(await client.generate("Hi")).text for _ in range(2)] == ["a", "b"]
            first.stop()
            assert (await client.generate("Hi")).text == "c"


async def test_calls_go_round_all_addresses() -> None:
    with MockGateway() as first, MockGateway() as second:
        async with AsyncClient([first.address, second.address], timeout_s=60) as client:
            for _ in range(6):
                await client.models()
    assert [len(gateway.calls) for gateway in (first, second)] == [3, 3]


async def test_an_address_that_is_down_is_left_out_while_others_serve() -> None:
    with MockGateway() as gateway:
        async with AsyncClient(["127.0.0.1:1", gateway.address], timeout_s=20, max_retries=0) as client:
            with pytest.raises(UnavailableError):
                await client.models()  # nobody knew
            for _ in range(4):
                await client.models()


async def test_an_abort_reaches_the_gateway_that_runs_the_request() -> None:
    slow = Answer("a", "b", delay_s=[0, 30])
    with MockGateway(slow) as first, MockGateway(slow) as second:
        async with AsyncClient([first.address, second.address], timeout_s=60) as client:
            streams = [client.stream("Hi", request_id=f"r{number}") for number in range(2)]
            for number, stream in enumerate(streams):
                assert (await anext(stream)).text == "a"
                await client.abort(f"r{number}")
                assert (await anext(stream)).finish_reason is FinishReason.ABORT
            with pytest.raises(NotFoundError):
                await client.abort("nobody's")


async def test_a_gateway_that_comes_back_is_waited_for() -> None:
    gateway = MockGateway(Answer("a"))
    gateway.start()
    gateway.stop()
    async with AsyncClient(gateway.address, timeout_s=20, max_retries=50) as client:
        waiting = asyncio.create_task(client.generate("Hi"))
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        with gateway:
            assert (await waiting).text == "a"


async def test_the_timeout_covers_all_tries() -> None:
    async with AsyncClient("127.0.0.1:1", timeout_s=0.4, max_retries=1000) as client:
        began = asyncio.get_running_loop().time()
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await client.generate("Hi")
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await collect(client.stream("Hi"))
        assert asyncio.get_running_loop().time() - began < 5


async def test_a_closed_client_says_so(gateway: MockGateway, client: AsyncClient) -> None:
    await client.close()
    with pytest.raises(RequestAbortedError, match="closed"):
        await client.models()
    with pytest.raises(RequestAbortedError, match="closed"):
        client.stream("Hi")


# ---- chat, keys, arguments ----


async def test_chat_is_a_generation_from_messages(gateway: MockGateway, client: AsyncClient) -> None:
    gateway.script(Answer("Hello"), Answer("Hel", "lo"))
    assert (await client.chat(HI, max_tokens=9)).text == "Hello"
    assert "".join([piece.text for piece in await collect(client.chat_stream(HI))]) == "Hello"
    for call in gateway.calls:
        assert call.request.generation.chat.messages[0].content == "Hi"
    assert gateway.calls[0].request.generation.sampling.max_tokens == 9


async def test_the_key_goes_with_every_call() -> None:
    with MockGateway(Answer("a"), Answer("b"), api_key="secret-1") as gateway:
        async with AsyncClient(gateway.address, timeout_s=20, api_key="secret-1") as client:
            await client.generate("Hi")
            await collect(client.stream("Hi"))
            await client.models()
        assert {call.api_key for call in gateway.calls} == {"secret-1"}
        async with AsyncClient(gateway.address, timeout_s=20, api_key="secret-2") as client:
            with pytest.raises(UnauthenticatedError):
                await client.models()


@pytest.mark.parametrize("key", ["", "with space", "line\nbreak", "ü", "x" * 5000, b"bytes"])
async def test_a_key_that_is_none_is_refused_without_being_shown(key: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="api_key is not shown here") as caught:
        AsyncClient("127.0.0.1:1", api_key=key)
    assert caught.value.value == ""


@pytest.mark.parametrize("address", ["10.0.0.1:80", "gateway:80", "dns:///localhost:80", ["127.0.0.1:80", "x:80"]])
async def test_a_key_does_not_leave_the_machine_without_tls_unless_told(address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="for all to read; allowed: with TLS"):
        AsyncClient(address, api_key="secret")
    async with AsyncClient(address, api_key="secret", insecure_api_key=True):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:80", "localhost:80", "[::1]:80"])
async def test_a_key_may_be_sent_to_this_machine(address: str) -> None:
    async with AsyncClient(address, api_key="secret"):
        pass


@pytest.mark.parametrize(
    "settings", [{"max_retries": -1}, {"max_resumes": 1.5}, {"max_retries": True}, {"address": []}, {"address": ["x"]}]
)
async def test_settings_that_are_none_are_named(settings: dict[str, Any]) -> None:
    (field,) = settings
    with pytest.raises(InvalidArgumentError, match=f"{field} is "):
        AsyncClient(**({"address": "127.0.0.1:1"} | settings))


@pytest.mark.parametrize("address", ["dns:///gateway:80", "dns://127.0.0.1:53/gateway:80", "dns:gateway:80"])
async def test_names_of_the_dns_are_addresses(address: str) -> None:
    async with AsyncClient(address):
        pass
