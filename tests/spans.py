"""A tracer that keeps its spans in memory, for tests of what a service tells it."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from holdback.tracing import Tracer


class Spans:
    """Attributes: tracer: to be given to a service."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    def named(self, name: str) -> list[ReadableSpan]:
        """Those that have ended, in that order."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]
