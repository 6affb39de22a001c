"""One trace through all three services, taken by a collector on loopback; and nothing of it without an endpoint."""

from __future__ import annotations

import asyncio
import json
import pathlib
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from holdback import rpc
from holdback.cli.local import LocalStack
from holdback.errors import ConfigError
from holdback.tracing import create_tracer, trace_id_of
from holdback.types import TraceContext
from tests.system.conftest import CHUNK

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = [20 + i for i in range(CHUNK + 5)]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span with the name of the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []
        self.came = asyncio.Event()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        self.came.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, service: str, name: str) -> list[trace_pb2.Span]:
        return [span for of, span in self.spans if (of, span.name) == (f"holdback-{service}", name)]


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


def attributes(span: trace_pb2.Span) -> dict[str, object]:
    return {entry.key: getattr(entry.value, str(entry.value.WhichOneof("value"))) for entry in span.attributes}


async def ask(stack: LocalStack, headers: dict[str, str], **options: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True} | options
    async with httpx.AsyncClient(base_url=f"http://{stack.http_address}", timeout=60, trust_env=False) as http:
        return await http.post("/v1/completions", json=body, headers=headers)


@pytest.mark.loopback
async def test_a_request_is_one_trace_from_the_client_to_the_executor(
    collector: tuple[Collector, str], stack_arguments: dict[str, list[str]], tmp_path: pathlib.Path
) -> None:
    spans, endpoint = collector
    to_collector = ["--otlp-endpoint", endpoint]
    arguments = {command: [*stack_arguments.get(command, []), *to_collector] for command in ("scheduler", "executor")}
    arguments["gateway"] = [*stack_arguments["gateway"], *to_collector, "--http-port", "0"]
    with (tmp_path / "log").open("wb") as log:
        async with LocalStack(arguments, log=log) as stack:
            await stack.wait_until_ready()
            given = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
            answer = await ask(stack, given)
            assert answer.status_code == 200
            assert (await ask(stack, {"traceparent": "not a context"})).status_code == 200
    # every process has sent its last spans before it ended
    (generate,) = [span for span in spans.of("gateway", "generate") if span.trace_id.hex() == TRACE_ID]
    (schedule,) = [span for span in spans.of("scheduler", "schedule") if span.trace_id.hex() == TRACE_ID]
    (execute,) = [span for span in spans.of("executor", "execute") if span.trace_id.hex() == TRACE_ID]
    assert generate.parent_span_id.hex() == SPAN_ID
    assert (schedule.parent_span_id, execute.parent_span_id) == (generate.span_id, schedule.span_id)
    assert generate.trace_state == schedule.trace_state == execute.trace_state == "vendor=1"
    parts = {
        (parent, span.name): span
        for parent in (generate.span_id, schedule.span_id, execute.span_id)
        for _, span in spans.spans
        if span.parent_span_id == parent
    }
    names = {parent: {name for of, name in parts if of == parent} for parent, _ in parts}
    assert names[generate.span_id] == {"tokenize", "schedule"}
    assert names[schedule.span_id] == {"queue", "prefill", "decode", "execute"}
    assert names[execute.span_id] == {"prefill_chunk", "decode"}
    chunks = [span for span in spans.of("executor", "prefill_chunk") if span.parent_span_id == execute.span_id]
    assert [attributes(span)["holdback.num_tokens"] for span in chunks] == [CHUNK, 5]
    assert [attributes(span)["holdback.num_tokens_padded"] for span in chunks] == [CHUNK, 32]
    queue, prefill, decode = (parts[schedule.span_id, name] for name in ("queue", "prefill", "decode"))
    assert schedule.start_time_unix_nano <= queue.end_time_unix_nano + 1_000_000
    assert abs(queue.end_time_unix_nano - prefill.start_time_unix_nano) < 1_000_000
    assert prefill.start_time_unix_nano < prefill.end_time_unix_nano <= decode.end_time_unix_nano
    assert attributes(schedule)["gen_ai.usage.output_tokens"] == attributes(generate)["gen_ai.usage.output_tokens"] == 4
    assert attributes(generate)["gen_ai.request.model"] == "small"
    assert [event.name for event in generate.events] == ["first_token"]
    others = [span.trace_id.hex() for span in spans.of("gateway", "generate") if span is not generate]
    assert len(others) == 1
    assert others[0] != TRACE_ID

    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    for event in ("request_ended", "http_request"):
        (line,) = [line for line in lines if line["event"] == event and line.get("trace_id") == TRACE_ID]
        assert line["request_id"] == answer.json()["id"]


@pytest.mark.loopback
async def test_without_an_endpoint_the_clients_context_is_in_the_logs_and_nothing_is_imported(
    stack_arguments: dict[str, list[str]], tmp_path: pathlib.Path
) -> None:
    arguments = stack_arguments | {"gateway": [*stack_arguments["gateway"], "--http-port", "0"]}
    with (tmp_path / "log").open("wb") as log:
        async with LocalStack(arguments, log=log) as stack:
            await stack.wait_until_ready()
            assert (await ask(stack, {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"})).status_code == 200
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    traced = {line["event"] for line in lines if line.get("trace_id") == TRACE_ID}
    assert traced == {"request_ended", "http_request"}


def test_no_process_imports_opentelemetry_without_an_endpoint() -> None:
    modules = "gateway.server, scheduler_svc.server, executor_svc.server"
    program = f"import sys, {modules}; sys.exit(any('opentelemetry' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
    assert create_tracer("gateway", None) is None


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'holdback\[tracing\]'"):
        create_tracer("gateway", "http://127.0.0.1:4317")


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [(f"00-{TRACE_ID}-{SPAN_ID}-01", TRACE_ID), ("", None), ("00-12-34-01", None), ("nonsense", None)],
)
def test_the_trace_id_is_read_where_there_is_one(traceparent: str, trace_id: str | None) -> None:
    assert trace_id_of(TraceContext(traceparent)) == trace_id
