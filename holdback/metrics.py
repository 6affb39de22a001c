"""Metrics of a process, and the port that shows them to Prometheus.

A process declares its metrics in a table of `Metric`, and says their values when it is asked: nothing is kept for
Prometheus alone, and nothing is spent on it between two scrapes. `docs/metrics.md` has every metric; a test compares.

The port serves `GET /metrics` and nothing else, on the process's event loop, so that what is read does not change
meanwhile. It is HTTP/1.1 with one request for each connection, since a scrape comes every few seconds.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from holdback.distribution import Distribution
from holdback.errors import ConfigError
from holdback.tls import NO_TLS, Tls
from holdback.types import Phase

log = structlog.get_logger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
PATH = "/metrics"
MAX_HEAD_BYTES = 16 * 1024
TIMEOUT_S = 5.0
"""For a client to send its request, and again to take the answer."""

MAX_CONNECTIONS = 16
"""At once; more are closed. Who asks for metrics has few of them."""


class Kind(enum.Enum):
    """What a metric is to Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric that a process shows.

    Attributes:
        name: as it is scraped, the `_total` of a counter included.
        kind: of it.
        help: one line for people.
        labels: names, in the order of the values.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A value at one moment: a number, or the distribution of a histogram."""

    metric: Metric
    labels: Sequence[str]
    value: float | Distribution


def bucket_name(phase: Phase, size: int, context: int | None = None) -> str:
    """A compiled shape as a label, as vLLM Neuron writes it: `prefill_s128`, `decode_b8`.

    Args:
        phase: of the graph.
        size: prefill bucket in tokens, or decode batch in rows.
        context: its context bucket in tokens, `prefill_s128_c256`; None leaves that out.
    """
    name = f"prefill_s{size}" if phase is Phase.PREFILL else f"decode_b{size}"
    return name if context is None else f"{name}_c{context}"


Source = Callable[[], Iterable[Sample]]
"""Says every value that there is now."""


class Exposition:
    """What a process shows, as text.

    Args:
        metrics: declared, in the order of the text. A sample of any other is a fault of the source.
        source: of their values. Called on the thread that asks for the text.
    """

    def __init__(self, metrics: Sequence[Metric], source: Source) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(_Samples(metrics, source))

    def text(self) -> bytes:
        """In the format that `CONTENT_TYPE` names."""
        return generate_latest(self._registry)


class _Samples(Collector):
    """Samples as families, which is how `prometheus_client` takes them."""

    def __init__(self, metrics: Sequence[Metric], source: Source) -> None:
        self._metrics = metrics
        self._source = source

    def describe(self) -> Iterable[Family]:
        """Nothing: names are declared once, and asking for values at registration may be too early."""
        return ()

    def collect(self) -> Iterator[Family]:
        families = {metric: _family(metric) for metric in self._metrics}
        for sample in self._source():
            _add(families[sample.metric], sample)
        yield from families.values()


def _family(metric: Metric) -> Family:
    match metric.kind:
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case Kind.COUNTER:
            return CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)


def _add(family: Family, sample: Sample) -> None:
    value = sample.value
    if isinstance(family, HistogramMetricFamily) and isinstance(value, Distribution):
        bounds = [*map(floatToGoString, value.bounds), "+Inf"]
        counts = itertools.accumulate(value.counts)
        family.add_metric(sample.labels, list(zip(bounds, counts, strict=True)), value.sum)
    elif isinstance(family, (GaugeMetricFamily, CounterMetricFamily)) and not isinstance(value, Distribution):
        family.add_metric(sample.labels, value)
    else:
        raise TypeError(f"{sample.metric.name} is a {sample.metric.kind.value}, its value is {value!r}")


class MetricsServer:
    """The metrics port. `start` and `stop` it on the event loop of the process.

    Args:
        text: makes the answer.
        tls: of the process; with a certificate the port speaks HTTPS, and asks for one where other ports do.
    """

    def __init__(self, text: Callable[[], bytes], tls: Tls = NO_TLS) -> None:
        self._text = text
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, 0 takes a free one. Raises ConfigError when it cannot."""
        context = self._tls.http_context()
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, ssl=context, limit=MAX_HEAD_BYTES, reuse_address=True
            )
        except OSError as error:
            raise ConfigError(f"metrics_port is {port}, which cannot be bound on {host}: {error.strerror}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stops listening; what is under way is cut."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        client = asyncio.create_task(self._serve(reader, writer))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError):
            pass  # the client is gone or too slow, and there is nobody to tell
        except Exception:
            log.exception("metrics_failed")
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        status, body = self._response(head)
        content_type = CONTENT_TYPE if status == "200 OK" else "text/plain; charset=utf-8"
        lines = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        async with asyncio.timeout(TIMEOUT_S):
            await writer.drain()

    def _response(self, head: bytes) -> tuple[str, bytes]:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != PATH.encode():
            return "404 Not Found", f"{PATH} is what there is\n".encode()
        if method != b"GET":
            return "405 Method Not Allowed", b"GET is what there is\n"
        return "200 OK", self._text()
