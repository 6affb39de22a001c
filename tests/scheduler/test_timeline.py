"""The trace of the last steps: every slice where it belongs, none over another."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdback.errors import ConfigError, HoldbackError
from holdback.v1 import executor_pb2, scheduler_pb2, types_pb2
from scheduler_svc.cli import timeline
from scheduler_svc.server import SchedulerServer
from scheduler_svc.timeline import trace
from tests.scheduler.parts import build_spec
from tests.scheduler.stubs import StubExecutor, StubGateway

Serve = Callable[..., Awaitable[SchedulerServer]]


def build_step(
    number: int,
    phase: types_pb2.Phase.ValueType,
    *,
    sent: int,
    duration: int | None,
    device: int,
    size: int,
    tokens: int,
) -> scheduler_pb2.StepRecord:
    return scheduler_pb2.StepRecord(
        step=number,
        phase=phase,
        sent_unix_us=sent,
        duration_us=duration,
        size=size,
        num_tokens=tokens,
        timings=executor_pb2.StepTimings(device_us=device),
    )


def build_state(*steps: scheduler_pb2.StepRecord) -> scheduler_pb2.GetStateResponse:
    lane = scheduler_pb2.LaneState(executor=scheduler_pb2.ExecutorInfo(executor_id="executor-0"), steps=steps)
    return scheduler_pb2.GetStateResponse(lanes=[lane])


def slices(document: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(event["name"], event["ts"], event["dur"]) for event in document["traceEvents"] if event["ph"] == "X"]


PREFILL, DECODE = types_pb2.PHASE_PREFILL, types_pb2.PHASE_DECODE


def test_prefill_decode_padding_and_idle_are_slices_on_one_track() -> None:
    state = build_state(
        build_step(0, PREFILL, sent=1000, duration=500, device=400, size=16, tokens=12),  # 1100 to 1500
        build_step(1, DECODE, sent=1010, duration=590, device=100, size=4, tokens=4),  # 1500 to 1600
        build_step(2, DECODE, sent=1900, duration=140, device=100, size=4, tokens=1),  # 1940 to 2040
    )
    assert slices(trace(state)) == [
        ("prefill", 1100, 400),
        ("padding", 1400, 100),
        ("decode", 1500, 100),
        ("idle", 1600, 340),
        ("decode", 1940, 100),
        ("padding", 1965, 75),
    ]


def test_each_phase_has_a_counter_that_is_zero_outside_its_steps() -> None:
    state = build_state(
        build_step(0, PREFILL, sent=1000, duration=500, device=400, size=16, tokens=12),  # 1100 to 1500
        build_step(1, DECODE, sent=1010, duration=590, device=100, size=4, tokens=4),  # 1500 to 1600
        build_step(2, DECODE, sent=1900, duration=140, device=100, size=4, tokens=1),  # 1940 to 2040
    )
    counts = [event for event in trace(state)["traceEvents"] if event["ph"] == "C"]
    assert [(event["name"], event["ts"], event["args"]) for event in counts] == [
        ("prefill tokens", 1100, {"tokens": 12}),
        ("prefill tokens", 1500, {"tokens": 0}),
        ("decode tokens", 1500, {"tokens": 4}),
        ("decode tokens", 1600, {"tokens": 0}),
        ("decode tokens", 1940, {"tokens": 1}),
        ("decode tokens", 2040, {"tokens": 0}),
    ]


def test_clocks_that_disagree_make_no_slice_overlap_or_shrink_below_nothing() -> None:
    state = build_state(
        build_step(0, DECODE, sent=1000, duration=500, device=400, size=1, tokens=1),
        build_step(1, DECODE, sent=1010, duration=500, device=400, size=1, tokens=1),  # says 1110 to 1510
        build_step(2, DECODE, sent=1020, duration=400, device=400, size=1, tokens=1),  # ends before the one before
    )
    found = slices(trace(state))
    assert found == [("decode", 1100, 400), ("decode", 1500, 10), ("decode", 1510, 0)]


def test_steps_without_a_result_and_steps_that_only_told_ends_have_no_slice() -> None:
    state = build_state(
        build_step(0, types_pb2.PHASE_UNSPECIFIED, sent=1000, duration=5, device=0, size=0, tokens=0),
        build_step(1, DECODE, sent=1010, duration=None, device=0, size=1, tokens=1),
    )
    assert slices(trace(state)) == []


def test_a_step_of_an_executor_that_measures_nothing_is_as_long_as_its_way() -> None:
    state = build_state(build_step(0, DECODE, sent=1000, duration=50, device=0, size=1, tokens=1))
    assert slices(trace(state)) == [("decode", 1000, 50)]


def test_each_lane_is_a_process_with_its_name() -> None:
    state = build_state()
    state.lanes.append(scheduler_pb2.LaneState(executor=scheduler_pb2.ExecutorInfo(executor_id="other")))
    names = {event["pid"]: event["args"]["name"] for event in trace(state)["traceEvents"] if "tid" not in event}
    assert names == {1: "executor-0", 2: "other"}


@pytest.mark.loopback
async def test_the_command_writes_the_steps_of_a_running_scheduler(
    serve: Serve, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await serve()
    output = tmp_path / "trace.json"
    async with StubExecutor(server.port), StubGateway(server.port) as gateway:
        await gateway.add(0, build_spec("chat-1", list(range(20, 43)), max_tokens=3))  # chunks of 16 and 7
        await gateway.until_ended(0)
        assert await asyncio.to_thread(timeline, [f"127.0.0.1:{server.port}", "--output", str(output)]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    steps = [event for event in document["traceEvents"] if event["name"] in ("prefill", "decode") and "dur" in event]
    assert [(step["name"], step["args"]["tokens"], step["args"]["size"]) for step in steps] == [
        ("prefill", 16, 16),
        ("prefill", 7, 8),
        ("decode", 1, 4),
        ("decode", 1, 4),
    ]
    assert steps[0]["args"]["requests"] == ["chat-1"]
    assert "of 1 executors" in capsys.readouterr().out


@pytest.mark.loopback
async def test_the_command_says_what_does_not_work(serve: Serve, tmp_path: pathlib.Path) -> None:
    server = await serve()
    target = f"127.0.0.1:{server.port}"
    with pytest.raises(ConfigError, match=r"--output .* Is a directory"):
        await asyncio.to_thread(timeline, [target, "--output", str(tmp_path)])
    for steps, problem in (
        ("-1", "--steps is -1"),
        ("99999999999", "--steps is 99999999999"),
        ("x", "--steps: invalid"),
    ):
        with pytest.raises(ConfigError, match=problem):
            await asyncio.to_thread(timeline, [target, f"--steps={steps}"])
    with pytest.raises(ConfigError, match="is no scheduler's port"):
        await asyncio.to_thread(timeline, [f"127.0.0.1:{server.health_port}"])
    await server.stop()
    with pytest.raises(HoldbackError):
        await asyncio.to_thread(timeline, [target])
