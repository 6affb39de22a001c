"""From the rows of a step to the gateways whose requests they are.

In a steady decode one step has the rows of the step before, so whose they are is worked out once and not for each row
of each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scheduler_svc.core.output import StepUpdate
from scheduler_svc.core.request import Request
from scheduler_svc.requests import Session, Submission

T = TypeVar("T")


@dataclass(slots=True)
class _Share:
    """The rows of one gateway. `rows` is None when it has all of them."""

    session: Session
    handles: list[int]
    rows: list[int] | None

    def of(self, values: Sequence[T]) -> Sequence[T]:
        return values if self.rows is None else [values[row] for row in self.rows]


class FanOut:
    """Tells gateways the tokens of one lane's steps.

    Args:
        submissions: of all requests that run, by `req_id`.
    """

    def __init__(self, submissions: Mapping[str, Submission]) -> None:
        self._submissions = submissions
        self._requests: list[Request] = []
        self._shares: list[_Share] = []

    def tell(self, update: StepUpdate, now: float) -> None:
        """`now` is the time of first tokens, clock seconds."""
        if not update.requests:
            return
        # The same objects are the same rows: a request that starts again is another one.
        if update.requests != self._requests:
            self._share_out(update.requests, now)
        for share in self._shares:
            share.session.outbox.tokens(
                share.handles,
                share.of(update.output_indices),
                share.of(update.token_ids),
                share.of(update.logprobs) if update.logprobs else (),
            )

    def _share_out(self, requests: list[Request], now: float) -> None:
        shares: dict[int, _Share] = {}
        for row, request in enumerate(requests):
            submission = self._submissions[request.req_id]
            if submission.first_token_at is None:
                submission.first_token_at = now
            share = shares.setdefault(id(submission.session), _Share(submission.session, [], []))
            share.handles.append(submission.handle)
            if share.rows is not None:
                share.rows.append(row)
        self._requests, self._shares = requests, list(shares.values())
        if len(self._shares) == 1:
            self._shares[0].rows = None
