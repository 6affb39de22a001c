"""From one global queue to the lanes, and from the lanes back to the gateways.

Binding is late: a request waits in the global queue until a lane's `schedule()` takes its first chunk, so a lane that
joins, or a slot that gets free, helps the oldest request at once. Which lane that is says `placement`.

    submit ──> parked (model unknown) ──> GlobalQueue ──offer, bind──> Lane ──update──> ended
                                              ^                          |
                                              └──── executor lost ───────┘

Races that are accepted: an abort may cross the last token; the request ends once, by what comes first. Everything here
runs on the event loop between two awaits and is called by nobody else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial

import structlog

from holdback.errors import (
    DeadlineExceededError,
    ErrorReason,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    RequestAbortedError,
)
from holdback.request_limits import MAX_REQUEST_ID_BYTES
from holdback.types import FinishReason, ModelInfo, RequestSpec, Usage
from scheduler_svc.clock import Clock
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.core.output import StepUpdate
from scheduler_svc.core.prefix_cache import PrefixCacheStats
from scheduler_svc.core.request import Request, check_request
from scheduler_svc.deadlines import MAX_AT_ONCE, Deadlines
from scheduler_svc.fan_out import FanOut
from scheduler_svc.global_queue import GlobalQueue, LaneQueue
from scheduler_svc.lane import Lane
from scheduler_svc.limits import check_room, check_sizes, check_wait, expected_wait_s
from scheduler_svc.placement import Placement
from scheduler_svc.pool import ANY_MODEL, Pool
from scheduler_svc.request_traces import RequestTraces
from scheduler_svc.requests import (
    Cause,
    Resubmission,
    Session,
    Submission,
    log_end,
    make_req_id,
    replaced_error,
    step_error,
)
from scheduler_svc.steps import StepTotals

log = structlog.get_logger(__name__)


class Dispatcher:
    """Every living submission, the queue, and the lanes.

    Attributes:
        queue: submissions that wait and whose model is known.
        placement: chooses the lane of the next one.
        num_finished: ends since start, by reason.
        num_moves, num_lanes_left: requests taken back to the queue, and lanes that left, by the cause.
    """

    def __init__(
        self, config: SchedulerServiceConfig, pool: Pool, clock: Clock, traces: RequestTraces | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._clock = clock
        self._traces = traces or RequestTraces(None, clock)
        self._numbers = itertools.count()
        self._submissions: dict[str, Submission] = {}
        self._fan_outs: dict[Lane, FanOut] = {}
        self._parked = GlobalQueue(config.scheduling_policy)
        self._past_prefix_cache = PrefixCacheStats(0, 0)
        self._past_totals = StepTotals()
        self.queue = GlobalQueue(config.scheduling_policy)
        self.placement = Placement(self.queue, self._submissions, clock)
        self._deadlines = Deadlines(clock, self._expire, self.placement.wake_chosen)
        self.num_finished = Counter[FinishReason]()
        self.num_moves = Counter[Cause]()
        self.num_lanes_left = Counter[Cause]()
        pool.on_change(self._pool_changed)

    @property
    def lanes(self) -> list[Lane]:
        """That serve, in order of joining."""
        return self.placement.lanes

    @property
    def head(self) -> Submission | None:
        """The request that is next; before the pool's model is known, the one that will be."""
        return self.queue.head or self._parked.head

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self._parked)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests have to prefill."""
        return self.queue.num_tokens + self._parked.num_tokens

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Over all lanes since start, those that are gone included."""
        stats = [self._past_prefix_cache, *(lane.core.prefix_cache_stats for lane in self.lanes)]
        return PrefixCacheStats(sum(entry.queries for entry in stats), sum(entry.hits for entry in stats))

    @property
    def totals(self) -> StepTotals:
        """All steps since start, those of lanes that are gone included."""
        totals = StepTotals()
        for part in (self._past_totals, *(lane.totals for lane in self.lanes)):
            totals.add(part)
        return totals

    @property
    def expected_wait_s(self) -> float | None:
        """How long the lanes need to prefill what waits, as measured; None without a lane."""
        return expected_wait_s(self.lanes, self.num_waiting_tokens)

    def queued_s(self, submission: Submission) -> float:
        """How long a waiting request has waited, earlier submissions included."""
        return submission.queued_s + self._clock.now() - submission.queued_since

    # ---- gateways ----

    def submit(
        self, session: Session, handle: int, spec: RequestSpec, resubmission: Resubmission | None = None
    ) -> None:
        """Takes a request, or ends its handle with the reason why not. Never raises for a bad request.

        One that was submitted before, on a stream that is lost, is exempt from the limits of the queue.
        """
        if self._is_used_twice(session, handle):
            return
        try:
            replaced = session.check_identity(spec)
            check_sizes(spec)
            check_request(spec, self._pool.model or ANY_MODEL)
            self._pool.check_serves()
            self._deadlines.check()
            if resubmission is None:
                self._check_queue(spec)
        except HoldbackError as error:
            self.refuse(session, handle, spec.request_id, Usage(prompt_tokens=len(spec.prompt_token_ids)), error)
            return
        if replaced is not None:
            self._end(replaced, FinishReason.ABORT, error=replaced_error(spec))
        self._add(session, handle, spec, resubmission)

    def refuse(self, session: Session, handle: int, request_id: str, usage: Usage, error: HoldbackError) -> None:
        """Ends the handle of a request that was not taken."""
        if self._is_used_twice(session, handle):
            return
        log.info(
            "request_refused",
            request_id=request_id[:MAX_REQUEST_ID_BYTES],
            gateway=session.name,
            error_reason=error.reason.value,
            message=error.message,
        )
        session.outbox.ended(handle, FinishReason.ERROR, usage, error=error)

    def _is_used_twice(self, session: Session, handle: int) -> bool:
        """A handle names one request. Used twice it names none: the one that has it ends, and the new one with it."""
        living = session.by_handle.get(handle)
        if living is not None:
            error = InvalidArgumentError.of("handle", handle, "one that was not used on this stream")
            self._end(living, FinishReason.ERROR, error=error)
        return living is not None

    def abort(self, session: Session, request_id: str, generation: int) -> None:
        """Ends a submission; does nothing when it is unknown, ended or of another generation."""
        submission = session.find(request_id, generation)
        if submission is not None:
            self._end(submission, FinishReason.ABORT)

    def end_session(self, session: Session) -> None:
        """The gateway's stream is gone: what runs of its requests ends now, what waits in turns."""
        for submission in [found for found in session.by_handle.values() if found.lane is not None]:
            self._end_with_session(submission)
        self._end_waiting_of(session)

    def _end_waiting_of(self, session: Session) -> None:
        # The latest first, so that the head of the queue changes once.
        for submission in list(itertools.islice(reversed(session.by_handle.values()), MAX_AT_ONCE)):
            self._end_with_session(submission)
        if session.by_handle:
            self._clock.call_later(0, partial(self._end_waiting_of, session))

    def _end_with_session(self, submission: Submission) -> None:
        self._end(submission, FinishReason.ABORT, error=RequestAbortedError("the gateway's stream ended"))

    def _check_queue(self, spec: RequestSpec) -> None:
        """Raises ResourceExhaustedError or DeadlineExceededError: it may not wait, or not long enough."""
        num_tokens = len(spec.prompt_token_ids) + len(spec.output_token_ids)
        check_room(self._config, self.lanes, self.num_waiting, self.num_waiting_tokens, num_tokens)
        if spec.deadline_ms is not None:
            check_wait(self.lanes, self.queue.num_tokens_ahead(spec.priority), spec.deadline_ms)

    def _add(self, session: Session, handle: int, spec: RequestSpec, resubmission: Resubmission | None) -> None:
        number, now = next(self._numbers), self._clock.now()
        submission = Submission(
            req_id=make_req_id(number, spec.request_id),
            number=number,
            session=session,
            handle=handle,
            spec=spec,
            arrived_at=now,
            first_arrived_at=now if resubmission is None else now - resubmission.age_s,
            has_started=resubmission is not None and resubmission.has_started,
            queued_since=now,
            queued_s=spec.queued_ms / 1000,
        )
        self._traces.start(submission)
        self._submissions[submission.req_id] = submission
        session.add(submission)
        if spec.deadline_ms is not None:
            self._deadlines.add(submission, now + spec.deadline_ms / 1000)
        if self._pool.model is None:
            self._parked.add(submission)
        else:
            self._enqueue(submission, self._pool.model)

    def _expire(self, submission: Submission) -> None:
        where = f"deadline_ms is {submission.spec.deadline_ms}"
        self._end(submission, FinishReason.ABORT, error=DeadlineExceededError(f"{where}; it has passed"))

    def _enqueue(self, submission: Submission, model: ModelInfo) -> None:
        submission.request = Request(submission.req_id, submission.spec, model.eos_token_ids)
        self.queue.add(submission)
        if submission in self.queue.heads:
            self.placement.wake_chosen()

    # ---- lanes ----

    def new_lane_queue(self) -> LaneQueue:
        return LaneQueue(self.queue, self._put_back)

    def add_lane(self, lane: Lane) -> None:
        """A lane joins. Raises FailedPreconditionError when its model is not the pool's."""
        self._pool.executor_joined(lane.info.model)
        self.placement.add(lane)
        self._fan_outs[lane] = FanOut(self._submissions)
        self.placement.wake_chosen()

    def remove_lane(self, lane: Lane, *, is_lost: bool) -> None:
        """Takes a lane's requests back to the front of the queue, as continuations.

        Args:
            is_lost: the lane did not end by a drain; requests of the step that it may be due to have moved once more.
        """
        past, lanes = self._past_prefix_cache, lane.core.prefix_cache_stats
        self._past_prefix_cache = PrefixCacheStats(past.queries + lanes.queries, past.hits + lanes.hits)
        self._past_totals.add(lane.totals)
        self.placement.remove(lane)
        del self._fan_outs[lane]
        blamed = lane.req_ids_to_blame if is_lost else set()
        cause = Cause.LOSS if is_lost else Cause.DRAIN
        self.num_lanes_left[cause] += 1
        for request in lane.core.release_all():
            submission = self._submissions[request.req_id]
            self._unbind(submission, request)
            if request.req_id in blamed:
                self._count_move(submission)
            if submission.num_moves > self._config.max_request_moves:
                self._end(submission, FinishReason.ERROR, error=self._too_many_moves(submission))
            else:
                self.num_moves[cause] += 1
                self._traces.move(submission, cause)
                self.queue.add(submission)
        self._end_stranded(lane)
        self._pool.executor_left()
        self.placement.wake_chosen()

    def offer(self, lane: Lane) -> None:
        """Called by a lane before each `schedule()`. Nothing is placed whose deadline has passed."""
        if self._deadlines.check():
            self.placement.offer(lane)
        else:
            lane.queue.offered = None  # all lanes are asked again once those that expired are out

    def bind(self, lane: Lane, req_ids: Sequence[str]) -> None:
        """Called by a lane after the `schedule()` that took these requests."""
        now = self._clock.now()
        for req_id in req_ids:
            self.placement.count_bound(lane)
            submission = self._submissions[req_id]
            submission.lane = lane
            submission.has_started = True
            submission.queued_s += now - submission.queued_since
            self._traces.bind(submission, lane.info.executor_id)
            if submission.first_bound_at is None:
                submission.first_bound_at = now
            submission.session.outbox.started(
                submission.handle,
                num_cached_tokens=submission.core_request.num_cached_tokens,
                queued_ms=round(submission.queued_s * 1000),
                executor_id=lane.info.executor_id,
            )
        self.placement.wake_chosen()

    def update(self, lane: Lane, update: StepUpdate) -> None:
        """Called by a lane with what a step brought."""
        self._fan_outs[lane].tell(update, self._clock.now())
        for ending in update.endings:
            submission = self._submissions[ending.request.req_id]
            error = None if ending.error is None else step_error(ending.error, lane.info.executor_id)
            self._end(submission, ending.finish_reason, error=error, stop_token_id=ending.stop_token_id)

    def _put_back(self, request: Request) -> None:
        """The core gives a request back: not placed after all, or to start again, as it hit blocks that turned bad."""
        submission = self._submissions[request.req_id]
        if submission.lane is not None:
            self._unbind(submission, request)
            self.num_moves[Cause.BAD_BLOCK] += 1
            self._traces.move(submission, Cause.BAD_BLOCK)
        self.queue.add(submission)

    def _unbind(self, submission: Submission, request: Request) -> None:
        submission.lane = None
        submission.request = request
        submission.queued_since = self._clock.now()

    def _count_move(self, submission: Submission) -> None:
        submission.num_moves += 1
        submission.has_used_up_moves = submission.num_moves >= self._config.max_request_moves

    def _end_stranded(self, lane: Lane) -> None:
        """A core that failed in the middle of an update may have lost sight of requests; their clients must not."""
        for submission in [found for found in self._submissions.values() if found.lane is lane]:
            self._end(submission, FinishReason.ERROR, error=InternalError("the request was lost with its lane"))

    def _too_many_moves(self, submission: Submission) -> InternalError:
        return InternalError(
            f"the request was part of {submission.num_moves} steps that failed or lost their executor; "
            f"allowed: {self._config.max_request_moves} (max_request_moves)",
            reason=ErrorReason.TOO_MANY_MOVES,
        )

    # ---- the pool and the end ----

    def _pool_changed(self) -> None:
        if self._pool.model is not None:
            self._unpark(self._pool.model)
        if self._pool.is_lost:
            for submission in list(self.queue):
                self._end(submission, FinishReason.ERROR, error=self._pool.no_executor())

    def _unpark(self, model: ModelInfo) -> None:
        """The model is known now: what waited for that is checked against it and queued."""
        parked, self._parked = self._parked, GlobalQueue(self._config.scheduling_policy)
        for submission in parked:
            try:
                check_request(submission.spec, model)
            except HoldbackError as error:
                self._end(submission, FinishReason.ERROR, error=error)
            else:
                self._enqueue(submission, model)

    def _end(
        self,
        submission: Submission,
        reason: FinishReason,
        *,
        error: HoldbackError | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """The one way out: takes the request from wherever it is, and tells the gateway once."""
        self._take_out(submission, reason)
        del self._submissions[submission.req_id]
        submission.session.discard(submission)
        self._deadlines.discard(submission)
        self.num_finished[reason] += 1
        submission.session.outbox.ended(
            submission.handle, reason, submission.usage, stop_token_id=stop_token_id, error=error
        )
        self._traces.end(submission, reason, error)
        log_end(submission, reason, error, self._clock.now())

    def _take_out(self, submission: Submission, reason: FinishReason) -> None:
        """After the end of a step the core has finished it already, and `finish` finds nothing."""
        if submission.lane is not None:
            submission.lane.finish(submission.req_id, reason)
            return
        submission.queued_s += self._clock.now() - submission.queued_since
        self._parked.remove(submission)
        was_head = submission in self.queue.heads
        self.queue.remove(submission)
        if was_head:
            self.placement.wake_chosen()
