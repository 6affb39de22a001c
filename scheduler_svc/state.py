"""Answers to `GetLoad` and `GetState`: what a router needs in numbers, and what a person needs in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from holdback import codec
from holdback.v1 import scheduler_pb2
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.lane import Lane
from scheduler_svc.pool import Pool
from scheduler_svc.requests import request_id_of
from scheduler_svc.steps import SentStep, StepTotals

MAX_ROWS = 100_000
"""Rows of past steps in one answer; with the longest request ids about 30 MB."""


def load(pool: Pool, dispatcher: Dispatcher) -> scheduler_pb2.GetLoadResponse:
    lanes, wait_s = dispatcher.lanes, dispatcher.expected_wait_s
    usable = sum(lane.core.num_usable_blocks for lane in lanes)
    free = sum(lane.core.num_free_blocks for lane in lanes)
    prefix_cache = dispatcher.prefix_cache_stats
    return scheduler_pb2.GetLoadResponse(
        num_running=sum(len(lane.core.running) for lane in lanes),
        num_waiting=dispatcher.num_waiting,
        num_waiting_tokens=dispatcher.num_waiting_tokens,
        num_executors=pool.num_executors,
        num_slots=sum(lane.info.limits.max_num_seqs for lane in lanes),
        kv_usage=(usable - free) / usable if usable else 0.0,
        prefix_cache_queries=prefix_cache.queries,
        prefix_cache_hits=prefix_cache.hits,
        finished=[
            scheduler_pb2.FinishedCount(finish_reason=codec.encode_finish_reason(reason), count=count)
            for reason, count in dispatcher.num_finished.items()
        ],
        queue_ms=None if wait_s is None else round(wait_s * 1000),
        graphs=_graphs(dispatcher.totals),
    )


async def state(
    pool: Pool, dispatcher: Dispatcher, request: scheduler_pb2.GetStateRequest
) -> scheduler_pb2.GetStateResponse:
    """Everything at one moment; the rows of past steps, of which there are many, are added piece by piece."""
    head = dispatcher.head
    lanes = [(lane, list(_steps(lane, request))) for lane in dispatcher.lanes]
    response = scheduler_pb2.GetStateResponse(
        pool=pool.status(),
        lanes=[_lane_state(dispatcher, lane) for lane, _ in lanes],
        num_waiting=dispatcher.num_waiting,
        head_waits_because=head_waits_because(pool, dispatcher),
        num_waiting_tokens=dispatcher.num_waiting_tokens,
        head_request_id="" if head is None else head.spec.request_id,
        head_queued_ms=0 if head is None else round(dispatcher.queued_s(head) * 1000),
    )
    room = MAX_ROWS
    for message, (_, steps) in zip(response.lanes, lanes, strict=True):
        room = await _fill_steps(message, steps, room, with_rows=not request.without_rows)
    return response


async def _fill_steps(message: scheduler_pb2.LaneState, steps: list[SentStep], room: int, *, with_rows: bool) -> int:
    """Adds the latest steps that have at most `room` rows; returns the room that is left. Lanes run in between."""
    num_rows = [len(step.req_ids) if with_rows else 0 for step in steps]
    first = len(steps)
    while first and room >= num_rows[first - 1]:
        first -= 1
        room -= num_rows[first]
    for step in steps[first:]:
        message.steps.append(_step_record(step, with_rows=with_rows))
        await asyncio.sleep(0)
    return room


def _steps(lane: Lane, request: scheduler_pb2.GetStateRequest) -> Iterator[SentStep]:
    """The steps that are asked for, oldest first."""
    steps, request_id = list(lane.steps), request.request_id
    if request_id:
        # Steady steps share one list of ids, which is looked through once.
        shared = {id(step.req_ids): step.req_ids for step in steps}
        has_it = {key: any(request_id_of(req_id) == request_id for req_id in ids) for key, ids in shared.items()}
        steps = [step for step in steps if has_it[id(step.req_ids)]]
    yield from steps[-request.max_steps :]


def head_waits_because(pool: Pool, dispatcher: Dispatcher) -> str:
    """Names the check and the lane for each lane; empty when nothing waits."""
    if not dispatcher.num_waiting:
        return ""
    if dispatcher.queue.head is None or not dispatcher.lanes:
        return pool.not_ready_reason or "the pool has lost its executors and waits for one"
    reasons = ((lane.info.executor_id, _lane_refuses_because(dispatcher, lane)) for lane in dispatcher.lanes)
    return "; ".join(f"{executor_id}: {reason or 'it takes the request next'}" for executor_id, reason in reasons)


def _lane_refuses_because(dispatcher: Dispatcher, lane: Lane) -> str:
    head = dispatcher.queue.head
    return "" if head is None else dispatcher.placement.why_not(head, lane) or lane.why_not_yet() or ""


def _graphs(totals: StepTotals) -> Iterator[scheduler_pb2.GraphTotal]:
    for (phase, size), total in sorted(totals.graphs.items(), key=lambda entry: (entry[0][0].value, entry[0][1])):
        yield scheduler_pb2.GraphTotal(
            phase=codec.encode_phase(phase),
            size=size,
            num_steps=total.num_steps,
            num_tokens=total.num_tokens,
            num_padding=total.num_padding,
        )


def _lane_state(dispatcher: Dispatcher, lane: Lane) -> scheduler_pb2.LaneState:
    core = lane.core
    return scheduler_pb2.LaneState(
        executor=codec.encode_executor_info(replace(lane.info, lease="")),
        state=codec.encode_state(core.state),
        num_running=len(core.running),
        num_free_blocks=core.num_free_blocks,
        num_usable_blocks=core.num_usable_blocks,
        max_kv_concurrent=core.max_kv_concurrent,
        total_padding_tokens=core.total_padding_tokens,
        num_steps=lane.num_steps,
        num_slots=lane.info.limits.max_num_seqs,
        graphs=_graphs(lane.totals),
        max_stall_us=core.max_stall_us,
        max_decode_stall_ms=core.config.max_decode_stall_ms,
        prefix_cache_queries=core.prefix_cache_stats.queries,
        prefix_cache_hits=core.prefix_cache_stats.hits,
        num_steps_in_flight=lane.num_steps_in_flight,
        is_draining=lane.is_draining,
        head_waits_because=_lane_refuses_because(dispatcher, lane),
        prefill_tokens_per_s=lane.prefill_rate.tokens_per_us * 1e6,
    )


def _step_record(step: SentStep, *, with_rows: bool) -> scheduler_pb2.StepRecord:
    return scheduler_pb2.StepRecord(
        step=step.step,
        state=codec.encode_state(step.state),
        sent_unix_us=step.sent_unix_us,
        duration_us=step.duration_us,
        rows=_rows(step) if with_rows else (),
        phase=codec.encode_phase(step.phase),
        size=step.size,
        num_tokens=step.num_tokens,
        expected_us=step.expected_us,
        timings=None if step.timings is None else codec.encode_timings(step.timings),
    )


def _rows(step: SentStep) -> Iterator[scheduler_pb2.StepRow]:
    for req_id, num_computed in zip(step.req_ids, step.num_computed_tokens, strict=True):
        yield scheduler_pb2.StepRow(
            request_id=request_id_of(req_id),
            num_computed_tokens=num_computed,
            num_scheduled_tokens=step.num_scheduled_tokens[req_id],
            num_scheduled_tokens_padded=step.num_scheduled_tokens_padded[req_id],
        )
