"""Traces: one span for each request and service, in the client's trace, sent to a collector by OTLP.

A service starts its span with the W3C context that came with the request, and hands the span's own context on: gateway,
scheduler, executor. Parts whose times are known afterwards (queue, prefill, decode) are added then, so nothing is
measured for a trace alone. Without an endpoint there is no `Tracer`, OpenTelemetry is not imported, and the client's
context is passed on as it came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdback.errors import ConfigError
from holdback.types import TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.trace import Tracer as OtelTracer

Attributes = Mapping[str, str | int | float | bool]

EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
"""How long a process that stops waits for its last spans to be taken."""


def trace_id_of(trace: TraceContext) -> str | None:
    """The trace id of a context, 32 hexadecimal digits; None where there is none. For logs."""
    parts = trace.traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None


class RequestSpan:
    """One request in one service, until `end`. May be used by any thread.

    Attributes:
        context: to hand on.
    """

    def __init__(self, tracer: OtelTracer, span: Span, context: Context) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, context)
        self.context = TraceContext(carrier.get("traceparent", ""), carrier.get("tracestate", ""))
        self._tracer = tracer
        self._span = span
        self._context = context

    def part(self, name: str, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """A part that is over. Times are Unix nanoseconds."""
        span = self._tracer.start_span(name, self._context, start_time=start_ns, attributes=attributes)
        span.end(end_ns)

    def event(self, name: str, attributes: Attributes | None = None, at_ns: int | None = None) -> None:
        self._span.add_event(name, attributes, at_ns)

    def end(self, attributes: Attributes | None = None, error: str | None = None) -> None:
        """`error`: its reason; None for an end as it should be."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(dict(attributes or {}))
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class Tracer:
    """Makes the spans of one process and sends them, in the background."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("holdback")

    def start(self, name: str, parent: TraceContext, attributes: Attributes | None = None) -> RequestSpan:
        """A span of a request; the first one of a new trace if `parent` is empty or malformed."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
        carrier = {key: value for key, value in given.items() if value}
        above = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(name, above, kind=SpanKind.SERVER, attributes=attributes)
        return RequestSpan(self._tracer, span, set_span_in_context(span, above))

    def close(self) -> None:
        """Sends what is left, as long as that does not take long. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def create_tracer(process: str, endpoint: str | None) -> Tracer | None:
    """The tracer of a process; None without an endpoint.

    Args:
        process: what it is, for example "scheduler".
        endpoint: of a collector, `http://HOST:PORT` or `https://...`, OTLP over gRPC.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces go to {endpoint}, but {error.name} is not installed: pip install 'holdback[tracing]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": f"holdback-{process}"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


class ClockOffset:
    """Turns seconds of a monotonic clock into Unix nanoseconds.

    Args:
        now: seconds of that clock.
    """

    def __init__(self, now: float) -> None:
        self._offset_ns = time.time_ns() - int(now * 1e9)

    def unix_ns(self, at: float) -> int:
        return self._offset_ns + int(at * 1e9)
