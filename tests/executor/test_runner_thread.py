"""The thread that drives the device, and one `Execute` stream on it without a network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable

import pytest

from executor_svc.device_thread import DeviceThread
from executor_svc.devices.base import StepInputs
from executor_svc.devices.simulated import SimulatedFaults
from executor_svc.execution import Execution
from executor_svc.registration import Backoff
from executor_svc.runner import NeuronModelRunner
from holdback.codec import StepEncoder
from holdback.errors import InternalError
from holdback.types import SchedulerOutput
from holdback.v1 import executor_pb2
from tests.executor.builders import Steps, build_device


async def requests_of(outputs: Iterable[SchedulerOutput]) -> AsyncIterator[executor_pb2.ExecuteRequest]:
    encoder = StepEncoder()
    for output in outputs:
        yield executor_pb2.ExecuteRequest(step=encoder.encode(output))


def run_all(thread: DeviceThread) -> None:
    """Runs what is posted to a thread that has not started, while the event loop stands still."""
    done = threading.Event()
    thread.post(done.set)
    thread.start()
    assert done.wait(10)


@pytest.mark.case("B60")
async def test_no_step_behind_a_failed_one_is_run(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    device = build_device(faults=SimulatedFaults(error_token_id=99))
    launches: list[int] = []
    launch = device.launch

    def record(inputs: StepInputs) -> object:
        launches.append(inputs.num_tokens)
        return launch(inputs)

    monkeypatch.setattr(device, "launch", record)
    thread = DeviceThread()
    execution = Execution(NeuronModelRunner(device), thread)
    first = steps.new("good", [20, 21, 22], slot=0, blocks=[1])
    await execution.read(requests_of([first, steps.new("bad", [98, 99], slot=1, blocks=[2]), steps.decode("good")]))
    run_all(thread)
    responses = execution.responses()
    assert list((await anext(responses)).output.sampled_token_ids) == [52]
    with pytest.raises(InternalError, match="step 1: RuntimeError: the simulated device fails on token 99"):
        await anext(responses)
    assert launches == [3, 2]
    thread.stop()


async def test_no_step_of_a_stream_that_ended_is_begun(steps: Steps) -> None:
    device = build_device()
    thread = DeviceThread()
    execution = Execution(NeuronModelRunner(device), thread)
    await execution.read(requests_of([steps.new("r", [20, 21, 22])]))
    execution.end(InternalError("the lease ended"))
    run_all(thread)
    assert not device.kv_token_ids.any()
    with pytest.raises(InternalError, match="the lease ended"):
        await anext(execution.responses())
    thread.stop()


async def test_a_stream_that_the_scheduler_closes_ends_when_all_is_answered(steps: Steps) -> None:
    thread = DeviceThread()
    execution = Execution(NeuronModelRunner(build_device()), thread)
    await execution.read(requests_of([steps.new("r", [20, 21, 22]), steps.decode("r")]))
    thread.start()
    tokens = [list(response.output.sampled_token_ids) async for response in execution.responses()]
    assert tokens == [[52], [72]]
    thread.stop()


async def test_steps_are_read_ahead_only_so_far(steps: Steps) -> None:
    thread = DeviceThread()
    execution = Execution(NeuronModelRunner(build_device()), thread)
    taken: list[int] = []

    async def count() -> AsyncIterator[executor_pb2.ExecuteRequest]:
        async for request in requests_of([steps.new("r", [20], blocks=[1, 2, 3]), *_decodes(steps, 9)]):
            taken.append(request.step.step)
            yield request

    reader = asyncio.create_task(execution.read(count()))
    done, _ = await asyncio.wait({reader}, timeout=0.05)
    assert not done
    assert taken == list(range(8))
    thread.start()
    assert len([response async for response in execution.responses()]) == 10
    await reader
    thread.stop()


def _decodes(steps: Steps, count: int) -> list[SchedulerOutput]:
    return [steps.decode("r") for _ in range(count)]


async def test_the_thread_runs_calls_in_order_and_hands_back_results_and_errors() -> None:
    thread = DeviceThread()
    thread.start()
    order: list[int] = []
    for number in range(3):
        thread.post(lambda number=number: order.append(number))  # type: ignore[misc]
    assert await thread.call(lambda: [*order]) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    assert await thread.call(lambda: "still there") == "still there"
    thread.stop()


async def test_a_watchdog_can_see_how_long_a_call_has_run() -> None:
    thread = DeviceThread()
    assert thread.busy_s == 0.0
    thread.start()
    assert await thread.call(lambda: thread.busy_s) > 0
    release = threading.Event()
    thread.post(lambda: release.wait(10))
    waiting = asyncio.create_task(thread.call(lambda: None))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    first = thread.busy_s
    assert 0 < first < thread.busy_s
    release.set()
    await waiting
    thread.stop()


def test_pauses_grow_to_a_limit_and_start_over_after_a_success() -> None:
    backoff = Backoff(first_s=1.0, longest_s=4.0)
    pauses = [backoff.next_s() for _ in range(4)]
    for pause, longest in zip(pauses, (1, 2, 4, 4), strict=True):
        assert longest / 2 <= pause <= longest
    backoff.reset()
    assert backoff.next_s() <= 1
