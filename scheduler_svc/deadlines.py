"""When requests run out of time: a heap, and one timer for the earliest."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.clock import Clock, Timer
from scheduler_svc.requests import Submission

MIN_LEFT_OVER = 64

MAX_AT_ONCE = 64
"""Requests that expire before the event loop does something else: about 3 ms."""


@dataclass(order=True, slots=True)
class _Entry:
    at: float
    number: int
    submission: Submission | None = field(compare=False)


class Deadlines:
    """Calls `expire` once for each submission whose deadline passes before it is discarded.

    The timer is late when the process is busy, so whoever is about to rely on a submission's life calls `check` first.
    Where many expire together, the timer comes back for the rest, and calls `on_caught_up` behind the last of them.
    """

    def __init__(
        self, clock: Clock, expire: Callable[[Submission], None], on_caught_up: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._expire = expire
        self._on_caught_up = on_caught_up
        self._is_behind = False
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._numbers = itertools.count()
        self._timer: Timer | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, submission: Submission, at: float) -> None:
        """`at` is in clock seconds."""
        entry = self._entries[submission.req_id] = _Entry(at, next(self._numbers), submission)
        heapq.heappush(self._heap, entry)
        self._arm()

    def discard(self, submission: Submission) -> None:
        """Nothing happens when it has no deadline, or when that has passed."""
        entry = self._entries.pop(submission.req_id, None)
        if entry is None:
            return
        entry.submission = None
        # What is discarded stays in the heap until its time comes; it must not outgrow what lives.
        if len(self._heap) > 2 * len(self._entries) + MIN_LEFT_OVER:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def check(self) -> bool:
        """Expires those whose time has come, in order, `MAX_AT_ONCE` of them; False while there are more."""
        num_left = MAX_AT_ONCE
        while self._heap and (self._heap[0].submission is None or self._heap[0].at <= self._clock.now()):
            if num_left == 0:
                self._is_behind = True
                return False
            submission = heapq.heappop(self._heap).submission
            if submission is not None:
                del self._entries[submission.req_id]
                self._expire(submission)
                num_left -= 1
        return True

    def _arm(self) -> None:
        """Sets the timer for the earliest deadline, unless it is set for that or for one before it."""
        if not self._heap or (self._timer is not None and self._timer_at <= self._heap[0].at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._heap[0].at
        self._timer = self._clock.call_later(max(0.0, self._timer_at - self._clock.now()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        is_caught_up = self.check()
        self._arm()
        if is_caught_up and self._is_behind:
            self._is_behind = False
            self._on_caught_up()
