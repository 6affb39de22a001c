"""Requests outlive their stream: what is open is submitted again, and no token is lost or counted twice."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.engine_client import EngineClient
from gateway.scheduler_messages import longest_silence_s
from gateway.submission import Submission, Update
from holdback.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    UnavailableError,
)
from holdback.types import FinishReason, RequestSpec, SamplingParams
from holdback.v1 import scheduler_pb2
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler

pytestmark = pytest.mark.loopback


@pytest.fixture
async def engine(scheduler: ScriptedScheduler) -> AsyncIterator[EngineClient]:
    engine = make_engine(scheduler.target)
    engine.start()
    await wait_ready(engine)
    yield engine
    await engine.close()


def make_engine(target: str, loss_timeout_s: float = 20, silence_timeout_s: float = 20) -> EngineClient:
    return EngineClient(
        target,
        model_name="toy",
        session="s" * 16,
        gateway_id="test",
        loss_timeout_s=loss_timeout_s,
        silence_timeout_s=silence_timeout_s,
    )


async def wait_ready(engine: EngineClient) -> None:
    async with asyncio.timeout(60):
        while True:
            next_change = engine.next_change
            if engine.is_ready:
                return
            await next_change.wait()


async def wait_loss(engine: EngineClient) -> UnavailableError:
    async with asyncio.timeout(60):
        while True:
            next_change = engine.next_change
            if engine.loss is not None:
                return engine.loss
            await next_change.wait()


def spec(request_id: str = "r", **fields: Any) -> RequestSpec:
    return RequestSpec(request_id, [5, 6, 7], fields.pop("sampling", SamplingParams(max_tokens=50)), **fields)


async def next_update(submission: Submission) -> Update:
    async with asyncio.timeout(60):
        async for update in submission.updates():
            return update
    raise AssertionError("no update came")


async def tokens_until(submission: Submission, count: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        taken += (await next_update(submission)).token_ids
    return taken


async def error_of(submission: Submission) -> HoldbackError:
    async with asyncio.timeout(60):
        async for update in submission.updates():
            if update.ended is not None:
                assert update.ended.error is not None
                return update.ended.error
    raise AssertionError("no end came")


async def test_a_lost_scheduler_costs_no_token_and_doubles_none(
    engine: EngineClient, scheduler: ScriptedScheduler
) -> None:
    submission = engine.submit(spec(cache_salt="salt", priority=3), MODEL)
    first = await scheduler.next_add()
    scheduler.started(first.handle, num_cached_tokens=2, queued_ms=40)
    scheduler.tokens(first.handle, 0, [10, 11])
    assert await tokens_until(submission, 2) == [10, 11]

    await scheduler.stop()
    await scheduler.start(scheduler.port)
    again = await scheduler.next_add()
    assert again.resubmission.has_started
    assert (again.spec.request_id, again.spec.generation) == ("r", 1)
    assert list(again.spec.output_token_ids) == [10, 11]
    assert (again.spec.cache_salt, again.spec.priority, again.spec.sampling.max_tokens) == ("salt", 3, 50)
    assert again.spec.queued_ms >= 40
    assert [hello.session for hello in scheduler.hellos] == ["s" * 16] * 2

    scheduler.tokens(again.handle, 1, [11, 12])
    scheduler.tokens(again.handle, 3, [13])
    scheduler.ended(again.handle, FinishReason.LENGTH)
    rest = [update async for update in submission.updates()]
    assert [token for update in rest for token in update.token_ids] == [12, 13]
    assert rest[-1].ended is not None
    assert rest[-1].ended.finish_reason is FinishReason.LENGTH


async def test_what_had_started_is_submitted_again_first(engine: EngineClient, scheduler: ScriptedScheduler) -> None:
    for name in ("waits", "runs", "came late"):
        engine.submit(spec(name), MODEL)
    adds = [await scheduler.next_add() for _ in range(3)]
    scheduler.tokens(adds[1].handle, 0, [10])
    scheduler.break_stream()
    again = [await scheduler.next_add() for _ in range(3)]
    assert [add.spec.request_id for add in again] == ["runs", "waits", "came late"]
    assert [add.resubmission.has_started for add in again] == [True, False, False]


async def test_a_request_that_no_scheduler_has_seen_is_no_resubmission(scheduler: ScriptedScheduler) -> None:
    await scheduler.stop()
    engine = make_engine(scheduler.target)
    engine.start()
    engine.submit(spec(), MODEL)
    await scheduler.start(scheduler.port)
    add = await scheduler.next_add()
    assert (add.spec.generation, add.HasField("resubmission")) == (0, False)
    await engine.close()


async def test_a_gap_breaks_the_stream_and_the_next_stream_heals_it(
    engine: EngineClient, scheduler: ScriptedScheduler
) -> None:
    submission = engine.submit(spec(), MODEL)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [10])
    scheduler.tokens(add.handle, 2, [12])
    again = await scheduler.next_add()
    assert list(again.spec.output_token_ids) == [10]
    assert again.spec.generation == 1
    scheduler.tokens(again.handle, 1, [11, 12])
    assert await tokens_until(submission, 3) == [10, 11, 12]


async def test_updates_of_one_step_are_told_apart_by_handle(engine: EngineClient, scheduler: ScriptedScheduler) -> None:
    submissions = [engine.submit(spec(f"r{index}"), MODEL) for index in range(3)]
    handles = [(await scheduler.next_add()).handle for _ in range(3)]
    assert len(set(handles)) == 3
    scheduler.send(handles=handles, output_indices=[0, 0, 0], token_ids=[10, 20, 30])
    scheduler.send(
        handles=[handles[2], handles[0], 999],
        output_indices=[1, 1, 0],
        num_new_tokens=[2, 1, 1],
        token_ids=[31, 32, 11, 9],
    )
    assert await tokens_until(submissions[2], 3) == [30, 31, 32]
    assert await tokens_until(submissions[0], 2) == [10, 11]
    assert await tokens_until(submissions[1], 1) == [20]


async def test_closing_a_request_aborts_it_and_frees_its_id(engine: EngineClient, scheduler: ScriptedScheduler) -> None:
    submission = engine.submit(spec(), MODEL)
    with pytest.raises(AlreadyExistsError, match="request_id is 'r'"):
        engine.submit(spec(), MODEL)
    submission.close()
    submission.close()
    again = engine.submit(spec(), MODEL)
    first, second = await scheduler.next_add(), await scheduler.next_add()
    assert await scheduler.next_abort() == ("r", 0)
    scheduler.tokens(first.handle, 0, [1])
    scheduler.tokens(second.handle, 0, [10])
    assert await tokens_until(again, 1) == [10]
    assert submission.take().token_ids == []


async def test_an_abort_names_the_generation_it_means(engine: EngineClient, scheduler: ScriptedScheduler) -> None:
    submission = engine.submit(spec(), MODEL)
    await scheduler.next_add()
    scheduler.break_stream()
    await scheduler.next_add()
    submission.close()
    assert await scheduler.next_abort() == ("r", 1)


async def test_a_request_whose_last_token_had_come_ends_without_being_submitted_again(
    engine: EngineClient, scheduler: ScriptedScheduler
) -> None:
    submission = engine.submit(spec(), MODEL)
    other = engine.submit(spec("other"), MODEL)
    add, _ = await scheduler.next_add(), await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [10, 2])
    scheduler.break_stream()
    assert (await scheduler.next_add()).spec.request_id == "other"
    updates = [update async for update in submission.updates()]
    assert [token for update in updates for token in update.token_ids] == [10, 2]
    assert updates[-1].ended is not None
    assert updates[-1].ended.finish_reason is FinishReason.STOP
    assert other.ended is None


async def test_a_deadline_that_passes_without_a_scheduler_ends_the_request(scheduler: ScriptedScheduler) -> None:
    await scheduler.stop()
    engine = make_engine(scheduler.target)
    engine.start()
    submission = engine.submit(spec(deadline_ms=1), MODEL)
    later = engine.submit(spec("later", deadline_ms=60_000), MODEL)
    await scheduler.start(scheduler.port)
    assert isinstance(await error_of(submission), DeadlineExceededError)
    add = await scheduler.next_add()
    assert add.spec.request_id == "later"
    assert add.spec.deadline_ms < 60_000
    assert later.ended is None
    await engine.close()


async def test_requests_end_when_the_scheduler_stays_away_and_new_ones_are_refused_until_it_is_back(
    scheduler: ScriptedScheduler,
) -> None:
    engine = make_engine(scheduler.target, loss_timeout_s=0.2)
    engine.start()
    await wait_ready(engine)
    submission = engine.submit(spec(), MODEL)
    await scheduler.next_add()
    await scheduler.stop()
    error = await error_of(submission)
    assert isinstance(error, UnavailableError)
    assert error.reason is ErrorReason.NO_SCHEDULER
    assert error.message == "the scheduler of model 'toy' could not be reached for 0.2 s"
    assert not engine.is_ready
    with pytest.raises(UnavailableError):
        engine.submit(spec(), MODEL)
    await scheduler.start(scheduler.port)
    await wait_ready(engine)
    engine.submit(spec(), MODEL)
    assert (await scheduler.next_add()).spec.generation == 0
    await engine.close()


async def test_a_short_loss_is_not_unready(engine: EngineClient, scheduler: ScriptedScheduler) -> None:
    next_change = engine.next_change
    await scheduler.stop()
    await asyncio.wait_for(next_change.wait(), 60)
    assert engine.is_ready


@pytest.mark.case("B59")
async def test_a_scheduler_that_freezes_is_lost_though_its_connection_stays(scheduler: ScriptedScheduler) -> None:
    scheduler.heartbeat_interval_s = 0.05
    engine = make_engine(scheduler.target, loss_timeout_s=0.2, silence_timeout_s=1)
    engine.start()
    await wait_ready(engine)
    submission = engine.submit(spec(), MODEL)
    await scheduler.next_add()
    scheduler.freeze()
    error = await error_of(submission)
    assert error.reason is ErrorReason.NO_SCHEDULER
    assert not engine.is_ready
    scheduler.thaw()
    await wait_ready(engine)
    engine.submit(spec("again"), MODEL)
    assert (await scheduler.next_add()).spec.request_id == "again"
    await engine.close()


async def test_a_short_freeze_costs_no_token(scheduler: ScriptedScheduler) -> None:
    scheduler.heartbeat_interval_s = 0.05
    engine = make_engine(scheduler.target, silence_timeout_s=1)
    engine.start()
    await wait_ready(engine)
    submission = engine.submit(spec(), MODEL)
    first = await scheduler.next_add()
    scheduler.tokens(first.handle, 0, [10, 11])
    assert await tokens_until(submission, 2) == [10, 11]
    next_change = engine.next_change
    scheduler.freeze()
    await asyncio.wait_for(next_change.wait(), 60)
    scheduler.thaw()
    again = await scheduler.next_add()
    assert list(again.spec.output_token_ids) == [10, 11]
    assert again.spec.generation == 1
    await engine.close()


async def test_heartbeats_keep_a_stream_on_which_nothing_else_comes(scheduler: ScriptedScheduler) -> None:
    scheduler.heartbeat_interval_s = 0.05
    engine = make_engine(scheduler.target, silence_timeout_s=2)
    engine.start()
    await wait_ready(engine)
    await scheduler.until_heartbeats(50)  # in more than 2 s
    assert engine.is_connected
    assert len(scheduler.hellos) == 1
    await engine.close()


def test_a_scheduler_of_an_older_version_may_be_silent() -> None:
    accepted = scheduler_pb2.GatewayAccepted()
    assert longest_silence_s(accepted, 10) is None
    accepted.heartbeat_interval_ms = 60_000
    assert longest_silence_s(accepted, 10) == 180
    accepted.heartbeat_interval_ms = 1_000
    assert longest_silence_s(accepted, 10) == 10


async def test_a_scheduler_that_was_never_there_is_a_loss_after_the_timeout() -> None:
    engine = make_engine("127.0.0.1:1", loss_timeout_s=0.1)
    engine.start()
    submission = engine.submit(spec(), MODEL)
    assert (await wait_loss(engine)).reason is ErrorReason.NO_SCHEDULER
    assert isinstance(await error_of(submission), UnavailableError)
    await engine.close()


async def test_another_model_does_not_continue_an_answer(engine: EngineClient, scheduler: ScriptedScheduler) -> None:
    submission = engine.submit(spec(), MODEL)
    await scheduler.next_add()
    scheduler.set_model(dataclasses.replace(MODEL, fingerprint="toy-2"))
    error = await error_of(submission)
    assert isinstance(error, FailedPreconditionError)
    assert "toy-2" in error.message
    assert await scheduler.next_abort() == ("r", 0)


async def test_a_scheduler_of_another_protocol_is_not_used(scheduler: ScriptedScheduler) -> None:
    scheduler.protocol_major = 9
    engine = make_engine(scheduler.target, loss_timeout_s=0.3)
    engine.start()
    engine.submit(spec(), MODEL)
    await wait_loss(engine)
    async with asyncio.timeout(60):
        while not scheduler.hellos:  # noqa: ASYNC110 - nobody tells of them, and no time need pass
            await asyncio.sleep(0)
    assert scheduler.adds.empty()
    await engine.close()


async def test_lists_that_do_not_fit_each_other_break_the_stream(
    engine: EngineClient, scheduler: ScriptedScheduler
) -> None:
    engine.submit(spec(), MODEL)
    add = await scheduler.next_add()
    scheduler.send(handles=[add.handle], output_indices=[0], token_ids=[1, 2])
    assert (await scheduler.next_add()).spec.generation == 1


async def test_log_probabilities_that_come_twice_for_a_token_break_the_stream(
    engine: EngineClient, scheduler: ScriptedScheduler
) -> None:
    engine.submit(spec(), MODEL)
    add = await scheduler.next_add()
    twice = [scheduler_pb2.UpdateLogprobs(token_index=0)] * 2
    scheduler.send(handles=[add.handle], output_indices=[0], token_ids=[1], logprobs=twice)
    assert (await scheduler.next_add()).spec.generation == 1


async def test_closing_ends_what_is_open(scheduler: ScriptedScheduler) -> None:
    engine = make_engine(scheduler.target)
    engine.start()
    submission = engine.submit(spec(), MODEL)
    await engine.close()
    assert (await error_of(submission)).reason is ErrorReason.SHUTTING_DOWN
