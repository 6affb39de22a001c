"""Several gateways behind a name of the DNS that changes: new ones are found, and streams go on whatever happens.

All gateways have the same port on addresses of their own, as pods behind a headless service have. The pool's
`default_max_tokens` tells which gateway answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from gateway.server import GatewayServer
from holdback import AsyncClient, rpc
from holdback.types import FinishReason
from tests.gateway.conftest import wait_until_ready
from tests.gateway.name_server import NameServer
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer

pytestmark = pytest.mark.loopback

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NUMBERS = (1, 2, 3)
AGE_S = 0.5
TEXT = "Grüße aus 東京 🦀!"


@pytest.fixture(autouse=True)
def resolve_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC asks for a name every 30 s at most, which is a tenth of the age of connections by default."""
    options = [*rpc._CHANNEL_OPTIONS, ("grpc.dns_min_time_between_resolutions_ms", int(AGE_S * 100))]
    monkeypatch.setattr(rpc, "_CHANNEL_OPTIONS", options)


@pytest.fixture
async def schedulers() -> AsyncIterator[list[ScriptedScheduler]]:
    schedulers = [ScriptedScheduler() for _ in ADDRESSES]
    for number, scheduler in zip(NUMBERS, schedulers, strict=True):
        scheduler.default_max_tokens = number
        await scheduler.start()
    yield schedulers
    for scheduler in schedulers:
        await scheduler.stop()


@pytest.fixture
async def gateways(make_gateway: Callable[..., Any], schedulers: list[ScriptedScheduler]) -> list[GatewayServer]:
    """Three gateways, each with a scheduler of its own."""
    gateways: list[GatewayServer] = []
    for host, scheduler in zip(ADDRESSES, schedulers, strict=True):
        port = gateways[0].port if gateways else 0
        gateway = await make_gateway(
            host=host,
            port=port,
            scheduler=scheduler.target,
            max_connection_age_s=AGE_S,
        )
        await wait_until_ready(gateway)
        gateways.append(gateway)
    return gateways


def ids(text: str) -> list[int]:
    return byte_ids(make_tokenizer("byte_level"), text.encode())


async def answering(client: AsyncClient) -> int:
    """The number of the gateway that answers a call."""
    return (await client.models())[0].default_max_tokens


async def until_answered_by(client: AsyncClient, numbers: set[int]) -> None:
    """Calls until as many calls in a row as there are gateways were answered by exactly these."""
    async with asyncio.timeout(60):
        while {await answering(client) for _ in NUMBERS} != numbers:
            pass


@pytest.mark.case("B66")
async def test_new_gateways_are_found_and_old_ones_left_while_streams_go_on(
    gateways: list[GatewayServer], schedulers: list[ScriptedScheduler]
) -> None:
    async with (
        NameServer(ADDRESSES[:1]) as names,
        AsyncClient(names.target(gateways[0].port), timeout_s=60) as client,
    ):
        stream = client.stream(token_ids=[5, 6], max_tokens=60)
        add = await schedulers[0].next_add()
        schedulers[0].started(add.handle)
        schedulers[0].tokens(add.handle, 0, ids("a"))
        assert (await anext(stream)).text == "a"
        assert {await answering(client) for _ in range(6)} == {1}

        names.addresses = ADDRESSES
        await until_answered_by(client, set(NUMBERS))
        names.addresses = ADDRESSES[1:]
        await until_answered_by(client, {2, 3})

        schedulers[0].tokens(add.handle, 1, ids("b"))
        schedulers[0].ended(add.handle, FinishReason.LENGTH)
        assert [piece.text async for piece in stream] == ["b", ""]
        assert stream.num_resumes == 0


async def test_a_stream_of_a_gateway_that_dies_goes_on_at_another_with_the_same_text(
    gateways: list[GatewayServer], schedulers: list[ScriptedScheduler]
) -> None:
    token_ids = ids(TEXT)
    async with (
        NameServer(ADDRESSES[:1]) as names,
        AsyncClient(names.target(gateways[0].port), timeout_s=60) as client,
    ):
        stream = client.stream(token_ids=[5, 6], stop="!", max_tokens=60)
        first = await schedulers[0].next_add()
        schedulers[0].started(first.handle)
        num_sent = len(TEXT[: TEXT.index("京")].encode()) + 1  # inside a character
        schedulers[0].tokens(first.handle, 0, token_ids[:num_sent])
        pieces = [await anext(stream)]
        assert pieces[0].text == "Grüße aus 東"

        names.addresses = ADDRESSES[1:2]
        reading = asyncio.create_task(collect(stream))
        await gateways[0].stop()
        rest = await schedulers[1].next_add()
        assert list(rest.spec.output_token_ids) == token_ids[:num_sent]
        assert rest.spec.sampling.seed == first.spec.sampling.seed
        schedulers[1].started(rest.handle)
        schedulers[1].tokens(rest.handle, num_sent, token_ids[num_sent:])
        pieces += await reading
    assert "".join(piece.text for piece in pieces) == TEXT.removesuffix("!")
    assert [token_id for piece in pieces for token_id in piece.token_ids] == token_ids
    assert pieces[-1].stop_string == "!"
    assert stream.num_resumes == 1
    assert stream.usage is not None
    assert stream.usage.completion_tokens == len(token_ids)


async def collect(stream: Any) -> list[Any]:
    return [piece async for piece in stream]
