"""What a lane remembers of the steps that it has sent: those in flight, and the last ones for people."""

from __future__ import annotations

from dataclasses import dataclass

from holdback.distribution import Distribution
from holdback.errors import InternalError
from holdback.types import ModelRunnerOutput, Phase, SchedulerOutput, SchedulerState, StepTimings


@dataclass(slots=True)
class SentStep:
    """A step as it was run, without its prompts.

    Attributes:
        step: number on the wire.
        phase: of the batch; None for a step that only told ends.
        size: of its tensors: prefill bucket in tokens, or decode batch in rows.
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
        timings: where the executor says that the time went, each at most `duration_us`; None while it runs.
    """

    step: int
    phase: Phase | None
    size: int
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

    @property
    def num_tokens(self) -> int:
        """That it computes, padding excluded."""
        if self.phase is Phase.DECODE:
            return len(self.req_ids)
        return sum(self.num_scheduled_tokens.values())

    def end(self, output: ModelRunnerOutput, now: float) -> None:
        """The result is there. What the executor says of its time is cut to the time in which it had the step.

        Estimates and bounds rest on it, so it is believed that far and no further.

        Args:
            output: gets the timings that count.
            now: clock seconds.
        """
        self.duration_us = most = max(0, round((now - self.sent_at) * 1e6))
        said = output.timings
        if max(said.queue_us, said.device_us, said.host_us) > most:
            output.timings = StepTimings(min(said.queue_us, most), min(said.device_us, most), min(said.host_us, most))
        self.timings = output.timings

    def timed_out(self) -> InternalError:
        return InternalError(
            f"step {self.step} has run for {self.timeout_s:g} s; allowed: step_timeout_factor times its expected time, "
            "at least min_step_timeout_s and at most max_step_timeout_s"
        )


PADDING_TOKENS = tuple(2**power for power in range(5, 15))
PADDING_ROWS = tuple(2**power for power in range(8))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of what is counted of steps; vLLM and vLLM Neuron have the same for these numbers."""


@dataclass(slots=True)
class GraphTotal:
    """What one compiled shape was used for.

    Attributes:
        num_steps: that ran it.
        num_tokens: computed by them.
        num_padding: what is left of the shape, tokens of a prefill or rows of a decode.
        padding: of each step.
    """

    padding: Distribution
    num_steps: int = 0
    num_tokens: int = 0
    num_padding: int = 0

    def add(self, other: GraphTotal) -> None:
        self.padding.add(other.padding)
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_padding += other.num_padding


class StepTotals:
    """All steps of a lane, or of several.

    Attributes:
        graphs: by phase and size.
        tokens: of each step, padding left out.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[Phase, int], GraphTotal] = {}
        self.tokens = Distribution(STEP_TOKENS)

    def count(self, step: SentStep) -> None:
        if step.phase is None:
            return
        num_tokens = step.num_tokens
        num_padding = step.size - num_tokens
        total = self._graph(step.phase, step.size)
        total.num_steps += 1
        total.num_tokens += num_tokens
        total.num_padding += num_padding
        total.padding.observe(num_padding)
        self.tokens.observe(num_tokens)

    def add(self, other: StepTotals) -> None:
        for (phase, size), total in other.graphs.items():
            self._graph(phase, size).add(total)
        self.tokens.add(other.tokens)

    def _graph(self, phase: Phase, size: int) -> GraphTotal:
        total = self.graphs.get((phase, size))
        if total is None:
            bounds = PADDING_TOKENS if phase is Phase.PREFILL else PADDING_ROWS
            total = self.graphs[phase, size] = GraphTotal(Distribution(bounds))
        return total


@dataclass(slots=True)
class StepInFlight:
    """A step that the executor has not answered."""

    output: SchedulerOutput
    record: SentStep
