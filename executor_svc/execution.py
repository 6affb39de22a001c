"""One `Execute` stream: steps in, results out, strictly in order.

The event loop parses a step and posts it to the device thread, which runs it; the loop sends what it answers. The first
step that fails ends the stream, and nothing that was sent behind it is run: it was scheduled on the belief that the
failed step happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import structlog

from executor_svc.device_thread import DeviceThread
from executor_svc.runner import NeuronModelRunner
from holdback.codec import StepDecoder, encode_runner_output
from holdback.errors import FailedPreconditionError, HoldbackError, InternalError, InvalidArgumentError
from holdback.types import SchedulerOutput
from holdback.v1 import executor_pb2

log = structlog.get_logger()

MAX_UNANSWERED_STEPS = 8
"""Steps that are read ahead; a scheduler that sends more waits. Two are ever in flight, the rest only tell ends."""


@dataclass(frozen=True, slots=True)
class _End:
    error: HoldbackError | None


class Execution:
    """One stream from `accepted` on. Everything but the running of a step happens on the event loop."""

    def __init__(self, runner: NeuronModelRunner, thread: DeviceThread) -> None:
        self._runner = runner
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._decoder = StepDecoder()
        self._outbox: asyncio.Queue[executor_pb2.ExecuteResponse | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_UNANSWERED_STEPS)
        self._num_unanswered = 0
        self._takes_steps = True
        self._ended = False
        self._step_failed = False  # of the device thread alone

    async def read(self, requests: AsyncIterator[executor_pb2.ExecuteRequest]) -> None:
        """Takes steps until the scheduler closes its side, a step cannot be decoded, or `drain`."""
        try:
            while self._takes_steps:
                await self._room.acquire()
                request = await anext(requests, None)
                if request is None:
                    self._take_no_more()
                elif self._takes_steps:
                    self._submit(request)
        except HoldbackError as error:
            self.end(_as_step_error(error, "the step"))

    async def responses(self) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        """What to send, until the end. Raises the error that ended the stream."""
        while True:
            item = await self._outbox.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
            if item.HasField("output"):
                self._room.release()

    def drain(self, reason: str) -> None:
        """Announces the end, takes no further step, and ends the stream when those taken are answered."""
        if self._takes_steps and not self._ended:
            self._outbox.put_nowait(executor_pb2.ExecuteResponse(draining=executor_pb2.Draining(reason=reason)))
            self._take_no_more()

    def end(self, error: HoldbackError | None) -> None:
        """Ends the stream now. Steps that are posted but have not begun are not run. A second end does nothing."""
        if not self._ended:
            self._ended = True
            self._takes_steps = False
            self._outbox.put_nowait(_End(error))

    def _take_no_more(self) -> None:
        self._takes_steps = False
        if self._num_unanswered == 0:
            self.end(None)

    def _submit(self, request: executor_pb2.ExecuteRequest) -> None:
        kind = request.WhichOneof("request")
        if kind != "step":
            raise InvalidArgumentError.of("request", kind, "step, after the one open")
        arrived_ns = time.perf_counter_ns()
        output = self._decoder.decode(request.step)
        self._num_unanswered += 1
        self._thread.post(partial(self._run, output, arrived_ns))

    def _run(self, output: SchedulerOutput, arrived_ns: int) -> None:
        """On the device thread: one step."""
        if self._ended or self._step_failed:
            return
        try:
            message = encode_runner_output(self._runner.execute(output, arrived_ns))
        except Exception as error:
            self._step_failed = True
            log.exception("step_failed", step=output.step)
            self._tell_loop(self.end, _as_step_error(error, f"step {output.step}"))
        else:
            self._tell_loop(self._answer, executor_pb2.ExecuteResponse(output=message))

    def _tell_loop(self, function: object, argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for the answer
            self._loop.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]

    def _answer(self, response: executor_pb2.ExecuteResponse) -> None:
        self._num_unanswered -= 1
        if self._ended:
            return
        self._outbox.put_nowait(response)
        if not self._takes_steps and self._num_unanswered == 0:
            self.end(None)


def _as_step_error(error: Exception, step: str) -> HoldbackError:
    """What the stream ends with: a step out of order as it is, everything else as INTERNAL with the reason."""
    if isinstance(error, FailedPreconditionError):
        return error
    if isinstance(error, HoldbackError):
        return InternalError(f"{step}: {error.message}")
    return InternalError(f"{step}: {type(error).__name__}: {error}")
