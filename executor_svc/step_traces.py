"""The executor's spans: one for each request that it is told of, with each prefill chunk and the decode as parts.

Decode steps are not looked at one by one: a request decodes from its last chunk until the scheduler says that it has
ended. Spans start and end on the launching thread, chunks are added on the collecting one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdback.tracing import Attributes, RequestSpan, Tracer
from holdback.types import ModelRunnerOutput, NewRequestData, Phase, SchedulerOutput


@dataclass(slots=True)
class _Traced:
    """A request that has a span.

    Attributes:
        span: of it.
        num_left: tokens to prefill behind the chunks that were launched.
        prefilled_ns: when its last chunk was collected, Unix time; None before.
    """

    span: RequestSpan
    num_left: int
    prefilled_ns: int | None = None


@dataclass(slots=True)
class _Chunk:
    """A prefill step in flight."""

    traced: _Traced
    num_tokens: int
    num_padded: int
    is_last: bool


class StepTraces:
    """Told of the steps of one `Execute` stream."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traced: dict[str, _Traced] = {}
        self._chunks: dict[int, _Chunk] = {}

    def launch(self, output: SchedulerOutput) -> None:
        """A step was launched."""
        for req_id in output.finished_req_ids:
            self._end(req_id)
        for new in output.scheduled_new_reqs:
            self._start(new)
        if output.phase is Phase.PREFILL:
            for req_id, num_tokens in output.num_scheduled_tokens.items():
                traced = self._traced[req_id]
                traced.num_left -= num_tokens
                num_padded = output.num_scheduled_tokens_padded[req_id]
                self._chunks[output.step] = _Chunk(traced, num_tokens, num_padded, traced.num_left == 0)

    def collect(self, output: ModelRunnerOutput) -> None:
        """The result of a step is there."""
        chunk = self._chunks.pop(output.step, None)
        if chunk is None:
            return
        now_ns = time.time_ns()
        attributes = {"holdback.num_tokens": chunk.num_tokens, "holdback.num_tokens_padded": chunk.num_padded}
        chunk.traced.span.part("prefill_chunk", now_ns - output.timings.device_us * 1000, now_ns, attributes)
        if chunk.is_last:
            chunk.traced.prefilled_ns = now_ns

    def end(self) -> None:
        """The stream is over; nothing is launched or collected any more."""
        for req_id in list(self._traced):
            self._end(req_id, "LEASE_ENDED")

    def _start(self, new: NewRequestData) -> None:
        attributes: Attributes = {
            "holdback.request_id": new.spec.request_id,
            "holdback.cached_tokens": new.num_computed_tokens,
        }
        span = self._tracer.start("execute", new.spec.trace, attributes)
        num_prefill = len(new.spec.prompt_token_ids) + len(new.spec.output_token_ids)
        self._traced[new.req_id] = _Traced(span, num_prefill - new.num_computed_tokens)

    def _end(self, req_id: str, error: str | None = None) -> None:
        traced = self._traced.pop(req_id, None)
        if traced is None:
            return
        if traced.prefilled_ns is not None:
            traced.span.part("decode", traced.prefilled_ns, time.time_ns())
        traced.span.end(error=error)
