"""Fields are counted as the parser would make them, however the bytes are cut, and long requests have few enough."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.malformed import MAX_FIELDS, MAX_UNCOUNTED_BYTES
from gateway.server import GatewayServer
from gateway.wire import has_more_fields
from holdback import rpc
from holdback.errors import InvalidArgumentError
from holdback.v1 import inference_pb2
from tests.gateway.random_messages import messages
from tests.gateway.scripted_scheduler import ScriptedScheduler

EOS = 2
GENERATION = inference_pb2.Generation.DESCRIPTOR


def counted(message: Message, limit: int) -> bool:
    kind: Any = message.DESCRIPTOR
    return has_more_fields(message.SerializeToString(), kind, limit)


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
    assert not counted(message, exact)
    assert exact == 0 or counted(message, exact - 1)


def test_messages_within_count_and_packed_numbers_are_one_field() -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage()] * 3)
    message = inference_pb2.Generation(chat=chat, output_token_ids=range(1000))
    assert not counted(message, 5)
    assert counted(message, 4)


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_counted_to_an_end(data: bytes) -> None:
    assert not has_more_fields(data, GENERATION, len(data))


@pytest.mark.parametrize("data", [b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 20, b"\x0d\x01", b"\x0b", b"\x80"])
def test_fields_that_are_cut_off_or_unknown_end_the_count(data: bytes) -> None:
    assert not has_more_fields(data, GENERATION, 1)


@pytest.mark.loopback
@pytest.mark.parametrize("fields", [{"stop": [""] * 200_000}, {"chat": 200_000}])
async def test_a_long_request_of_very_many_fields_is_refused_unread_and_the_next_one_served(
    gateway: GatewayServer, scheduler: ScriptedScheduler, fields: dict[str, Any]
) -> None:
    if "chat" in fields:
        fields = {"chat": inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage()] * fields["chat"])}
    data = inference_pb2.GenerateRequest(generation=inference_pb2.Generation(**fields)).SerializeToString()
    assert len(data) > MAX_UNCOUNTED_BYTES
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        call: Any = channel.unary_unary("/holdback.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(data, timeout=60)
        error = rpc.error_from_rpc(caught.value)
        assert isinstance(error, InvalidArgumentError)
        assert (error.field, f"more than {MAX_FIELDS} fields" in error.message) == ("request", True)
        scheduler.answer = [EOS]
        long_text = inference_pb2.Generation(token_ids=inference_pb2.TokenIds(token_ids=[5] * 3), stop=["x" * 1000])
        await call(inference_pb2.GenerateRequest(generation=long_text).SerializeToString(), timeout=60)
