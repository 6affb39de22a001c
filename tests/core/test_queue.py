"""The waiting queue."""

import pytest

from holdback.errors import AlreadyExistsError
from scheduler_svc.core.queue import RequestQueue
from tests.core.builders import build_request, ids


def build_queue(*req_ids):
    queue = RequestQueue()
    for req_id in req_ids:
        queue.append(build_request(req_id))
    return queue


def test_first_come_first_served():
    queue = build_queue("a", "b", "c")
    assert queue.peek().req_id == "a"
    assert [queue.popleft().req_id for _ in range(3)] == ["a", "b", "c"]
    assert len(queue) == 0


def test_a_request_put_in_front_is_the_head():
    queue = build_queue("a", "b")
    queue.appendleft(build_request("c"))
    assert ids(queue) == ["c", "a", "b"]


def test_any_request_can_be_taken_out_and_the_order_of_the_others_stays():
    queue = build_queue("a", "b", "c")
    assert queue.remove("b").req_id == "b"
    assert queue.remove("b") is None
    assert ids(queue) == ["a", "c"]
    assert "a" in queue
    assert "b" not in queue


def test_an_empty_queue_has_no_head():
    queue = RequestQueue()
    assert queue.peek() is None
    assert not queue
    with pytest.raises(IndexError, match="empty"):
        queue.popleft()


@pytest.mark.parametrize("operation", ["append", "appendleft"])
def test_an_id_waits_once(operation):
    queue = build_queue("a", "b")
    with pytest.raises(AlreadyExistsError, match="req_id is 'b'"):
        getattr(queue, operation)(build_request("b"))
    assert ids(queue) == ["a", "b"]
