"""The scheduler's metrics, worked out from what is there when somebody asks; docs/metrics.md has them for people.

Counters are those that the parts keep for themselves, so a step costs nothing more. Series of the pool are there from
the start, also without an executor, as autoscalers need them; those of a lane come and go with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdback.metrics import Kind, Metric, Sample, bucket_name
from holdback.types import Phase, SchedulerState
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.lane import Lane
from scheduler_svc.pool import Pool
from scheduler_svc.requests import Cause
from scheduler_svc.steps import StepTotals

ENGINE = "0"
"""A pool is what vLLM calls an engine: one queue."""

_VLLM = ("model_name", "engine")
_NEURON = ("model_name", "bucket_name")
_POOL = ("model_name",)
_LANE = ("model_name", "executor")

RUNNING = Metric("vllm:num_requests_running", Kind.GAUGE, "Requests that are bound to an executor.", _VLLM)
WAITING = Metric("vllm:num_requests_waiting", Kind.GAUGE, "Requests in the pool's queue.", _VLLM)
KV_USAGE = Metric("vllm:kv_cache_usage_perc", Kind.GAUGE, "Share of all KV blocks that requests hold, [0, 1].", _VLLM)
QUERIES = Metric("vllm:prefix_cache_queries_total", Kind.COUNTER, "Prompt tokens looked up in the prefix cache.", _VLLM)
HITS = Metric("vllm:prefix_cache_hits_total", Kind.COUNTER, "Prompt tokens hit in the prefix cache.", _VLLM)
STEP_SIZES = Metric("vllm:iteration_tokens_total", Kind.HISTOGRAM, "Tokens of a step, padding left out.", _VLLM)
ROWS_PADDING = Metric("vllm_neuron:num_seqs_padding", Kind.HISTOGRAM, "Padding rows of a decode step.", _NEURON)
TOKENS_PADDING = Metric(
    "vllm_neuron:num_batched_tokens_padding", Kind.HISTOGRAM, "Padding tokens of a prefill step.", _NEURON
)
QUEUED_TOKENS = Metric("holdback:queued_prefill_tokens", Kind.GAUGE, "Tokens to prefill of what waits.", _POOL)
KV_EXECUTORS = Metric(
    "holdback:kv_cache_usage_executors", Kind.GAUGE, "Sum of each executor's share of held KV blocks.", _POOL
)
NUM_EXECUTORS = Metric("holdback:num_executors", Kind.GAUGE, "Executors that serve.", _POOL)
NUM_SLOTS = Metric("holdback:num_slots", Kind.GAUGE, "Requests that the executors can run at once.", _POOL)
HEAD_QUEUED = Metric("holdback:head_queued_seconds", Kind.GAUGE, "How long the head of the queue has waited.", _POOL)
HELD_BACK = Metric(
    "holdback:held_back_steps_total",
    Kind.COUNTER,
    "Times that a lane was about to choose a step and could not take the head, by check.",
    ("model_name", "reason"),
)
MOVES = Metric(
    "holdback:request_moves_total", Kind.COUNTER, "Requests taken back from an executor.", ("model_name", "cause")
)
LEFT = Metric("holdback:executors_left_total", Kind.COUNTER, "Executors that have left.", ("model_name", "cause"))
STALL_BOUND = Metric("holdback:decode_stall_bound_seconds", Kind.GAUGE, "How long prefills may hide decodes.", _POOL)
LANE_STATE = Metric("holdback:lane_state", Kind.GAUGE, "1 for the state of the lane, else 0.", (*_LANE, "state"))
LANE_RUNNING = Metric("holdback:lane_requests_running", Kind.GAUGE, "Requests on this executor.", _LANE)
LANE_BOUND = Metric("holdback:lane_requests_bound_total", Kind.COUNTER, "Requests that it took.", _LANE)
LANE_KV_USAGE = Metric("holdback:lane_kv_cache_usage", Kind.GAUGE, "Share of its held KV blocks, [0, 1].", _LANE)
LANE_BLOCKS = Metric("holdback:lane_usable_blocks", Kind.GAUGE, "Its KV blocks.", _LANE)
LANE_PEAK = Metric(
    "holdback:lane_admission_peak_blocks", Kind.GAUGE, "Most KV blocks that its requests may hold at once.", _LANE
)
LANE_STALL = Metric(
    "holdback:lane_decode_stall_max_seconds", Kind.GAUGE, "Longest that prefills have hidden its decodes.", _LANE
)

METRICS = (
    *(RUNNING, WAITING, KV_USAGE, QUERIES, HITS, STEP_SIZES, ROWS_PADDING, TOKENS_PADDING),
    *(QUEUED_TOKENS, KV_EXECUTORS, NUM_EXECUTORS, NUM_SLOTS, HEAD_QUEUED, HELD_BACK, MOVES, LEFT, STALL_BOUND),
    *(LANE_STATE, LANE_RUNNING, LANE_BOUND, LANE_KV_USAGE, LANE_BLOCKS, LANE_PEAK, LANE_STALL),
)

LANE_STATES = (*(state.value for state in SchedulerState), "DRAINING")


class SchedulerMetrics:
    """The source of the scheduler's samples. Called on the event loop, between two awaits of everything else."""

    def __init__(self, config: SchedulerServiceConfig, pool: Pool, dispatcher: Dispatcher) -> None:
        self._config = config
        self._pool = pool
        self._dispatcher = dispatcher

    def __call__(self) -> Iterator[Sample]:
        model_name = self._model_name
        yield from self._queue(model_name)
        yield from self._counts(model_name)
        yield from _steps(model_name, self._dispatcher.totals)
        for lane in self._dispatcher.lanes:
            yield from _lane(model_name, lane)

    @property
    def _model_name(self) -> str:
        if self._config.served_model_name is not None:
            return self._config.served_model_name
        return "" if self._pool.model is None else self._pool.model.name

    def _queue(self, model_name: str) -> Iterator[Sample]:
        dispatcher, lanes = self._dispatcher, self._dispatcher.lanes
        usable = sum(lane.core.num_usable_blocks for lane in lanes)
        free = sum(lane.core.num_free_blocks for lane in lanes)
        vllm, pool = (model_name, ENGINE), (model_name,)
        yield Sample(RUNNING, vllm, sum(len(lane.core.running) for lane in lanes))
        yield Sample(WAITING, vllm, dispatcher.num_waiting)
        yield Sample(KV_USAGE, vllm, (usable - free) / usable if usable else 0.0)
        yield Sample(QUEUED_TOKENS, pool, dispatcher.num_waiting_tokens)
        yield Sample(KV_EXECUTORS, pool, sum(map(_kv_usage, lanes)))
        yield Sample(NUM_EXECUTORS, pool, self._pool.num_executors)
        yield Sample(NUM_SLOTS, pool, sum(lane.info.limits.max_num_seqs for lane in lanes))
        head = dispatcher.head
        yield Sample(HEAD_QUEUED, pool, 0.0 if head is None else dispatcher.queued_s(head))

    def _counts(self, model_name: str) -> Iterator[Sample]:
        dispatcher, prefix_cache = self._dispatcher, self._dispatcher.prefix_cache_stats
        yield Sample(QUERIES, (model_name, ENGINE), prefix_cache.queries)
        yield Sample(HITS, (model_name, ENGINE), prefix_cache.hits)
        for check, count in dispatcher.placement.num_held_back.items():
            yield Sample(HELD_BACK, (model_name, check.value), count)
        for cause in Cause:
            yield Sample(MOVES, (model_name, cause.value), dispatcher.num_moves[cause])
        for cause in (Cause.LOSS, Cause.DRAIN):
            yield Sample(LEFT, (model_name, cause.value), dispatcher.num_lanes_left[cause])
        bound_ms = self._config.max_decode_stall_ms
        yield Sample(STALL_BOUND, (model_name,), math.inf if bound_ms is None else bound_ms / 1000)


def _steps(model_name: str, totals: StepTotals) -> Iterator[Sample]:
    yield Sample(STEP_SIZES, (model_name, ENGINE), totals.tokens)
    for (phase, size), total in totals.graphs.items():
        metric = TOKENS_PADDING if phase is Phase.PREFILL else ROWS_PADDING
        yield Sample(metric, (model_name, bucket_name(phase, size)), total.padding)


def _lane(model_name: str, lane: Lane) -> Iterator[Sample]:
    labels, core = (model_name, lane.info.executor_id), lane.core
    state = "DRAINING" if lane.is_draining else core.state.value
    for value in LANE_STATES:
        yield Sample(LANE_STATE, (*labels, value), value == state)
    yield Sample(LANE_RUNNING, labels, len(core.running))
    yield Sample(LANE_BOUND, labels, lane.num_bound)
    yield Sample(LANE_KV_USAGE, labels, _kv_usage(lane))
    yield Sample(LANE_BLOCKS, labels, core.num_usable_blocks)
    yield Sample(LANE_PEAK, labels, core.num_peak_blocks)
    yield Sample(LANE_STALL, labels, core.max_stall_us / 1e6)


def _kv_usage(lane: Lane) -> float:
    return 1 - lane.core.num_free_blocks / lane.core.num_usable_blocks
