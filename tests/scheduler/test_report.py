"""The state of a scheduler as a person reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from holdback.v1 import scheduler_pb2
from scheduler_svc.cli import state as state_command
from scheduler_svc.report import report
from scheduler_svc.server import SchedulerServer
from scheduler_svc.state import state
from tests.scheduler.parts import Simulation, build_spec, settle
from tests.scheduler.stubs import StubExecutor, StubGateway

Serve = Callable[..., Awaitable[SchedulerServer]]


async def report_of(simulation: Simulation) -> list[str]:
    found = await state(simulation.pool, simulation.dispatcher, scheduler_pb2.GetStateRequest(max_steps=1))
    return list(report(found))


async def test_a_pool_without_an_executor_says_so(simulate: Callable[..., Simulation]) -> None:
    assert await report_of(simulate()) == [
        "pool   not ready: no executor has registered yet",
        "queue  nothing waits",
    ]


async def test_lanes_queue_and_why_its_head_waits_are_shown(simulate: Callable[..., Simulation]) -> None:
    simulation = simulate(async_scheduling=False, max_decode_stall_ms=250)
    simulation.add_lane("executor-0", is_stepped=True, max_num_seqs=1)
    simulation.add_lane("drains", is_stepped=True, max_num_seqs=1, prefill_us=1000)
    for handle in range(3):
        simulation.submit(handle, build_spec(f"chat-{handle}", [20 + handle] * 5))
    await settle()
    simulation.lanes[1].lane.drain("scale-down")
    simulation.clock.advance(1.5)
    assert await report_of(simulation) == [
        "pool   tiny (model), max_model_len 64, ready",
        "queue  requests: 1, tokens to prefill: 5; the head is 'chat-2', for 1.5 s",
        "       executor-0: 1 requests run; max_num_seqs is 1",
        "       drains: it is draining",
        "",
        "executor    device     state           running  free blocks  steps  in flight  longest stall          prefill",
        "executor-0  simulated  ACTIVE_PREFILL   1 of 1     62 of 64      1          1    0 of 250 ms  160000 tokens/s",
        "drains      simulated  DRAINING         1 of 1     62 of 64      1          1    0 of 250 ms   16000 tokens/s",
    ]


@pytest.mark.loopback
async def test_the_command_shows_a_running_scheduler(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    server = await serve()
    async with StubExecutor(server.port, "executor-7"), StubGateway(server.port) as gateway:
        await gateway.add(0, build_spec("chat-1", [20, 21, 22]))
        await gateway.until_ended(0)
        capsys.readouterr()
        target = f"127.0.0.1:{server.port}"
        assert await asyncio.to_thread(state_command, [target]) == 0
        assert "executor-7  simulated  " in capsys.readouterr().out
        assert await asyncio.to_thread(state_command, [target, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    [lane] = document["lanes"]
    assert lane["executor"]["executor_id"] == "executor-7"
    assert document["pool"]["ready"] is True
