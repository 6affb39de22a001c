"""A request on its way through the service: who submitted it, where it is, what happened to it so far.

The core's `Request` knows tokens and blocks; a `Submission` knows everything around it: gateway, deadline, moves,
times. One submission has one core request at a time; after a lost executor it gets another, which goes on from the
outputs so far.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from holdback.errors import (
    AlreadyExistsError,
    ErrorReason,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    RequestAbortedError,
)
from holdback.request_limits import MAX_REQUEST_ID_BYTES
from holdback.tracing import RequestSpan, trace_id_of
from holdback.types import FinishReason, RequestSpec, Usage
from scheduler_svc.core.request import Request
from scheduler_svc.outbox import Outbox

if TYPE_CHECKING:
    from scheduler_svc.lane import Lane

log = structlog.get_logger(__name__)


class Cause(enum.Enum):
    """Why a request goes back to the queue, or an executor leaves.

    Attributes:
        LOSS: the executor was lost, or a step of it failed.
        DRAIN: it was told to stop.
        BAD_BLOCK: the request had hit blocks that turned out bad; it starts again.
    """

    LOSS = "loss"
    DRAIN = "drain"
    BAD_BLOCK = "bad_block"


@dataclass(frozen=True, slots=True)
class Resubmission:
    """Where a request belongs that was submitted before, on a stream that is lost.

    Attributes:
        has_started: it ran on an executor.
        age_s: since it was first submitted.
    """

    has_started: bool
    age_s: float


@dataclass(eq=False, slots=True)
class Submission:
    """One `AddRequest` that was accepted, until it ends.

    Attributes:
        req_id: unique in this scheduler; `request_id_of` gives the gateway's id back.
        number: order of arrival here.
        session: of the gateway that submitted it.
        handle: its name on the gateway's stream.
        spec: as submitted.
        arrived_at: clock seconds.
        first_arrived_at: the same, unless it was submitted before: when that was first.
        has_started: it ran before, here or at an earlier scheduler: it waits before all that have not.
        request: what the core works on; None until the pool's model is known.
        lane: where it runs; None while it waits.
        num_moves: failed steps that it was part of.
        has_used_up_moves: one more such step ends it; does not change while it waits.
        queued_since: since when it waits, clock seconds; means nothing while it runs.
        queued_s: time waited until then, earlier submissions included.
        first_bound_at: clock seconds; None before.
        first_token_at: clock seconds; None before.
        span: in its trace; None without traces.
    """

    req_id: str
    number: int
    session: Session
    handle: int
    spec: RequestSpec
    arrived_at: float
    first_arrived_at: float
    has_started: bool
    queued_since: float
    queued_s: float
    request: Request | None = None
    lane: Lane | None = None
    num_moves: int = 0
    has_used_up_moves: bool = False
    first_bound_at: float | None = None
    first_token_at: float | None = None
    span: RequestSpan | None = None

    @property
    def core_request(self) -> Request:
        """What the core works on. A submission without one waits for the model and reaches no queue or lane."""
        if self.request is None:
            raise LookupError(f"{self.req_id} waits for the pool's model")
        return self.request

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to prefill before the next new one."""
        if self.request is not None:
            return self.request.num_prefill_tokens
        return len(self.spec.prompt_token_ids) + len(self.spec.output_token_ids)

    @property
    def usage(self) -> Usage:
        if self.request is not None:
            return self.request.usage()
        return Usage(len(self.spec.prompt_token_ids), len(self.spec.output_token_ids), 0)


@dataclass(eq=False, slots=True)
class Session:
    """One gateway's stream and the requests that came over it. They end when it ends.

    Attributes:
        name: of the gateway, for logs.
        outbox: what the gateway has not been told yet.
        by_request_id: living submissions by the gateway's id.
        by_handle: the same by handle.
    """

    name: str
    outbox: Outbox = field(default_factory=Outbox)
    by_request_id: dict[str, Submission] = field(default_factory=dict)
    by_handle: dict[int, Submission] = field(default_factory=dict)

    def add(self, submission: Submission) -> None:
        self.by_request_id[submission.spec.request_id] = submission
        self.by_handle[submission.handle] = submission

    def discard(self, submission: Submission) -> None:
        del self.by_request_id[submission.spec.request_id]
        del self.by_handle[submission.handle]

    def find(self, request_id: str, generation: int) -> Submission | None:
        """The living submission that an abort means; None when it has ended or is of another generation."""
        submission = self.by_request_id.get(request_id)
        return submission if submission is not None and submission.spec.generation == generation else None

    def check_identity(self, spec: RequestSpec) -> Submission | None:
        """Returns the living submission that `spec` replaces, if any.

        Raises:
            InvalidArgumentError: an id of no or too many bytes.
            AlreadyExistsError: the id is alive with this or a higher generation.
        """
        length = len(spec.request_id.encode())
        if not 1 <= length <= MAX_REQUEST_ID_BYTES:
            raise InvalidArgumentError.of("spec.request_id", f"{length} bytes", f"1 to {MAX_REQUEST_ID_BYTES} bytes")
        living = self.by_request_id.get(spec.request_id)
        if living is not None and spec.generation <= living.spec.generation:
            raise AlreadyExistsError(
                f"request_id is {spec.request_id!r} with generation {spec.generation}, which is alive with generation "
                f"{living.spec.generation}; allowed: another id, or a higher generation"
            )
        return living


def replaced_error(spec: RequestSpec) -> RequestAbortedError:
    """What ends a request that its gateway has submitted again."""
    return RequestAbortedError(
        f"request_id {spec.request_id!r} was submitted again with generation {spec.generation}",
        reason=ErrorReason.REPLACED_BY_NEWER_GENERATION,
    )


def step_error(reason: ErrorReason, executor_id: str) -> InternalError:
    """What ends a request whose row of a step failed."""
    what = "its numbers were not finite" if reason is ErrorReason.NUMERIC_ERROR else "it failed"
    return InternalError(f"the step of this request failed on {executor_id!r}: {what}", reason=reason)


def log_end(submission: Submission, reason: FinishReason, error: HoldbackError | None, now: float) -> None:
    """The one line of a request's end. Times are seconds; those of the first token and the end count from arrival."""
    usage, arrived_at, first_token_at = submission.usage, submission.arrived_at, submission.first_token_at
    log.info(
        "request_ended",
        request_id=submission.spec.request_id,
        trace_id=trace_id_of(submission.spec.trace),
        gateway=submission.session.name,
        finish_reason=reason.value,
        error_reason=None if error is None else error.reason.value,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        queued_s=round(submission.queued_s, 6),
        first_token_s=None if first_token_at is None else round(first_token_at - arrived_at, 6),
        total_s=round(now - arrived_at, 6),
        num_moves=submission.num_moves,
    )


def make_req_id(number: int, request_id: str) -> str:
    return f"{number}/{request_id}"


def request_id_of(req_id: str) -> str:
    """The gateway's id in a `req_id`."""
    return req_id.partition("/")[2]
