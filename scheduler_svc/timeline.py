"""The last steps of each lane as a trace that Perfetto and Chrome show: prefill, decode, padding, idle.

A lane is a process of the trace. Its track `device` has a slice for each step, as long as the executor says that the
device took, ending when the result arrived; in it the share that went into padding; between two steps `idle`. The
counters `prefill tokens` and `decode tokens` are what a step computes while it runs. Times come from two clocks, so a
slice may be off by the way of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc.aio

from holdback import rpc
from holdback.endpoints import check_address
from holdback.errors import ConfigError, InvalidArgumentError
from holdback.tls import NO_TLS, Tls
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

TIMEOUT_S = 30.0

Event = dict[str, Any]

DEVICE_TRACK = 1
NAMES = {types_pb2.PHASE_PREFILL: "prefill", types_pb2.PHASE_DECODE: "decode"}


async def fetch(
    target: str, request: scheduler_pb2.GetStateRequest, tls: Tls = NO_TLS
) -> scheduler_pb2.GetStateResponse:
    """The state of the scheduler on `host:port`. Raises HoldbackError; ConfigError where something else serves."""
    try:
        check_address(target)
    except InvalidArgumentError as error:
        raise ConfigError(error.message) from None
    async with rpc.create_channel(target, tls) as channel:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        try:
            return await stub.GetState(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of_server(error, "scheduler", target, tls) from None


def trace(state: scheduler_pb2.GetStateResponse) -> dict[str, Any]:
    """A trace in the Trace Event Format, JSON object form; times are Unix microseconds."""
    events = [event for number, lane in enumerate(state.lanes, start=1) for event in _lane_events(number, lane)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _lane_events(number: int, lane: scheduler_pb2.LaneState) -> Iterator[Event]:
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": lane.executor.executor_id}}
    yield {"ph": "M", "pid": number, "tid": DEVICE_TRACK, "name": "thread_name", "args": {"name": "device"}}
    free_at: int | None = None
    for step in lane.steps:
        if step.phase not in NAMES or not step.HasField("duration_us"):
            continue
        end = step.sent_unix_us + step.duration_us
        start = end - (step.timings.device_us or step.duration_us)
        if free_at is not None:
            start, end = max(start, free_at), max(end, free_at)
            if start > free_at:
                args = {"next_step_sent_after_us": step.sent_unix_us - free_at}
                yield _slice(number, "idle", free_at, start - free_at, args)
        yield from _step_events(number, step, start, end - start)
        free_at = end


def _step_events(number: int, step: scheduler_pb2.StepRecord, start: int, duration: int) -> Iterator[Event]:
    args = {
        "step": step.step,
        "tokens": step.num_tokens,
        "size": step.size,
        "expected_us": step.expected_us,
        "queue_us": step.timings.queue_us,
        "host_us": step.timings.host_us,
        "requests": [row.request_id for row in step.rows],
    }
    yield _slice(number, NAMES[step.phase], start, duration, args)
    num_padding = step.size - step.num_tokens
    padding_us = duration * num_padding // step.size if step.size else 0
    if padding_us > 0:
        yield _slice(number, "padding", start + duration - padding_us, padding_us, {"tokens": num_padding})
    yield _count(number, start, NAMES[step.phase], step.num_tokens)
    yield _count(number, start + duration, NAMES[step.phase], 0)


def _count(number: int, at: int, name: str, value: int) -> Event:
    return {"ph": "C", "pid": number, "name": f"{name} tokens", "ts": at, "args": {"tokens": value}}


def _slice(number: int, name: str, start: int, duration: int, args: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "pid": number,
        "tid": DEVICE_TRACK,
        "name": name,
        "cat": "step",
        "ts": start,
        "dur": duration,
        "args": args,
    }
