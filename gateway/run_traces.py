"""The gateway's spans: one for each generation, with the text's way to the scheduler and back as parts."""

from __future__ import annotations

from gateway.generation import CallContext, GenerationRun
from gateway.pool import Pool
from holdback.tracing import Attributes, ClockOffset, RequestSpan, Tracer


def start_span(tracer: Tracer, request_id: str, pool: Pool, call: CallContext) -> RequestSpan:
    """A generation begins, in the trace of its client."""
    attributes = {"holdback.request_id": request_id, "gen_ai.request.model": pool.names[0]}
    return tracer.start("generate", call.trace, attributes)


def end_span(span: RequestSpan, run: GenerationRun) -> None:
    """It is over, however that came."""
    at = ClockOffset(run.clock())
    if run.submitted_at is not None:
        span.part("tokenize", at.unix_ns(run.arrived_at), at.unix_ns(run.submitted_at))
    for choice in run.choices:
        times = None if choice.submission is None else choice.submission.times
        if times is not None and times.first_token_at is not None:
            span.event("first_token", {"holdback.choice": choice.index}, at.unix_ns(times.first_token_at))
    usage = run.usage
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "holdback.finish_reasons": ",".join(run.end_of(choice).value for choice in run.choices),
    }
    failure = next((choice.error for choice in run.choices if choice.error is not None), run.failure)
    span.end(attributes, None if failure is None else failure.reason.value)
