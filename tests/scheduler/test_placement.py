"""Which request is next, and which lane takes it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdback.errors import UnavailableError
from scheduler_svc.core.checks import HeldBack
from scheduler_svc.core.config import SchedulingPolicy
from scheduler_svc.core.request import Request
from scheduler_svc.global_queue import GlobalQueue
from scheduler_svc.requests import Session, Submission, request_id_of
from tests.scheduler.parts import Simulation, build_spec, prompt_of, settle

Simulate = Callable[..., Simulation]


# ---- the queue ----


def build_submission(number: int, priority: int = 0, *, has_started: bool = False) -> Submission:
    spec = build_spec(f"r{number}", [20] * (number + 1), priority=priority)
    return Submission(f"{number}/r", number, Session("gateway"), number, spec, 0.0, 0.0, has_started, 0.0, 0.0)


def numbers(queue: GlobalQueue) -> list[int]:
    return [submission.number for submission in queue]


def test_under_fcfs_priorities_mean_nothing() -> None:
    queue = GlobalQueue(SchedulingPolicy.FCFS)
    for number, priority in enumerate((5, -5, 0)):
        queue.add(build_submission(number, priority))
    assert numbers(queue) == [0, 1, 2]
    assert queue.num_tokens_ahead(-100) == 1 + 2 + 3


def test_lower_priorities_come_first_and_within_one_who_came_first() -> None:
    queue = GlobalQueue(SchedulingPolicy.PRIORITY)
    for number, priority in enumerate((0, 5, -5, 0, -5)):
        queue.add(build_submission(number, priority))
    assert numbers(queue) == [2, 4, 0, 3, 1]
    assert queue.head is not None
    assert queue.head.number == 2
    assert queue.num_tokens_ahead(-6) == 0
    assert queue.num_tokens_ahead(0) == 3 + 5 + 1 + 4
    assert queue.num_tokens == 1 + 2 + 3 + 4 + 5


def test_of_one_priority_those_that_have_started_stand_in_front_in_order_of_arrival() -> None:
    queue = GlobalQueue(SchedulingPolicy.PRIORITY)
    for number, priority in ((6, 1), (7, 2)):
        queue.add(build_submission(number, priority))
    for number, priority in ((5, 2), (4, 2), (1, 2), (3, 1)):
        queue.add(build_submission(number, priority, has_started=True))
    assert numbers(queue) == [3, 6, 1, 4, 5, 7]


@given(
    operations=st.lists(
        st.tuples(st.booleans(), st.integers(0, 15), st.integers(-2, 2), st.booleans()),
        max_size=50,
    ),
    policy=st.sampled_from(SchedulingPolicy),
)
def test_order_and_counts_are_right_after_any_operations(
    operations: list[tuple[bool, int, int, bool]], policy: SchedulingPolicy
) -> None:
    queue, waiting = GlobalQueue(policy), dict[int, Submission]()
    for is_removal, number, priority, has_started in operations:
        if is_removal:
            waits = number in waiting
            assert queue.remove(waiting.pop(number, build_submission(number, priority))) is waits
        elif number not in waiting:
            waiting[number] = build_submission(number, priority, has_started=has_started)
            queue.add(waiting[number])
    classes: dict[int, list[Submission]] = {}
    for submission in waiting.values():
        classes.setdefault(submission.spec.priority * (policy is SchedulingPolicy.PRIORITY), []).append(submission)
    expected = []
    for _, members in sorted(classes.items()):
        started = [submission.number for submission in members if submission.has_started]
        expected += sorted(started) + sorted(member.number for member in members if not member.has_started)
    assert numbers(queue) == expected
    assert (queue.head.number if queue.head else None) == (expected[0] if expected else None)
    assert len(queue) == len(waiting)
    assert queue.num_tokens == queue.num_tokens_ahead(2) == sum(number + 1 for number in waiting)


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [0, 2, 3, 1])])
async def test_the_policy_decides_who_is_served_next(simulate: Simulate, policy: str, order: list[int]) -> None:
    simulation = simulate(scheduling_policy=policy)
    simulation.add_lane(max_num_seqs=1)
    for handle, priority in enumerate((9, 5, -1, 0)):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), priority=priority))
        await settle(0 if handle else 5)
    await simulation.until_ended(order[-1])
    assert simulation.answers.started_order == order


async def test_a_moved_request_keeps_its_priority(simulate: Simulate) -> None:
    simulation = simulate(scheduling_policy="priority", async_scheduling=False)
    lane = simulation.add_lane(is_stepped=True, max_num_seqs=1)
    simulation.submit(0, build_spec("low", prompt_of(0), priority=3))
    await settle()
    simulation.submit(1, build_spec("high", prompt_of(1), priority=1))
    await lane.lose(UnavailableError("gone"))
    assert [waiting.spec.request_id for waiting in simulation.dispatcher.queue] == ["high", "low"]


# ---- the lane ----


@pytest.mark.case("B66")
async def test_requests_one_after_the_other_go_round_all_lanes(simulate: Simulate) -> None:
    simulation = simulate()
    for number in range(3):
        simulation.add_lane(f"executor-{number}")
    for handle in range(30):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle)))
        await simulation.until_ended(handle)
    counts = Counter(simulation.answers[handle].started[0].executor_id for handle in range(30))
    assert counts == {"executor-0": 10, "executor-1": 10, "executor-2": 10}


async def test_a_lane_that_hangs_does_not_hold_up_the_head(simulate: Simulate) -> None:
    simulation = simulate()
    hangs = simulation.add_lane("hangs", is_stepped=True, prefill_us=100)
    other = simulation.add_lane("other", is_stepped=True, prefill_us=200)
    simulation.submit(0, build_spec("a", prompt_of(0), max_tokens=9))
    await settle()
    assert len(hangs.unanswered) == 2
    simulation.submit(1, build_spec("b", prompt_of(1), max_tokens=9))
    await settle()
    assert other.sent == []  # the other is faster, and its step may end any moment
    simulation.clock.advance(0.4)
    await settle()
    assert other.sent == []
    simulation.clock.advance(0.2)
    await settle()
    assert [request_id_of(req_id) for req_id in other.sent[0].num_scheduled_tokens] == ["b"]
    await hangs.step()
    simulation.submit(2, build_spec("c", prompt_of(2), max_tokens=9))
    await hangs.step()
    assert any("2/c" in step.num_scheduled_tokens for step in hangs.sent)


async def test_where_all_that_accept_are_late_the_head_waits_for_the_best_of_them(simulate: Simulate) -> None:
    simulation = simulate()
    lanes = [simulation.add_lane(f"executor-{number}", is_stepped=True) for number in range(2)]
    for handle in range(2):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=9))
    await settle()
    simulation.clock.advance(4)
    simulation.submit(2, build_spec("waits", prompt_of(2)))
    simulation.clock.advance(4)
    await settle()
    assert simulation.dispatcher.num_waiting == 1
    await asyncio.gather(*(lane.step() for lane in lanes))
    assert simulation.dispatcher.num_waiting == 0


async def test_a_lane_is_asked_again_only_when_something_happened_there(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(async_scheduling=False)
    steps, stands = (simulation.add_lane(name, is_stepped=True, max_num_seqs=2) for name in ("steps", "stands"))
    asked = Counter[str]()
    for lane in (steps, stands):
        ask, name = lane.lane.core.held_back_by, lane.lane.info.executor_id

        def count(
            request: Request, name: str = name, ask: Callable[[Request], HeldBack | None] = ask
        ) -> HeldBack | None:
            asked[name] += 1
            return ask(request)

        monkeypatch.setattr(lane.lane.core, "held_back_by", count)
    for handle in range(4):
        simulation.submit(handle, build_spec(f"r{handle}", prompt_of(handle), max_tokens=30))
        await settle()
        for lane in (steps, stands):
            if lane.unanswered:
                await lane.step()
    simulation.submit(4, build_spec("waits", prompt_of(4)))
    await settle()
    before = asked.copy()
    for _ in range(20):
        await steps.step()
    assert (asked - before)["steps"] >= 20
    assert (asked - before)["stands"] == 0
    simulation.dispatcher.abort(simulation.session, "r1", 0)  # it ran on `stands`
    await settle()
    await stands.step()
    assert simulation.read()[4].started[0].executor_id == "stands"
