"""The scheduler's spans: one for each request, with its waits, its prefill and its decode as parts.

The span's own context goes on to the executor in place of the one that came. Nothing here runs in a step.
"""

from __future__ import annotations

from dataclasses import replace

from holdback.errors import HoldbackError
from holdback.tracing import Attributes, ClockOffset, Tracer
from holdback.types import FinishReason
from scheduler_svc.clock import Clock
from scheduler_svc.requests import Cause, Submission


class RequestTraces:
    """Told of what happens to submissions. Without a tracer none has a span, and nothing happens."""

    def __init__(self, tracer: Tracer | None, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock

    def start(self, submission: Submission) -> None:
        """It is new, and nobody has seen its spec yet."""
        if self._tracer is None:
            return
        spec = submission.spec
        attributes: Attributes = {"holdback.request_id": spec.request_id, "holdback.generation": spec.generation}
        submission.span = self._tracer.start("schedule", spec.trace, attributes)
        submission.spec = replace(spec, trace=submission.span.context)

    def bind(self, submission: Submission, executor_id: str) -> None:
        """It has waited since `queued_since`."""
        if (span := submission.span) is not None:
            now = self._clock.now()
            at = ClockOffset(now)
            attributes = {"holdback.executor": executor_id}
            span.part("queue", at.unix_ns(submission.queued_since), at.unix_ns(now), attributes)

    def move(self, submission: Submission, cause: Cause) -> None:
        """It was taken back from its executor."""
        if (span := submission.span) is not None:
            span.event("moved", {"holdback.cause": cause.value})

    def end(self, submission: Submission, reason: FinishReason, error: HoldbackError | None) -> None:
        """It is over."""
        span, bound_at, first_at = submission.span, submission.first_bound_at, submission.first_token_at
        if span is None:
            return
        now = self._clock.now()
        at = ClockOffset(now)
        if bound_at is not None:
            span.part("prefill", at.unix_ns(bound_at), at.unix_ns(now if first_at is None else first_at))
        if first_at is not None:
            span.part("decode", at.unix_ns(first_at), at.unix_ns(now))
        usage = submission.usage
        attributes = {
            "holdback.finish_reason": reason.value,
            "holdback.num_moves": submission.num_moves,
            "holdback.cached_tokens": usage.cached_tokens,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
        span.end(attributes, None if error is None else error.reason.value)
