"""What a lane remembers of the steps that it has sent: those in flight, and the last ones for people."""

from __future__ import annotations

from dataclasses import dataclass

from holdback.errors import InternalError
from holdback.types import Phase, SchedulerOutput, SchedulerState, StepTimings


@dataclass(slots=True)
class SentStep:
    """A step as it was run, without its prompts.

    Attributes:
        step: number on the wire.
        phase: of the batch; None for a step that only told ends.
        state: of the lane's scheduler after `schedule()`.
        req_ids: rows in schedule order.
        num_computed_tokens: parallel to them, before the step.
        num_scheduled_tokens: by req_id.
        num_scheduled_tokens_padded: by req_id.
        expected_us: device time by the latency table, at the largest context.
        sent_unix_us: wall time.
        sent_at: clock seconds.
        timeout_s: after which it is given up.
        duration_us: from sending to the result; None while it runs.
        timings: where the executor says that the time went; None while it runs.
    """

    step: int
    phase: Phase | None
    state: SchedulerState
    req_ids: list[str]
    num_computed_tokens: list[int]
    num_scheduled_tokens: dict[str, int]
    num_scheduled_tokens_padded: dict[str, int]
    expected_us: int
    sent_unix_us: int
    sent_at: float
    timeout_s: float
    duration_us: int | None = None
    timings: StepTimings | None = None

    def timed_out(self) -> InternalError:
        return InternalError(
            f"step {self.step} has run for {self.timeout_s:g} s; allowed: step_timeout_factor times its expected time, "
            "at least min_step_timeout_s"
        )


@dataclass(slots=True)
class StepInFlight:
    """A step that the executor has not answered."""

    output: SchedulerOutput
    record: SentStep
