"""Which lane takes the head of the queue.

Strictly first come, first served: only the head is ever offered, and to one lane. Of those that accept it now that is
the one with the least uncached prefill time, then the least load, then the one that was given nothing for longest. It
may have as many steps in flight as it is allowed; the head then waits for the end of one. A lane whose step takes
several times what it should is passed over while another accepts, so that a device that hangs does not hold up all.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_svc.clock import Clock, Timer
from scheduler_svc.global_queue import GlobalQueue
from scheduler_svc.lane import Lane
from scheduler_svc.requests import Submission


class Placement:
    """Chooses among the lanes.

    Attributes:
        lanes: that serve, in order of joining.

    Args:
        queue: whose head is placed.
        submissions: all that live, by `req_id`.
        max_moves: failed steps that a request survives.
    """

    def __init__(
        self, queue: GlobalQueue, submissions: Mapping[str, Submission], clock: Clock, *, max_moves: int
    ) -> None:
        self.lanes: list[Lane] = []
        self._queue = queue
        self._submissions = submissions
        self._clock = clock
        self._max_moves = max_moves
        self._timer: Timer | None = None
        self._num_bound = 0
        self._last_bound: dict[Lane, int] = {}

    def add(self, lane: Lane) -> None:
        self.lanes.append(lane)
        self._last_bound[lane] = 0

    def remove(self, lane: Lane) -> None:
        self.lanes.remove(lane)
        del self._last_bound[lane]

    def count_bound(self, lane: Lane) -> None:
        """A lane took a request."""
        self._num_bound += 1
        self._last_bound[lane] = self._num_bound

    def choose(self) -> Lane | None:
        """The lane that is to take the head of the queue; None while none accepts it or nothing waits."""
        head = self._queue.head
        if head is None:
            return None
        accepting = [lane for lane in self.lanes if self.why_not(head, lane) is None]
        if len(accepting) < 2:
            return accepting[0] if accepting else None
        now, request = self._clock.now(), head.core_request
        in_time = [lane for lane in accepting if lane.late_at is None or now < lane.late_at]
        return min(
            in_time or accepting,
            key=lambda lane: (lane.uncached_prefill_us(request), lane.load, self._last_bound[lane]),
        )

    def why_not(self, submission: Submission, lane: Lane) -> str | None:
        """Why a lane does not take a waiting request now; None when it does."""
        if lane.is_draining:
            return "it is draining"
        if self._has_used_up_moves(submission) and any(
            self._has_used_up_moves(self._submissions[request.req_id]) for request in lane.core.running
        ):
            return "another request there has also used up max_request_moves"
        return lane.why_not(submission.core_request)

    def _has_used_up_moves(self, submission: Submission) -> bool:
        return submission.num_moves > 0 and submission.num_moves >= self._max_moves

    def offer(self, lane: Lane) -> None:
        """Before each `schedule()` of a lane: offers it the head if it is the one to take it."""
        head = self._queue.head
        if head is None or self.why_not(head, lane) is not None:
            # The others were woken when something changed that concerns them.
            lane.queue.is_offered = False
            return
        chosen = self.choose()
        lane.queue.is_offered = chosen is lane
        if chosen is not None and chosen is not lane:
            self._wake(chosen)

    def wake_chosen(self) -> None:
        chosen = self.choose()
        if chosen is not None:
            self._wake(chosen)

    def _wake(self, lane: Lane) -> None:
        """A lane that cannot take the head at once is left to it only as long as its step may reasonably take."""
        lane.wake()
        if lane.late_at is None or self._timer is not None:
            return
        left_s = lane.late_at - self._clock.now()
        if left_s > 0:
            self._timer = self._clock.call_later(left_s, self._choose_again)

    def _choose_again(self) -> None:
        self._timer = None
        self.wake_chosen()
