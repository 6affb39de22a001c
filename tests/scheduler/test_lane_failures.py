"""An executor that dies, drains, lies or hangs: its requests go on elsewhere, no token is lost or doubled."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdback.errors import FailedPreconditionError, InternalError, UnavailableError
from holdback.types import ModelRunnerOutput, SchedulerOutput
from scheduler_svc.requests import request_id_of
from tests.scheduler.paged import PagedExecutor, paged_answer
from tests.scheduler.parts import (
    SimulatedLane,
    Simulation,
    answer_of,
    build_spec,
    settle,
    until,
)

Simulate = Callable[..., Simulation]
PROMPT = [20, 21, 22]


def rows_of(step: SchedulerOutput) -> list[str]:
    return [request_id_of(req_id) for req_id in step.num_scheduled_tokens]


async def test_requests_of_a_lost_executor_go_on_at_another_from_the_outputs_so_far(simulate: Simulate) -> None:
    simulation = simulate()
    first = simulation.add_lane("first", is_stepped=True)
    for handle in range(3):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=6))
    await settle()
    for _ in range(5):  # three prefills, two decode steps
        await first.step()
    assert [len(simulation.read()[handle].tokens) for handle in range(3)] == [3, 3, 3]
    await first.lose(UnavailableError("the pod died"))
    second = simulation.add_lane("second")
    await until(lambda: all(simulation.read()[handle].ended is not None for handle in range(3)))
    for handle in range(3):
        answer = simulation.answers[handle]
        assert answer.tokens == answer_of([20 + handle], 6)
        assert answer.finish_reason == "length"
        assert [started.executor_id for started in answer.started] == ["first", "second"]
        assert answer.ended is not None
        assert (answer.ended.usage.prompt_tokens, answer.ended.usage.completion_tokens) == (1, 6)
    assert [list(new.spec.output_token_ids) for step in second.sent for new in step.scheduled_new_reqs] == [
        answer_of([20 + handle], 3) for handle in range(3)
    ]


@pytest.mark.case("B60")
async def test_an_executor_that_comes_back_is_taken_for_empty(simulate: Simulate) -> None:
    simulation = simulate()
    prompt = list(range(20, 40))
    for handle in range(2):
        lane = simulation.add_lane("the same")
        simulation.submit(handle, build_spec(f"r{handle}", prompt, max_tokens=2))
        answer = await simulation.until_ended(handle)
        assert answer.tokens == answer_of(prompt, 2)
        assert answer.started[0].num_cached_tokens == 0
        assert lane.sent[0].step == 0
        assert lane.sent[0].scheduled_new_reqs[0].block_ids == [1, 2, 3, 4]  # a chunk of 16 in blocks of 4
        await lane.lose(UnavailableError("restarted"))


async def test_moved_requests_stand_in_front_in_order_of_arrival(simulate: Simulate) -> None:
    simulation = simulate()
    lanes = [simulation.add_lane(f"executor-{n}", is_stepped=True, max_num_seqs=2) for n in range(2)]
    for handle in range(6):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=20))
        await settle()
        for lane in lanes:
            if lane.unanswered:
                await lane.step()
    running = [request_id_of(waiting.req_id) for lane in lanes for waiting in lane.lane.core.running]
    assert sorted(running) == ["r0", "r1", "r2", "r3"]
    await lanes[1].lose(UnavailableError("gone"))
    await lanes[0].lose(UnavailableError("gone"))
    assert [waiting.spec.request_id for waiting in simulation.dispatcher.queue] == [f"r{n}" for n in range(6)]


async def test_a_drained_executor_finishes_its_step_and_no_move_is_counted(simulate: Simulate) -> None:
    simulation = simulate(max_request_moves=0, async_scheduling=False)
    first = simulation.add_lane("first", is_stepped=True)
    simulation.submit(0, build_spec(prompt=PROMPT, max_tokens=4))
    await settle()
    await first.step()
    first.lane.drain("scale-down")
    await settle()
    assert simulation.read()[0].tokens == answer_of(PROMPT, 1)
    await first.step()
    assert simulation.read()[0].tokens == answer_of(PROMPT, 2)
    assert await first.ended() is None
    assert len(first.sent) == 2
    simulation.add_lane("second")
    await simulation.until_ended(0)
    assert simulation.answers[0].tokens == answer_of(PROMPT, 4)
    assert simulation.answers[0].finish_reason == "length"


async def test_a_draining_executor_takes_nothing_new(simulate: Simulate) -> None:
    simulation = simulate(async_scheduling=False)
    draining = simulation.add_lane("draining", is_stepped=True)
    simulation.submit(0, build_spec("r0", [20]))
    await settle()
    draining.lane.drain("scale-down")
    simulation.submit(1, build_spec("r1", [21]))
    await settle()
    assert [rows_of(step) for step in draining.sent] == [["r0"]]
    assert simulation.dispatcher.num_waiting == 1


async def test_a_request_that_takes_executors_down_ends_and_its_neighbours_go_on(simulate: Simulate) -> None:
    simulation = simulate(max_request_moves=2)
    simulation.submit(0, build_spec("poison", [20], max_tokens=9))
    simulation.submit(1, build_spec("innocent", [21], max_tokens=9))
    for number in range(3):
        lane = simulation.add_lane(f"executor-{number}", is_stepped=True)
        await settle()
        assert rows_of(lane.unanswered[0]) == ["poison"]
        await lane.lose(UnavailableError("it took the device down"))
    answer = simulation.read()[0]
    assert (answer.finish_reason, answer.error_reason) == ("error", "TOO_MANY_MOVES")
    assert answer.ended is not None
    assert answer.ended.error.code == 13  # INTERNAL
    assert "max_request_moves" in answer.ended.error.message
    simulation.add_lane("last")
    await simulation.until_ended(1)
    assert simulation.answers[1].tokens == answer_of([21], 9)


async def test_two_that_have_used_up_their_moves_do_not_share_a_lane(simulate: Simulate) -> None:
    simulation = simulate(max_request_moves=1)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=9))
    lane = simulation.add_lane("first", is_stepped=True)
    await settle()
    await lane.step()
    await lane.step()
    assert sorted(rows_of(lane.unanswered[0])) == ["r0", "r1"]
    await lane.lose(UnavailableError("gone"))
    alone = simulation.add_lane("second", is_stepped=True)
    await settle()
    for _ in range(3):
        await alone.step()
    assert {row for step in alone.sent for row in rows_of(step)} == {"r0"}
    other = simulation.add_lane("third", is_stepped=True)
    await settle()
    assert rows_of(other.unanswered[0]) == ["r1"]


async def test_those_that_never_failed_do_not_wait_for_those_that_have_used_up_their_moves(simulate: Simulate) -> None:
    simulation = simulate(max_request_moves=1, async_scheduling=False)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"failed {handle}", [20 + handle], max_tokens=4 + handle))
    lane = simulation.add_lane("first", is_stepped=True, max_num_seqs=2)
    await settle()
    await lane.step()
    await lane.step()
    await lane.lose(UnavailableError("gone"))  # in a step with both
    for handle in range(2, 5):
        simulation.submit(handle, build_spec(f"new {handle}", [20 + handle], max_tokens=8))
    second = simulation.add_lane("second", is_stepped=True, max_num_seqs=2)
    await settle()
    while second.unanswered:
        await second.step()
    # Beside the first that failed runs one that did not; the other one that failed is the next, and none passes it.
    assert simulation.read().started_order == [0, 1, 2, 3, 4]
    first_rows = [rows_of(step) for step in second.sent if step.scheduled_new_reqs]
    assert first_rows == [["failed 0"], ["new 2"], ["failed 1"], ["new 3"], ["new 4"]]
    assert all(not {"failed 0", "failed 1"} <= set(rows_of(step)) for step in second.sent)
    for handle, max_tokens in enumerate((4, 5, 8, 8, 8)):
        assert simulation.answers[handle].tokens == answer_of([20 + handle], max_tokens)


async def test_one_that_may_not_go_to_a_lane_keeps_its_place_where_it_may(simulate: Simulate) -> None:
    simulation = simulate(max_request_moves=1, async_scheduling=False)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"failed {handle}", [20 + handle], max_tokens=9))
    lane = simulation.add_lane("first", is_stepped=True)
    await settle()
    await lane.step()
    await lane.step()
    await lane.lose(UnavailableError("gone"))
    simulation.submit(2, build_spec("new", [22], max_tokens=9))
    lanes = [simulation.add_lane(name, is_stepped=True, max_num_seqs=1) for name in ("second", "third")]
    await settle()
    assert [rows_of(lane.unanswered[0]) for lane in lanes] == [["failed 0"], ["failed 1"]]
    assert simulation.dispatcher.num_waiting == 1


Tamper = Callable[[ModelRunnerOutput], ModelRunnerOutput]


@pytest.mark.parametrize(
    ("tamper", "error", "message"),
    [
        (lambda output: dataclasses.replace(output, step=output.step + 1), FailedPreconditionError, "output.step is 2"),
        (lambda output: dataclasses.replace(output, step=0), FailedPreconditionError, "output.step is 0; allowed: 1"),
        (lambda output: dataclasses.replace(output, sampled_token_ids=[]), InternalError, "has 0 tokens for 1"),
        (lambda output: dataclasses.replace(output, sampled_token_ids=[20, 20]), InternalError, "has 2 tokens for 1"),
        (lambda output: dataclasses.replace(output, sampled_token_ids=[128]), InternalError, "has 128; allowed"),
        (lambda output: dataclasses.replace(output, failed_rows=[1]), InternalError, "failed_rows of step 1"),
    ],
)
async def test_an_output_that_does_not_fit_its_step_resets_the_lane_and_changes_nothing(
    simulate: Simulate, tamper: Tamper, error: type[Exception], message: str
) -> None:
    simulation = simulate()
    liar = simulation.add_lane("liar", is_stepped=True)
    simulation.submit(0, build_spec(prompt=PROMPT, max_tokens=4))
    await settle()
    await liar.step()
    liar.lane.receive(tamper(liar.executor.execute(liar.unanswered.popleft())))
    raised = await liar.ended()
    assert isinstance(raised, error)
    assert message in str(raised)
    assert simulation.read()[0].tokens == answer_of(PROMPT, 1)
    simulation.add_lane("honest")
    await simulation.until_ended(0)
    assert simulation.answers[0].tokens == answer_of(PROMPT, 4)


async def test_an_answer_to_no_step_resets_the_lane(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane()
    lane.lane.receive(ModelRunnerOutput(0))
    raised = await lane.ended()
    assert isinstance(raised, FailedPreconditionError)
    assert simulation.dispatcher.lanes == []


@pytest.mark.parametrize(
    "timeouts",
    [
        {"min_step_timeout_s": 0.02},
        {"min_step_timeout_s": 0.01, "max_step_timeout_s": 0.02, "step_timeout_factor": 1000},
    ],
)
async def test_a_step_that_does_not_return_ends_the_lane(simulate: Simulate, timeouts: dict[str, float]) -> None:
    simulation = simulate(**timeouts)
    hung = simulation.add_lane("hung", is_stepped=True)
    simulation.submit(0, build_spec(prompt=PROMPT))
    raised = await hung.ended()
    assert isinstance(raised, InternalError)
    assert "step 0 has run for 0.02 s" in str(raised)
    simulation.change(min_step_timeout_s=60, max_step_timeout_s=600)
    simulation.add_lane("second")
    await simulation.until_ended(0)
    assert simulation.answers[0].tokens == answer_of(PROMPT, 3)


async def test_a_step_that_cannot_be_sent_ends_the_lane(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate(min_step_timeout_s=0.02)
    full = simulation.add_lane("full")

    async def never(output: SchedulerOutput) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(full, "send", never)
    simulation.submit(0, build_spec(prompt=PROMPT))
    assert isinstance(await full.ended(), InternalError)
    simulation.change(min_step_timeout_s=60)
    simulation.add_lane("second")
    assert (await simulation.until_ended(0)).tokens == answer_of(PROMPT, 3)


async def test_a_core_that_would_stand_still_ends_the_lane(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    simulation.submit(0, build_spec(prompt=PROMPT))
    await settle()
    monkeypatch.setattr(lane.lane.core, "schedule", SchedulerOutput)
    while lane.unanswered:
        lane.answer()
    raised = await lane.ended()
    assert isinstance(raised, InternalError)
    assert "scheduled nothing though 1 requests run" in str(raised)


async def test_numbers_that_are_not_finite_end_that_request_alone(simulate: Simulate) -> None:
    simulation = simulate()
    lane = simulation.add_lane(is_stepped=True)
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", [20 + handle], max_tokens=4))
    await settle()
    await lane.step()
    await lane.step()
    output = lane.executor.execute(lane.unanswered.popleft())
    assert rows_of(lane.sent[-1]) == ["r1", "r0"]
    output.failed_rows, output.sampled_token_ids[0] = [0], 0
    lane.lane.receive(output)
    await settle()
    while lane.unanswered:
        await lane.step()
    answers = simulation.read()
    assert (answers[1].finish_reason, answers[1].error_reason) == ("error", "NUMERIC_ERROR")
    assert answers[0].tokens == answer_of([20], 4)


Operation = tuple[str, int]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(0, 2)),
        st.tuples(st.just("lose"), st.integers(0, 2)),
        st.tuples(st.just("drain"), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, is_async=st.booleans(), admission=st.sampled_from(["max_model_len", "phased"]))
def test_whatever_happens_each_request_ends_once_with_its_own_tokens(
    operations: list[Operation], is_async: bool, admission: str
) -> None:
    asyncio.run(_operate(operations, async_scheduling=is_async, kv_admission=admission))


async def _operate(operations: list[Operation], **settings: object) -> None:
    simulation = Simulation(max_request_moves=100, **settings)
    lanes = [_replacement(simulation, number, 0) for number in range(3)]
    prompts: list[list[int]] = []
    for count, (kind, value) in enumerate(operations):
        if kind == "submit":
            prompts.append([20 + len(prompts) % 90] * value)
            handle = len(prompts) - 1
            simulation.submit(handle, build_spec(f"r{handle}", prompts[-1], max_tokens=1 + value % 8))
        elif kind == "abort":
            simulation.dispatcher.abort(simulation.session, f"r{value}", 0)
        elif kind == "step" and lanes[value].unanswered:
            lanes[value].answer()
        elif kind == "lose":
            await lanes[value].lose(UnavailableError("gone"))
            lanes[value] = _replacement(simulation, value, count)
        elif kind == "drain":
            lanes[value].lane.drain("rollout")
            while lanes[value].unanswered:
                await lanes[value].step()
            await lanes[value].ended()
            lanes[value] = _replacement(simulation, value, count)
        await settle(10)
        for lane in lanes:
            lane.lane.core.check_integrity()
    while any(lane.unanswered for lane in lanes):
        for lane in lanes:
            if lane.unanswered:
                await lane.step()
    _check_answers(simulation, prompts)
    await simulation.stop()


def _replacement(simulation: Simulation, number: int, count: int) -> SimulatedLane:
    """Two slots, and less KV memory than two of the longest requests need."""
    executor = PagedExecutor(max_num_seqs=2)
    name = f"executor-{number}-{count}"
    return simulation.add_lane(name, is_stepped=True, executor=executor, max_num_seqs=2, num_blocks=21)


def _check_answers(simulation: Simulation, prompts: list[list[int]]) -> None:
    answers = simulation.read()
    assert len(answers.by_handle) == len(prompts)
    for handle, prompt in enumerate(prompts):
        answer = answers[handle]
        expected = paged_answer(prompt, 1 + len(prompt) % 8)
        assert answer.finish_reason in ("length", "abort")
        assert answer.tokens == expected[: len(answer.tokens)]
        assert len(answer.tokens) == len(expected) or answer.finish_reason == "abort"
    assert simulation.dispatcher.num_waiting == 0
    assert all(lane.core.num_free_blocks == lane.core.num_usable_blocks for lane in simulation.dispatcher.lanes)


async def test_checks_of_an_idle_lane_take_a_small_share_of_the_time(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate()
    lane = simulation.add_lane()
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        simulation.clock.stall(0.5)  # as many blocks take

    monkeypatch.setattr(lane.lane.core, "check_integrity", check)
    for handle in range(10):
        simulation.submit(handle, build_spec(f"r{handle}", PROMPT, max_tokens=1))
        await simulation.until_ended(handle)
        await settle()
        simulation.clock.advance(10)
    assert num_checks == 2  # at once, and again after 50 s
