"""Which graph runs a step, and the warm-up that builds and times them all."""

from __future__ import annotations

import threading

import pytest
import structlog.testing

from executor_svc.devices.base import GraphKey
from executor_svc.devices.simulated import SimulatedLatencies
from executor_svc.graphs import DeclaredGraphs, warm_up
from holdback.errors import InternalError, UnavailableError
from holdback.types import GraphLatency, Phase
from tests.executor.builders import build_device

LATENCIES = SimulatedLatencies(prefill_us_per_token=10.0, decode_us=7)


def test_the_smallest_context_that_holds_is_chosen() -> None:
    graphs = DeclaredGraphs([GraphKey(Phase.PREFILL, 128, context) for context in (1024, 0, 256)])
    chosen = [graphs.choose(Phase.PREFILL, 128, context).context for context in (0, 1, 256, 257, 1024)]
    assert chosen == [0, 256, 256, 1024, 1024]


def test_a_size_or_a_context_that_no_graph_has_is_refused() -> None:
    graphs = DeclaredGraphs([GraphKey(Phase.PREFILL, 128, 256), GraphKey(Phase.DECODE, 4, 256)])
    with pytest.raises(InternalError, match=r"prefill shape is 64; allowed: the declared buckets \[128\]"):
        graphs.choose(Phase.PREFILL, 64, 0)
    with pytest.raises(InternalError, match="context of a decode of shape 4 is 257; allowed: at most 256"):
        graphs.choose(Phase.DECODE, 4, 257)


def test_every_graph_is_timed_at_its_smallest_and_largest_context() -> None:
    device = build_device(prefill_buckets=(4, 32), seqs_buckets=(1, 2), latencies=LATENCIES)
    assert warm_up(device) == (
        GraphLatency(Phase.PREFILL, 4, 0, 40),
        GraphLatency(Phase.PREFILL, 4, 28, 40),
        GraphLatency(Phase.PREFILL, 32, 0, 320),
        GraphLatency(Phase.DECODE, 1, 1, 7),
        GraphLatency(Phase.DECODE, 1, 32, 7),
        GraphLatency(Phase.DECODE, 2, 1, 7),
        GraphLatency(Phase.DECODE, 2, 32, 7),
    )


def test_a_device_with_context_buckets_times_each_graph_it_declares() -> None:
    device = build_device(prefill_buckets=(8,), seqs_buckets=(2,), context_buckets=(16, 32), latencies=LATENCIES)
    assert [(latency.phase, latency.size, latency.context) for latency in warm_up(device)] == [
        (Phase.PREFILL, 8, 0),
        (Phase.PREFILL, 8, 16),
        (Phase.PREFILL, 8, 32),
        (Phase.DECODE, 2, 16),
        (Phase.DECODE, 2, 32),
    ]


def test_warm_up_leaves_a_device_as_new() -> None:
    device = build_device()
    warm_up(device)
    assert not device.kv_token_ids.any()
    assert not device.last_token.any()


@pytest.mark.case("B26")
def test_warm_up_writes_to_the_sink_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = build_device()
    monkeypatch.setattr(device, "reset", lambda: None)
    device.kv_token_ids[:-1] = 99
    warm_up(device)
    assert (device.kv_token_ids[:-1] == 99).all()
    assert not device.last_token[:-1].any()


def test_each_graph_has_a_line_of_progress() -> None:
    with structlog.testing.capture_logs() as lines:
        warm_up(build_device(prefill_buckets=(4,), seqs_buckets=(1, 2), latencies=LATENCIES))
    ready = [line for line in lines if line["event"] == "graph_ready"]
    assert [(line["phase"], line["size"], line["context"], line["number"], line["of"]) for line in ready] == [
        ("prefill", 4, 32, 1, 3),
        ("decode", 1, 32, 2, 3),
        ("decode", 2, 32, 3, 3),
    ]
    assert ready[0]["latency_us"] == {0: 40, 28: 40}
    assert (lines[-1]["event"], lines[-1]["num_graphs"], lines[-1]["num_misses"]) == ("graphs_ready", 3, None)


def test_a_warm_up_can_be_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError, match="warm-up was stopped"):
        warm_up(build_device(), stop)
