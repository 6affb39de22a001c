"""The one queue of the pool, and how a lane sees it.

Requests that have started before stand in front, in their order of arrival; behind them those that have not, first
come, first served. A lane sees only the head, and only in the `schedule()` for which the dispatcher offers it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from scheduler_svc.core.request import Request
from scheduler_svc.requests import Submission


class GlobalQueue:
    """Waiting submissions whose model is known. Every operation but iteration and a move is O(1)."""

    def __init__(self) -> None:
        self._started: OrderedDict[str, Submission] = OrderedDict()
        self._fresh: OrderedDict[str, Submission] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._started) + len(self._fresh)

    def __iter__(self) -> Iterator[Submission]:
        return itertools.chain(self._started.values(), self._fresh.values())

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._started or req_id in self._fresh

    @property
    def num_tokens(self) -> int:
        """Tokens that all of them have to prefill."""
        return self._num_tokens

    @property
    def head(self) -> Submission | None:
        return next(iter(self), None)

    def append(self, submission: Submission) -> None:
        """A new arrival; a resubmission of one that had started goes behind those that have started."""
        queue = self._started if submission.has_started else self._fresh
        queue[submission.req_id] = submission
        self._num_tokens += submission.num_prefill_tokens

    def put_back(self, submissions: Iterable[Submission]) -> None:
        """Requests that lost their lane, each where its arrival puts it among those that have started."""
        moved = sorted(submissions, key=lambda submission: submission.number)
        if not moved:
            return
        older = []
        while self._started and next(iter(self._started.values())).number < moved[-1].number:
            older.append(self._started.popitem(last=False)[1])
        for submission in sorted([*older, *moved], key=lambda submission: submission.number, reverse=True):
            self._started[submission.req_id] = submission
            self._started.move_to_end(submission.req_id, last=False)
        self._num_tokens += sum(submission.num_prefill_tokens for submission in moved)

    def remove(self, req_id: str) -> Submission | None:
        """Takes one out, wherever it stands; None when it does not wait."""
        submission = self._started.pop(req_id, None) or self._fresh.pop(req_id, None)
        if submission is not None:
            self._num_tokens -= submission.num_prefill_tokens
        return submission


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
        head = self.peek()
        if head is None:
            raise IndexError("popleft from a lane that is offered nothing")
        self._queue.remove(head.req_id)
        self.is_offered = False
        return head

    def append(self, request: Request) -> None:
        self._put_back(request)

    def appendleft(self, request: Request) -> None:
        self._put_back(request)

    def remove(self, req_id: str) -> Request | None:
        """Nothing waits here for good; the dispatcher takes waiting requests out of its own queue."""
        return None
