"""One executor's lane: schedule, execute, update, until the executor is drained or lost.

    wake ──> schedule() ──> send ──> ... the executor runs ... ──> output ──> update_from_output() ──> gateways
               ^                                                                     |
               └─────────────────────────────────────────────────────────────────────┘

The lane sleeps on one event. An output that arrives, a request offered by the dispatcher, an abort, a drain, a stream
that ends: each sets it. Everything that changes the core runs on the event loop between two awaits, so a step is
scheduled and applied in one piece.

With `async_scheduling` two steps are in flight where the executor allows it: step N + 1 is sent while N runs, so the
device goes from one to the next without waiting for the network or for this process. A step that only tells ends runs
nothing and does not count.

Whatever is wrong with a step ends the lane with an exception: the number of the step, the number of tokens, an error
of the executor, a step that takes too long, a core that would stand still. Nothing is applied of a step that does not
fit. The owner then takes the requests back; the executor registers again with a new lease and empty KV memory.

Not here: which lane gets a request (`dispatcher`), leases and heartbeats (`executors`), the wire (`step_stream`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from holdback.errors import InternalError, UnavailableError
from holdback.types import ExecutorInfo, FinishReason, ModelRunnerOutput, Phase, SchedulerOutput
from scheduler_svc.clock import Clock
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.checks import HeldBack
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.output import StepUpdate
from scheduler_svc.core.request import Request
from scheduler_svc.global_queue import LaneQueue
from scheduler_svc.latency import LatencyTable
from scheduler_svc.output_check import check_output
from scheduler_svc.steps import SentStep, StepInFlight, StepTotals

log = structlog.get_logger(__name__)

MAX_UNANSWERED_STEPS = 8
"""As many steps as an executor reads ahead: those that run requests, which the core counts, and those that only tell
ends."""

MAX_CHECK_SHARE = 0.01
"""Of the time, for checks of an idle lane: with a million blocks one takes most of a second."""

LATE_FACTOR = 4.0
MIN_LATE_S = 0.5


class StepSender(Protocol):
    """Where steps go. What comes back arrives through `Lane.receive`, `Lane.drain` and `Lane.fail`."""

    async def send(self, output: SchedulerOutput) -> None: ...


class LaneOwner(Protocol):
    """What a lane needs of the dispatcher."""

    def offer(self, lane: Lane) -> None:
        """Called before each `schedule()`: offers what this lane may take of the global queue, if it is the one to."""

    def bind(self, lane: Lane, req_ids: Sequence[str]) -> None:
        """Called after a `schedule()` that took requests."""

    def update(self, lane: Lane, update: StepUpdate) -> None:
        """Called with what a step brought."""


class Lane:
    """Drives one executor over one `Execute` stream.

    Attributes:
        info: what the executor said of itself.
        core: decides the steps. Only this lane and, between its steps, the dispatcher call it.
        queue: the core's view of the global queue.
        latencies: expected times on this executor.
        prefill_rate: measured.
        steps: the last ones, oldest first.
        totals: of all steps sent.
        num_steps: sent so far, those that only told ends included.
        num_bound: requests that it took so far.
        is_draining: takes no further step; what is in flight is finished.
        failure: why the stream is gone; None while it is not.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        queue: LaneQueue,
        sender: StepSender,
        owner: LaneOwner,
        config: SchedulerServiceConfig,
        clock: Clock,
    ) -> None:
        self.info = info
        self.queue = queue
        self.latencies = LatencyTable(info)
        self.core = build_core(info, queue, config, self.latencies)
        self.prefill_rate = self.latencies.prefill_rate()
        self.steps: deque[SentStep] = deque(maxlen=config.num_state_steps)
        self.totals = StepTotals()
        self.num_steps = 0
        self.num_bound = 0
        self.is_draining = False
        self._sender = sender
        self._owner = owner
        self._config = config
        self._clock = clock
        self._in_flight: deque[StepInFlight] = deque()
        self._received: deque[ModelRunnerOutput] = deque()
        self.failure: Exception | None = None
        self._wakeup = asyncio.Event()
        self._last_output_at = clock.now()
        self._oldest_is_to_blame = False
        self._is_checked = False
        self._next_check_at = 0.0
        self._asked: tuple[Request, HeldBack | None] | None = None
        self._estimated: tuple[Request, int] | None = None

    @property
    def load(self) -> float:
        """Share of the slots in use, in [0, 1]."""
        return len(self.core.running) / self.info.limits.max_num_seqs

    @property
    def num_steps_in_flight(self) -> int:
        """That the executor has not answered, those that only told ends included."""
        return len(self._in_flight)

    @property
    def req_ids_to_blame(self) -> set[str]:
        """Requests of the steps that the end of this lane may be due to.

        An error that the executor reports, a result that does not fit and a step that does not return belong to the
        oldest step in flight, as steps run in order. An executor that is gone may have died in any of them.
        """
        steps = list(self._in_flight)[:1] if self._oldest_is_to_blame else self._in_flight
        return {req_id for step in steps for req_id in step.output.num_scheduled_tokens}

    @property
    def late_at(self) -> float | None:
        """When the oldest step in flight has run for much longer than it should, clock seconds; None without one.

        That is no fault yet, but others are better.
        """
        if not self._in_flight:
            return None
        return self._oldest_since + max(MIN_LATE_S, LATE_FACTOR * self._in_flight[0].record.expected_us / 1e6)

    @property
    def _oldest_since(self) -> float:
        """Since when the oldest step in flight runs: one behind another from the result of that one on."""
        return max(self._in_flight[0].record.sent_at, self._last_output_at)

    def wake(self) -> None:
        """Something may have changed for this lane."""
        self._wakeup.set()

    def receive(self, output: ModelRunnerOutput) -> None:
        """The executor answered a step."""
        self._received.append(output)
        self._wakeup.set()

    def drain(self, reason: str) -> None:
        """Sends no further step; `run` returns once those in flight are applied."""
        if not self.is_draining:
            log.info("executor_drains", executor=self.info.executor_id, reason=reason)
        self.stop_sending()

    def stop_sending(self) -> None:
        """As `drain`, of an executor that has not said that it drains."""
        self.is_draining = True
        self._wakeup.set()

    def fail(self, error: Exception) -> None:
        """The stream is gone; `run` raises this after the outputs that came before."""
        if self.failure is None:
            self.failure = error
        self._wakeup.set()

    def finish(self, req_id: str, reason: FinishReason) -> None:
        """Ends a request from outside: slot and blocks are free with the next `schedule()`."""
        self._core_changes()
        self.core.finish_request(req_id, reason)
        self._wakeup.set()

    def held_back_by(self, request: Request) -> HeldBack | None:
        """The check by which the core does not take a waiting request now; None when it does.

        All lanes are asked whenever one may take the head, and the answer of most has not changed since.
        """
        if self._asked is None or self._asked[0] is not request:
            self._asked = request, self.core.held_back_by(request)
        return self._asked[1]

    def why_not_yet(self) -> str | None:
        """Why no step can be sent, which a request that is let in waits for; None when one can."""
        if self._may_send or not self._in_flight:
            return None
        number, since_s = len(self._in_flight), self._clock.now() - self._oldest_since
        which = (
            "its step in flight is not back,"
            if number == 1
            else f"its {number} steps in flight are not back, the oldest"
        )
        return f"{which} since {since_s:.1f} s"

    def uncached_prefill_us(self, request: Request) -> int:
        """Expected time to prefill a request here, what is cached here left out."""
        if self._estimated is None or self._estimated[0] is not request:
            num_hit_tokens = self.core.num_hit_tokens(request)
            self._estimated = request, self.latencies.prefill_us(request.num_prefill_tokens, num_hit_tokens)
        return self._estimated[1]

    def _core_changes(self) -> None:
        """What was asked of the core holds no longer."""
        self._asked = self._estimated = None

    async def run(self) -> None:
        """Returns when drained; otherwise ends with what went wrong, an error that the executor reports included."""
        try:
            await self._run()
        except UnavailableError:
            raise
        except Exception:
            self._oldest_is_to_blame = True
            raise

    async def _run(self) -> None:
        while True:
            self._apply_received()
            if self.is_draining and (not self._in_flight or isinstance(self.failure, UnavailableError)):
                # A stream that ends while it drains has not taken the last steps: nothing of them happened.
                return
            if self.failure is not None:
                raise self.failure
            step = self._schedule() if self._may_send else None
            if step is not None:
                await self._send(step)
            elif not self._received:
                await self._sleep()

    @property
    def _may_send(self) -> bool:
        return (
            not self.is_draining
            and self.core.num_steps_in_flight < self.core.max_steps_in_flight
            and len(self._in_flight) < MAX_UNANSWERED_STEPS
        )

    def _apply_received(self) -> None:
        while self._received:
            output = self._received.popleft()
            step = check_output(output, self._in_flight, self.info)
            now = self._clock.now()
            step.record.end(output, now)
            self._core_changes()
            update = self.core.update_from_output(step.output, output)
            self._in_flight.popleft()
            self._last_output_at = now
            self._measure(step, output)
            self._owner.update(self, update)

    def _measure(self, step: StepInFlight, output: ModelRunnerOutput) -> None:
        if step.record.phase is Phase.PREFILL:
            num_tokens = step.record.num_tokens + sum(new.num_computed_tokens for new in step.output.scheduled_new_reqs)
            self.prefill_rate.add(num_tokens, output.timings.device_us or step.record.expected_us)

    async def _send(self, step: StepInFlight) -> None:
        try:
            async with asyncio.timeout(step.record.timeout_s):
                await self._sender.send(step.output)
        except TimeoutError:
            raise step.record.timed_out() from None

    def _schedule(self) -> StepInFlight | None:
        """The next step, noted as in flight; None when there is nothing to send."""
        self._owner.offer(self)
        self._core_changes()
        output = self.core.schedule()
        self.queue.offered = None
        if output.scheduled_new_reqs:
            self.num_bound += len(output.scheduled_new_reqs)
            self._owner.bind(self, [new.req_id for new in output.scheduled_new_reqs])
        if not output.num_scheduled_tokens:
            self._check_progress()
            if not output.finished_req_ids:
                return None
        self.num_steps = output.step + 1
        step = StepInFlight(output, self._record(output))
        self._in_flight.append(step)
        self.steps.append(step.record)
        self.totals.count(step.record)
        self._is_checked = False
        return step

    def _check_progress(self) -> None:
        """A core that has requests and schedules none would stand still for good."""
        if self.core.running and not self._in_flight:
            raise InternalError(f"schedule() scheduled nothing though {len(self.core.running)} requests run")

    def _record(self, output: SchedulerOutput) -> SentStep:
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        size = self.latencies.size_of(output)
        expected_us = self.latencies.longest_us(output.phase, size)
        return SentStep(
            step=output.step,
            phase=output.phase,
            size=size,
            state=self.core.state,
            req_ids=[*cached.req_ids, *(row.req_id for row in new)] if new else cached.req_ids,
            num_computed_tokens=(
                [*cached.num_computed_tokens, *(row.num_computed_tokens for row in new)]
                if new
                else cached.num_computed_tokens
            ),
            num_scheduled_tokens=output.num_scheduled_tokens,
            num_scheduled_tokens_padded=output.num_scheduled_tokens_padded,
            expected_us=expected_us,
            sent_unix_us=self._clock.unix_us(),
            sent_at=self._clock.now(),
            timeout_s=self._config.step_timeout_s(expected_us),
        )

    async def _sleep(self) -> None:
        """Until something happens. Raises InternalError when the oldest step in flight takes too long."""
        if not self._in_flight:
            self._check_idle()
            await self._wakeup.wait()
        else:
            record = self._in_flight[0].record
            left_s = self._oldest_since + record.timeout_s - self._clock.now()
            try:
                async with asyncio.timeout(left_s):
                    await self._wakeup.wait()
            except TimeoutError:
                raise record.timed_out() from None
        self._wakeup.clear()

    def _check_idle(self) -> None:
        """An idle lane checks that all adds up, unless that would take more than a small share of the time."""
        began = self._clock.now()
        if self._is_checked or began < self._next_check_at:
            return
        self.core.check_integrity()
        self._is_checked = True
        now = self._clock.now()
        self._next_check_at = now + (now - began) / MAX_CHECK_SHARE


def build_core(
    info: ExecutorInfo, queue: LaneQueue, config: SchedulerServiceConfig, latencies: LatencyTable
) -> NeuronScheduler:
    """A core with two steps in flight where the settings and the executor both allow it, else with one."""
    is_async = config.async_scheduling and info.limits.max_steps_in_flight > 1
    core = NeuronAsyncScheduler if is_async else NeuronScheduler
    return core(scheduler_config(info, config), queue, latencies.graph_us)


def scheduler_config(info: ExecutorInfo, config: SchedulerServiceConfig) -> SchedulerConfig:
    """The core's configuration for an executor. Raises ConfigError where K1 or K2 refuse it."""
    limits = info.limits
    return SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=info.model.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_batched_tokens_buckets=limits.num_batched_tokens_buckets,
        num_seqs_buckets=limits.num_seqs_buckets,
        enable_prefix_caching=config.enable_prefix_caching,
        kv_admission=config.kv_admission,
        max_decode_stall_ms=config.max_decode_stall_ms,
    )
