"""When a call that failed may be made again, and after which time.

A call that nobody can have taken up is safe to repeat: gRPC never sent it, or the gateway refused it, or the gateway
says that it is stopping and holds nothing of it any more. Questions that change nothing are safe to repeat after any
lost connection. A generation whose connection broke may have begun; it is only ever continued (`holdback.resumption`).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import grpc
import grpc.aio

from holdback import rpc
from holdback.endpoints import Endpoint
from holdback.errors import (
    DeadlineExceededError,
    ErrorReason,
    HoldbackError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)

FIRST_WAIT_S = 0.1
MAX_WAIT_S = 2.0
MAX_REFUSAL_WAIT_S = 60.0  # who is told to come back later than that is better told so

# How gRPC's core begins what it says when it found no connection to send a call on.
_NEVER_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a failed call tells about whether it may be made again.

    Attributes:
        error: to raise if it is not.
        was_not_taken: nothing of the call was done, or nothing is left of it.
        was_lost: the connection or the gateway went away under the call.
    """

    error: HoldbackError
    was_not_taken: bool
    was_lost: bool

    @classmethod
    def of(cls, failure: grpc.aio.AioRpcError, endpoint: Endpoint) -> Failure:
        """Reads the status of a call to an endpoint that this side has not cancelled."""
        error = rpc.error_of_server(failure, "gateway", endpoint.address, endpoint.tls)
        if any(key == rpc.STATUS_DETAILS_KEY for key, _ in failure.trailing_metadata() or ()):
            is_stopping = isinstance(error, UnavailableError) and error.reason is ErrorReason.SHUTTING_DOWN
            return cls(error, is_stopping or isinstance(error, ResourceExhaustedError), is_stopping)
        was_not_sent = (failure.details() or "").startswith(_NEVER_SENT)
        if failure.code() is grpc.StatusCode.CANCELLED:
            error = UnavailableError(f"the call was ended on the way: {error.message}")
        return cls(error, was_not_sent, failure.code() in _LOST)

    def explain(self, why: str) -> HoldbackError:
        """The error, with the reason why the call is not made again."""
        return UnavailableError(f"{self.error.message}; {why}", reason=self.error.reason)


class Deadline:
    """The end of one call, all tries together; on the running event loop's clock."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; None without end. Raises DeadlineExceededError when none are."""
        if self._at is None:
            return None
        left_s = self._at - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceededError("the timeout of the call passed")
        return left_s

    def allows(self, wait_s: float) -> bool:
        """Whether there is time left after a wait."""
        return self._at is None or asyncio.get_running_loop().time() + wait_s < self._at


class Backoff:
    """The waits between the tries of one call: doubling, and random so that many clients do not come back at once."""

    def __init__(self, max_retries: int, deadline: Deadline) -> None:
        self._max_retries = max_retries
        self._deadline = deadline
        self._num_failures = 0

    def reset(self) -> None:
        """A try has brought something: the next failure is the first one again."""
        self._num_failures = 0

    def wait_after(self, error: HoldbackError) -> float:
        """Seconds until the next try. Raises `error` when there is no try or no time left for one."""
        wait_s: float = min(FIRST_WAIT_S * 2.0**self._num_failures, MAX_WAIT_S) * random.uniform(0.5, 1.0)
        if isinstance(error, ResourceExhaustedError):
            wait_s = error.retry_after_s * random.uniform(1.0, 1.2)
        self._num_failures += 1
        is_too_late = wait_s > MAX_REFUSAL_WAIT_S or not self._deadline.allows(wait_s)
        if self._num_failures > self._max_retries or is_too_late:
            raise error
        return wait_s


def check_count(name: str, value: int) -> None:
    """Raises InvalidArgumentError for anything but a whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgumentError.of(name, value, "an integer, at least 0")
