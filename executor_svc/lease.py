"""The right to drive this executor: one lease for each registration, one `Execute` stream for each lease."""

from __future__ import annotations

import asyncio
import secrets

from executor_svc.execution import Execution
from holdback.errors import ErrorReason, FailedPreconditionError, HoldbackError, UnavailableError


class Lease:
    """A fresh random lease. It ends once, for one reason, and its stream ends with it.

    Attributes:
        text: what the scheduler must present.
        execution: the stream, once it is open.
    """

    def __init__(self) -> None:
        self.text = secrets.token_hex(16)
        self.execution: Execution | None = None
        self._ended: asyncio.Future[HoldbackError] = asyncio.get_running_loop().create_future()

    def end(self, error: HoldbackError) -> None:
        """Ends the lease, and its stream as stale. What ends it later changes nothing."""
        if self.execution is not None:
            self.execution.end(
                FailedPreconditionError(f"the lease ended: {error.message}", reason=ErrorReason.LEASE_MISMATCH)
            )
        if not self._ended.done():
            self._ended.set_result(error)

    async def wait_for_end(self) -> HoldbackError:
        """Why it ended. Waits without owning: it may be cancelled and asked again."""
        return await asyncio.shield(self._ended)


class LeaseHolder:
    """The current lease of this executor, if it has one. Whatever else is presented is refused."""

    def __init__(self) -> None:
        self.current: Lease | None = None

    def open_execution(self, presented: str, execution: Execution) -> Lease:
        """Gives the lease its stream.

        Raises:
            FailedPreconditionError: it is not the current lease, or it has had its stream (LEASE_MISMATCH).
        """
        lease = self.current
        if lease is None or not secrets.compare_digest(presented.encode(), lease.text.encode()):
            raise FailedPreconditionError(
                "lease is not the current one of this executor; allowed: the one of its latest registration",
                reason=ErrorReason.LEASE_MISMATCH,
            )
        if lease.execution is not None:
            raise FailedPreconditionError(
                "lease has had its Execute stream; allowed: one for each lease", reason=ErrorReason.LEASE_MISMATCH
            )
        lease.execution = execution
        return lease


def lease_lost(why: str) -> UnavailableError:
    return UnavailableError(why, reason=ErrorReason.NO_SCHEDULER)
