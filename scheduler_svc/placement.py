"""Which lane takes the head of the queue.

Strictly first come, first served: the head alone is offered, and to one lane. With one exception: where the head has
used up its moves and may not go to a lane, for another such runs there, that lane may take the first request that has
not, so that those that never failed do not wait for those that may be at fault. Of the lanes that accept now it is the
one with the least uncached prefill time, then the least load, then the one that was given nothing for longest. It may
have as many steps in flight as it is allowed; the head then waits for the end of one. A lane whose step takes
several times what it should is passed over while another accepts, so that a device that hangs does not hold up all.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_svc.clock import Clock, Timer
from scheduler_svc.core.checks import Check, HeldBack
from scheduler_svc.global_queue import GlobalQueue
from scheduler_svc.lane import Lane
from scheduler_svc.requests import Submission

_DRAINING = HeldBack(Check.DRAINING, "it is draining")
_MOVES_USED_UP = HeldBack(Check.MOVES_USED_UP, "another request there has also used up max_request_moves")


class Placement:
    """Chooses among the lanes.

    Attributes:
        lanes: that serve, in order of joining.
        num_held_back: times that a lane was about to choose a step and could not take what is next, by check.

    Args:
        queue: whose head is placed.
        submissions: all that live, by `req_id`.
    """

    def __init__(self, queue: GlobalQueue, submissions: Mapping[str, Submission], clock: Clock) -> None:
        self.lanes: list[Lane] = []
        self.num_held_back = dict.fromkeys(Check, 0)
        self._queue = queue
        self._submissions = submissions
        self._clock = clock
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

    def next_for(self, lane: Lane) -> Submission | None:
        """The request that a lane is to be asked about: the head, or the first with moves left where that is barred."""
        head = self._queue.head
        if head is None or not head.has_used_up_moves or not self._runs_one_without_moves(lane):
            return head
        return self._queue.first_with_moves

    def choose(self, submission: Submission) -> Lane | None:
        """The lane that is to take a request which is next for some; None while none of them accepts it."""
        accepting = [
            lane
            for lane in self.lanes
            if self.next_for(lane) is submission and self.held_back_by(submission, lane) is None
        ]
        if len(accepting) < 2:
            return accepting[0] if accepting else None
        now, request = self._clock.now(), submission.core_request
        in_time = [lane for lane in accepting if lane.late_at is None or now < lane.late_at]
        return min(
            in_time or accepting,
            key=lambda lane: (lane.uncached_prefill_us(request), lane.load, self._last_bound[lane]),
        )

    def why_not(self, submission: Submission, lane: Lane) -> str | None:
        """Why a lane does not take a waiting request now; None when it does."""
        held_back = self.held_back_by(submission, lane)
        return None if held_back is None else held_back.why

    def held_back_by(self, submission: Submission, lane: Lane) -> HeldBack | None:
        """The check by which a lane does not take a waiting request now; None when it does."""
        if lane.is_draining:
            return _DRAINING
        if submission.has_used_up_moves and self._runs_one_without_moves(lane):
            return _MOVES_USED_UP
        return lane.held_back_by(submission.core_request)

    def _runs_one_without_moves(self, lane: Lane) -> bool:
        return any(self._submissions[request.req_id].has_used_up_moves for request in lane.core.running)

    def offer(self, lane: Lane) -> None:
        """Before each `schedule()` of a lane: offers it what is next for it, if it is the one to take that."""
        lane.queue.offered = None
        submission = self.next_for(lane)
        if submission is None:
            return
        held_back = self.held_back_by(submission, lane)
        if held_back is not None:
            # The others were woken when something changed that concerns them.
            self.num_held_back[held_back.check] += 1
            return
        chosen = self.choose(submission)
        if chosen is lane:
            lane.queue.offered = submission
        elif chosen is not None:
            self._wake(chosen)

    def wake_chosen(self) -> None:
        """What waits in front may have a lane now."""
        for submission in self._queue.heads:
            chosen = self.choose(submission)
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
