"""The executor's spans: chunks with their padding, and an end for each, also where a lease is lost in the middle."""

from __future__ import annotations

from opentelemetry.trace import StatusCode

from executor_svc.runner import NeuronModelRunner
from executor_svc.step_traces import StepTraces
from holdback.types import SchedulerOutput
from tests.executor.builders import Steps, build_runner
from tests.spans import Spans


def run(traces: StepTraces, runner: NeuronModelRunner, *outputs: SchedulerOutput) -> None:
    """Launches and collects each step, as the two threads do."""
    for output in outputs:
        launched = runner.launch(output)
        traces.launch(output)
        traces.collect(runner.collect(launched))


def test_a_request_has_its_chunks_and_its_decode(steps: Steps) -> None:
    spans = Spans()
    traces, runner = StepTraces(spans.tracer), build_runner()
    prompt = list(range(20, 31))
    run(
        traces,
        runner,
        steps.new("r", prompt, blocks=[1, 2, 3], num_tokens=8, padded=8),
        steps.chunk("r", 3),
        steps.decode("r"),
    )
    assert not spans.named("execute")
    run(traces, runner, steps.finish("r"))
    (execute,) = spans.named("execute")
    assert [chunk.attributes for chunk in spans.named("prefill_chunk")] == [
        {"holdback.num_tokens": 8, "holdback.num_tokens_padded": 8},
        {"holdback.num_tokens": 3, "holdback.num_tokens_padded": 4},
    ]
    (decode,) = spans.named("decode")
    assert decode.start_time == spans.named("prefill_chunk")[-1].end_time
    assert all(part.parent == execute.context for part in (decode, *spans.named("prefill_chunk")))
    assert execute.status.status_code is StatusCode.UNSET


def test_a_lease_that_ends_ends_the_spans_of_all_requests(steps: Steps) -> None:
    spans = Spans()
    traces, runner = StepTraces(spans.tracer), build_runner()
    run(traces, runner, steps.new("decodes", [20], slot=0, blocks=[1]))
    run(traces, runner, steps.new("prefills", [21] * 8, slot=1, blocks=[2, 3], num_tokens=4))
    traces.end()
    traces.end()
    assert [(span.status.description) for span in spans.named("execute")] == ["LEASE_ENDED", "LEASE_ENDED"]
    assert len(spans.named("decode")) == 1


def test_a_result_behind_the_end_of_its_request_is_no_fault(steps: Steps) -> None:
    spans = Spans()
    traces, runner = StepTraces(spans.tracer), build_runner()
    first = steps.new("r", [20] * 8, blocks=[1, 2], num_tokens=4)
    launched = runner.launch(first)
    traces.launch(first)
    aborted = steps.finish("r")
    behind = runner.launch(aborted)
    traces.launch(aborted)
    traces.collect(runner.collect(launched))
    traces.collect(runner.collect(behind))
    assert len(spans.named("execute")) == 1
    assert len(spans.named("prefill_chunk")) == 1
