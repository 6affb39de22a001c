"""The gateway as a process: what it needs to start, when it is ready, how it stops."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from holdback import AsyncClient
from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    RequestAbortedError,
    UnavailableError,
)
from holdback.health import LIVENESS
from holdback.types import FinishReason
from tests.gateway.conftest import client_of, wait_until_ready
from tests.gateway.health import wait_for, watch
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.texts import EOS, collect, ids_of, text_of

pytestmark = pytest.mark.loopback

Make = Callable[..., Any]


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


async def test_pools_of_the_same_scheduler_do_not_end_each_others_streams(
    make_gateway: Make, directory: pathlib.Path, scheduler: ScriptedScheduler
) -> None:
    pools = [
        {"served_model_names": [name], "scheduler": scheduler.target, "tokenizer": directory} for name in ("one", "two")
    ]
    await wait_until_ready(await make_gateway(pools=pools))
    sessions = [hello.session for hello in scheduler.hellos]
    assert (len(sessions), len(set(sessions))) == (2, 2)


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
        assert text_of(await collect(stream)) == "next"
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 9


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
        assert text_of(await collect(stream)) == "end"
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


@pytest.mark.case("B62")
@pytest.mark.parametrize("is_in_time", [True, False])
async def test_a_drain_waits_for_other_calls_too_and_what_is_left_of_them_is_told_why_it_ended(
    make_gateway: Make, monkeypatch: pytest.MonkeyPatch, is_in_time: bool
) -> None:
    gateway = await make_gateway(scheduler="127.0.0.1:1", drain_timeout_s=60 if is_in_time else 0.1)
    (pool,) = gateway.pools
    has_begun, may_go_on = asyncio.Event(), asyncio.Event()

    async def encode_slowly(text: str) -> list[int]:
        has_begun.set()
        await may_go_on.wait()
        return [5]

    monkeypatch.setattr(pool.tokenizer, "encode", encode_slowly)
    async with client_of(gateway) as client:
        pending = asyncio.create_task(client.tokenize("x"))
        await asyncio.wait_for(has_begun.wait(), 60)
        draining = asyncio.create_task(gateway.drain())
        if is_in_time:
            with pytest.raises(UnavailableError):
                await client.models()
            assert not draining.done()
            may_go_on.set()
            assert await pending == [5]
            await asyncio.wait_for(draining, 60)
        else:
            await draining
            stopping = asyncio.create_task(gateway.stop())
            with pytest.raises(UnavailableError, match="the gateway stopped") as caught:
                await pending
            assert caught.value.reason is ErrorReason.SHUTTING_DOWN
            await stopping


async def test_a_call_that_its_client_cancels_leaves_nothing_to_wait_for(
    make_gateway: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await make_gateway(scheduler="127.0.0.1:1")
    (pool,) = gateway.pools
    has_begun = asyncio.Event()

    async def encode_for_ever(text: str) -> list[int]:
        has_begun.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(pool.tokenizer, "encode", encode_for_ever)
    async with client_of(gateway) as client:
        pending = asyncio.create_task(client.tokenize("x"))
        await asyncio.wait_for(has_begun.wait(), 60)
        pending.cancel()
        await asyncio.wait_for(gateway.drain(), 20)
