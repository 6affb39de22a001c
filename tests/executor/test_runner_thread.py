"""The threads that drive the device, and one `Execute` stream on them without a network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest

from executor_svc.device_thread import DeviceThread, DeviceThreads
from executor_svc.devices.base import StepInputs, StepResult
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, expected_tokens
from executor_svc.execution import Execution
from executor_svc.registration import Backoff
from executor_svc.runner import NeuronModelRunner
from holdback.codec import StepEncoder
from holdback.errors import ErrorReason, FailedPreconditionError, InternalError
from holdback.types import SchedulerOutput
from holdback.v1 import executor_pb2
from tests.executor.builders import VOCAB_SIZE, Steps, build_device

PROMPT = [20, 21, 22]
ANSWER = [52, 72, 52, *expected_tokens(PROMPT, 12, VOCAB_SIZE)[3:]]  # the first three worked out in test_simulated


@pytest.fixture
def threads() -> Iterator[DeviceThreads]:
    """Not started, so that a test decides what is posted before anything runs."""
    threads = DeviceThreads()
    yield threads
    if threads.launching._thread.ident is not None:
        assert threads.stop(10)


class SteppedDevice(SimulatedDevice):
    """A device whose steps end when the test says so, in their order.

    Attributes:
        launches: the number of real tokens of each step, as it is launched.
        most_in_flight: steps that were launched and not collected at once.
    """

    def __init__(self, **knobs: object) -> None:
        base = build_device(**knobs)  # type: ignore[arg-type]
        super().__init__(base.model, base.limits, base._latencies, base._faults)
        self._loop = asyncio.get_running_loop()
        self._ends = threading.Semaphore(0)
        self.launches: asyncio.Queue[int] = asyncio.Queue()
        self.most_in_flight = self._num_in_flight = 0

    def end_step(self) -> None:
        self._ends.release()

    def launch(self, inputs: StepInputs) -> object:
        ticket = super().launch(inputs)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        self._loop.call_soon_threadsafe(self.launches.put_nowait, inputs.num_tokens)
        return ticket

    def collect(self, ticket: object) -> StepResult:
        assert self._ends.acquire(timeout=60)
        self._num_in_flight -= 1
        return super().collect(ticket)


async def requests_of(outputs: Iterable[SchedulerOutput]) -> AsyncIterator[executor_pb2.ExecuteRequest]:
    encoder = StepEncoder()
    for output in outputs:
        yield executor_pb2.ExecuteRequest(step=encoder.encode(output))


async def requests_from(queue: asyncio.Queue[SchedulerOutput | None]) -> AsyncIterator[executor_pb2.ExecuteRequest]:
    """Steps as the test sends them; None closes the stream."""
    encoder = StepEncoder()
    while (output := await queue.get()) is not None:
        yield executor_pb2.ExecuteRequest(step=encoder.encode(output))


async def tokens_of(responses: AsyncIterator[executor_pb2.ExecuteResponse]) -> list[int]:
    return list((await anext(responses)).output.sampled_token_ids)


async def test_a_step_is_launched_while_the_one_before_it_runs(steps: Steps, threads: DeviceThreads) -> None:
    device, queue = SteppedDevice(), asyncio.Queue[SchedulerOutput | None]()
    threads.start()
    execution = Execution(NeuronModelRunner(device), threads)
    reader, responses = asyncio.create_task(execution.read(requests_from(queue))), execution.responses()
    queue.put_nowait(steps.new("r", PROMPT, blocks=[1, 2]))
    assert await device.launches.get() == 3
    queue.put_nowait(steps.decode("r"))
    assert await device.launches.get() == 1  # and nothing has ended yet
    device.end_step()
    assert await tokens_of(responses) == ANSWER[:1]
    queue.put_nowait(steps.decode("r"))
    assert await device.launches.get() == 1
    for token in ANSWER[1:3]:
        device.end_step()
        assert await tokens_of(responses) == [token]
    queue.put_nowait(None)
    await reader


async def test_a_result_goes_out_though_no_further_step_comes(steps: Steps, threads: DeviceThreads) -> None:
    device, queue = SteppedDevice(), asyncio.Queue[SchedulerOutput | None]()
    threads.start()
    execution = Execution(NeuronModelRunner(device), threads)
    reader, responses = asyncio.create_task(execution.read(requests_from(queue))), execution.responses()
    queue.put_nowait(steps.new("r", PROMPT))
    device.end_step()
    assert await tokens_of(responses) == ANSWER[:1]
    queue.put_nowait(None)
    await reader


@pytest.mark.parametrize("depth", [1, 2])
async def test_as_many_steps_are_launched_as_may_be_in_flight_and_no_more(
    depth: int, steps: Steps, threads: DeviceThreads
) -> None:
    device = SteppedDevice(max_steps_in_flight=depth)
    threads.start()
    execution = Execution(NeuronModelRunner(device), threads)
    await execution.read(requests_of([steps.new("r", PROMPT, blocks=[1, 2]), *_decodes(steps, 4)]))
    for _ in range(depth):
        await device.launches.get()
    responses = execution.responses()
    for token in ANSWER[:5]:
        device.end_step()
        assert await tokens_of(responses) == [token]
    assert device.most_in_flight == depth


@pytest.mark.case("B60")
async def test_no_step_behind_a_failed_one_is_answered(steps: Steps, threads: DeviceThreads) -> None:
    device = build_device(faults=SimulatedFaults(error_token_id=99))
    execution = Execution(NeuronModelRunner(device), threads)
    first = steps.new("good", PROMPT, slot=0, blocks=[1])
    await execution.read(requests_of([first, steps.new("bad", [98, 99], slot=1, blocks=[2]), steps.decode("good")]))
    threads.start()
    responses = execution.responses()
    assert await tokens_of(responses) == ANSWER[:1]
    with pytest.raises(InternalError, match="step 1: RuntimeError: the simulated device fails on token 99"):
        await anext(responses)
    await threads.call_when_idle(lambda: None)
    assert device.kv_token_ids[1].tolist() == [*PROMPT, 0]  # where the decode behind it would have written


async def test_a_refused_step_ends_the_stream_behind_the_answers_to_those_before(
    steps: Steps, threads: DeviceThreads
) -> None:
    device = SteppedDevice()
    threads.start()
    execution = Execution(NeuronModelRunner(device), threads)
    good = steps.new("r", PROMPT, blocks=[1, 2])
    await execution.read(requests_of([good, steps.decode("r", blocks={"r": [99]}), steps.decode("r")]))
    responses = execution.responses()
    assert await device.launches.get() == 3
    device.end_step()
    assert await tokens_of(responses) == ANSWER[:1]
    with pytest.raises(InternalError, match=r"step 1: block is 99; allowed: \[1, 17\)"):
        await anext(responses)
    await threads.call_when_idle(lambda: None)
    assert device.launches.empty()


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_a_step_out_of_order_ends_the_stream_behind_the_answers_to_those_before(
    number: int, steps: Steps, threads: DeviceThreads
) -> None:
    device = SteppedDevice()
    threads.start()
    execution = Execution(NeuronModelRunner(device), threads)
    sent = [steps.new("r", PROMPT, blocks=[1, 2]), steps.decode("r"), steps.decode("r")]
    requests = [request async for request in requests_of(sent)]
    requests[2].step.step = number
    await execution.read(_iterate(requests))
    responses = execution.responses()
    for token in ANSWER[:2]:
        device.end_step()
        assert await tokens_of(responses) == [token]
    with pytest.raises(FailedPreconditionError, match=f"step is {number}; allowed: 2, the next one") as raised:
        await anext(responses)
    assert raised.value.reason is ErrorReason.STEP_OUT_OF_ORDER


async def _iterate(requests: Iterable[executor_pb2.ExecuteRequest]) -> AsyncIterator[executor_pb2.ExecuteRequest]:
    for request in requests:
        yield request


async def test_no_step_of_a_stream_that_ended_is_begun(steps: Steps, threads: DeviceThreads) -> None:
    device = build_device()
    execution = Execution(NeuronModelRunner(device), threads)
    await execution.read(requests_of([steps.new("r", PROMPT)]))
    execution.end(InternalError("the lease ended"))
    threads.start()
    await threads.call_when_idle(lambda: None)
    assert not device.kv_token_ids.any()
    with pytest.raises(InternalError, match="the lease ended"):
        await anext(execution.responses())


async def test_what_a_stream_leaves_in_flight_is_dropped_by_a_reset(steps: Steps, threads: DeviceThreads) -> None:
    device = SteppedDevice()
    runner = NeuronModelRunner(device)
    threads.start()
    execution = Execution(runner, threads)
    await execution.read(requests_of([steps.new("r", PROMPT, blocks=[1, 2]), *_decodes(steps, 3)]))
    for _ in range(2):
        await device.launches.get()
    execution.end(InternalError("the lease ended"))
    for _ in range(2):
        device.end_step()
    await threads.call_when_idle(runner.reset)
    assert runner.oldest() is None
    assert device.launches.empty()
    assert not device.kv_token_ids.any()
    again = Execution(runner, threads)
    await again.read(requests_of([Steps().new("r", PROMPT)]))
    device.end_step()
    assert await tokens_of(again.responses()) == ANSWER[:1]


async def test_a_stream_that_the_scheduler_closes_ends_when_all_is_answered(
    steps: Steps, threads: DeviceThreads
) -> None:
    execution = Execution(NeuronModelRunner(build_device()), threads)
    await execution.read(requests_of([steps.new("r", PROMPT), steps.decode("r")]))
    threads.start()
    tokens = [list(response.output.sampled_token_ids) async for response in execution.responses()]
    assert tokens == [[52], [72]]


async def test_steps_are_read_ahead_only_so_far(steps: Steps, threads: DeviceThreads) -> None:
    execution = Execution(NeuronModelRunner(build_device()), threads)
    taken: list[int] = []

    async def count() -> AsyncIterator[executor_pb2.ExecuteRequest]:
        async for request in requests_of([steps.new("r", [20], blocks=[1, 2, 3]), *_decodes(steps, 9)]):
            taken.append(request.step.step)
            yield request

    reader = asyncio.create_task(execution.read(count()))
    done, _ = await asyncio.wait({reader}, timeout=0.05)
    assert not done
    assert taken == list(range(8))
    threads.start()
    assert len([response async for response in execution.responses()]) == 10
    await reader


def _decodes(steps: Steps, count: int) -> list[SchedulerOutput]:
    return [steps.decode("r") for _ in range(count)]


async def test_a_thread_runs_calls_in_order_and_hands_back_results_and_errors() -> None:
    thread = DeviceThread("test")
    thread.start()
    order: list[int] = []
    for number in range(3):
        thread.post(lambda number=number: order.append(number))  # type: ignore[misc]
    assert await thread.call(lambda: [*order]) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    assert await thread.call(lambda: "still there") == "still there"
    thread.stop()
    assert thread.has_ended(60)


def test_a_thread_that_still_computes_has_not_ended() -> None:
    threads, release = DeviceThreads(), threading.Event()
    threads.start()
    threads.collecting.post(lambda: release.wait(30))
    assert not threads.stop(0.05)
    release.set()
    assert threads.collecting.has_ended(60)


def test_pauses_grow_to_a_limit_and_start_over_after_a_success() -> None:
    backoff = Backoff(first_s=1.0, longest_s=4.0)
    pauses = [backoff.next_s() for _ in range(4)]
    for pause, longest in zip(pauses, (1, 2, 4, 4), strict=True):
        assert longest / 2 <= pause <= longest
    backoff.reset()
    assert backoff.next_s() <= 1
