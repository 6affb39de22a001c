"""Faults that other serving systems shipped, against the whole service on one lane, as its state tells them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdback.errors import InternalError
from holdback.types import FinishReason, ModelRunnerOutput
from holdback.v1 import scheduler_pb2, types_pb2
from scheduler_svc.state import load, state
from tests.scheduler.paged import PagedExecutor, paged_answer
from tests.scheduler.parts import SimulatedLane, Simulation, build_spec, settle

Simulate = Callable[..., Simulation]
PREFILL, DECODE = types_pb2.SCHEDULER_STATE_ACTIVE_PREFILL, types_pb2.SCHEDULER_STATE_ACTIVE_DECODE
BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


def add_lane(simulation: Simulation, **sizes: Any) -> SimulatedLane:
    executor = PagedExecutor(sizes.get("block_size", 4), sizes.get("max_num_seqs", 4))
    return simulation.add_lane(is_stepped=True, executor=executor, **sizes)


async def steps_of(simulation: Simulation, request_id: str = "") -> Sequence[scheduler_pb2.StepRecord]:
    request = scheduler_pb2.GetStateRequest(request_id=request_id)
    [lane] = (await state(simulation.pool, simulation.dispatcher, request)).lanes
    return [step for step in lane.steps if step.rows]


def numbers_of(step: scheduler_pb2.StepRecord, request_id: str) -> tuple[int, int, int]:
    """Computed before, scheduled, padded."""
    [row] = [row for row in step.rows if row.request_id == request_id]
    return row.num_computed_tokens, row.num_scheduled_tokens, row.num_scheduled_tokens_padded


async def drain_steps(lane: SimulatedLane, most: int = 10_000) -> None:
    """Answers until nothing is in flight. A lane that goes idle has checked that everything balances."""
    await settle()
    while lane.unanswered:
        assert most > 0
        most -= 1
        await lane.step()


@BOTH
@pytest.mark.case("B01")
async def test_no_step_is_empty_while_a_held_back_prompt_does_not_fit(simulate: Simulate, is_async: bool) -> None:
    simulation = simulate(enable_prefix_caching=False, async_scheduling=is_async)
    lane = add_lane(simulation, block_size=16, num_blocks=10, max_model_len=128, prefill_buckets=(128,))
    prompts = {0: list(range(20, 120)), 1: [30] * 48}
    simulation.submit(0, build_spec("A", prompts[0], max_tokens=20))
    await settle(5)
    simulation.submit(1, build_spec("B", prompts[1], max_tokens=1))
    await drain_steps(lane, 200)
    steps = await steps_of(simulation)
    assert [[row.request_id for row in step.rows] for step in steps] == [["A"]] * 20 + [["B"]]
    answers = simulation.read()
    assert answers[0].tokens == paged_answer(prompts[0], 20)
    assert answers[1].tokens == paged_answer(prompts[1], 1)


@BOTH
@pytest.mark.case("B04")
async def test_a_prompt_longer_than_a_step_is_chunked(simulate: Simulate, is_async: bool) -> None:
    simulation = simulate(async_scheduling=is_async)
    lane = add_lane(
        simulation, block_size=16, num_blocks=257, max_model_len=4096, prefill_buckets=(128, 256, 512, 1024)
    )
    simulation.submit(0, build_spec("long", [20 + i % 100 for i in range(3000)], max_tokens=1))
    await drain_steps(lane)
    chunks = [numbers_of(step, "long") for step in await steps_of(simulation)]
    assert chunks == [(0, 1024, 1024), (1024, 1024, 1024), (2048, 952, 1024)]


@BOTH
@pytest.mark.case("B06")
async def test_a_stream_goes_on_while_prompts_keep_arriving(simulate: Simulate, is_async: bool) -> None:
    # 10 ms of stall, 1 ms a prefill: a decode step after at most ten prefills.
    simulation = simulate(max_decode_stall_ms=10, async_scheduling=is_async)
    lane = add_lane(simulation, max_num_seqs=8, num_blocks=129, prefill_us=1000)
    simulation.submit(0, build_spec("A", [20] * 5, max_tokens=50))
    await settle()
    num_steps = 0
    while simulation.read()[0].ended is None:
        num_steps += 1
        assert num_steps <= 50 * 11 + 10
        simulation.submit(num_steps, build_spec(f"r{num_steps}", [21 + num_steps % 90] * 16, max_tokens=1))
        await lane.step()
    assert simulation.answers[0].tokens == paged_answer([20] * 5, 50)
    assert num_steps > 400  # prefills did go first
    [seen] = (await state(simulation.pool, simulation.dispatcher, scheduler_pb2.GetStateRequest(max_steps=1))).lanes
    assert 9_000 <= seen.max_stall_us <= 10_000
    assert seen.max_decode_stall_ms == 10


B07_SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 257,
    "max_model_len": 2048,
    "prefill_buckets": (128, 256, 512),
}
B07_PROMPT = [20 + i % 97 for i in range(1300)]


async def start_b07(simulation: Simulation) -> SimulatedLane:
    """B decodes with 4 tokens left, and A's first chunk is on its way."""
    lane = add_lane(simulation, **B07_SIZES)
    simulation.submit(0, build_spec("B", [90] * 10, max_tokens=6))
    await settle()
    await lane.step()
    await lane.step()
    simulation.submit(1, build_spec("A", B07_PROMPT, max_tokens=2))
    await settle()
    return lane


@pytest.mark.case("B07")
async def test_three_chunks_and_then_both_decode(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    lane = await start_b07(simulation)
    await drain_steps(lane)
    steps = await steps_of(simulation)
    first = next(i for i, step in enumerate(steps) if step.rows[0].request_id == "A")
    chunks = [numbers_of(step, "A") for step in steps[first : first + 3]]
    assert chunks == [(0, 512, 512), (512, 512, 512), (1024, 276, 512)]
    assert [step.state for step in steps[first : first + 4]] == [PREFILL, PREFILL, PREFILL, DECODE]
    assert [row.request_id for row in steps[first + 3].rows] == ["A", "B"]
    assert simulation.read()[1].tokens == paged_answer(B07_PROMPT, 2)


@pytest.mark.case("B07")
@pytest.mark.case("B11")
async def test_after_an_abort_between_chunks_the_very_next_step_decodes(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    lane = await start_b07(simulation)
    await lane.step()  # B's step that was out
    await lane.step()  # the first chunk
    assert numbers_of((await steps_of(simulation))[-1], "A") == (512, 512, 512)
    simulation.dispatcher.abort(simulation.session, "A", 0)
    await lane.step()
    latest = (await steps_of(simulation))[-1]
    assert (latest.state, [row.request_id for row in latest.rows]) == (DECODE, ["B"])
    assert lane.lane.core.num_free_blocks == 256 - 1
    await drain_steps(lane)
    assert simulation.read()[0].tokens == paged_answer([90] * 10, 6)


@pytest.mark.case("B07")
async def test_numbers_of_its_own_that_are_not_finite_end_a_request_between_chunks(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    lane = await start_b07(simulation)
    await lane.step()
    await lane.step()
    output = lane.executor.execute(lane.unanswered.popleft())
    lane.lane.receive(dataclasses.replace(output, failed_rows=[0]))
    await settle()
    latest = (await steps_of(simulation))[-1]
    assert (latest.state, [row.request_id for row in latest.rows]) == (DECODE, ["B"])
    assert lane.lane.core.num_free_blocks == 256 - 1
    await drain_steps(lane)
    assert simulation.read()[1].error_reason == "NUMERIC_ERROR"
    assert simulation.answers[0].tokens == paged_answer([90] * 10, 6)


@BOTH
@pytest.mark.case("B07")
async def test_after_any_other_error_b_goes_on_after_a_prefill_of_its_own(simulate: Simulate, is_async: bool) -> None:
    simulation = simulate(async_scheduling=is_async)
    lane = await start_b07(simulation)
    await lane.step()
    await lane.lose(InternalError("step 4: the device failed"))
    lane = add_lane(simulation, **B07_SIZES)
    await drain_steps(lane)
    for handle, prompt, count in ((0, [90] * 10, 6), (1, B07_PROMPT, 2)):
        assert simulation.read()[handle].tokens == paged_answer(prompt, count)
    first = (await steps_of(simulation, "B"))[0]
    assert first.state == PREFILL


@BOTH
@pytest.mark.case("B10")
async def test_the_context_limit_is_exact(simulate: Simulate, is_async: bool) -> None:
    simulation = simulate(async_scheduling=is_async)
    lane = add_lane(simulation, block_size=16, num_blocks=65, max_model_len=256, prefill_buckets=(256,))
    for handle, (length, max_tokens) in enumerate([(256, 1), (255, 2**31 - 1), (250, 100), (257, 1)]):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + i % 90 for i in range(length)], max_tokens=max_tokens))
    answers = simulation.read()
    assert [answers[handle].error_reason for handle in (0, 3)] == ["PROMPT_TOO_LONG", "PROMPT_TOO_LONG"]
    assert simulation.dispatcher.num_waiting == 2  # nothing of these two is queued
    await drain_steps(lane)
    simulation.read()
    assert [(len(answers[handle].tokens), answers[handle].finish_reason) for handle in (1, 2)] == [
        (1, "length"),
        (6, "length"),
    ]


@BOTH
@pytest.mark.case("B12")
async def test_the_phase_is_that_of_the_message(simulate: Simulate, is_async: bool) -> None:
    simulation = simulate(async_scheduling=is_async)
    lane = add_lane(simulation, block_size=16, num_blocks=65, max_model_len=512, prefill_buckets=(128, 256, 512))
    simulation.submit(0, build_spec("r", [20 + i % 90 for i in range(200)], max_tokens=5))
    await drain_steps(lane)
    steps = await steps_of(simulation)
    assert [numbers_of(step, "r") for step in steps[:3]] == [(0, 200, 256), (200, 1, 1), (201, 1, 1)]
    assert [step.state for step in steps[:3]] == [PREFILL, DECODE, DECODE]
    assert len(steps) == 5


@pytest.mark.case("B13")
async def test_a_late_row_of_an_aborted_request_disturbs_nobody(simulate: Simulate) -> None:
    prompts = {handle: [20 + handle * 9 + i for i in range(6)] for handle in range(5)}
    tokens = {}
    for is_async in (True, False):
        simulation = simulate(async_scheduling=is_async)
        # Blocks for just four requests of 20 tokens.
        lane = add_lane(simulation, num_blocks=21, max_model_len=20, prefill_buckets=(8,))
        for handle in range(4):
            simulation.submit(handle, build_spec(f"R{handle}", prompts[handle], max_tokens=12))
        await settle()
        for _ in range(6):
            await lane.step()
        assert any(row.startswith("2/") for row in lane.unanswered[-1].num_scheduled_tokens)
        simulation.dispatcher.abort(simulation.session, "R2", 0)
        simulation.submit(4, build_spec("new", prompts[4], max_tokens=12))
        await drain_steps(lane)
        answers = simulation.read()
        tokens[is_async] = {handle: answers[handle].tokens for handle in (0, 1, 3, 4)}
        assert answers[2].finish_reason == "abort"
        assert lane.lane.core.num_free_blocks == 20
    assert tokens[True] == tokens[False] == {handle: paged_answer(prompts[handle], 12) for handle in (0, 1, 3, 4)}


@BOTH
@pytest.mark.case("B47")
async def test_exactly_as_many_tokens_as_asked_are_told_and_counted(simulate: Simulate, is_async: bool) -> None:
    simulation = simulate(async_scheduling=is_async)
    lane = add_lane(simulation)
    for handle, max_tokens in enumerate((1, 5, 20)):
        simulation.submit(handle, build_spec(f"r{handle}", [30 + handle, 31], max_tokens=max_tokens))
    await drain_steps(lane)
    for handle, max_tokens in enumerate((1, 5, 20)):
        answer = simulation.read()[handle]
        assert answer.tokens == paged_answer([30 + handle, 31], max_tokens)
        assert answer.finish_reason == "length"
        assert answer.ended is not None
        assert (answer.ended.usage.prompt_tokens, answer.ended.usage.completion_tokens) == (2, max_tokens)
    assert simulation.dispatcher.num_finished == {FinishReason.LENGTH: 3}
    [seen] = (await state(simulation.pool, simulation.dispatcher, scheduler_pb2.GetStateRequest())).lanes
    computed = sum(graph.num_tokens for graph in seen.graphs)
    assert computed == 3 * 2 + 4 + 19  # prompts, and every output but the last of each


@pytest.mark.case("B56")
async def test_a_deadline_that_passes_frees_everything_within_two_steps(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_lane(simulation, max_model_len=2100, num_blocks=2101, prefill_buckets=(64,))
    simulation.submit(0, build_spec("r", [20] * 9, max_tokens=2000, deadline_ms=300))
    await settle()
    for _ in range(10):
        await lane.step()
    simulation.clock.advance(0.3)
    assert simulation.read()[0].error_reason == "DEADLINE_EXCEEDED"
    loaded = load(simulation.pool, simulation.dispatcher)
    assert (loaded.num_running, loaded.num_waiting, loaded.kv_usage) == (0, 0, 0)
    assert [(entry.finish_reason, entry.count) for entry in loaded.finished] == [(types_pb2.FINISH_REASON_ABORT, 1)]
    sent_before = len(lane.sent)
    await drain_steps(lane)
    assert [len(step.num_scheduled_tokens) for step in lane.sent[sent_before:]] == [0]
    assert lane.lane.core.num_free_blocks == 2100


@pytest.mark.case("B56")
async def test_a_client_that_vanishes_while_it_waits_leaves_nothing(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_lane(simulation, max_num_seqs=1)
    simulation.submit(0, build_spec("runs", [20], max_tokens=9))
    simulation.submit(1, build_spec("waits", [21], max_tokens=9))
    await settle()
    simulation.dispatcher.abort(simulation.session, "waits", 0)
    assert simulation.dispatcher.num_waiting == 0
    await drain_steps(lane)
    assert simulation.read()[1].finish_reason == "abort"
    assert {row for step in lane.sent for row in step.num_scheduled_tokens} == {"0/runs"}


@pytest.mark.case("B67")
async def test_gauges_fall_to_zero_with_no_traffic_and_no_counter_falls(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_lane(simulation, max_num_seqs=16, num_blocks=257)
    for handle in range(20):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 3, max_tokens=50))
    await settle()
    for _ in range(5):
        await lane.step()
    before = load(simulation.pool, simulation.dispatcher)
    assert before.num_running > 0
    simulation.dispatcher.end_session(simulation.session)
    await drain_steps(lane)
    for _ in range(2):
        simulation.clock.advance(10)
        after = load(simulation.pool, simulation.dispatcher)
        assert (after.num_running, after.num_waiting, after.num_waiting_tokens, after.kv_usage) == (0, 0, 0, 0)
        assert [(entry.finish_reason, entry.count) for entry in after.finished] == [(types_pb2.FINISH_REASON_ABORT, 20)]
        assert after.prefix_cache_queries >= before.prefix_cache_queries
        totals = {(graph.phase, graph.size): graph for graph in after.graphs}
        for graph in before.graphs:
            assert totals[graph.phase, graph.size].num_tokens >= graph.num_tokens
    [seen] = (await state(simulation.pool, simulation.dispatcher, scheduler_pb2.GetStateRequest())).lanes
    assert (seen.num_running, seen.num_free_blocks) == (0, 256)


async def test_a_result_of_a_lane_without_requests_is_refused(simulate: Simulate) -> None:
    simulation = simulate()
    lane = add_lane(simulation)
    lane.lane.receive(ModelRunnerOutput(0, [20]))
    assert await lane.ended() is not None
