"""The waiting queues."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdback.errors import AlreadyExistsError
from holdback.types import RequestSpec
from scheduler_svc.core.config import SchedulingPolicy
from scheduler_svc.core.queue import KeyedQueue, PriorityRequestQueue, RequestQueue, new_queue
from scheduler_svc.core.request import Request
from tests.core.builders import build_drive, build_request, ids

both_queues = pytest.mark.parametrize("queue_class", [RequestQueue, PriorityRequestQueue])


def build_queue(*req_ids, queue_class=RequestQueue):
    queue = queue_class()
    for req_id in req_ids:
        queue.append(build_request(req_id))
    return queue


def build_prioritised(req_id, priority):
    return Request(req_id, RequestSpec(req_id, (1,), priority=priority), ())


@both_queues
def test_first_come_first_served(queue_class):
    queue = build_queue("a", "b", "c", queue_class=queue_class)
    assert queue.peek().req_id == "a"
    assert [queue.popleft().req_id for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


@both_queues
def test_a_request_put_in_front_is_the_head(queue_class):
    queue = build_queue("a", "b", queue_class=queue_class)
    queue.appendleft(build_request("c"))
    assert ids(queue) == ["c", "a", "b"]
    queue.appendleft(build_request("d"))
    assert ids(queue) == ["d", "c", "a", "b"]


@both_queues
def test_any_request_can_be_taken_out_and_the_order_of_the_others_stays(queue_class):
    queue = build_queue("a", "b", "c", queue_class=queue_class)
    assert queue.remove("b").req_id == "b"
    assert queue.remove("b") is None
    assert ids(queue) == ["a", "c"]
    assert "a" in queue
    assert "b" not in queue
    assert queue.remove("a").req_id == "a"
    assert queue.peek().req_id == "c"


@both_queues
def test_an_empty_queue_has_no_head(queue_class):
    queue = queue_class()
    assert queue.peek() is None
    assert not queue
    with pytest.raises(IndexError, match="empty"):
        queue.popleft()


@both_queues
@pytest.mark.parametrize("operation", ["append", "appendleft"])
def test_an_id_waits_once(queue_class, operation):
    queue = build_queue("a", "b", queue_class=queue_class)
    with pytest.raises(AlreadyExistsError, match="req_id is 'b'"):
        getattr(queue, operation)(build_request("b"))
    assert ids(queue) == ["a", "b"]


def test_the_lowest_priority_comes_first_and_who_returns_comes_first_in_its_own():
    queue = PriorityRequestQueue()
    for req_id, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        queue.append(build_prioritised(req_id, priority))
    assert ids(queue) == ["d", "b", "a", "c"]
    queue.appendleft(build_prioritised("again", 1))
    assert ids(queue) == ["d", "b", "again", "a", "c"]
    assert [queue.popleft().req_id for _ in range(5)] == ["d", "b", "again", "a", "c"]


def test_an_id_that_comes_back_has_its_new_place_only():
    queue = PriorityRequestQueue()
    for req_id, priority in (("a", 0), ("b", 1), ("c", 2)):
        queue.append(build_prioritised(req_id, priority))
    queue.remove("b")
    queue.append(build_prioritised("b", 3))
    assert [queue.popleft().req_id for _ in range(3)] == ["a", "c", "b"]
    assert queue.peek() is None


def test_a_scheduler_serves_by_priority_when_it_is_told_to():
    drive = build_drive(scheduling_policy=SchedulingPolicy.PRIORITY)
    for req_id, priority in (("late", 5), ("early", 1), ("next", 1)):
        drive.scheduler.add_request(build_prioritised(req_id, priority))
    steps = drive.run(3)
    assert [list(step.num_scheduled_tokens) for step in steps] == [["early"], ["next"], ["late"]]
    assert isinstance(new_queue(SchedulingPolicy.FCFS), RequestQueue)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9), st.integers(0, 3))))
def test_items_come_in_the_order_of_their_keys_whatever_is_taken_out_meanwhile(operations):
    queue: KeyedQueue[str] = KeyedQueue()
    expected: dict[str, tuple[int, int]] = {}
    for number, (operation, name, major) in enumerate(operations):
        item = f"i{name}"
        if operation == "push" and item not in expected:
            expected[item] = major, number
            queue.push(item, expected[item], item)
        elif operation == "remove":
            assert queue.remove(item) == (item if expected.pop(item, None) is not None else None)
        elif operation == "pop" and expected:
            first = min(expected, key=lambda item: expected[item])
            del expected[first]
            assert queue.pop() == first
        assert list(queue) == sorted(expected, key=lambda item: expected[item])
        assert queue.peek() == next(iter(queue), None)
        assert len(queue._heap) <= 2 * len(queue) + 1
