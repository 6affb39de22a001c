"""What a scheduler may send wrong, and what it is told: the stream ends with the reason, the executor starts anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from holdback import rpc
from holdback.codec import StepEncoder
from holdback.errors import ErrorReason, FailedPreconditionError, HoldbackError, InternalError
from holdback.v1 import executor_pb2, types_pb2
from tests.executor.builders import Steps, build_device
from tests.executor.serving import ANSWER, PROMPT, running
from tests.executor.stub_scheduler import Drive, StubScheduler

pytestmark = pytest.mark.loopback

Message = executor_pb2.SchedulerOutput


def changed(name: str, value: object) -> Callable[[Message], None]:
    return lambda message: setattr(message, name, value)


def added(name: str, *values: int) -> Callable[[Message], None]:
    return lambda message: getattr(message, name).extend(values)


def in_new(name: str, value: int) -> Callable[[Message], None]:
    return lambda message: setattr(message.new_requests[0], name, value)


def in_cached(name: str, *values: int) -> Callable[[Message], None]:
    """Replaces a list of the known requests."""

    def change(message: Message) -> None:
        message.cached_requests.ClearField(name)  # type: ignore[arg-type]
        getattr(message.cached_requests, name).extend(values)

    return change


def with_blocks(*block_ids: int) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        message.new_requests[0].block_ids[:] = block_ids

    return change


def with_counts(scheduled: int, padded: int) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        message.num_scheduled_tokens[:] = [scheduled]
        message.num_scheduled_tokens_padded[:] = [padded]

    return change


def with_new_block(message: Message) -> None:
    """The block that the request has already."""
    message.cached_requests.new_block_rows.append(0)
    message.cached_requests.new_block_ids.append(1)


def same_again(message: Message) -> None:
    message.cached_requests.Clear()
    message.cached_requests.same_as_last_decode = True


def token_outside(message: Message) -> None:
    message.new_requests[0].spec.prompt_token_ids[1] = 116


def two_biases(message: Message) -> None:
    for bias in (1.0, 1.0):
        message.new_requests[0].spec.sampling.logit_bias.add(token_id=5, bias=bias)


# Each is the change of a good step: a new request (step 1), or a decode of the one that runs (step 2).
OF_A_NEW_REQUEST = [
    (changed("step", 0), "step is 0; allowed: 1, the next one"),
    (changed("step", 2), "step is 2; allowed: 1, the next one"),
    (changed("step", 2**64 - 1), "step is 18446744073709551615; allowed: 1, the next one"),
    (changed("phase", types_pb2.PHASE_DECODE), "num_scheduled_tokens is 1; allowed: 0 entries"),
    (changed("phase", types_pb2.PHASE_UNSPECIFIED), "phase is none; allowed: prefill or decode"),
    (added("finished_handles", 7), "finished_handles is 7; allowed: a handle that was told and has not finished"),
    (added("finished_handles", 0, 0), "finished_handles is 0; allowed: a handle that was told and has not finished"),
    (added("num_scheduled_tokens", 1), "num_scheduled_tokens is 2; allowed: 1 entries"),
    (added("num_scheduled_tokens_padded", 4), "num_scheduled_tokens_padded is 2; allowed: 1 entries"),
    (in_new("handle", 0), "new_requests.handle is 0; allowed: 1, the next one"),
    (in_new("slot", 0), "slot is 0; allowed: one that no running request has"),
    (in_new("slot", 4), "slot is 4; allowed: [0, 4)"),
    (in_new("num_computed_tokens", 4), "num_computed_tokens is 4; allowed: a multiple of 4 below 3"),
    (token_outside, "token id is 116; allowed: [0, 116)"),
    (two_biases, "sampling.logit_bias[1].token_id is 5; allowed: at most one entry per token"),
    (with_blocks(0), "block is 0; allowed: [1, 17); block 0 is the null block"),
    (with_blocks(17), "block is 17; allowed: [1, 17)"),
    (with_blocks(1), "block to write to is 1; allowed: one that no block table has"),
    (with_blocks(2, 2), "block to write to is 2; allowed: one that no block table has"),
    (with_blocks(), "tokens in row 0 is 3; allowed: at most 0, what its blocks hold"),
    (with_counts(0, 4), "num_scheduled_tokens of 'b#1' is 0; allowed: [1, 3]"),
    (with_counts(5, 4), "num_scheduled_tokens of 'b#1' is 5; allowed: [1, 3]"),
    (with_counts(2**32 - 1, 4), "num_scheduled_tokens of 'b#1' is 4294967295; allowed: [1, 3]"),
    (with_counts(3, 5), "prefill shape is 5; allowed: the declared buckets [4, 8]"),
    (with_counts(3, 2**32 - 1), "prefill shape is 4294967295; allowed: the declared buckets [4, 8]"),
]
OF_A_DECODE = [
    (with_new_block, "block to write to is 1; allowed: one that no block table has"),
    (in_cached("handles", 7), "cached_requests.handles is 7; allowed: handles that were told and have not finished"),
    (in_cached("handles", 0, 0), "cached_requests.num_computed_tokens is 1; allowed: 2 entries"),
    (in_cached("num_computed_tokens", 2), "num_computed_tokens of 'a#0' is 2; allowed: 3, what this executor computed"),
    (in_cached("new_block_rows", 0), "cached_requests.new_block_ids is 0; allowed: 1 entries"),
    (in_cached("new_block_ids", 5), "cached_requests.new_block_ids is 1; allowed: 0 entries"),
    (same_again, "cached_requests.same_as_last_decode is True; allowed: false before the first decode"),
    (changed("phase", types_pb2.PHASE_PREFILL), "num_scheduled_tokens is 0; allowed: 1 entries"),
    (added("num_scheduled_tokens", 1), "num_scheduled_tokens is 1; allowed: 0 entries"),
    (added("num_scheduled_tokens_padded", 1), "num_scheduled_tokens_padded is 1; allowed: 0 entries"),
]


async def refusal_of(change: Callable[[Message], None], drive: Drive, *, is_new: bool) -> HoldbackError:
    """What the stream ends with when, behind a good step in flight, a changed one comes. The good one is answered."""
    steps, encoder = Steps(), StepEncoder()
    good = encoder.encode(steps.new("a", PROMPT, slot=0, blocks=[1]))
    bad = encoder.encode(steps.new("b", PROMPT, slot=1, blocks=[2]) if is_new else steps.decode("a"))
    change(bad)
    await drive.accepted()
    for message in (good, bad):
        await drive.call.write(executor_pb2.ExecuteRequest(step=message))
    assert list((await drive.next()).output.sampled_token_ids) == ANSWER[:1]
    with pytest.raises(HoldbackError) as raised:
        await drive.next()
    return raised.value


@pytest.mark.parametrize(("cases", "is_new"), [(OF_A_NEW_REQUEST, True), (OF_A_DECODE, False)], ids=["new", "decode"])
async def test_a_step_that_cannot_be_right_is_refused_with_what_is_wrong_and_the_executor_starts_anew(
    cases: list[tuple[Callable[[Message], None], str]], is_new: bool, scheduler: StubScheduler
) -> None:
    device = build_device()
    async with running(scheduler.target, device):
        leases = set()
        for change, message in cases:
            registered = await scheduler.registrations.get()
            leases.add(registered.info.lease)
            assert not device.kv_token_ids.any()
            async with Drive(registered.info) as drive:
                error = await refusal_of(change, drive, is_new=is_new)
            assert re.search(re.escape(message), error.message), (message, error.message)
            if message.startswith("step is"):
                assert (type(error), error.reason) == (FailedPreconditionError, ErrorReason.STEP_OUT_OF_ORDER)
            else:
                assert type(error) is InternalError
        assert len(leases) == len(cases)
        last = await scheduler.registrations.get()
        async with Drive(last.info) as drive:
            await drive.accepted()
            assert await drive.run(Steps().new("r", PROMPT)) == ANSWER[:1]


async def test_a_second_open_ends_the_stream(scheduler: StubScheduler) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            await drive.call.write(executor_pb2.ExecuteRequest(open=executor_pb2.OpenExecution(lease=info.lease)))
            with pytest.raises(InternalError, match="the step: request is 'open'; allowed: step, after the one open"):
                await drive.next()


NO_MESSAGE = b"\xff\xff\xff\xff"


async def test_bytes_that_are_no_message_end_the_stream_behind_what_is_right(
    scheduler: StubScheduler, steps: Steps
) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        step = StepEncoder().encode(steps.new("r", PROMPT))
        opening = executor_pb2.OpenExecution(lease=info.lease, protocol_version=info.protocol_version)
        good = executor_pb2.ExecuteRequest(open=opening), executor_pb2.ExecuteRequest(step=step)
        async with rpc.create_channel(f"127.0.0.1:{info.port}") as channel:
            call = open_execute(channel)
            for content in (*map(executor_pb2.ExecuteRequest.SerializeToString, good), NO_MESSAGE):
                await call.write(content)
            answers = [executor_pb2.ExecuteResponse.FromString(await call.read()) for _ in range(3)]
            assert [answer.WhichOneof("response") for answer in answers] == ["accepted", "output", "failed"]
            assert "the step: DecodeError: " in answers[-1].failed.message
        last = (await scheduler.registrations.get()).info
        async with Drive(last) as drive:
            await drive.accepted()
            assert await drive.run(Steps().new("r", PROMPT)) == ANSWER[:1]


async def test_bytes_that_are_no_message_open_nothing(scheduler: StubScheduler) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with rpc.create_channel(f"127.0.0.1:{info.port}") as channel:
            call = open_execute(channel)
            await call.write(NO_MESSAGE)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "the first message cannot be read" in await call.details()


def open_execute(channel: grpc.aio.Channel) -> Any:
    """`Execute`, in bytes both ways."""
    return channel.stream_stream("/holdback.v1.ExecutorService/Execute")()


async def test_a_message_of_a_newer_scheduler_is_passed_over(scheduler: StubScheduler, steps: Steps) -> None:
    """Field 9 is not known here. More of them than are read ahead hold nothing up."""
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            for _ in range(20):
                await drive.call.write(executor_pb2.ExecuteRequest.FromString(bytes([9 << 3, 1])))
            assert await drive.run(steps.new("r", PROMPT)) == ANSWER[:1]
