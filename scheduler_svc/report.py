"""The state of a scheduler for a terminal: pool, queue and why its head waits, and a table of the lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdback.v1 import scheduler_pb2, types_pb2

HEADER = ("executor", "device", "state", "running", "free blocks", "steps", "in flight", "longest stall", "prefill")


def report(state: scheduler_pb2.GetStateResponse) -> Iterator[str]:
    """Lines of text."""
    yield f"pool   {_pool(state.pool)}"
    yield f"queue  {_queue(state)}"
    yield from (f"       {reason}" for reason in _why(state))
    if state.lanes:
        yield ""
        yield from _table([HEADER, *map(_lane, state.lanes)])


def _pool(pool: scheduler_pb2.PoolStatus) -> str:
    ready = "ready" if pool.ready else f"not ready: {pool.not_ready_reason}"
    if not pool.HasField("model"):
        return ready
    return f"{pool.model.name} ({pool.model.fingerprint}), max_model_len {pool.model.max_model_len}, {ready}"


def _queue(state: scheduler_pb2.GetStateResponse) -> str:
    if not state.num_waiting:
        return "nothing waits"
    head = f"the head is {state.head_request_id!r}, for {state.head_queued_ms / 1000:.1f} s"
    return f"requests: {state.num_waiting}, tokens to prefill: {state.num_waiting_tokens}; {head}"


def _why(state: scheduler_pb2.GetStateResponse) -> Iterator[str]:
    """Why the head waits: one line for each lane, or one for the pool."""
    if state.num_waiting and state.lanes:
        for lane in state.lanes:
            yield f"{lane.executor.executor_id}: {lane.head_waits_because or 'it takes the request next'}"
    elif state.head_waits_because:
        yield state.head_waits_because


def _lane(lane: scheduler_pb2.LaneState) -> Sequence[str]:
    name = types_pb2.SchedulerState.Name(lane.state).removeprefix("SCHEDULER_STATE_")
    bound = f" of {lane.max_decode_stall_ms:g}" if lane.HasField("max_decode_stall_ms") else ""
    return (
        lane.executor.executor_id,
        lane.executor.device,
        "DRAINING" if lane.is_draining else name,
        f"{lane.num_running} of {lane.num_slots}",
        f"{lane.num_free_blocks} of {lane.num_usable_blocks}",
        str(lane.num_steps),
        str(lane.num_steps_in_flight),
        f"{lane.max_stall_us / 1000:.0f}{bound} ms",
        f"{lane.prefill_tokens_per_s:.0f} tokens/s",
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest entry; names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            entry.ljust(width) if index < 3 else entry.rjust(width)
            for index, (entry, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
