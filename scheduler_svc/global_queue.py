"""The one queue of the pool, and how a lane sees it.

Under the policy `priority` lower priorities come first; under `fcfs` all count as one. Within one, requests that have
started before stand in front; among equals who came first is first. A lane sees only the head, and only in the
`schedule()` for which the dispatcher offers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from scheduler_svc.core.config import SchedulingPolicy
from scheduler_svc.core.queue import KeyedQueue
from scheduler_svc.core.request import Request
from scheduler_svc.requests import Submission


class GlobalQueue:
    """Waiting submissions.

    Attributes:
        num_tokens: that all of them have to prefill.
    """

    def __init__(self, policy: SchedulingPolicy = SchedulingPolicy.FCFS) -> None:
        self._policy = policy
        self._queue: KeyedQueue[Submission] = KeyedQueue()
        self._num_tokens_by_priority = Counter[int]()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Submission]:
        return iter(self._queue)

    @property
    def head(self) -> Submission | None:
        return self._queue.peek()

    def num_tokens_ahead(self, priority: int) -> int:
        """Tokens to prefill before a new arrival of this priority."""
        if self._policy is SchedulingPolicy.FCFS:
            return self.num_tokens
        return sum(count for number, count in self._num_tokens_by_priority.items() if number <= priority)

    def add(self, submission: Submission) -> None:
        """Puts in a new arrival, or one that lost its lane; where it stands follows from what it is."""
        priority = self._priority_of(submission)
        key = (priority, int(not submission.has_started), submission.first_arrived_at, submission.number)
        self._queue.push(submission.req_id, key, submission)
        self._count(priority, submission.num_prefill_tokens)

    def remove(self, submission: Submission) -> bool:
        """Takes one out, wherever it stands; False when it does not wait."""
        if self._queue.remove(submission.req_id) is None:
            return False
        self._count(self._priority_of(submission), -submission.num_prefill_tokens)
        return True

    def _count(self, priority: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._num_tokens_by_priority[priority] += num_tokens
        if not self._num_tokens_by_priority[priority]:
            del self._num_tokens_by_priority[priority]

    def _priority_of(self, submission: Submission) -> int:
        return submission.spec.priority if self._policy is SchedulingPolicy.PRIORITY else 0


class LaneQueue:
    """The core's `WaitingQueue` of one lane: the head of the global queue while it is offered, else nothing.

    What the core puts back goes to the dispatcher, which alone knows where it belongs.
    """

    def __init__(self, queue: GlobalQueue, put_back: Callable[[Request], None]) -> None:
        self._queue = queue
        self._put_back = put_back
        self.is_offered = False

    def __len__(self) -> int:
        return 0 if self.peek() is None else 1

    def __iter__(self) -> Iterator[Request]:
        head = self.peek()
        return iter(() if head is None else (head,))

    def __contains__(self, req_id: object) -> bool:
        head = self.peek()
        return head is not None and head.req_id == req_id

    def peek(self) -> Request | None:
        head = self._queue.head if self.is_offered else None
        return None if head is None else head.core_request

    def popleft(self) -> Request:
        """Binds the head to this lane. Raises IndexError when it is not offered."""
        head = self._queue.head if self.is_offered else None
        if head is None:
            raise IndexError("popleft from a lane that is offered nothing")
        self._queue.remove(head)
        self.is_offered = False
        return head.core_request

    def append(self, request: Request) -> None:
        self._put_back(request)

    def appendleft(self, request: Request) -> None:
        self._put_back(request)

    def remove(self, req_id: str) -> Request | None:
        """Nothing waits here for good; the dispatcher takes waiting requests out of its own queue."""
        return None
