"""What `GetLoad` and `GetState` say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdback.errors import UnavailableError
from holdback.v1 import scheduler_pb2, types_pb2
from scheduler_svc import state as state_module
from scheduler_svc.state import load, state
from tests.scheduler.parts import Simulation, build_spec, prompt_of, settle

Simulate = Callable[..., Simulation]
PREFILL, DECODE = types_pb2.PHASE_PREFILL, types_pb2.PHASE_DECODE


async def state_of(simulation: Simulation, **request: object) -> scheduler_pb2.GetStateResponse:
    asked = scheduler_pb2.GetStateRequest(**request)  # type: ignore[arg-type]
    return await state(simulation.pool, simulation.dispatcher, asked)


def load_of(simulation: Simulation) -> scheduler_pb2.GetLoadResponse:
    return load(simulation.pool, simulation.dispatcher)


Graphs = dict[tuple[int, int], tuple[int, int, int]]


def graphs_of(message: scheduler_pb2.LaneState | scheduler_pb2.GetLoadResponse) -> Graphs:
    return {
        (graph.phase, graph.size): (graph.num_steps, graph.num_tokens, graph.num_padding) for graph in message.graphs
    }


async def test_padding_is_counted_for_each_bucket(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane()
    simulation.submit(0, build_spec("r0", list(range(20, 43)), max_tokens=3))  # chunks of 16 and 7, two decode steps
    await simulation.until_ended(0)
    simulation.submit(1, build_spec("r1", [90], max_tokens=1))
    await simulation.until_ended(1)
    [lane] = (await state_of(simulation)).lanes
    assert graphs_of(lane) == {(PREFILL, 8): (2, 8, 8), (PREFILL, 16): (1, 16, 0), (DECODE, 4): (2, 2, 6)}
    assert lane.total_padding_tokens == 8


async def test_no_total_falls_when_a_lane_goes(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane()
    simulation.submit(0, build_spec("r0", prompt_of(0), max_tokens=3))
    await simulation.until_ended(0)
    await settle()
    before = graphs_of(load_of(simulation))
    await lane.lose(UnavailableError("gone"))
    assert before == graphs_of(load_of(simulation)) == {(PREFILL, 8): (1, 3, 5), (DECODE, 4): (2, 2, 6)}
    simulation.add_lane()
    simulation.submit(1, build_spec("r1", prompt_of(1), max_tokens=1))
    await simulation.until_ended(1)
    assert graphs_of(load_of(simulation))[PREFILL, 8] == (2, 6, 10)


@pytest.mark.case("B24")
async def test_a_hit_is_only_what_another_request_left(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane(block_size=16, max_model_len=2048, num_blocks=257, prefill_buckets=(256,))
    prompt = [(i * 31) % 100 + 20 for i in range(1024)]
    for handle, expected in enumerate([(1024, 0), (2048, 1008)]):
        simulation.submit(handle, build_spec(f"r{handle}", prompt, max_tokens=5))
        ended = (await simulation.until_ended(handle)).ended
        assert ended is not None
        [lane] = (await state_of(simulation)).lanes
        assert (lane.prefix_cache_queries, lane.prefix_cache_hits) == expected
        load = load_of(simulation)
        assert (load.prefix_cache_queries, load.prefix_cache_hits) == expected
        assert ended.usage.cached_tokens == (0, 1008)[handle]


async def test_the_longest_stall_stands_beside_its_bound(simulate: Simulate) -> None:
    simulation = simulate(max_decode_stall_ms=250, async_scheduling=False)
    lane = simulation.add_lane(is_stepped=True, prefill_us=100_000)
    for handle in range(4):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=9))
    await settle()
    while lane.unanswered:
        await lane.step()
    [seen] = (await state_of(simulation)).lanes
    assert (seen.max_stall_us, seen.max_decode_stall_ms) == (200_000, 250)
    strict = simulate(max_decode_stall_ms=None)
    strict.add_lane()
    assert not (await state_of(strict)).lanes[0].HasField("max_decode_stall_ms")


async def test_a_lane_shows_its_slots_steps_and_rate(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane("busy", is_stepped=True, prefill_us=160_000)
    simulation.submit(0, build_spec("r0", prompt_of(0), max_tokens=9))
    await settle()
    [lane] = (await state_of(simulation)).lanes
    assert (lane.num_slots, lane.num_running, lane.num_steps_in_flight, lane.is_draining) == (4, 1, 2, False)
    assert lane.prefill_tokens_per_s == pytest.approx(100)  # 16 tokens in 160 ms
    [prefill, decode] = lane.steps
    assert (prefill.phase, prefill.size, prefill.num_tokens, prefill.expected_us) == (PREFILL, 8, 3, 160_000)
    assert (decode.phase, decode.size, decode.num_tokens, decode.expected_us) == (DECODE, 4, 1, 10)
    assert not prefill.HasField("timings")


async def test_why_the_head_waits_is_said_for_the_pool_and_for_each_lane(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane("full", is_stepped=True, max_num_seqs=1)
    simulation.add_lane("drains", is_stepped=True, max_num_seqs=1)
    for handle in range(3):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 5, queued_ms=400 * handle))
    await settle()
    simulation.lanes[1].lane.drain("scale-down")
    simulation.clock.advance(0.2)
    seen = await state_of(simulation)
    assert (seen.num_waiting, seen.num_waiting_tokens) == (1, 5)
    assert (seen.head_request_id, seen.head_queued_ms) == ("r2", 1000)
    reasons = {lane.executor.executor_id: lane.head_waits_because for lane in seen.lanes}
    assert reasons == {"full": "1 requests run; max_num_seqs is 1", "drains": "it is draining"}
    assert seen.head_waits_because == "full: 1 requests run; max_num_seqs is 1; drains: it is draining"


async def test_a_lane_whose_steps_do_not_come_back_is_not_said_to_take_the_head_next(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane("hangs", is_stepped=True)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=9))
        await settle()
    simulation.clock.advance(3.2)
    waits = "its 2 steps in flight are not back, the oldest since 3.2 s"
    seen = await state_of(simulation)
    assert (seen.head_waits_because, seen.lanes[0].head_waits_because) == (f"hangs: {waits}", waits)
    await lane.step()
    await lane.step()
    assert simulation.dispatcher.num_waiting == 0


async def test_words_name_requests_as_their_gateways_do(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    simulation.add_lane(is_stepped=True)
    simulation.submit(0, build_spec("chat-1", [20] * 40))
    simulation.submit(1, build_spec("chat-2", [21]))
    await settle()
    seen = await state_of(simulation)
    assert seen.lanes[0].head_waits_because == "request 'chat-1' is prefilling, 16 of 40 tokens are computed"


async def test_the_head_is_named_before_any_executor_is_there(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.submit(0, build_spec("early"))
    seen = await state_of(simulation)
    assert (seen.head_request_id, seen.head_waits_because) == ("early", "no executor has registered yet")
    assert not load_of(simulation).HasField("queue_ms")


async def test_the_load_says_how_long_the_queue_takes(simulate: Simulate) -> None:
    simulation = simulate()
    for number in range(2):
        simulation.add_lane(f"executor-{number}", is_stepped=True, max_num_seqs=1, prefill_us=1_600_000)
    for handle in range(3):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle] * 10))
    await settle()
    assert load_of(simulation).queue_ms == 500  # 10 tokens at 10 a second on each of two


async def test_steps_are_left_out_before_an_answer_gets_too_large(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate()
    for number in range(2):
        simulation.add_lane(f"executor-{number}", max_num_seqs=1)
        simulation.submit(number, build_spec(f"r{number}", prompt_of(number), max_tokens=6))
    for handle in range(2):
        await simulation.until_ended(handle)
    await settle()
    monkeypatch.setattr(state_module, "MAX_ROWS", 8)
    first, second = (await state_of(simulation)).lanes
    assert [len(step.rows) for step in first.steps] == [1] * 6 + [0]  # a prefill, five decodes, and what tells the end
    assert [step.step for step in second.steps] == [4, 5, 6]
    first, second = (await state_of(simulation, without_rows=True)).lanes
    assert [len(lane.steps) for lane in (first, second)] == [7, 7]
    assert not any(step.rows for step in second.steps)
    assert [step.num_tokens for step in second.steps] == [3, 1, 1, 1, 1, 1, 0]
    [latest] = (await state_of(simulation, max_steps=1)).lanes[1].steps
    assert latest.step == 6


async def test_only_steps_with_the_request_are_shown(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    for handle, max_tokens in enumerate((6, 3)):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=max_tokens))
    await settle()
    while lane.unanswered:
        await lane.step()
    [seen] = (await state_of(simulation, request_id="r1")).lanes
    assert [step.num_tokens for step in seen.steps] == [3, 2, 2]
    assert [(await state_of(simulation, request_id="nobody")).lanes[0].steps] == [[]]
