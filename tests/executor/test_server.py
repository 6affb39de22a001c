"""The executor process on loopback, driven by a scheduler that only does what the test says."""

from __future__ import annotations

import asyncio
import threading

import pytest

from executor_svc import server
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, SimulatedLatencies, expected_tokens
from holdback.errors import ConfigError, ErrorReason, FailedPreconditionError, InternalError
from holdback.v1 import executor_pb2, scheduler_pb2
from tests.executor.builders import VOCAB_SIZE, Steps, build_device
from tests.executor.serving import (
    ANSWER,
    NOT_SERVING,
    PROMPT,
    SERVING,
    drop_all,
    free_port,
    health_of,
    running,
    watch_launches,
)
from tests.executor.stub_scheduler import Drive, StubScheduler

pytestmark = pytest.mark.loopback


async def test_an_executor_says_what_it_is(scheduler: StubScheduler) -> None:
    device = build_device(latencies=SimulatedLatencies(prefill_us_per_token=10, decode_us=7))
    async with running(scheduler.target, device):
        info = (await scheduler.registrations.get()).info
    assert info.executor_id == "under-test"
    assert 16 <= len(info.lease) <= 64
    assert info.protocol_version.major == 1
    assert info.device == "simulated"
    assert (info.model.fingerprint, info.model.vocab_size, info.model.max_model_len) == ("simulated", VOCAB_SIZE, 32)
    assert list(info.limits.num_batched_tokens_buckets) == [4, 8]
    assert list(info.limits.num_seqs_buckets) == [1, 2, 4]
    assert (info.limits.block_size, info.limits.num_blocks, info.limits.max_steps_in_flight) == (4, 17, 2)
    assert [(entry.size, entry.context, entry.latency_us) for entry in info.latencies] == [
        *((4, 0, 40), (4, 28, 40), (8, 0, 80), (8, 24, 80)),
        *((1, 1, 7), (1, 32, 7), (2, 1, 7), (2, 32, 7), (4, 1, 7), (4, 32, 7)),
    ]


async def test_steps_are_run_in_order_and_answered_one_by_one(scheduler: StubScheduler, steps: Steps) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            await drive.send(steps.new("r", PROMPT, blocks=[3, 5]))
            await drive.send(steps.decode("r"))
            await drive.send(steps.decode("r"))
            outputs = [(await drive.next()).output for _ in range(3)]
    assert [output.step for output in outputs] == [0, 1, 2]
    assert [list(output.sampled_token_ids) for output in outputs] == [[token] for token in ANSWER]
    assert all(output.timings.device_us >= 1 for output in outputs)


@pytest.mark.case("B13")
@pytest.mark.parametrize("num_outputs", [0, 1, 2, 5])
async def test_a_slot_and_blocks_given_away_with_a_late_step_in_flight_serve_their_next_owner(
    num_outputs: int, scheduler: StubScheduler, steps: Steps
) -> None:
    """All is sent at once, as a scheduler does that never waits: the late step is the one that samples output n."""
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        old, other = [90, 91, 92], [30, 31]
        async with Drive(info) as drive:
            await drive.accepted()
            await drive.send(steps.new("other", other, slot=1, blocks=[5, 6, 7]))
            await drive.send(steps.new("old", old, slot=0, blocks=[1, 2, 3]))
            for _ in range(num_outputs):
                await drive.send(steps.decode("other", "old"))
            await drive.send(steps.new("new", PROMPT, slot=0, blocks=[1, 2], finished=["old"]))
            for _ in range(2):
                await drive.send(steps.decode("new", "other"))
            outputs = [list((await drive.next()).output.sampled_token_ids) for _ in range(num_outputs + 5)]
    others = expected_tokens(other, num_outputs + 3, VOCAB_SIZE)
    olds = expected_tokens(old, num_outputs + 1, VOCAB_SIZE)
    assert outputs == [
        *([others[0]], [olds[0]]),
        *([others[step], olds[step]] for step in range(1, num_outputs + 1)),
        *(ANSWER[:1], [ANSWER[1], others[num_outputs + 1]], [ANSWER[2], others[num_outputs + 2]]),
    ]


async def test_an_executor_is_alive_while_it_loads_and_ready_once_accepted(scheduler: StubScheduler) -> None:
    loaded = threading.Event()

    def load() -> SimulatedDevice:
        loaded.wait(30)
        return build_device()

    health_port = free_port()
    async with running(scheduler.target, load, health_port=health_port):
        assert await health_of(health_port, "liveness") == SERVING
        assert await health_of(health_port, "readiness") == NOT_SERVING
        assert await health_of(health_port, "startup") == NOT_SERVING
        assert scheduler.registrations.empty()
        loaded.set()
        registered = await scheduler.registrations.get()
        await health_of(health_port, "readiness", SERVING)
        assert await health_of(health_port, "startup") == SERVING
        scheduler.refusal = InternalError("not now")
        registered.end.set()
        await health_of(health_port, "readiness", NOT_SERVING)
        assert await health_of(health_port, "startup") == SERVING


async def test_heartbeats_go_both_ways(scheduler: StubScheduler) -> None:
    scheduler.heartbeat_interval_ms = 10
    async with running(scheduler.target, build_device()):
        registered = await scheduler.registrations.get()
        numbers = [(await registered.received.get()).heartbeat.number for _ in range(3)]
    assert numbers == [0, 1, 2]


@pytest.mark.parametrize("lease", ["", "x" * 32, "é"])
async def test_another_lease_is_refused(lease: str, scheduler: StubScheduler) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info, lease=lease) as drive:
            with pytest.raises(FailedPreconditionError, match="lease is not the current one") as raised:
                await drive.next()
        assert raised.value.reason is ErrorReason.LEASE_MISMATCH
        async with Drive(info) as drive:  # the right one is none the worse for it
            await drive.accepted()


async def test_a_lease_has_one_stream(scheduler: StubScheduler, steps: Steps) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as first:
            await first.accepted()
            async with Drive(info) as second:
                with pytest.raises(FailedPreconditionError, match="lease has had its Execute stream"):
                    await second.next()
            assert await first.run(steps.new("r", PROMPT)) == ANSWER[:1]


async def test_another_protocol_version_is_refused_with_both_numbers(scheduler: StubScheduler) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info, major=2) as drive:
            with pytest.raises(FailedPreconditionError, match=r"protocol_version.major is 2; allowed: 1") as raised:
                await drive.next()
        assert raised.value.reason is ErrorReason.PROTOCOL_MISMATCH


async def test_a_stream_before_registration_is_refused(scheduler: StubScheduler) -> None:
    loaded = threading.Event()

    def load() -> SimulatedDevice:
        loaded.wait(30)
        return build_device()

    port, health_port = free_port(), free_port()
    async with running(scheduler.target, load, port=port, health_port=health_port):
        await health_of(health_port, "liveness", SERVING)
        async with Drive(scheduler_pb2.ExecutorInfo(port=port, lease="0" * 32)) as drive:
            with pytest.raises(FailedPreconditionError, match="not registered yet"):
                await drive.next()
        loaded.set()


@pytest.mark.case("B60")
@pytest.mark.parametrize("how", ["ended", "cancelled", "silent"])
async def test_a_registration_that_is_lost_drops_the_stream_and_voids_memory(
    how: str, scheduler: StubScheduler, steps: Steps
) -> None:
    scheduler.is_silent = how == "silent"
    if scheduler.is_silent:
        scheduler.lease_timeout_ms = 2000
    device = build_device()
    async with running(scheduler.target, device):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            assert await drive.run(steps.new("r", PROMPT)) == ANSWER[:1]
            assert device.kv_token_ids.any()
            if how != "silent":
                registered.is_cancelled = how == "cancelled"
                registered.end.set()
            with pytest.raises(FailedPreconditionError, match="the lease ended: the scheduler") as raised:
                await drive.next()
            assert raised.value.reason is ErrorReason.LEASE_MISMATCH
            scheduler.is_silent = False
        again = await scheduler.registrations.get()
        assert not device.kv_token_ids.any()
        assert not device.last_token.any()
        assert again.info.lease != registered.info.lease
        async with Drive(again.info) as drive:
            await drive.accepted()
            assert await drive.run(Steps().new("r", PROMPT)) == ANSWER[:1]
        async with Drive(again.info, lease=registered.info.lease) as stale:
            with pytest.raises(FailedPreconditionError, match="lease is not the current one"):
                await stale.next()


async def test_a_stream_that_the_scheduler_drops_ends_its_lease(scheduler: StubScheduler, steps: Steps) -> None:
    device = build_device()
    async with running(scheduler.target, device):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            await drive.run(steps.new("r", PROMPT))
        again = await scheduler.registrations.get()
        assert registered.gone.is_set()
        assert again.info.lease != registered.info.lease
        assert not device.kv_token_ids.any()


@pytest.mark.parametrize(("number", "message"), [(0, "step is 0; allowed: 1"), (2, "step is 2; allowed: 1")])
async def test_a_repeated_or_left_out_step_ends_the_stream(
    number: int, message: str, scheduler: StubScheduler, steps: Steps
) -> None:
    async with running(scheduler.target, build_device()):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            await drive.send(steps.new("r", PROMPT))
            await drive.send(steps.decode("r"), step=number)
            assert list((await drive.next()).output.sampled_token_ids) == ANSWER[:1]
            with pytest.raises(FailedPreconditionError, match=message) as raised:
                await drive.next()
        assert raised.value.reason is ErrorReason.STEP_OUT_OF_ORDER
        assert (await scheduler.registrations.get()).info.lease != registered.info.lease


@pytest.mark.case("B60")
async def test_a_step_that_fails_ends_the_stream_and_what_was_sent_behind_it_is_not_answered(
    scheduler: StubScheduler, steps: Steps
) -> None:
    async with running(scheduler.target, build_device(faults=SimulatedFaults(error_token_id=99))):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            await drive.send(steps.new("good", PROMPT, slot=0, blocks=[1]))
            await drive.send(steps.new("bad", [99, 98], slot=1, blocks=[2]))
            await drive.send(steps.decode("good"))
            assert list((await drive.next()).output.sampled_token_ids) == ANSWER[:1]
            with pytest.raises(InternalError, match="step 1: RuntimeError: the simulated device fails on token 99"):
                await drive.next()
        again = await scheduler.registrations.get()
        assert again.info.lease != registered.info.lease
        async with Drive(again.info) as drive:
            await drive.accepted()
            assert await drive.run(Steps().new("good", PROMPT)) == ANSWER[:1]


async def test_a_failed_lease_is_held_until_the_scheduler_has_read_why_and_ends_the_stream(
    scheduler: StubScheduler, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FAILURE_TIMEOUT_S", 3600)
    async with running(scheduler.target, build_device()):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            await drive.send(steps.new("r", PROMPT, blocks=[17]))
            for _ in range(20):  # of a megabyte, more than waits unread
                await drive.send(steps.new("r", [2**21] * 2**18))
            response = await drive.call.read()
            assert isinstance(response, executor_pb2.ExecuteResponse)
            assert "block is 17; allowed: [1, 17)" in response.failed.message
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await registered.gone.wait()
        assert (await scheduler.registrations.get()).info.lease != registered.info.lease


async def test_a_step_that_contradicts_the_executor_ends_the_stream_with_the_reason(
    scheduler: StubScheduler, steps: Steps
) -> None:
    async with running(scheduler.target, build_device()):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            await drive.send(steps.new("r", PROMPT, blocks=[17]))
            with pytest.raises(InternalError, match=r"step 0: block is 17; allowed: \[1, 17\)"):
                await drive.next()


async def test_numbers_that_are_not_finite_fail_their_row_and_not_the_stream(
    scheduler: StubScheduler, steps: Steps
) -> None:
    async with running(scheduler.target, build_device(faults=SimulatedFaults(nan_token_id=99))):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            await drive.send(steps.new("bad", [99], slot=0, blocks=[1]))
            output = (await drive.next()).output
            assert (list(output.sampled_token_ids), list(output.failed_rows)) == ([0], [0])
            assert await drive.run(steps.new("good", PROMPT, slot=1, blocks=[2])) == ANSWER[:1]


@pytest.mark.parametrize("reason", [ErrorReason.MODEL_MISMATCH, ErrorReason.CONFIG_INVALID])
async def test_an_executor_that_does_not_fit_the_pool_ends(reason: ErrorReason, scheduler: StubScheduler) -> None:
    scheduler.refusal = FailedPreconditionError("fingerprint is 'a'; allowed: 'b', the pool's", reason=reason)
    async with running(scheduler.target, build_device()) as (_, task):
        with pytest.raises(FailedPreconditionError, match="fingerprint is 'a'; allowed: 'b'"):
            await task


async def test_a_scheduler_of_another_protocol_ends_the_executor(scheduler: StubScheduler) -> None:
    scheduler.major = 2
    async with running(scheduler.target, build_device()) as (_, task):
        with pytest.raises(FailedPreconditionError, match=r"version.major is 2 at the scheduler; allowed: 1"):
            await task


async def test_a_scheduler_that_cannot_take_it_now_is_asked_again(scheduler: StubScheduler, steps: Steps) -> None:
    scheduler.refusal = InternalError("not now")
    async with running(scheduler.target, build_device()):
        await scheduler.refused.wait()
        scheduler.refusal = None
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            assert await drive.run(steps.new("r", PROMPT)) == ANSWER[:1]


async def test_a_stop_finishes_the_step_that_runs_and_says_so_on_both_streams(
    scheduler: StubScheduler, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = build_device(latencies=SimulatedLatencies(prefill_us_per_token=0, decode_us=100_000))
    launches = watch_launches(device, monkeypatch)
    async with running(scheduler.target, device) as (process, task):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            await drive.run(steps.new("r", PROMPT, blocks=[1, 2]))
            drop_all(launches)
            await drive.send(steps.decode("r"))
            await launches.get()
            process.stop()
            responses = [await drive.next(), await drive.next()]
            assert {response.WhichOneof("response") for response in responses} == {"draining", "output"}
            (output,) = [response.output for response in responses if response.HasField("output")]
            assert list(output.sampled_token_ids) == ANSWER[1:2]
            with pytest.raises(EOFError):
                await drive.next()
        assert await registered.draining() == "the executor was asked to stop"
        assert await task == 0


async def test_a_step_that_hangs_does_not_keep_a_stop_waiting(
    scheduler: StubScheduler, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = build_device(faults=SimulatedFaults(hang_token_id=99))
    launches = watch_launches(device, monkeypatch)
    async with running(scheduler.target, device, drain_timeout_s=1) as (process, task):
        registered = await scheduler.registrations.get()
        async with Drive(registered.info) as drive:
            await drive.accepted()
            drop_all(launches)
            await drive.send(steps.new("r", [99]))
            await launches.get()
            process.stop()
            assert (await drive.next()).HasField("draining")
            assert await task == 1


async def test_a_port_in_use_is_a_sentence(scheduler: StubScheduler) -> None:
    port = int(scheduler.target.rpartition(":")[2])
    async with running(scheduler.target, build_device(), port=port) as (_, task):
        with pytest.raises(ConfigError, match=f"port is {port}, which cannot be bound on 127.0.0.1"):
            await task


@pytest.mark.case("B54")
async def test_a_prompt_beyond_the_usual_message_limit_arrives(scheduler: StubScheduler, steps: Steps) -> None:
    prompt = [20_000 + i % 1000 for i in range(1_500_000)]  # three bytes each, 4.5 MB together
    device = build_device(
        block_size=4096, num_blocks=513, max_model_len=2**21, prefill_buckets=(512,), vocab_size=32_000
    )
    async with running(scheduler.target, device):
        info = (await scheduler.registrations.get()).info
        async with Drive(info) as drive:
            await drive.accepted()
            assert await drive.run(steps.new("r", prompt, num_tokens=512, padded=512)) == []
            assert device.kv_token_ids[1, :3].tolist() == [20_000, 20_001, 20_002]
