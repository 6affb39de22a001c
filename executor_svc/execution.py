"""One `Execute` stream: steps in, results out, strictly in order.

The event loop only parses. Each step goes to the launching thread, which applies its changes and launches it while the
step before it still runs, then to the collecting thread, which waits for it; the loop sends what it answers. At most
`max_steps_in_flight` steps are launched and not collected.

The first failure ends the stream, after the answers to the steps before it. Nothing that was sent behind a failed step
is launched any more, and no result of what was is sent: it was scheduled on the belief that the failed step happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError

from executor_svc.device_thread import DeviceThreads
from executor_svc.runner import LaunchedStep, NeuronModelRunner
from executor_svc.step_traces import StepTraces
from holdback.codec import StepDecoder, encode_runner_output
from holdback.errors import FailedPreconditionError, HoldbackError, InternalError, InvalidArgumentError
from holdback.types import SchedulerOutput
from holdback.v1 import executor_pb2

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_UNANSWERED_STEPS = 8
"""Steps that are read ahead; a scheduler that sends more waits. Two are ever in flight, the rest only tell ends."""


@dataclass(frozen=True, slots=True)
class _End:
    error: HoldbackError | None


class Execution:
    """One stream from `accepted` on. Everything but launching and collecting happens on the event loop."""

    def __init__(self, runner: NeuronModelRunner, threads: DeviceThreads, traces: StepTraces | None = None) -> None:
        self._runner = runner
        self._threads = threads
        self._traces = traces
        self._loop = asyncio.get_running_loop()
        self._decoder = StepDecoder()
        self._outbox: asyncio.Queue[executor_pb2.ExecuteResponse | _End] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_UNANSWERED_STEPS)
        self._places = threading.Semaphore(runner.device.limits.max_steps_in_flight)
        self._num_unanswered = 0
        self._takes_steps = True
        self._ends_when_answered = False
        self._ended = False
        self._launches = True  # of the launching thread, until a step is refused
        self._collects = True  # of the collecting thread, until a step fails

    async def read(self, requests: AsyncIterator[executor_pb2.ExecuteRequest]) -> None:
        """Takes steps until a step cannot be decoded, the stream fails or drains; returns when the scheduler closes it.

        What comes later is read as well, for the scheduler may be stuck in writing it.
        """
        try:
            while self._takes_steps:
                await self._room.acquire()
                request = await anext(requests, None)
                if request is None:
                    self._take_no_more()
                elif self._takes_steps:
                    self._submit(request)
        except Exception as error:  # of ours, or of what is no message at all
            self._takes_steps = False
            self._threads.launching.post(partial(self._refuse, _as_step_error(error, "the step")))
        with contextlib.suppress(DecodeError):
            async for _ in requests:
                pass

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
        """Ends the stream now: nothing more is launched or answered. A second end does nothing."""
        if not self._ended:
            self._ended = True
            self._takes_steps = False
            self._room.release()
            self._outbox.put_nowait(_End(error))
            if self._traces is not None:
                self._threads.launching.post(self._traces.end)

    def _take_no_more(self) -> None:
        self._takes_steps = False
        self._ends_when_answered = True
        if self._num_unanswered == 0:
            self.end(None)

    def _submit(self, request: executor_pb2.ExecuteRequest) -> None:
        kind = request.WhichOneof("request")
        if kind is None:  # of a newer scheduler, and means nothing here
            self._room.release()
            return
        if kind != "step":
            raise InvalidArgumentError.of("request", kind, "step, after the one open")
        arrived_ns = time.monotonic_ns()
        output = self._decoder.decode(request.step)
        self._num_unanswered += 1
        self._threads.launching.post(partial(self._launch, output, arrived_ns))

    def _launch(self, output: SchedulerOutput, arrived_ns: int) -> None:
        """On the launching thread: one step, once there is a place for it."""
        if not self._is_wanted():
            return
        self._places.acquire()
        if not self._is_wanted():
            self._places.release()
            return
        try:
            launched = self._runner.launch(output, arrived_ns)
        except Exception as error:
            log.exception("step_failed", step=output.step)
            self._places.release()
            self._refuse(_as_step_error(error, f"step {output.step}"))
        else:
            if self._traces is not None:
                self._traces.launch(output)
            self._threads.collecting.post(partial(self._collect, launched))

    def _is_wanted(self) -> bool:
        return self._launches and self._collects and not self._ended

    def _refuse(self, error: HoldbackError) -> None:
        """On the launching thread: the stream ends behind the answers to what is launched."""
        self._launches = False
        self._threads.collecting.post(partial(self._fail, error))

    def _collect(self, launched: LaunchedStep) -> None:
        """On the collecting thread. What nobody wants any more is left in flight, for the runner's `reset`."""
        if self._collects and not self._ended:
            try:
                output = self._runner.collect(launched)
                message = encode_runner_output(output)
            except Exception as error:
                log.exception("step_failed", step=launched.step)
                self._fail(_as_step_error(error, f"step {launched.step}"))
            else:
                if self._traces is not None:
                    self._traces.collect(output)
                self._tell_loop(self._answer, executor_pb2.ExecuteResponse(output=message))
        self._places.release()

    def _fail(self, error: HoldbackError) -> None:
        """On the collecting thread: everything before is answered."""
        if self._collects:
            self._collects = False
            self._tell_loop(self.end, error)

    def _tell_loop(self, function: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for the answer
            self._loop.call_soon_threadsafe(function, argument)

    def _answer(self, response: executor_pb2.ExecuteResponse) -> None:
        self._num_unanswered -= 1
        if self._ended:
            return
        self._outbox.put_nowait(response)
        if self._ends_when_answered and self._num_unanswered == 0:
            self.end(None)


def _as_step_error(error: Exception, step: str) -> HoldbackError:
    """What the stream ends with: a step out of order as it is, everything else as INTERNAL with the reason."""
    if isinstance(error, FailedPreconditionError):
        return error
    if isinstance(error, HoldbackError):
        return InternalError(f"{step}: {error.message}")
    return InternalError(f"{step}: {type(error).__name__}: {error}")
