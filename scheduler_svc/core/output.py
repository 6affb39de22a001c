"""What a step leaves behind in the scheduler, and what its result means for each request."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdback.errors import ErrorReason
from holdback.types import (
    CachedRequestsData,
    FinishReason,
    NewRequestData,
    Phase,
    SchedulerOutput,
    TokenLogprobs,
)
from scheduler_svc.core.request import Request


# One is made for every row of every step, so no slots: CPython 3.11 fills a plain instance faster.
@dataclass
class RequestUpdate:
    """What one step brought to one request.

    Attributes:
        req_id: which.
        output_index: index of the first new token among all outputs of the request, earlier submissions counted.
        new_token_ids: empty when the step failed for this request.
        logprobs: parallel to `new_token_ids`; None where not asked for.
        finish_reason: why it ended with this step; None while it goes on.
        stop_token_id: the one of `stop_token_ids` that ended it; None for EOS and every other ending.
        error: with FinishReason.ERROR, the stable reason.
    """

    req_id: str
    output_index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ErrorReason | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The scheduler's own memory of a step in flight: results are attributed by it, never by who has a slot or id now.

    Attributes:
        step: number of the step.
        rows: in schedule order.
        sampling_rows: those that sample a token, in the same order.
        num_prefill_rows: 0 for a decode step, all rows for a prefill step.
    """

    step: int
    rows: list[Request]
    sampling_rows: list[Request]
    num_prefill_rows: int

    def add_logprobs(self, updates: list[RequestUpdate], logprobs: list[TokenLogprobs | None]) -> None:
        """Gives each update the entry of its row, parallel to `sampling_rows`; one without a token gets none."""
        of_request = dict(zip((request.req_id for request in self.sampling_rows), logprobs, strict=True))
        for update in updates:
            entry = of_request.get(update.req_id)
            if entry is not None and update.new_token_ids:
                update.logprobs = [entry]


@dataclass(slots=True)
class DecodeRows:
    """The rows of the last decode step, with what its output said of them. In a steady state the next has the same."""

    rows: list[Request] = field(default_factory=list)
    req_ids: list[str] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """One step while `schedule()` builds it. `rows` are known requests, in schedule order before the new ones.

    Attributes:
        num_computed_tokens: parallel to `rows`, before the step.
        prefill_counts: index of a row to the tokens of its chunk; every other row decodes one token.
        new_blocks: index of a row to the blocks that it got.
        filled_blocks: prompt blocks that the step completes, as (request, number of the block).
        new_rows: requests scheduled for the first time; parallel to `new_reqs` and `new_counts`.
    """

    rows: list[Request] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    prefill_counts: dict[int, int] = field(default_factory=dict)
    new_blocks: dict[int, list[int]] = field(default_factory=dict)
    filled_blocks: list[tuple[Request, int]] = field(default_factory=list)
    new_rows: list[Request] = field(default_factory=list)
    new_reqs: list[NewRequestData] = field(default_factory=list)
    new_counts: list[int] = field(default_factory=list)
    _num_tokens_above_one: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + len(self.new_rows) + self._num_tokens_above_one

    @property
    def num_prefill_rows(self) -> int:
        return len(self.prefill_counts) + len(self.new_rows)

    def count_prefill(self, row: int, num_tokens: int) -> None:
        """Says that `rows[row]` computes a prefill chunk."""
        self.prefill_counts[row] = num_tokens
        self._num_tokens_above_one += num_tokens - 1

    def add_new(self, request: Request, new: NewRequestData, num_tokens: int) -> None:
        self.new_rows.append(request)
        self.new_reqs.append(new)
        self.new_counts.append(num_tokens)
        self._num_tokens_above_one += num_tokens - 1

    def to_output(self, step: int, finished_req_ids: list[str], last_decode: DecodeRows) -> SchedulerOutput:
        """The message to the executor, without padding.

        Args:
            last_decode: a decode step with the same rows shares its lists of ids and counts; nobody changes those.
        """
        if not self.num_prefill_rows and self.rows == last_decode.rows:
            req_ids, num_scheduled = last_decode.req_ids, last_decode.num_scheduled_tokens
        else:
            req_ids, num_scheduled = self._count_tokens()
        new_block_ids: list[list[int] | None] = [None] * len(req_ids)
        for row, block_ids in self.new_blocks.items():
            new_block_ids[row] = block_ids
        phase = Phase.DECODE if self.rows else None
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=self.new_reqs,
            scheduled_cached_reqs=CachedRequestsData(req_ids, self.num_computed_tokens, new_block_ids),
            num_scheduled_tokens=num_scheduled,
            num_scheduled_tokens_padded=num_scheduled,
            finished_req_ids=finished_req_ids,
            phase=Phase.PREFILL if self.num_prefill_rows else phase,
        )

    def _count_tokens(self) -> tuple[list[str], dict[str, int]]:
        """Ids of `rows`, and the tokens of every row of the step."""
        req_ids = [request.req_id for request in self.rows]
        num_scheduled = dict.fromkeys(req_ids, 1)
        for row, count in self.prefill_counts.items():
            num_scheduled[req_ids[row]] = count
        for new, count in zip(self.new_reqs, self.new_counts, strict=True):
            num_scheduled[new.req_id] = count
        return req_ids, num_scheduled

    def to_record(self, step: int) -> StepRecord:
        """What must be remembered of the step; to be called once all counters are past it."""
        rows = self.rows + self.new_rows if self.new_rows else self.rows
        # A chunk that leaves tokens to compute samples nothing. Only a prefill step can have one.
        sampling_rows = [row for row in rows if not row.is_prefill] if self.num_prefill_rows else rows
        return StepRecord(step, rows, sampling_rows, self.num_prefill_rows)
