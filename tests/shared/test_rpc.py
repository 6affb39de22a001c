"""Errors keep their meaning over the wire; ports and peers are what they say."""

import asyncio
import contextlib
import inspect
from typing import Any

import grpc
import pytest

from holdback import errors, rpc
from holdback.errors import (
    ErrorReason,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from holdback.v1 import errors_pb2

CONCRETE = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.HoldbackError) and cls is not errors.HoldbackError
]


def test_every_exception_has_a_status():
    assert set(CONCRETE) == set(rpc.STATUS_CODES)


def test_every_reason_has_a_number_of_the_same_name():
    names = {f"ERROR_REASON_{reason.name}" for reason in ErrorReason}
    assert names | {"ERROR_REASON_UNSPECIFIED"} == set(errors_pb2.ErrorReason.keys())
    assert all(reason.name == reason.value for reason in ErrorReason)


@pytest.mark.parametrize("cls", CONCRETE)
def test_an_error_on_a_shared_stream_comes_back_as_it_was(cls):
    error = cls("what is wrong", reason=ErrorReason.QUEUE_FULL)
    back = rpc.decode_error(rpc.encode_error(error))
    assert back.message == "what is wrong"
    assert back.reason is ErrorReason.QUEUE_FULL
    assert rpc.STATUS_CODES[type(back)] is rpc.STATUS_CODES[cls]


@pytest.mark.parametrize("cls", CONCRETE)
def test_an_error_with_what_utf_8_cannot_write_is_sent_with_its_escape(cls):
    error = cls("half \ud83d")
    assert (rpc.encode_status(error).message, rpc.encode_error(error).message) == (r"half \ud83d",) * 2


def test_no_part_of_a_wrong_field_keeps_an_error_from_being_sent():
    error = InvalidArgumentError("m", field="f\udfff", value="v\ud800", limit="l\udc00")
    assert rpc.encode_status(error).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    back = rpc.decode_error(rpc.encode_error(error))
    assert isinstance(back, InvalidArgumentError)
    assert (back.field, back.value, back.limit) == (r"f\udfff", r"v\ud800", r"l\udc00")


@pytest.mark.parametrize("details", [b"\xff", b"\x1a\x02\x0a\xff"])
def test_details_that_are_none_leave_the_class_of_the_code(details):
    trailing = grpc.aio.Metadata((rpc.STATUS_DETAILS_KEY, details))
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="a proxy's words"
    )
    back = rpc.error_from_rpc(failure)
    assert (type(back), back.message) == (UnavailableError, "a proxy's words")


class Echo(grpc.GenericRpcHandler):
    """Fails every call with the error it is given."""

    def __init__(self, error):
        self.error = error

    def service(self, details):
        async def fail(request, context):
            await rpc.abort(context, self.error)

        return grpc.unary_unary_rpc_method_handler(fail)


async def call(error):
    server = rpc.create_server()
    server.add_generic_rpc_handlers((Echo(error),))
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/test/Call", bytes, bytes)(b"")
            return caught.value
    finally:
        await server.stop(None)


@pytest.mark.loopback
async def test_a_status_carries_field_value_and_limit():
    failure = await call(InvalidArgumentError.of("sampling.top_p", 1.5, "[0, 1]"))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    back = rpc.error_from_rpc(failure)
    assert isinstance(back, InvalidArgumentError)
    assert (back.field, back.value, back.limit) == ("sampling.top_p", "1.5", "[0, 1]")
    assert back.message == "sampling.top_p is 1.5; allowed: [0, 1]"
    assert back.reason is ErrorReason.INVALID_FIELD


@pytest.mark.loopback
async def test_a_status_says_when_to_try_again():
    back = rpc.error_from_rpc(await call(ResourceExhaustedError("queue is full", retry_after_s=2.5)))
    assert isinstance(back, ResourceExhaustedError)
    assert back.retry_after_s == 2.5


async def test_a_stream_whose_status_grpc_lost_counts_as_broken_not_as_a_fault_of_the_other_side():
    async with rpc.create_channel("127.0.0.1:1") as channel:
        call: Any = channel.stream_stream("/test/Call")()
        call._cython_call.set_internal_error("what a write that fails does")
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call.read()
    assert type(rpc.error_from_rpc(lost.value)) is UnavailableError
    meant = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "a bug")
    assert type(rpc.error_from_rpc(meant)) is InternalError


@pytest.mark.loopback
@pytest.mark.parametrize("character", ["x", "\U0001f600"])
async def test_a_message_longer_than_a_header_may_be_is_cut_and_arrives(character):
    failure = await call(InvalidArgumentError(character * 100_000))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.MAX_STATUS_MESSAGE_BYTES - 4 < len(failure.details().encode()) <= rpc.MAX_STATUS_MESSAGE_BYTES


class Silent(grpc.GenericRpcHandler):
    """Answers after a while."""

    def service(self, details):
        async def answer(request, context):
            await asyncio.sleep(6)
            return b"done"

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.loopback
async def test_a_call_may_be_silent_for_many_keepalive_intervals(monkeypatch):
    # The real intervals, 30 times faster (gRPC pings once a second at most): what a client pings must be what a server
    # of ours allows.
    times = {"grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms"}
    for name in ("_SERVER_OPTIONS", "_CHANNEL_OPTIONS"):
        options = [(key, value // 30 if key in times else value) for key, value in getattr(rpc, name)]
        monkeypatch.setattr(rpc, name, options)
    server = rpc.create_server()
    server.add_generic_rpc_handlers((Silent(),))
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary("/test/Call", bytes, bytes)(b"") == b"done"
    finally:
        await server.stop(None)


@pytest.mark.loopback
async def test_a_call_to_a_peer_that_froze_ends_with_the_keepalive_timeout(monkeypatch):
    # The real times, 30 times faster: a ping after a second, and a third of a second for its answer.
    times = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    options = [(key, value // 30 if key in times else value) for key, value in rpc._CHANNEL_OPTIONS]
    monkeypatch.setattr(rpc, "_CHANNEL_OPTIONS", options)
    let_go = asyncio.Event()

    async def greet_and_freeze(reader, writer):
        """An empty SETTINGS frame of HTTP/2, its acknowledgement, then nothing; the kernel takes in what comes."""
        writer.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]) + bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))
        with contextlib.suppress(ConnectionError):
            while await reader.read(65_536):
                pass
        writer.close()
        let_go.set()

    frozen = await asyncio.start_server(greet_and_freeze, "127.0.0.1", 0)
    port = frozen.sockets[0].getsockname()[1]
    try:
        async with rpc.create_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary("/test/Call", bytes, bytes)(b"")
        assert failure.value.details() == "Stream removed (ping timeout)"
        await asyncio.wait_for(let_go.wait(), 60)
    finally:
        frozen.close()
        await frozen.wait_closed()


class Gathering(grpc.GenericRpcHandler):
    """Answers every call once `number` of them are there."""

    def __init__(self, number):
        self.number, self.all_there = number, asyncio.Event()

    def service(self, details):
        async def answer(request, context):
            self.number -= 1
            if self.number == 0:
                self.all_there.set()
            await self.all_there.wait()
            return b"done"

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.loopback
async def test_a_burst_of_calls_is_served_and_not_dropped():
    number = 3000
    server = rpc.create_server()
    server.add_generic_rpc_handlers((Gathering(number),))
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test/Call", bytes, bytes)
            assert await asyncio.gather(*(call(b"") for _ in range(number))) == [b"done"] * number
    finally:
        await server.stop(None)


@pytest.mark.loopback
async def test_a_second_server_on_a_port_is_refused():
    first, second = rpc.create_server(), rpc.create_server()
    port = rpc.bind(first, "127.0.0.1", 0)
    await first.start()
    try:
        with pytest.raises(errors.ConfigError, match=f"port is {port}.*already in use"):
            rpc.bind(second, "127.0.0.1", port)
    finally:
        await first.stop(None)
        await second.stop(None)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:5000", "10.1.2.3"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fd00::7]:5000", "fd00::7"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:5000", "10.1.2.3"),
    ],
)
def test_a_peer_address_is_parsed_and_unmapped(peer, address):
    assert rpc.peer_ip(peer) == address


@pytest.mark.parametrize("peer", ["unix:/tmp/socket", "", "ipv4:example.com:80"])
def test_a_peer_without_an_ip_address_is_refused(peer):
    with pytest.raises(errors.FailedPreconditionError) as caught:
        rpc.peer_ip(peer)
    assert caught.value.reason is ErrorReason.ADDRESS_NOT_ALLOWED


def test_addresses_of_both_families_are_written_as_grpc_reads_them():
    assert rpc.format_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert rpc.format_address("::1", 80) == "[::1]:80"
