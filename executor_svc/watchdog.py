"""Ends the process when a step takes far too long.

A device that hangs cannot be helped from within: the thread that waits for it never returns, while heartbeats go on and
say that all is well. The scheduler gives such a step up and hands its requests to others; here the process ends with
`EXIT_STEP_TIMEOUT`, so that whatever started it can start a fresh one, which claims the device anew.

A step takes too long when the device has worked on it for more than `step_timeout_factor` times what its graph took at
warm-up, at the context where it took longest, and for more than `min_step_timeout_s`, or for more than
`max_step_timeout_s`. The time counts from the launch, or from the end of the step before if that is later. Loading,
warm-up and voiding are no steps and take what they take.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable

import structlog

from executor_svc.runner import LaunchedStep, NeuronModelRunner
from holdback.types import GraphLatency, Phase

log = structlog.get_logger(__name__)

EXIT_STEP_TIMEOUT = 3
"""Exit status of an executor whose device did not finish a step in time."""

LATE_S = 1.0
"""A watchdog that wakes this much late was stopped with its whole process, so what it sees may be done already."""


class StepWatchdog:
    """Watches the oldest step in flight from a thread of its own.

    Args:
        runner: whose steps.
        latencies: of every graph.
        timeout_s: seconds that a step may run, from the microseconds that it should take.
        end_process: called with the exit status, from the watchdog's thread.
    """

    def __init__(
        self,
        runner: NeuronModelRunner,
        latencies: Iterable[GraphLatency],
        *,
        timeout_s: Callable[[float], float],
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._min_timeout_s = timeout_s(0)
        self._end_process = end_process
        self._longest_us: dict[tuple[Phase, int], int] = {}
        for entry in latencies:
            key = entry.phase, entry.size
            self._longest_us[key] = max(self._longest_us.get(key, 0), entry.latency_us)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def timeout_s(self, launched: LaunchedStep) -> float:
        """How long the device may take for a step."""
        if launched.key is None:
            return self._min_timeout_s
        return self._timeout_s(self._longest_us.get((launched.key.phase, launched.key.size), 0))

    def _run(self) -> None:
        while not self._wait():
            late = self._overdue()
            if late is not None:
                self._end(*late)
                return

    def _wait(self) -> bool:
        """Until there may be something to see. True when the watch is over."""
        pause_s, started_s = self._pause_s(), time.monotonic()
        is_over = self._stopped.wait(pause_s)
        if time.monotonic() - started_s > pause_s + LATE_S:
            is_over = self._stopped.wait(min(LATE_S, self._min_timeout_s))
        return is_over

    def _pause_s(self) -> float:
        """Until the oldest step may be overdue. A step that is launched meanwhile is not overdue before that either."""
        oldest = self._runner.oldest()
        if oldest is None:
            return self._min_timeout_s
        launched, ran_s = oldest
        return min(self._min_timeout_s, max(0.0, self.timeout_s(launched) - ran_s))

    def _overdue(self) -> tuple[LaunchedStep, float] | None:
        oldest = self._runner.oldest()
        return oldest if oldest is not None and oldest[1] >= self.timeout_s(oldest[0]) else None

    def _end(self, launched: LaunchedStep, ran_s: float) -> None:
        key = launched.key
        log.critical(
            "step_timed_out",
            step=launched.step,
            phase=None if key is None else key.phase.value,
            size=None if key is None else key.size,
            ran_s=round(ran_s, 3),
            timeout_s=self.timeout_s(launched),
            exit_status=EXIT_STEP_TIMEOUT,
            waits_for=self._runner.device.describe_wait(),
            stacks=_stacks(),
        )
        self._end_process(EXIT_STEP_TIMEOUT)


def _stacks() -> dict[str, list[str]]:
    """Where each thread stands, its innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [
            f"{call.name} ({call.filename}:{call.lineno})" for call in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
