"""Fields are counted as the parser would make them, however the bytes are cut, and long requests have few enough."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import MAX_TOKEN_IDS
from gateway.malformed import MAX_FIELDS, MAX_UNCOUNTED_BYTES, MIN_NUMBER_LIMIT, max_numbers
from gateway.server import GatewayServer
from gateway.wire import fault_of
from holdback import rpc
from holdback.errors import InvalidArgumentError
from holdback.v1 import inference_pb2, types_pb2
from tests.gateway.random_messages import messages
from tests.gateway.scripted_scheduler import ScriptedScheduler

pytestmark = pytest.mark.case("B70")

EOS = 2
GENERATION: Any = inference_pb2.Generation.DESCRIPTOR
EMPTY_MESSAGE = b"\x0a\x00"  # an entry of `ChatMessages.messages`
GROUP = b"\xc3\x3e\xc4\x3e"  # field 1000, begun and ended


def fault(message: Message, *, max_fields: int = 10**6, max_numbers: int = 10**6) -> str | None:
    kind: Any = message.DESCRIPTOR
    return fault_of(message.SerializeToString(), kind, max_fields=max_fields, max_numbers=max_numbers)


def field(number: int, content: bytes) -> bytes:
    """A field of bytes below 128 MiB, on the wire."""
    size = len(content)
    length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21 & 127])
    return bytes([number << 3 | 2]) + length + content


def num_fields(message: Message) -> int:
    """What the parser made: an entry of a repeated field counts, a packed list is one field."""
    found = 0
    for field, value in message.ListFields():
        entries = value if field.is_repeated and not field.is_packed else [value]
        found += len(entries)
        if field.message_type is not None:
            found += sum(map(num_fields, entries))
    return found


@given(message=messages(inference_pb2.GenerateRequest, base=inference_pb2.GenerateRequest()))
@settings(max_examples=50, deadline=None)
def test_as_many_fields_are_counted_as_are_made(message: Message) -> None:
    exact = num_fields(message)
    assert fault(message, max_fields=exact) is None
    assert exact == 0 or fault(message, max_fields=exact - 1) == f"it has more than {exact - 1} fields"


def test_messages_within_count_and_packed_numbers_are_one_field() -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage()] * 3)
    message = inference_pb2.Generation(chat=chat, output_token_ids=range(1000))
    assert fault(message, max_fields=5) is None
    assert fault(message, max_fields=4) == "it has more than 4 fields"


@pytest.mark.parametrize("token_id", [0, 127, 128, 2**32 - 1])
def test_the_numbers_of_all_packed_lists_are_counted_however_long_each_is(token_id: int) -> None:
    prompt = inference_pb2.TokenIds(token_ids=[token_id] * 6)
    message = inference_pb2.Generation(token_ids=prompt, output_token_ids=[token_id] * 4)
    assert fault(message, max_numbers=10) is None
    assert fault(message, max_numbers=9) == "it has more than 9 numbers in lists"


def test_numbers_of_fixed_size_are_counted_by_their_size() -> None:
    message = types_pb2.TokenLogprobs(top_logprobs=[-0.5] * 3)
    assert fault(message, max_numbers=3) is None
    assert fault(message, max_numbers=2) == "it has more than 2 numbers in lists"


@given(data=st.binary(max_size=200))
def test_what_the_parser_takes_has_no_fault_and_fields_are_counted_to_an_end(data: bytes) -> None:
    found = fault_of(data, GENERATION, max_fields=len(data), max_numbers=len(data))
    try:
        inference_pb2.Generation.FromString(data)
    except DecodeError:
        return
    assert found is None or "wire type 3" in found


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0a\xff\xff\xff\xff\x0f", "a field that is cut off"),
        (b"\x0d\x01", "a field that is cut off"),
        (b"\x09\x01", "a field that is cut off"),
        (b"\xff" * 20, "a number that is cut off"),
        (b"\x80", "a number that is cut off"),
        (b"\x0b", "a field of wire type 3"),
        (b"\x0c", "a field of wire type 4"),
        (b"\x0e", "a field of wire type 6"),
        (b"\x0f", "a field of wire type 7"),
    ],
)
def test_what_would_end_the_count_early_is_a_fault_at_every_level(data: bytes, why: str) -> None:
    chat = field(4, EMPTY_MESSAGE + data)
    for message in (data, EMPTY_MESSAGE + data, chat):
        assert fault_of(message, GENERATION, max_fields=9, max_numbers=9) == f"it has {why}"


def test_as_many_numbers_are_taken_as_the_longest_model_may_need() -> None:
    assert max_numbers(8192) == MIN_NUMBER_LIMIT
    assert max_numbers(1_000_000) == 2_000_000
    assert max_numbers(2**31) == max_numbers(0) == 2 * MAX_TOKEN_IDS


def of_generation(**fields: Any) -> bytes:
    return inference_pb2.GenerateRequest(generation=inference_pb2.Generation(**fields)).SerializeToString()


MANY_FIELDS = f"more than {MAX_FIELDS} fields"
MANY_NUMBERS = f"more than {MIN_NUMBER_LIMIT} numbers in lists"
MANY_IDS = [5] * (MIN_NUMBER_LIMIT + 1)
CHAT = field(4, EMPTY_MESSAGE * 200_000)
OURS, VLLM = "holdback.v1.InferenceService", "vllm.grpc.engine.VllmEngine"


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("method", "data", "why"),
    [
        (f"{OURS}/Generate", of_generation(stop=[""] * 200_000), MANY_FIELDS),
        (f"{OURS}/Generate", field(1, CHAT), MANY_FIELDS),
        (f"{OURS}/Generate", GROUP + field(1, CHAT), "wire type 3"),
        (f"{OURS}/Generate", field(1, GROUP + CHAT), "wire type 3"),
        (f"{OURS}/GenerateStream", field(1, field(4, GROUP + EMPTY_MESSAGE * 200_000)), "wire type 3"),
        (f"{OURS}/Generate", of_generation(token_ids=inference_pb2.TokenIds(token_ids=MANY_IDS)), MANY_NUMBERS),
        (f"{OURS}/Generate", of_generation(text="a", output_token_ids=MANY_IDS), MANY_NUMBERS),
        (f"{OURS}/Detokenize", inference_pb2.DetokenizeRequest(token_ids=MANY_IDS).SerializeToString(), MANY_NUMBERS),
        (f"{VLLM}/Generate", GROUP + field(2, field(2, b"\x05" * len(MANY_IDS))), "wire type 3"),
        (f"{VLLM}/Generate", field(2, field(2, b"\x05" * len(MANY_IDS))), MANY_NUMBERS),
    ],
)
async def test_a_long_request_of_very_many_parts_is_refused_unread_and_the_next_one_served(
    gateway: GatewayServer, scheduler: ScriptedScheduler, method: str, data: bytes, why: str
) -> None:
    assert len(data) > MAX_UNCOUNTED_BYTES
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stream: Any = channel.unary_stream(f"/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream(data, timeout=60):
                pass
        error = rpc.error_from_rpc(caught.value)
        assert isinstance(error, InvalidArgumentError)
        assert (error.field, why in error.message) == ("request", True), error.message
        scheduler.answer = [EOS]
        call: Any = channel.unary_unary(f"/{OURS}/Generate")
        prompt = inference_pb2.TokenIds(token_ids=[5] * 3)
        await call(of_generation(token_ids=prompt, stop=["x" * 1000]), timeout=60)


@pytest.mark.loopback
async def test_what_is_in_a_short_request_is_not_counted_and_groups_are_passed_over(gateway: GatewayServer) -> None:
    text = inference_pb2.TokenizeRequest(text="a").SerializeToString()
    data = text + GROUP + b"\x7a\x00" * 2 * MAX_FIELDS  # field 15, empty
    assert len(data) <= MAX_UNCOUNTED_BYTES
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        call: Any = channel.unary_unary(f"/{OURS}/Tokenize")
        answer = inference_pb2.TokenizeResponse.FromString(await call(data, timeout=60))
    assert len(answer.token_ids) == 1
