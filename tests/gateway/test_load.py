"""Asking a scheduler for its load: how often, how long, and what follows from two answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from gateway.load import LoadReader
from gateway.server import GatewayServer
from holdback.errors import ErrorReason, UnavailableError
from holdback.v1 import scheduler_pb2, types_pb2
from tests.gateway.scripted_scheduler import ScriptedScheduler


class Counting:
    """A scheduler's stub that says how many tokens have been decoded so far, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_decoded = 0

    async def GetLoad(self, request: Any, **options: Any) -> scheduler_pb2.GetLoadResponse:  # noqa: N802
        totals = {types_pb2.PHASE_DECODE: self.num_decoded, types_pb2.PHASE_PREFILL: 1_000_000}
        return scheduler_pb2.GetLoadResponse(
            graphs=[
                scheduler_pb2.GraphTotal(phase=phase, size=8, num_tokens=tokens) for phase, tokens in totals.items()
            ]
        )


async def test_tokens_per_second_are_those_decoded_between_answers_that_are_far_enough_apart() -> None:
    stub: Any = Counting()
    reader = LoadReader(stub, "x:1", "toy", lambda: stub.now)

    async def rate(now: float, num_decoded: int) -> float:
        stub.now, stub.num_decoded = now, num_decoded
        await reader.read()
        return reader.tokens_per_s

    assert await rate(10.0, 500) == 0.0
    assert await rate(12.0, 700) == 100.0
    assert await rate(12.5, 900) == 100.0  # too soon: three callers at once are no measurement
    assert await rate(16.0, 900) == 50.0
    assert await rate(18.0, 40) == 0.0  # the scheduler started again
    assert await rate(20.0, 60) == 10.0


@pytest.mark.loopback
async def test_those_who_ask_at_once_cost_one_question(gateway: GatewayServer, scheduler: ScriptedScheduler) -> None:
    scheduler.may_answer_load.clear()
    (pool,) = gateway.pools
    asking = [asyncio.create_task(pool.engine.load.read()) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()
    scheduler.may_answer_load.set()
    scheduler.load = scheduler_pb2.GetLoadResponse(num_running=3)
    assert {(await task).num_running for task in asking[1:]} == {3}
    assert scheduler.num_load_questions == 1
    scheduler.load = scheduler_pb2.GetLoadResponse(num_running=4)
    assert (await pool.engine.load.read()).num_running == 4


@pytest.mark.loopback
async def test_a_connection_that_is_closed_meanwhile_is_a_scheduler_that_is_away(
    gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    scheduler.may_answer_load.clear()
    (pool,) = gateway.pools
    asking = asyncio.create_task(pool.engine.load.read())
    await asyncio.sleep(0)
    await pool.engine.close()
    with pytest.raises(UnavailableError) as caught:
        await asking
    assert caught.value.reason is ErrorReason.NO_SCHEDULER


@pytest.mark.loopback
async def test_who_asks_for_the_load_is_told_the_model_and_not_an_address(
    gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    (pool,) = gateway.pools
    await scheduler.stop()
    with structlog.testing.capture_logs() as lines, pytest.raises(UnavailableError) as caught:
        await pool.engine.load.read()
    assert caught.value.message == "the scheduler of model 'toy' does not answer: UNAVAILABLE"
    assert scheduler.target in [line.get("scheduler") for line in lines if line["event"] == "scheduler_gave_no_load"]
