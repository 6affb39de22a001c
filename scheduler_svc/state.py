"""Answers to `GetLoad` and `GetState`: what a router needs in numbers, and what a person needs in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdback import codec
from holdback.v1 import scheduler_pb2
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.lane import Lane
from scheduler_svc.pool import Pool
from scheduler_svc.requests import request_id_of
from scheduler_svc.steps import SentStep


def load(pool: Pool, dispatcher: Dispatcher) -> scheduler_pb2.GetLoadResponse:
    lanes = dispatcher.lanes
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
    )


def state(pool: Pool, dispatcher: Dispatcher, request: scheduler_pb2.GetStateRequest) -> scheduler_pb2.GetStateResponse:
    return scheduler_pb2.GetStateResponse(
        pool=pool.status(),
        lanes=[_lane_state(lane, request) for lane in dispatcher.lanes],
        num_waiting=dispatcher.num_waiting,
        head_waits_because=head_waits_because(pool, dispatcher),
    )


def head_waits_because(pool: Pool, dispatcher: Dispatcher) -> str:
    """Names the check and the lane for each lane; empty when nothing waits."""
    if not dispatcher.num_waiting:
        return ""
    head = dispatcher.queue.head
    if head is None or not dispatcher.lanes:
        return pool.not_ready_reason or "the pool has lost its executors and waits for one"
    reasons = ((lane.info.executor_id, dispatcher.placement.why_not(head, lane)) for lane in dispatcher.lanes)
    return "; ".join(f"{executor_id}: {reason or 'it takes the request next'}" for executor_id, reason in reasons)


def _lane_state(lane: Lane, request: scheduler_pb2.GetStateRequest) -> scheduler_pb2.LaneState:
    core = lane.core
    steps = [step for step in map(_step_record, lane.steps) if _concerns(step, request.request_id)]
    return scheduler_pb2.LaneState(
        executor=codec.encode_executor_info(replace(lane.info, lease="")),
        state=codec.encode_state(core.state),
        num_running=len(core.running),
        num_free_blocks=core.num_free_blocks,
        num_usable_blocks=core.num_usable_blocks,
        max_kv_concurrent=core.max_kv_concurrent,
        total_padding_tokens=core.total_padding_tokens,
        num_steps=lane.num_steps,
        steps=steps[-request.max_steps :],
    )


def _concerns(step: scheduler_pb2.StepRecord, request_id: str) -> bool:
    return not request_id or any(row.request_id == request_id for row in step.rows)


def _step_record(step: SentStep) -> scheduler_pb2.StepRecord:
    return scheduler_pb2.StepRecord(
        step=step.step,
        state=codec.encode_state(step.state),
        sent_unix_us=step.sent_unix_us,
        duration_us=step.duration_us,
        rows=_rows(step),
    )


def _rows(step: SentStep) -> Iterator[scheduler_pb2.StepRow]:
    for req_id, num_computed in zip(step.req_ids, step.num_computed_tokens, strict=True):
        yield scheduler_pb2.StepRow(
            request_id=request_id_of(req_id),
            num_computed_tokens=num_computed,
            num_scheduled_tokens=step.num_scheduled_tokens[req_id],
            num_scheduled_tokens_padded=step.num_scheduled_tokens_padded[req_id],
        )
