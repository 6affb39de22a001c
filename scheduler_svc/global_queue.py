"""The one queue of the pool, and how a lane sees it.

Under the policy `priority` lower priorities come first; under `fcfs` all count as one. Within one, requests that have
started before stand in front; among equals who came first is first. A lane sees only what the dispatcher offers it, and
only in the `schedule()` for which that is offered: the head, or, where the head may not go because it has used up its
moves, the first request that has not.
"""

from __future__ import annotations

import heapq
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
        # Apart from each other, so that the first of each is at hand.
        self._with_moves: KeyedQueue[Submission] = KeyedQueue()
        self._without_moves: KeyedQueue[Submission] = KeyedQueue()
        self._num_tokens_by_priority = Counter[int]()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._with_moves) + len(self._without_moves)

    def __iter__(self) -> Iterator[Submission]:
        return heapq.merge(self._with_moves, self._without_moves, key=self._key_of)

    @property
    def head(self) -> Submission | None:
        first, spent = self._with_moves.peek(), self._without_moves.peek()
        if first is None or spent is None:
            return first or spent
        return min(first, spent, key=self._key_of)

    @property
    def first_with_moves(self) -> Submission | None:
        """The first that has not used up its moves; the head, unless that has."""
        return self._with_moves.peek()

    @property
    def heads(self) -> list[Submission]:
        """Those that a lane may be offered: the head, and the first with moves left where that is another."""
        found = [self.head, self.first_with_moves]
        return [submission for submission in dict.fromkeys(found) if submission is not None]

    def num_tokens_ahead(self, priority: int) -> int:
        """Tokens to prefill before a new arrival of this priority."""
        if self._policy is SchedulingPolicy.FCFS:
            return self.num_tokens
        return sum(count for number, count in self._num_tokens_by_priority.items() if number <= priority)

    def add(self, submission: Submission) -> None:
        """Puts in a new arrival, or one that lost its lane; where it stands follows from what it is."""
        self._queue_of(submission).push(submission.req_id, self._key_of(submission), submission)
        self._count(self._priority_of(submission), submission.num_prefill_tokens)

    def remove(self, submission: Submission) -> bool:
        """Takes one out, wherever it stands; False when it does not wait."""
        if self._queue_of(submission).remove(submission.req_id) is None:
            return False
        self._count(self._priority_of(submission), -submission.num_prefill_tokens)
        return True

    def _queue_of(self, submission: Submission) -> KeyedQueue[Submission]:
        return self._without_moves if submission.has_used_up_moves else self._with_moves

    def _key_of(self, submission: Submission) -> tuple[int, int, float, int]:
        priority = self._priority_of(submission)
        return priority, int(not submission.has_started), submission.first_arrived_at, submission.number

    def _count(self, priority: int, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._num_tokens_by_priority[priority] += num_tokens
        if not self._num_tokens_by_priority[priority]:
            del self._num_tokens_by_priority[priority]

    def _priority_of(self, submission: Submission) -> int:
        return submission.spec.priority if self._policy is SchedulingPolicy.PRIORITY else 0


class LaneQueue:
    """The core's `WaitingQueue` of one lane: the request that is offered to it, else nothing.

    What the core puts back goes to the dispatcher, which alone knows where it belongs.

    Attributes:
        offered: a waiting request that the next `schedule()` may take.
    """

    def __init__(self, queue: GlobalQueue, put_back: Callable[[Request], None]) -> None:
        self._queue = queue
        self._put_back = put_back
        self.offered: Submission | None = None

    def __len__(self) -> int:
        return 0 if self.offered is None else 1

    def __iter__(self) -> Iterator[Request]:
        return iter(() if self.offered is None else (self.offered.core_request,))

    def __contains__(self, req_id: object) -> bool:
        return self.offered is not None and self.offered.req_id == req_id

    def peek(self) -> Request | None:
        return None if self.offered is None else self.offered.core_request

    def popleft(self) -> Request:
        """Binds what is offered to this lane. Raises IndexError when nothing is."""
        offered, self.offered = self.offered, None
        if offered is None:
            raise IndexError("popleft from a lane that is offered nothing")
        self._queue.remove(offered)
        return offered.core_request

    def append(self, request: Request) -> None:
        self._put_back(request)

    def appendleft(self, request: Request) -> None:
        self._put_back(request)

    def remove(self, req_id: str) -> Request | None:
        """Nothing waits here for good; the dispatcher takes waiting requests out of its own queue."""
        return None
