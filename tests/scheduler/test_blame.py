"""A step that fails costs a move to those in it alone, whichever of the executor's two streams ends first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import structlog

from executor_svc.devices.simulated import expected_tokens
from holdback.errors import InternalError, UnavailableError
from holdback.v1 import scheduler_pb2
from scheduler_svc import executors
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import answer_of, build_spec
from tests.scheduler.real import VOCAB_SIZE, prompt_of, real_executor
from tests.scheduler.stubs import WAIT_S, StubExecutor, StubGateway

pytestmark = pytest.mark.loopback

Serve = Callable[..., Awaitable[SchedulerServer]]


async def until_state(gateway: StubGateway, condition: Callable[[scheduler_pb2.GetStateResponse], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition(await gateway.stub.GetState(scheduler_pb2.GetStateRequest())):
            pass


async def hang_with_two_steps(executor: StubExecutor, gateway: StubGateway) -> None:
    """One request in each of two steps in flight."""
    executor.hangs_after = 0
    await gateway.add(0, build_spec("first", [20], max_tokens=2))
    await gateway.add(1, build_spec("second", [21], max_tokens=2))
    await executor.hangs()
    await until_state(gateway, lambda state: state.lanes[0].num_steps_in_flight == 2)


async def until_nothing_is_sent(gateway: StubGateway) -> None:
    await until_state(gateway, lambda state: all(lane.is_draining for lane in state.lanes))


@pytest.mark.parametrize("has_answered", [False, True], ids=["first step", "second step"])
async def test_a_failure_that_comes_after_the_end_of_the_registration_is_heard(
    serve: Serve, has_answered: bool
) -> None:
    server = await serve(max_request_moves=0)
    async with StubGateway(server.port) as gateway:
        with structlog.testing.capture_logs() as lines:
            async with StubExecutor(server.port, "fails") as executor:
                await hang_with_two_steps(executor, gateway)
                executor.leave()
                await until_nothing_is_sent(gateway)
                if has_answered:  # then the second step is the oldest one in flight
                    executor.fails_after = 1
                executor.fails_with = InternalError("the device is broken")
                executor.may_step.set()
                blamed, other = (1, 0) if has_answered else (0, 1)
                await gateway.until_ended(blamed)
        assert gateway.answers[blamed].error_reason == "TOO_MANY_MOVES"
        async with StubExecutor(server.port, "works"):
            await gateway.until_ended(other)
    assert gateway.answers[other].tokens == answer_of([20 + other], 2)
    assert [line["why"] for line in lines if line["event"] == "executor_lost"] == [
        "the lane was reset: the device is broken"
    ]


async def test_a_step_that_fails_while_its_executor_drains_is_blamed_too(serve: Serve) -> None:
    server = await serve(max_request_moves=0)
    async with StubGateway(server.port) as gateway:
        async with StubExecutor(server.port, "fails") as executor:
            await hang_with_two_steps(executor, gateway)
            await executor.drain()
            await until_nothing_is_sent(gateway)
            executor.fails_with = InternalError("the device is broken")
            executor.may_step.set()
            await gateway.until_ended(0)
        assert gateway.answers[0].error_reason == "TOO_MANY_MOVES"
        async with StubExecutor(server.port, "works"):
            await gateway.until_ended(1)
    assert gateway.answers[1].tokens == answer_of([21], 2)


async def test_a_failure_has_its_own_reason_though_the_registration_ends_in_the_same_moment(serve: Serve) -> None:
    server = await serve(max_request_moves=0)
    with structlog.testing.capture_logs() as lines:
        for number in range(10):
            async with StubGateway(server.port) as gateway, StubExecutor(server.port) as executor:
                executor.fails_with, executor.leaves_too = InternalError(f"fault {number}"), True
                await gateway.add(0, build_spec("a", [20], max_tokens=2))
                await gateway.until_ended(0)
    reasons = [line["why"] for line in lines if line["event"] == "executor_lost"]
    assert reasons == [f"the lane was reset: fault {number}" for number in range(10)]


@pytest.mark.parametrize("garbage", [b"\xff\xff", b"\x22\x05\x12\x03\xff\xfe\xfd"], ids=["no field", "no UTF-8"])
async def test_bytes_that_are_no_message_are_blamed_on_the_oldest_step(
    serve: Serve, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve(max_request_moves=0)
    async with StubGateway(server.port) as gateway:
        with structlog.testing.capture_logs() as lines:
            async with StubExecutor(server.port, "garbles") as executor:
                await hang_with_two_steps(executor, gateway)
                executor.says_bytes = garbage
                executor.may_step.set()
                await gateway.until_ended(0)
        assert gateway.answers[0].error_reason == "TOO_MANY_MOVES"
        async with StubExecutor(server.port, "works"):
            await gateway.until_ended(1)
    assert gateway.answers[1].tokens == answer_of([21], 2)
    (why,) = [line["why"] for line in lines if line["event"] == "executor_lost"]
    assert why.startswith("the lane was reset: a message of the executor cannot be read: ")
    assert [record for record in caplog.records if record.exc_info] == []  # gRPC would log a traceback


async def test_the_end_of_the_steps_is_logged_beside_that_of_the_registration(serve: Serve) -> None:
    server = await serve()
    async with StubGateway(server.port) as gateway:
        with structlog.testing.capture_logs() as lines:
            async with StubExecutor(server.port) as executor:
                await hang_with_two_steps(executor, gateway)
                executor.leave()
                await until_nothing_is_sent(gateway)
                executor.ends_with = UnavailableError("the scheduler was silent for 5 s")
                executor.may_step.set()
                await until_state(gateway, lambda state: not state.lanes)
    assert [line["why"] for line in lines if line["event"] == "executor_lost"] == [
        "its registration was cancelled, and its Execute stream ended: the scheduler was silent for 5 s"
    ]


async def test_an_executor_that_says_no_more_is_not_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "LAST_WORDS_S", 0.05)
    server = await serve(max_request_moves=0)
    async with StubGateway(server.port) as gateway, StubExecutor(server.port) as executor:
        await hang_with_two_steps(executor, gateway)
        executor.leave()
        answers = await gateway.until_ended(0, 1)
    # It may have died in either step.
    assert {answers[handle].error_reason for handle in range(2)} == {"TOO_MANY_MOVES"}


async def test_requests_beside_those_that_fail_each_device_are_never_to_blame(serve: Serve) -> None:
    server = await serve(max_request_moves=0)
    bad_token = VOCAB_SIZE - 1
    faulty = {"simulated_error_token_id": bad_token, "simulated_decode_us": 2000}
    with structlog.testing.capture_logs() as lines:
        async with (
            real_executor(server.port, "one", **faulty),
            real_executor(server.port, "two", **faulty),
            StubGateway(server.port) as gateway,
        ):
            await gateway.until(lambda answers: bool(answers.pools) and answers.pools[-1].num_executors == 2)
            for handle in range(6):
                await gateway.add(handle, build_spec(f"good {handle}", prompt_of(handle), max_tokens=30))
            for handle in range(100, 104):
                await gateway.add(handle, build_spec(f"bad {handle}", [20, 21, bad_token, 22], max_tokens=5))
                await gateway.until_ended(handle)
            answers = await gateway.until_ended(*range(6))
    for handle in range(6):
        assert answers[handle].tokens == expected_tokens(prompt_of(handle), 30, VOCAB_SIZE)
    assert {answers[handle].error_reason for handle in range(100, 104)} == {"TOO_MANY_MOVES"}
    reasons = [line["why"] for line in lines if line["event"] == "executor_lost"]
    assert len(reasons) == 4
    assert all(reason.endswith(f"the simulated device fails on token {bad_token}") for reason in reasons)
