"""Requests through one global queue to lanes and back, without gRPC and without time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdback.types import SchedulerOutput
from scheduler_svc import state
from scheduler_svc.requests import Session, request_id_of
from tests.scheduler.parts import Answers, Simulation, answer_of, build_spec, prompt_of, read_outbox, settle, until

Simulate = Callable[..., Simulation]


async def test_a_request_is_answered_and_ends_once(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane()
    simulation.submit(7, build_spec(prompt=[20, 21, 22], max_tokens=3))
    await simulation.until_ended(7)
    answer = simulation.answers[7]
    assert answer.tokens == [79, 82, 85]  # 16 + (63 + 3 i) % 100
    assert answer.finish_reason == "length"
    assert answer.ended is not None
    assert (answer.ended.usage.prompt_tokens, answer.ended.usage.completion_tokens) == (3, 3)
    assert [started.executor_id for started in answer.started] == ["executor-0"]


async def test_each_step_is_one_message_with_the_tokens_of_all(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    for handle in (0, 1):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=5))
    await settle()
    await lane.step()  # prefill of r0
    await lane.step()  # prefill of r1
    simulation.read()
    simulation.answers.updates.clear()
    await lane.step()
    [update] = simulation.read().updates
    assert list(update.handles) == [1, 0]  # a new prefill stands in front of running
    assert list(update.output_indices) == [1, 1]
    assert not update.num_new_tokens
    assert list(update.token_ids) == [answer_of(prompt_of(1), 2)[1], answer_of(prompt_of(0), 2)[1]]


async def test_of_a_step_each_gateway_is_told_its_own_rows_while_they_come_and_go(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    other, told = Session("other gateway"), Answers()
    simulation.submit(0, build_spec("a", prompt_of(0), max_tokens=9))
    simulation.dispatcher.submit(other, 0, build_spec("a", prompt_of(1), max_tokens=3, num_logprobs=0))
    simulation.submit(1, build_spec("b", prompt_of(2), max_tokens=5))
    simulation.dispatcher.submit(other, 1, build_spec("b", prompt_of(3), max_tokens=7))
    await settle()
    while lane.unanswered:
        await lane.step()
        read_outbox(other.outbox, told)
        simulation.read()
    assert simulation.answers[0].tokens == answer_of(prompt_of(0), 9)
    assert told[0].tokens == answer_of(prompt_of(1), 3)
    assert simulation.answers[1].tokens == answer_of(prompt_of(2), 5)
    assert told[1].tokens == answer_of(prompt_of(3), 7)


@pytest.mark.case("B09")
async def test_three_lanes_take_requests_in_order_of_arrival_and_lose_none(simulate: Simulate) -> None:
    simulation = simulate()
    for number in range(3):
        simulation.add_lane(f"executor-{number}", max_num_seqs=2)
    for handle in range(30):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=1 + handle % 7))
    await until(lambda: len(simulation.read().by_handle) == 30 and not simulation.dispatcher.num_waiting)
    await until(lambda: all(answer.ended is not None for answer in simulation.read().by_handle.values()))
    assert simulation.answers.started_order == list(range(30))
    for handle in range(30):
        assert simulation.answers[handle].tokens == answer_of(prompt_of(handle), 1 + handle % 7)
        assert len(simulation.answers[handle].started) == 1
    assert {lane.lane.info.executor_id for lane in simulation.lanes if lane.sent} == {
        "executor-0",
        "executor-1",
        "executor-2",
    }


@pytest.mark.case("B09")
async def test_an_abort_in_the_queue_leaves_the_order_of_the_others(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane(max_num_seqs=2)
    for handle in range(1, 6):
        simulation.submit(handle, build_spec(f"R{handle}", prompt_of(handle)))
    simulation.dispatcher.abort(simulation.session, "R3", 0)
    await until(lambda: all(simulation.read()[handle].ended is not None for handle in range(1, 6)))
    assert simulation.answers.started_order == [1, 2, 4, 5]
    assert simulation.answers[3].finish_reason == "abort"
    assert simulation.answers[3].tokens == []


@pytest.mark.case("B09")
async def test_a_small_request_does_not_overtake_a_head_that_does_not_fit(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True, num_blocks=12, max_model_len=28, prefill_buckets=(28,))
    simulation.submit(0, build_spec("running", [20] * 25, max_tokens=3))  # 7 of 11 blocks
    simulation.submit(1, build_spec("head", [21] * 21, max_tokens=1))  # 6 blocks, 4 are free
    simulation.submit(2, build_spec("small", [22], max_tokens=1))
    await settle()
    while simulation.read()[0].ended is None:
        assert lane.lane.core.num_free_blocks == 4
        assert simulation.answers.started_order == [0]
        await lane.step()
    while lane.unanswered:
        await lane.step()
    assert simulation.read().started_order == [0, 1, 2]


@pytest.mark.case("B01")
async def test_decodes_are_not_hidden_behind_a_prefill_that_cannot_be_placed(simulate: Simulate) -> None:
    simulation = simulate(enable_prefix_caching=False)
    lane = simulation.add_lane(
        is_stepped=True, block_size=16, num_blocks=10, max_model_len=128, max_num_seqs=4, prefill_buckets=(128,)
    )
    simulation.submit(0, build_spec("A", [20] * 100, max_tokens=20))
    await settle()
    simulation.submit(1, build_spec("B", [21] * 48, max_tokens=1))
    steps: list[SchedulerOutput] = []
    while simulation.read()[1].ended is None:
        assert len(steps) < 200
        steps.append(await lane.step())
    rows = [[request_id_of(req_id) for req_id in step.num_scheduled_tokens] for step in steps]
    assert rows == [["A"]] * 20 + [["B"]]  # one prefill and 19 decodes of A
    assert simulation.answers[0].tokens == answer_of([20] * 100, 20)


async def test_equal_lanes_share_the_load(simulate: Simulate) -> None:
    simulation = simulate()
    first = simulation.add_lane("executor-0", is_stepped=True)
    second = simulation.add_lane("executor-1", is_stepped=True)
    simulation.submit(0, build_spec("r0", prompt_of(0)))
    simulation.submit(1, build_spec("r1", prompt_of(1)))
    await settle()
    assert len(first.lane.core.running) == len(second.lane.core.running) == 1


async def test_a_cached_prefix_draws_a_request_to_its_lane(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane("executor-0")
    other = simulation.add_lane("executor-1")
    long_prompt = list(range(20, 60))
    simulation.submit(0, build_spec("warm", long_prompt, max_tokens=1))
    await simulation.until_ended(0)
    simulation.submit(1, build_spec("busy", [90], max_tokens=20))
    await simulation.until_started(1)
    assert simulation.answers[0].started[0].executor_id == "executor-0"
    simulation.submit(2, build_spec("hit", long_prompt, max_tokens=1))
    await simulation.until_ended(2)
    assert simulation.answers[2].started[0].executor_id == "executor-0"
    assert simulation.answers[2].started[0].num_cached_tokens == 36  # (40 - 1) // 4 blocks of 4
    assert not any("hit" in req_id for step in other.sent for req_id in step.num_scheduled_tokens)
    assert simulation.dispatcher.prefix_cache_stats == (81, 36)


@pytest.mark.case("B23")
async def test_executors_with_other_block_sizes_do_not_share_keys(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane("slow", block_size=4, prefill_us=1000)
    simulation.add_lane("fast", block_size=8, num_blocks=33, prefill_us=1)
    for handle, tail in enumerate((30, 40)):  # equal in the first 4 tokens only
        simulation.submit(handle, build_spec(f"r{handle}", [20] * 4 + [tail] * 9))
        answer = await simulation.until_ended(handle)
        assert (answer.started[0].executor_id, answer.started[0].num_cached_tokens) == ("fast", 0)


async def test_the_faster_executor_is_chosen_where_nothing_is_cached(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.add_lane("slow", prefill_us=200)
    simulation.add_lane("fast", prefill_us=100)
    simulation.submit(0, build_spec())
    await simulation.until_ended(0)
    assert simulation.answers[0].started[0].executor_id == "fast"


async def test_a_new_lane_helps_with_the_backlog_at_once(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    full = simulation.add_lane("full", is_stepped=True, max_num_seqs=1)
    for handle in range(3):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle)))
    await settle()
    assert simulation.read().started_order == [0]
    simulation.add_lane("new", max_num_seqs=1)
    await simulation.until_ended(2)
    assert [simulation.answers[handle].started[0].executor_id for handle in (1, 2)] == ["new", "new"]
    assert len(full.sent) == 1


async def test_nothing_is_sent_to_an_idle_executor(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane()
    await settle()
    assert lane.sent == []
    simulation.submit(0, build_spec(max_tokens=1))
    await simulation.until_ended(0)
    await settle()
    assert [len(step.num_scheduled_tokens) for step in lane.sent] == [1, 0]
    assert [request_id_of(req_id) for req_id in lane.sent[1].finished_req_ids] == ["r"]
    lane.lane.wake()
    await settle()
    assert len(lane.sent) == 2


async def test_the_state_says_why_the_head_waits(simulate: Simulate) -> None:
    simulation = simulate()

    def reason() -> str:
        return state.head_waits_because(simulation.pool, simulation.dispatcher)

    assert reason() == ""
    simulation.submit(0, build_spec("r0", prompt_of(0)))
    assert reason() == "no executor has registered yet"
    simulation.add_lane(is_stepped=True, max_num_seqs=1)
    await settle()
    assert reason() == ""
    simulation.submit(1, build_spec("r1", prompt_of(1)))
    assert "executor-0: " in reason()
    assert "max_num_seqs is 1" in reason()
    simulation.lanes[0].lane.drain("scale-down")
    assert reason() == "executor-0: it is draining"
