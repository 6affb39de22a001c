"""The one queue of the pool, and how a lane sees it.

Under the policy `priority` lower priorities come first; under `fcfs` all are of one class. Within a class requests that
have started before stand in front, in their order of arrival; behind them those that have not, first come, first
served. A lane sees only the head, and only in the `schedule()` for which the dispatcher offers it.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from scheduler_svc.core.request import Request
from scheduler_svc.requests import Submission


class SchedulingPolicy(enum.StrEnum):
    """Who is served first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class _PriorityClass:
    """Waiting submissions of one priority. Every operation but a move is O(1)."""

    def __init__(self) -> None:
        self._started: OrderedDict[str, Submission] = OrderedDict()
        self._fresh: OrderedDict[str, Submission] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._started) + len(self._fresh)

    def __iter__(self) -> Iterator[Submission]:
        return itertools.chain(self._started.values(), self._fresh.values())

    def append(self, submission: Submission) -> None:
        queue = self._started if submission.has_started else self._fresh
        queue[submission.req_id] = submission
        self.num_tokens += submission.num_prefill_tokens

    def put_back(self, moved: list[Submission]) -> None:
        moved.sort(key=lambda submission: submission.number)
        older = []
        while self._started and next(iter(self._started.values())).number < moved[-1].number:
            older.append(self._started.popitem(last=False)[1])
        for submission in sorted([*older, *moved], key=lambda submission: submission.number, reverse=True):
            self._started[submission.req_id] = submission
            self._started.move_to_end(submission.req_id, last=False)
        self.num_tokens += sum(submission.num_prefill_tokens for submission in moved)

    def remove(self, req_id: str) -> Submission | None:
        submission = self._started.pop(req_id, None) or self._fresh.pop(req_id, None)
        if submission is not None:
            self.num_tokens -= submission.num_prefill_tokens
        return submission


class GlobalQueue:
    """Waiting submissions. Every operation but iteration and a move costs the same however many wait."""

    def __init__(self, policy: SchedulingPolicy = SchedulingPolicy.FCFS) -> None:
        self._policy = policy
        # Only classes that have requests.
        self._classes: dict[int, _PriorityClass] = {}
        self._priorities: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Submission]:
        return itertools.chain.from_iterable(self._classes[priority] for priority in self._priorities)

    @property
    def num_tokens(self) -> int:
        """Tokens that all of them have to prefill."""
        return sum(entry.num_tokens for entry in self._classes.values())

    @property
    def head(self) -> Submission | None:
        return next(iter(self._classes[self._priorities[0]])) if self._priorities else None

    def num_tokens_ahead(self, priority: int) -> int:
        """Tokens to prefill before a new arrival of this priority."""
        if self._policy is SchedulingPolicy.FCFS:
            return self.num_tokens
        return sum(entry.num_tokens for number, entry in self._classes.items() if number <= priority)

    def append(self, submission: Submission) -> None:
        """A new arrival; a resubmission of one that had started goes behind those of its class that have started."""
        self._class_of(submission).append(submission)

    def put_back(self, submissions: Iterable[Submission]) -> None:
        """Requests that lost their lane, each where its arrival puts it among those of its class that have started."""
        by_class: dict[int, list[Submission]] = {}
        for submission in submissions:
            by_class.setdefault(self._priority_of(submission), []).append(submission)
        for moved in by_class.values():
            self._class_of(moved[0]).put_back(moved)

    def remove(self, submission: Submission) -> bool:
        """Takes one out, wherever it stands; False when it does not wait."""
        priority = self._priority_of(submission)
        entry = self._classes.get(priority)
        if entry is None or entry.remove(submission.req_id) is None:
            return False
        if not len(entry):
            del self._classes[priority]
            self._priorities.remove(priority)
        return True

    def _priority_of(self, submission: Submission) -> int:
        return submission.spec.priority if self._policy is SchedulingPolicy.PRIORITY else 0

    def _class_of(self, submission: Submission) -> _PriorityClass:
        priority = self._priority_of(submission)
        if priority not in self._classes:
            self._classes[priority] = _PriorityClass()
            bisect.insort(self._priorities, priority)
        return self._classes[priority]


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
