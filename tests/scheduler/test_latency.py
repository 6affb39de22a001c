"""What a step or a prompt is expected to cost, from the latencies that an executor measured."""

from __future__ import annotations

import pytest

from holdback.errors import ConfigError
from holdback.types import ExecutorInfo, ExecutorLimits, GraphLatency, ModelInfo, Phase, SchedulerOutput
from scheduler_svc.latency import LatencyTable


def build_table(latencies: list[tuple[Phase, int, int, int]], *, context_buckets: tuple[int, ...] = ()) -> LatencyTable:
    limits = ExecutorLimits(
        block_size=4,
        num_blocks=100,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_batched_tokens_buckets=(8, 16),
        num_seqs_buckets=(1, 2),
        decode_context_length_buckets=context_buckets,
    )
    model = ModelInfo("model", "tiny", 128, (2,), 64)
    return LatencyTable(
        ExecutorInfo("e", "lease", 1, model, limits, tuple(GraphLatency(*latency) for latency in latencies))
    )


MEASURED = [
    (Phase.PREFILL, 8, 0, 100),
    (Phase.PREFILL, 8, 64, 180),
    (Phase.PREFILL, 16, 0, 200),
    (Phase.PREFILL, 16, 64, 264),
    (Phase.DECODE, 1, 1, 10),
    (Phase.DECODE, 1, 64, 73),
    (Phase.DECODE, 2, 64, 90),
]


def test_time_grows_linearly_between_two_contexts_where_the_context_is_data() -> None:
    table = build_table(MEASURED)
    assert table.graph_us(Phase.PREFILL, 8, 0) == 100
    assert table.graph_us(Phase.PREFILL, 8, 16) == 120
    assert table.graph_us(Phase.DECODE, 1, 11) == 20
    assert table.graph_us(Phase.DECODE, 1, 64) == 73


def test_with_context_buckets_the_smallest_that_holds_the_context_counts() -> None:
    table = build_table(MEASURED, context_buckets=(64,))
    assert table.graph_us(Phase.PREFILL, 8, 0) == 100
    assert table.graph_us(Phase.PREFILL, 8, 1) == 180


def test_a_prompt_costs_its_chunks_and_cached_tokens_cost_nothing() -> None:
    table = build_table(MEASURED)
    assert table.prefill_us(40, 0) == 200 + 216 + 140  # 16 at 0, 16 at 16, 8 at 32
    assert table.prefill_us(40, 32) == 140
    assert table.prefill_us(40, 36) == 145  # 4 tokens in the bucket of 8 at 36


def test_a_step_is_given_the_time_of_its_graph_at_the_largest_context() -> None:
    table = build_table(MEASURED)
    prefill = SchedulerOutput(num_scheduled_tokens={"a": 5}, num_scheduled_tokens_padded={"a": 8}, phase=Phase.PREFILL)
    decode = SchedulerOutput(num_scheduled_tokens={"a": 1, "b": 1}, phase=Phase.DECODE)
    empty = SchedulerOutput()
    assert [table.size_of(output) for output in (prefill, decode, empty)] == [8, 2, 0]
    assert table.longest_us(Phase.PREFILL, 8) == 180
    assert table.longest_us(Phase.DECODE, 2) == 90
    assert table.longest_us(None, 0) == 0


@pytest.mark.parametrize("missing", [(Phase.PREFILL, 8), (Phase.DECODE, 2)])
def test_every_bucket_needs_a_latency(missing: tuple[Phase, int]) -> None:
    with pytest.raises(ConfigError, match=f"no {missing[0].value} graph of size {missing[1]}"):
        build_table([latency for latency in MEASURED if latency[:2] != missing])


def test_a_latency_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="graph of size 2, context 1 is 0; allowed: at least 1"):
        build_table([*MEASURED, (Phase.DECODE, 2, 1, 0)])
