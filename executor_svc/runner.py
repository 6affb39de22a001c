"""`NeuronModelRunner`: runs the `SchedulerOutput` that it is given, on whatever device it is given.

It decides nothing. A step goes through four things in this order: finished requests are forgotten, new ones entered,
blocks appended, and the batch is padded and launched. It uses the scheduler's counts as they are and keeps its own only
to refuse a step that contradicts them: a wrong step would write into somebody's memory without any other sign.

`launch` and `collect` are separate so that the next step's inputs are built while a step runs; `execute` does both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from executor_svc.devices.base import Device, GraphKey, StepInputs
from executor_svc.graphs import DeclaredGraphs
from executor_svc.inputs import InputBuilder
from executor_svc.requests import RunningRequests, refuse
from holdback.buckets import get_bucket_for_count
from holdback.types import ModelRunnerOutput, Phase, SchedulerOutput, StepTimings

log = structlog.get_logger()


@dataclass(slots=True)
class LaunchedStep:
    """A step between `launch` and `collect`. `ticket` is the device's; None when there was nothing to run."""

    step: int
    ticket: object | None
    queue_us: int
    host_us: int


class NeuronModelRunner:
    """Runs steps strictly in order on one device. Not thread-safe: the thread that drives the device drives it.

    After an error the requests of the step are in an unknown state: call `reset` before anything else.
    """

    def __init__(self, device: Device, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.device = device
        self._clock_ns = clock_ns
        self._graphs = DeclaredGraphs(device.declared_graphs())
        self.requests = RunningRequests(device.limits, device.model)
        self._inputs = InputBuilder(device.limits, self.requests)
        self._in_flight: deque[LaunchedStep] = deque()

    def execute(self, output: SchedulerOutput, arrived_ns: int | None = None) -> ModelRunnerOutput:
        """Runs one step and waits for its result. As `launch` and `collect`."""
        return self.collect(self.launch(output, arrived_ns))

    def launch(self, output: SchedulerOutput, arrived_ns: int | None = None) -> LaunchedStep:
        """Applies a step's changes and starts it.

        Args:
            output: the step.
            arrived_ns: when it arrived, on the runner's clock; for its timings.

        Raises:
            InternalError: the step contradicts what the executor knows or can run; nothing of it was started.
        """
        started_ns = self._clock_ns()
        if len(self._in_flight) >= self.device.limits.max_steps_in_flight:
            raise refuse("steps in flight", len(self._in_flight) + 1, f"{self.device.limits.max_steps_in_flight}")
        self._apply(output)
        inputs = self._build(output)
        self._tell_device(output)
        launched_ns = self._clock_ns()
        ticket = None if inputs is None else self.device.launch(inputs)
        self._advance(output)
        queue_us = 0 if arrived_ns is None else max(0, started_ns - arrived_ns) // 1000
        launched = LaunchedStep(output.step, ticket, queue_us, (launched_ns - started_ns) // 1000)
        self._in_flight.append(launched)
        return launched

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Waits for the oldest launched step. Raises InternalError for any other."""
        if not self._in_flight or self._in_flight[0] is not launched:
            raise refuse("step to collect", launched.step, "the oldest one in flight")
        self._in_flight.popleft()
        if launched.ticket is None:
            return ModelRunnerOutput(launched.step, timings=StepTimings(launched.queue_us, 0, launched.host_us))
        result = self.device.collect(launched.ticket)
        collected_ns = self._clock_ns()
        output = ModelRunnerOutput(
            step=launched.step,
            sampled_token_ids=result.token_ids.tolist(),
            logprobs=result.logprobs,
            failed_rows=result.failed_rows,
        )
        host_us = launched.host_us + (self._clock_ns() - collected_ns) // 1000
        output.timings = StepTimings(launched.queue_us, result.device_us, host_us)
        return output

    def reset(self) -> None:
        """Forgets every request and voids KV memory, for a new lease. Steps in flight are waited for and dropped."""
        while self._in_flight:
            launched = self._in_flight.popleft()
            if launched.ticket is not None:
                self._drop(launched)
        self.requests.clear()
        self.device.reset()

    def _drop(self, launched: LaunchedStep) -> None:
        try:
            self.device.collect(launched.ticket)
        except Exception:  # whatever it was, nobody waits for this step any more
            log.warning("dropped_step_failed", step=launched.step, exc_info=True)

    def _apply(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            self.requests.remove(req_id)
        for new in output.scheduled_new_reqs:
            self.requests.add(new)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self.requests.append_blocks(self.requests.slot_of(req_id), block_ids)

    def _tell_device(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self.device.start_request(new.slot, new.spec)

    def _build(self, output: SchedulerOutput) -> StepInputs | None:
        """Checks the rows of a step and builds its inputs; None when nothing is scheduled."""
        if output.phase is None:
            if output.num_scheduled_tokens:
                raise refuse("phase", "none", "prefill or decode, for something is scheduled")
            return None
        rows = np.array([self.requests.slot_of(req_id) for req_id in output.num_scheduled_tokens], np.intp)
        self._check_known_rows(output)
        if output.phase is Phase.PREFILL:
            return self._build_prefill(output, rows)
        return self._build_decode(output, rows)

    def _check_known_rows(self, output: SchedulerOutput) -> None:
        """Every row is told of exactly once, and both sides agree on what was computed before."""
        cached = output.scheduled_cached_reqs
        told = [*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        if len(told) != len(output.num_scheduled_tokens) or set(told) != output.num_scheduled_tokens.keys():
            raise refuse("requests told", len(told), f"the {len(output.num_scheduled_tokens)} scheduled ones")
        slots = [self.requests.slot_of(req_id) for req_id in cached.req_ids]
        computed = self.requests.num_computed_tokens[slots]
        differ = np.flatnonzero(computed != np.array(cached.num_computed_tokens, np.int64))
        if differ.size:
            row = int(differ[0])
            field = f"num_computed_tokens of {cached.req_ids[row]!r}"
            raise refuse(field, cached.num_computed_tokens[row], f"{computed[row]}, what this executor computed")

    def _build_prefill(self, output: SchedulerOutput, rows: npt.NDArray[np.intp]) -> StepInputs:
        if len(rows) != 1:
            raise refuse("rows of a prefill", len(rows), "1")
        (req_id, num_tokens), slot = next(iter(output.num_scheduled_tokens.items())), int(rows[0])
        size = output.num_scheduled_tokens_padded.get(req_id, 0)
        start = int(self.requests.num_computed_tokens[slot])
        remaining = int(self.requests.num_prefill_tokens[slot]) - start
        if remaining <= 0:
            raise refuse(f"phase of {req_id!r}", "prefill", "decode, for all its tokens are computed")
        key = self._graphs.choose(Phase.PREFILL, size, start)
        if not 1 <= num_tokens <= min(size, remaining):
            allowed = f"[1, {min(size, remaining)}], at most the bucket {size} and the {remaining} left to prefill"
            raise refuse(f"num_scheduled_tokens of {req_id!r}", num_tokens, allowed)
        self._check_blocks(rows, num_tokens)
        return self._inputs.build_prefill(key, slot, num_tokens)

    def _build_decode(self, output: SchedulerOutput, rows: npt.NDArray[np.intp]) -> StepInputs:
        for field in ("num_scheduled_tokens", "num_scheduled_tokens_padded"):
            counts = set(getattr(output, field).values())
            if counts != {1}:
                raise refuse(f"{field} of a decode", sorted(counts), "1 in each row")
        computed = self.requests.num_computed_tokens[rows]
        prefilling = np.flatnonzero(computed < self.requests.num_prefill_tokens[rows])
        if prefilling.size:
            req_id = list(output.num_scheduled_tokens)[int(prefilling[0])]
            raise refuse(f"phase of {req_id!r}", "decode", "prefill, for it has tokens left to prefill")
        key = self._decode_graph(len(rows), int(computed.max(initial=0)) + 1)
        self._check_blocks(rows, 1)
        return self._inputs.build_decode(key, rows)

    def _decode_graph(self, num_rows: int, context: int) -> GraphKey:
        limits = self.device.limits
        if not 1 <= num_rows <= limits.max_num_seqs:
            raise refuse("rows of a decode", num_rows, f"[1, {limits.max_num_seqs}]")
        return self._graphs.choose(Phase.DECODE, get_bucket_for_count(num_rows, limits.num_seqs_buckets), context)

    def _check_blocks(self, rows: npt.NDArray[np.intp], num_tokens: int) -> None:
        """Each row's block table reaches its last token of this step."""
        held = self.requests.num_blocks[rows] * self.device.limits.block_size
        needed = self.requests.num_computed_tokens[rows] + num_tokens
        short = np.flatnonzero(held < needed)
        if short.size:
            row = int(short[0])
            raise refuse(f"tokens in row {row}", int(needed[row]), f"at most {held[row]}, what its blocks hold")

    def _advance(self, output: SchedulerOutput) -> None:
        """Counts what a launched step computes and samples, before it is done."""
        requests = self.requests
        if output.phase is None:
            return
        rows = [requests.slots[req_id] for req_id in output.num_scheduled_tokens]
        requests.num_computed_tokens[rows] += np.fromiter(output.num_scheduled_tokens.values(), np.int32, len(rows))
        done = requests.num_computed_tokens[rows] >= requests.num_prefill_tokens[rows]
        requests.num_outputs[rows] += done.astype(np.int32)
