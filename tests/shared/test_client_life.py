"""From when on a client may be used, and until when."""

from __future__ import annotations

import asyncio

import pytest

from holdback import AsyncClient
from holdback.errors import RequestAbortedError
from holdback.testing import Answer, MockGateway

pytestmark = pytest.mark.loopback


def test_a_client_may_be_made_before_the_event_loop_runs() -> None:
    with MockGateway(Answer("hi")) as gateway:
        client = AsyncClient(gateway.address, timeout_s=60)

        async def use() -> str:
            async with client:
                return (await client.generate("x")).text

        assert asyncio.run(use()) == "hi"


@pytest.mark.parametrize("was_used", [False, True])
async def test_every_call_of_a_client_that_is_closed_says_so(was_used: bool) -> None:
    async with MockGateway() as gateway:
        client = AsyncClient(gateway.address, timeout_s=60)
        if was_used:
            await client.models()
        await client.close()
        for call in (lambda: client.abort("x"), lambda: client.models(), lambda: client.generate("x")):
            with pytest.raises(RequestAbortedError, match="the client is closed"):
                await call()
        with pytest.raises(RequestAbortedError, match="the client is closed"):
            client.stream("x")
