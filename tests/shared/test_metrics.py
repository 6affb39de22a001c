"""The metrics port and what it shows: one path, bounded clients, TLS; and histograms that cost little to feed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pathlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from holdback import metrics
from holdback.distribution import Distribution
from holdback.errors import ConfigError
from holdback.metrics import Exposition, Kind, Metric, MetricsServer, Sample, bucket_name
from holdback.tls import NO_TLS, Tls
from holdback.types import Phase
from tests.prometheus import Scrape

GAUGE = Metric("holdback:gauge", Kind.GAUGE, "A gauge.", ("name",))
COUNTER = Metric("holdback:things_total", Kind.COUNTER, "A counter.")
HISTOGRAM = Metric("holdback:seconds", Kind.HISTOGRAM, "A histogram.")


def show(*samples: Sample) -> Scrape:
    return Scrape(Exposition((GAUGE, COUNTER, HISTOGRAM), lambda: samples).text().decode())


def test_values_are_shown_with_their_kinds_and_labels() -> None:
    distribution = Distribution((1.0, 2.5))
    for value in (0.5, 1.0, 2.0, 7.0):
        distribution.observe(value)
    shown = show(Sample(GAUGE, ('a "b"\n',), 2.5), Sample(COUNTER, (), 3), Sample(HISTOGRAM, (), distribution))
    assert shown.of("holdback:gauge", name='a "b"\n') == 2.5
    assert shown.of("holdback:things_total") == 3
    assert [shown.of("holdback:seconds_bucket", le=le) for le in ("1.0", "2.5", "+Inf")] == [2, 3, 4]
    assert (shown.of("holdback:seconds_count"), shown.of("holdback:seconds_sum")) == (4, 10.5)
    assert shown.kinds["holdback:gauge"] == "gauge"
    assert shown.kinds["holdback:things_total"] == "counter"
    assert shown.kinds["holdback:seconds"] == "histogram"
    assert shown.of("process_resident_memory_bytes") > 0


def test_a_metric_without_a_series_is_named_all_the_same() -> None:
    assert show().kinds.keys() >= {"holdback:gauge", "holdback:things_total", "holdback:seconds"}


@pytest.mark.parametrize("sample", [Sample(GAUGE, ("a",), Distribution((1,))), Sample(HISTOGRAM, (), 1.0)])
def test_a_value_of_another_kind_is_a_fault(sample: Sample) -> None:
    with pytest.raises(TypeError, match=sample.metric.name):
        show(sample)


def test_what_is_not_declared_is_a_fault() -> None:
    with pytest.raises(KeyError):
        show(Sample(Metric("holdback:other", Kind.GAUGE, "Not in the table."), (), 1))


@given(st.lists(st.floats(-10, 100)), st.lists(st.floats(-10, 100)))
def test_distributions_count_as_prometheus_does_and_add_up(first: list[float], second: list[float]) -> None:
    bounds = (0.0, 1.0, 5.0, 50.0)

    def of(values: Iterable[float]) -> Distribution:
        distribution = Distribution(bounds)
        for value in values:
            distribution.observe(value)
        return distribution

    total = of(first)
    total.add(of(second))
    both = first + second
    upto = [sum(total.counts[: index + 1]) for index in range(len(bounds))]
    assert upto == [sum(value <= bound for value in both) for bound in bounds]
    assert total.count == len(both)
    assert math.isclose(total.sum, math.fsum(both), abs_tol=1e-9)


def test_distributions_of_other_bounds_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"\(1,\)"):
        Distribution((1,)).add(Distribution((2,)))


@pytest.mark.parametrize(
    ("phase", "context", "name"),
    [(Phase.PREFILL, None, "prefill_s8"), (Phase.DECODE, None, "decode_b8"), (Phase.DECODE, 256, "decode_b8_c256")],
)
def test_buckets_are_called_as_vllm_neuron_calls_them(phase: Phase, context: int | None, name: str) -> None:
    assert bucket_name(phase, 8, context) == name


# ---- the port ----


@contextlib.asynccontextmanager
async def serving(text: Callable[[], bytes] = lambda: b"all\n", tls: Tls = NO_TLS) -> AsyncIterator[int]:
    server = MetricsServer(text, tls)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.stop()


async def ask(port: int, request: bytes, context: ssl.SSLContext | None = None) -> bytes:
    name = None if context is None else "localhost"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def is_served(port: int) -> bool:
    try:
        return b"200" in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    except ConnectionError:
        return False


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /metrics HTTP/1.1", b"200"),
        (b"GET /metrics?name=x HTTP/1.0", b"200"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"GET / HTTP/1.1", b"404"),
        (b"GET /metrics/../etc HTTP/1.1", b"404"),
        (b"\xff\x00 \xff", b"404"),
        (b"", b"404"),
    ],
)
async def test_one_path_and_one_method_are_served(line: bytes, status: bytes) -> None:
    async with serving() as port:
        answer = await ask(port, line + b"\r\nHost: a\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == status
    assert f"Content-Length: {len(body)}".encode() in head
    assert (body == b"all\n") is (status == b"200")


@pytest.mark.loopback
async def test_a_head_without_end_is_cut_at_its_limit_and_others_are_served() -> None:
    async with serving() as port:
        assert await ask(port, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 10_000) == b""
        assert b"200" in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")


@pytest.mark.loopback
async def test_a_client_that_says_nothing_is_let_go_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(metrics.MAX_CONNECTIONS)]
        async with asyncio.timeout(60):
            while await is_served(port):
                pass
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(60):
            while not await is_served(port):
                pass
    monkeypatch.setattr(metrics, "TIMEOUT_S", 0.05)
    async with serving() as port:
        assert await ask(port, b"GET /met") == b""


@pytest.mark.loopback
async def test_a_source_that_fails_ends_its_own_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    failures = iter([True, False])

    def text() -> bytes:
        if next(failures):
            raise RuntimeError("a counter is missing")
        return b"all\n"

    async with serving(text) as port:
        assert await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).endswith(b"all\n")
    assert "a counter is missing" in capsys.readouterr().out


@pytest.mark.loopback
async def test_a_port_that_is_taken_is_named() -> None:
    async with serving() as port:
        with pytest.raises(ConfigError, match=f"metrics_port is {port}"):
            await MetricsServer(lambda: b"").start("127.0.0.1", port)


@pytest.mark.loopback
async def test_with_a_certificate_the_port_speaks_tls_and_takes_up_a_new_one(tmp_path: pathlib.Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> ssl.SSLContext:
        authority = trustme.CA()
        own = authority.issue_cert("localhost")
        own.cert_chain_pems[0].write_to_path(cert)
        own.private_key_pem.write_to_path(key)
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return context

    first = issue()
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    async with serving(tls=Tls(cert, key)) as port:
        assert b"200" in await ask(port, request, first)
        with pytest.raises((ConnectionError, AssertionError)):
            assert b"200" in await ask(port, request)
        second = issue()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(ssl.SSLError):
                    assert b"200" in await ask(port, request, second)
                    break
        with pytest.raises(ssl.SSLError):
            await ask(port, request, first)


@pytest.mark.loopback
async def test_where_callers_need_a_certificate_a_scraper_needs_one(tmp_path: pathlib.Path) -> None:
    authority, cert, key, ca = trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    own = authority.issue_cert("localhost")
    own.cert_chain_pems[0].write_to_path(cert)
    own.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    stranger, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (stranger, known):
        authority.configure_trust(context)
    authority.issue_cert("scraper").configure_cert(known)
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    async with serving(tls=Tls(cert, key, client_ca=ca)) as port:
        answer = b""  # the handshake of a client may be over before the server has looked at its certificate
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            answer = await ask(port, request, stranger)
        assert answer == b""
        assert b"200" in await ask(port, request, known)
