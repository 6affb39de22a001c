"""`NeuronModelRunner`: runs the `SchedulerOutput` that it is given, on whatever device it is given.

It decides nothing. A step goes through four things in this order: finished requests are forgotten, new ones entered,
blocks appended, and the batch is padded and launched.

`launch` and `collect` are separate so that a step is built and launched while the one before it runs: nothing of a step
needs the tokens of the one before on the host, for the device keeps each slot's last token. What a launched step reads
was copied for it, so the changes of the next step, a slot or a block that goes to another request among them, do not
reach it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from executor_svc.counts import DeviceTimes
from executor_svc.devices.base import Device, GraphKey
from executor_svc.requests import RunningRequests, refuse
from executor_svc.steps import StepBuilder
from holdback.types import ModelRunnerOutput, SchedulerOutput, StepTimings

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class LaunchedStep:
    """A step between `launch` and `collect`.

    Attributes:
        step: its number.
        started_ns: when `launch` was called.
        queue_us: from its arrival until then.
        key: the graph that runs; None when there is nothing to run.
        ticket: the device's.
        host_us: what the host spent on it so far.
    """

    step: int
    started_ns: int
    queue_us: int
    key: GraphKey | None = None
    ticket: object = None
    host_us: int = 0


class NeuronModelRunner:
    """Runs steps strictly in order on one device.

    One thread calls `launch`, the same or another one `collect`, any thread `oldest`; `reset` only while nobody does
    either. After an error the requests of the step are in an unknown state: `reset` before anything else.

    Attributes:
        device: what runs the steps.
        requests: what is known of the requests, the changes of launched steps included.
        times: of the device.
    """

    def __init__(self, device: Device, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.device = device
        self.requests = RunningRequests(device.limits, device.model)
        self._clock_ns = clock_ns
        self._builder = StepBuilder(device, self.requests)
        self.times = DeviceTimes()
        self._in_flight: deque[LaunchedStep] = deque()
        self._collected_ns = clock_ns()

    def execute(self, output: SchedulerOutput, arrived_ns: int | None = None) -> ModelRunnerOutput:
        """Runs one step and waits for its result. As `launch` and `collect`."""
        return self.collect(self.launch(output, arrived_ns))

    def launch(self, output: SchedulerOutput, arrived_ns: int | None = None) -> LaunchedStep:
        """Applies a step's changes and starts it, without waiting for the steps before it.

        Args:
            output: the step.
            arrived_ns: when it arrived, on the runner's clock; for its timings.

        Raises:
            InternalError: the step contradicts what the executor knows or can run; nothing of it was started.
            InvalidArgumentError: a new request has sampling parameters that cannot be; nothing was started either.
        """
        started_ns = self._clock_ns()
        if len(self._in_flight) >= self.device.limits.max_steps_in_flight:
            raise refuse("steps in flight", len(self._in_flight) + 1, f"{self.device.limits.max_steps_in_flight}")
        queue_us = 0 if arrived_ns is None else max(0, started_ns - arrived_ns) // 1000
        launched = LaunchedStep(output.step, started_ns, queue_us)
        if not self._in_flight:
            self.times.idle_ns += max(0, started_ns - self._collected_ns)
        self._in_flight.append(launched)
        try:
            self._start(launched, output)
        except BaseException:
            self._in_flight.pop()
            raise
        launched.host_us = (self._clock_ns() - started_ns) // 1000
        return launched

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Waits for the oldest launched step. Raises InternalError for any other, and whatever made the step fail."""
        if not self._in_flight or self._in_flight[0] is not launched:
            raise refuse("step to collect", launched.step, "the oldest one in flight")
        if launched.key is None:
            self._collected_ns = self._clock_ns()
            self._in_flight.popleft()
            return ModelRunnerOutput(launched.step, timings=StepTimings(launched.queue_us, 0, launched.host_us))
        try:
            result = self.device.collect(launched.ticket)
        finally:
            # In this order, so that `oldest` may take the next step for younger than it is, but never for older.
            collected_ns = self._collected_ns = self._clock_ns()
            self._in_flight.popleft()
        output = ModelRunnerOutput(
            step=launched.step,
            sampled_token_ids=result.token_ids.tolist(),
            logprobs=result.logprobs,
            failed_rows=result.failed_rows,
        )
        host_us = launched.host_us + (self._clock_ns() - collected_ns) // 1000
        output.timings = StepTimings(launched.queue_us, result.device_us, host_us)
        self.times.add(launched.key, result.device_us)
        return output

    def oldest(self) -> tuple[LaunchedStep, float] | None:
        """The oldest step in flight, the one that the device works on, and for how many seconds it has."""
        try:
            launched = self._in_flight[0]
        except IndexError:
            return None
        return launched, (self._clock_ns() - max(launched.started_ns, self._collected_ns)) / 1e9

    def idle_s(self) -> float:
        """How long no step was in flight since this was made."""
        collected_ns, idle_ns = self._collected_ns, self.times.idle_ns
        if not self._in_flight:
            idle_ns += max(0, self._clock_ns() - collected_ns)
        return idle_ns / 1e9

    def reset(self) -> None:
        """Forgets every request and voids KV memory, for a new lease. Steps in flight are waited for and dropped."""
        while self._in_flight:
            launched = self._in_flight[0]
            try:
                self.collect(launched)
            except Exception as error:  # whatever it was, nobody waits for this step any more
                log.warning("dropped_step_failed", step=launched.step, reason=f"{type(error).__name__}: {error}")
        self._builder.forget_rows()
        self.requests.clear()
        self.device.reset()

    def _start(self, launched: LaunchedStep, output: SchedulerOutput) -> None:
        self._apply(output)
        inputs = self._builder.build(output)
        for new in output.scheduled_new_reqs:
            self.device.start_request(new.slot, new.spec)
        if inputs is not None:
            launched.key = inputs.key
            launched.ticket = self.device.launch(inputs)
            self._builder.advance(output, inputs)

    def _apply(self, output: SchedulerOutput) -> None:
        requests = self.requests
        if output.finished_req_ids:
            self._builder.forget_rows()
            for req_id in output.finished_req_ids:
                requests.remove(req_id)
        for new in output.scheduled_new_reqs:
            requests.add(new)
        cached = output.scheduled_cached_reqs
        if len(cached.new_block_ids) != len(cached.req_ids):
            raise refuse("new_block_ids", len(cached.new_block_ids), f"{len(cached.req_ids)} entries")
        if any(cached.new_block_ids):
            for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if block_ids:
                    requests.append_blocks(requests.slot_of(req_id), block_ids)
