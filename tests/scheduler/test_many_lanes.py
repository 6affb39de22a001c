"""Several gateways and executors over real streams: they come, go, hang and come back, and nobody loses a token."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from executor_svc.devices.simulated import expected_tokens
from holdback import rpc
from holdback.errors import ErrorReason, FailedPreconditionError, InternalError
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.server import SchedulerServer
from tests.scheduler.parts import answer_of, build_spec
from tests.scheduler.real import VOCAB_SIZE, prompt_of, real_executor
from tests.scheduler.stubs import WAIT_S, StubExecutor, StubGateway

pytestmark = pytest.mark.loopback

Serve = Callable[..., Awaitable[SchedulerServer]]


async def num_executors(gateway: StubGateway, count: int) -> None:
    """Waits until the pool has so many."""
    await gateway.until(lambda answers: bool(answers.pools) and answers.pools[-1].num_executors == count)


async def get_load(server: SchedulerServer) -> scheduler_pb2.GetLoadResponse:
    async with rpc.create_channel(f"127.0.0.1:{server.port}") as channel:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=WAIT_S)


def spread(*gateways: StubGateway) -> Counter[str]:
    """How many requests each executor began."""
    answers = itertools.chain.from_iterable(gateway.answers.by_handle.values() for gateway in gateways)
    return Counter(answer.started[0].executor_id for answer in answers if answer.started)


class Caller:
    """Two gateways that send requests one after the other, in turn, each with a prompt of its own."""

    def __init__(self, *gateways: StubGateway) -> None:
        self._gateways = gateways
        self._numbers = itertools.count()

    async def call(self, count: int) -> None:
        for number in itertools.islice(self._numbers, count):
            gateway = self._gateways[number % len(self._gateways)]
            await gateway.add(number, build_spec(f"r{number}", self.prompt(number), max_tokens=2))
            await gateway.until_ended(number)
            assert gateway.answers[number].tokens == answer_of(self.prompt(number), 2)

    @staticmethod
    def prompt(number: int) -> list[int]:
        return [20 + number % 100, 20 + number // 100]


@pytest.mark.case("B66")
async def test_calls_spread_evenly_over_executors_that_come_and_go(serve: Serve) -> None:
    server = await serve()
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(StubGateway(server.port, f"session of gateway {number}"))
            for number in range(2)
        ]
        executors = [
            await stack.enter_async_context(StubExecutor(server.port, f"executor-{number}")) for number in range(3)
        ]
        await num_executors(gateways[0], 3)
        caller = Caller(*gateways)
        await caller.call(90)
        assert spread(*gateways) == {"executor-0": 30, "executor-1": 30, "executor-2": 30}
        await stack.enter_async_context(StubExecutor(server.port, "executor-3"))
        await num_executors(gateways[0], 4)
        await caller.call(80)
        with_fourth = spread(*gateways)
        # It was given nothing for longest, and then takes its turn.
        assert sorted(with_fourth.values()) == [20, 50, 50, 50]
        await executors[1].drain()
        assert await executors[1].registration_ended() is None
        await num_executors(gateways[0], 3)
        await caller.call(60)
        without_second = spread(*gateways) - with_fourth
        assert without_second == {"executor-0": 20, "executor-2": 20, "executor-3": 20}


async def test_streams_of_two_gateways_go_on_while_executors_die_drain_and_come(serve: Serve) -> None:
    server = await serve(max_request_moves=10)
    async with contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(StubGateway(server.port, f"session of gateway {number}"))
            for number in range(2)
        ]
        executors = [
            await stack.enter_async_context(StubExecutor(server.port, f"executor-{number}", max_num_seqs=4))
            for number in range(3)
        ]
        await num_executors(gateways[0], 3)
        for handle in range(20):
            gateway = gateways[handle % 2]
            await gateway.add(handle, build_spec(f"r{handle}", [20 + handle] * 5, max_tokens=55))
        await gateways[0].until(lambda answers: len(answers[0].tokens) >= 10)
        await executors[0].die()
        await stack.enter_async_context(StubExecutor(server.port, "executor-3", max_num_seqs=4))
        await gateways[0].until(lambda answers: len(answers[0].tokens) >= 20)
        await executors[1].drain()
        assert await executors[1].registration_ended() is None
        for number, gateway in enumerate(gateways):
            answers = await gateway.until_ended(*range(number, 20, 2))
            for handle in range(number, 20, 2):
                assert answers[handle].tokens == answer_of([20 + handle] * 5, 55)
                assert answers[handle].finish_reason == "length"


@pytest.mark.case("B60")
async def test_a_device_that_hangs_with_its_heartbeats_alive_is_found(serve: Serve) -> None:
    # Far longer than a busy machine stops an honest step for, and the lease far longer than that.
    server = await serve(min_step_timeout_s=5, heartbeat_interval_s=0.05, lease_timeout_s=60)
    async with StubExecutor(server.port, "hangs") as hangs, StubGateway(server.port) as gateway:
        hangs.hangs_after = 4
        await hangs.joined()
        await gateway.add(0, build_spec("r", [20, 21], max_tokens=30))
        await hangs.hangs()
        beats = hangs.num_heartbeats
        error = await hangs.registration_ended()
        assert isinstance(error, InternalError)
        assert "step 4 has run for 5 s" in error.message
        assert hangs.num_heartbeats > beats
        async with StubExecutor(server.port, "second"):
            answers = await gateway.until_ended(0)
    assert answers[0].tokens == answer_of([20, 21], 30)


async def test_an_executor_that_goes_silent_loses_its_requests_to_another(serve: Serve) -> None:
    server = await serve(heartbeat_interval_s=0.05, lease_timeout_s=2)
    async with StubExecutor(server.port, "silent", is_silent=True) as silent, StubGateway(server.port) as gateway:
        silent.hangs_after = 1
        await silent.joined()
        await gateway.add(0, build_spec("r", [20, 21], max_tokens=30))
        await gateway.until(lambda answers: bool(answers[0].started))
        async with StubExecutor(server.port, "second"):
            answers = await gateway.until_ended(0)
            assert await silent.registration_ended() is not None
    assert answers[0].tokens == answer_of([20, 21], 30)


@pytest.mark.case("B60")
async def test_an_executor_that_comes_back_with_other_blocks_is_believed_and_taken_for_empty(serve: Serve) -> None:
    server = await serve()
    prompt = list(range(20, 40))
    async with StubGateway(server.port) as gateway:
        for handle, num_blocks in enumerate((65, 33, 129)):
            async with StubExecutor(server.port, "the same", num_blocks=num_blocks) as executor:
                await executor.joined()
                await num_executors(gateway, 1)
                await gateway.add(handle, build_spec(f"r{handle}", prompt, max_tokens=4))
                answers = await gateway.until_ended(handle)
                assert answers[handle].tokens == answer_of(prompt, 4)
                assert answers[handle].started[0].num_cached_tokens == 0
                state = await gateway.stub.GetState(scheduler_pb2.GetStateRequest())
                [lane] = state.lanes
                assert lane.num_usable_blocks == num_blocks - 1
                assert lane.steps[0].step == 0
            await num_executors(gateway, 0)


async def test_an_executor_that_does_not_know_its_lease_is_asked_again_and_the_pool_serves_on(serve: Serve) -> None:
    server = await serve()
    async with (
        StubExecutor(server.port, "good") as good,
        StubExecutor(server.port, "confused", refuses_with=lease_mismatch()) as confused,
        StubGateway(server.port) as gateway,
    ):
        await good.joined()
        error = await confused.registration_ended()
        assert isinstance(error, InternalError)
        assert error.reason is ErrorReason.LEASE_MISMATCH
        await gateway.add(0, build_spec(prompt=[20]))
        assert (await gateway.until_ended(0))[0].tokens == answer_of([20], 3)


def lease_mismatch() -> FailedPreconditionError:
    return FailedPreconditionError("lease is not the current one", reason=ErrorReason.LEASE_MISMATCH)


async def test_a_request_that_crashes_every_executor_ends_and_all_others_finish(serve: Serve) -> None:
    server = await serve(max_request_moves=2)
    poison = 500
    async with contextlib.AsyncExitStack() as stack:
        for number in range(2):
            executor = real_executor(server.port, f"executor-{number}", simulated_error_token_id=poison)
            await stack.enter_async_context(executor)
        gateway = await stack.enter_async_context(StubGateway(server.port))
        await num_executors(gateway, 2)
        innocent = [handle for handle in range(16) if poison not in expected(handle)]
        for handle in innocent[:6]:
            await gateway.add(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=25))
        await gateway.add(100, build_spec("poison", [20, poison, 22], max_tokens=25))
        for handle in innocent[6:]:
            await gateway.add(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=25))
        answers = await gateway.until_ended(100, *innocent)
    assert len(innocent) > 10
    assert (answers[100].finish_reason, answers[100].error_reason) == ("error", "TOO_MANY_MOVES")
    assert answers[100].tokens == []
    for handle in innocent:
        assert answers[handle].tokens == expected(handle)


def expected(handle: int) -> list[int]:
    return expected_tokens(prompt_of(handle), 25, VOCAB_SIZE)


async def test_a_backlog_moves_to_a_new_executor_at_once(serve: Serve) -> None:
    server = await serve()
    async with StubExecutor(server.port, "full", max_num_seqs=1) as full, StubGateway(server.port) as gateway:
        await full.joined()
        full.may_step.clear()
        for handle in range(8):
            await gateway.add(handle, build_spec(f"r{handle}", [20 + handle]))
        await gateway.until(lambda answers: bool(answers[0].started))
        async with StubExecutor(server.port, "new", max_num_seqs=4):
            answers = await gateway.until_ended(*range(1, 8))
        assert {answers[handle].started[0].executor_id for handle in range(1, 8)} == {"new"}
        assert answers.started_order == list(range(8))


# ---- clients that leave ----


@pytest.mark.case("B56")
async def test_a_deadline_over_the_wire_ends_a_running_request_and_frees_all(serve: Serve) -> None:
    server = await serve()
    executor = StubExecutor(server.port, max_model_len=8100, num_blocks=8101)
    async with executor, StubGateway(server.port) as gateway:
        await num_executors(gateway, 1)
        await gateway.add(0, build_spec("r", [20], max_tokens=8000, deadline_ms=1500))
        answers = await gateway.until_ended(0)
        load = await get_load(server)
    assert (answers[0].finish_reason, answers[0].error_reason) == ("abort", "DEADLINE_EXCEEDED")
    assert 0 < len(answers[0].tokens) < 8000
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 0, 0)


@pytest.mark.case("B56")
async def test_a_gateway_that_vanishes_while_its_requests_wait_leaves_nothing(serve: Serve) -> None:
    server = await serve()
    async with (
        StubExecutor(server.port, max_num_seqs=1) as executor,
        StubGateway(server.port, "a session of 16 bytes") as watcher,
    ):
        executor.hangs_after = 1
        await executor.joined()
        async with StubGateway(server.port) as gateway:
            for handle in range(5):
                await gateway.add(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=40))
            await executor.hangs()
            await watcher.until_load(lambda load: load.num_running + load.num_waiting == 5)
        await watcher.until_load(lambda load: sum(entry.count for entry in load.finished) == 5)
        await watcher.add(0, build_spec("after", [90], max_tokens=2))
        executor.may_step.set()
        assert (await watcher.until_ended(0))[0].tokens == answer_of([90], 2)
        load = await get_load(server)
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 0, 0)
    assert {(entry.finish_reason, entry.count) for entry in load.finished} == {(3, 5), (2, 1)}
