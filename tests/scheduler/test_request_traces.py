"""The scheduler's spans: waits, moves and ends, in the trace that came with the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from opentelemetry.trace import StatusCode

from holdback.errors import UnavailableError
from holdback.types import TraceContext
from tests.scheduler.parts import Simulation, build_spec, settle
from tests.spans import Spans

Simulate = Callable[..., Simulation]
TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1")


async def test_a_request_that_moves_waits_twice_in_one_span_and_each_executor_gets_its_context(
    simulate: Simulate,
) -> None:
    spans = Spans()
    simulation = simulate(tracer=spans.tracer)
    first = simulation.add_lane("first", is_stepped=True)
    simulation.submit(0, replace(build_spec("r", max_tokens=4), trace=TRACE))
    await settle()
    await first.step()
    await first.lose(UnavailableError("the pod died"))
    second = simulation.add_lane("second")
    await simulation.until_ended(0)
    (span,) = spans.named("schedule")
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:x}", f"{span.parent.span_id:016x}") == (
        TRACE.traceparent[3:35],
        "00f067aa0ba902b7",
    )
    told = [new.spec.trace for lane in (first, second) for step in lane.sent for new in step.scheduled_new_reqs]
    assert told == [TraceContext(f"00-{TRACE.traceparent[3:35]}-{span.context.span_id:016x}-01", "vendor=1")] * 2
    assert [queue.attributes for queue in spans.named("queue")] == [
        {"holdback.executor": "first"},
        {"holdback.executor": "second"},
    ]
    assert [(event.name, event.attributes) for event in span.events] == [("moved", {"holdback.cause": "loss"})]
    assert len(spans.named("prefill")) == len(spans.named("decode")) == 1
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["holdback.num_moves"] == 1
    assert span.status.status_code is StatusCode.UNSET


async def test_a_request_that_never_ran_has_no_parts_and_says_why_it_ended(simulate: Simulate) -> None:
    spans = Spans()
    simulation = simulate(tracer=spans.tracer)
    simulation.submit(0, build_spec("r", deadline_ms=5))
    simulation.clock.advance(1)
    await simulation.until_ended(0)
    (span,) = spans.named("schedule")
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "DEADLINE_EXCEEDED")
    assert span.attributes is not None
    assert span.attributes["holdback.finish_reason"] == "abort"
    assert span.parent is None
    assert not spans.named("queue") + spans.named("prefill") + spans.named("decode")


async def test_without_a_tracer_the_context_goes_on_as_it_came(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane()
    simulation.submit(0, replace(build_spec("r"), trace=TRACE))
    await simulation.until_ended(0)
    assert [new.spec.trace for step in lane.sent for new in step.scheduled_new_reqs] == [TRACE]
