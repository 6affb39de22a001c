"""The scheduler over loopback with a real executor on the simulated device, whose answers tell a wrong step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from executor_svc.devices.simulated import expected_tokens
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import build_spec
from tests.scheduler.real import VOCAB_SIZE, prompt_of, real_executor
from tests.scheduler.stubs import StubGateway

pytestmark = pytest.mark.loopback

Serve = Callable[..., Awaitable[SchedulerServer]]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_answers_are_right_while_requests_stop_and_leave(serve: Serve, is_async: bool) -> None:
    server = await serve(async_scheduling=is_async)
    async with real_executor(server.port), StubGateway(server.port) as gateway:
        stops = {}
        for handle in range(30):
            answer = expected_tokens(prompt_of(handle), 20, VOCAB_SIZE)
            stops[handle] = answer.index(answer[handle % 11]) + 1 if handle % 3 == 0 else 1 + handle % 20
            stop = answer[handle % 11 : handle % 11 + 1] if handle % 3 == 0 else ()
            max_tokens = 20 if stop else stops[handle]
            await gateway.add(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=max_tokens, stop=stop))
            if handle % 5 == 4:
                # Whatever it has by now: it is somewhere between the queue and its end.
                await gateway.abort(f"r{handle - 2}")
        answers = await gateway.until_ended(*range(30))
    for handle in range(30):
        expected = expected_tokens(prompt_of(handle), stops[handle], VOCAB_SIZE)
        if answers[handle].finish_reason == "abort":
            assert handle % 5 == 2
            assert answers[handle].tokens == expected[: len(answers[handle].tokens)]
        else:
            assert answers[handle].tokens == expected


async def test_two_executors_of_different_memory_serve_one_queue(serve: Serve) -> None:
    server = await serve()
    async with (
        real_executor(server.port, "large"),
        real_executor(server.port, "small", num_blocks=33),
        StubGateway(server.port) as gateway,
    ):
        await gateway.until(lambda answers: bool(answers.pools) and answers.pools[-1].num_executors == 2)
        for handle in range(24):
            await gateway.add(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=25))
        answers = await gateway.until_ended(*range(24))
    for handle in range(24):
        assert answers[handle].tokens == expected_tokens(prompt_of(handle), 25, VOCAB_SIZE)
    assert {answers[handle].started[0].executor_id for handle in range(24)} == {"large", "small"}
