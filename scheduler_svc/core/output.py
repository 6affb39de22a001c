"""What a step leaves behind in the scheduler, and what its result means for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from holdback.errors import ErrorReason
from holdback.types import (
    CachedRequestsData,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    Phase,
    SchedulerOutput,
    TokenLogprobs,
)
from scheduler_svc.core.request import Request


@dataclass(slots=True)
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


@dataclass(slots=True)
class Ending:
    """A request that a step ended; attributes as those of `RequestUpdate`."""

    request: Request
    finish_reason: FinishReason
    stop_token_id: int | None = None
    error: ErrorReason | None = None


@dataclass(slots=True, eq=False)
class StepUpdate(Sequence[RequestUpdate]):
    """What one step brought, as parallel lists; read as a sequence it is one `RequestUpdate` per request.

    A steady step brings one token to each of many requests and nothing else, so nothing is made for a row. Nobody
    changes the lists.

    Attributes:
        requests: that got a token, in schedule order.
        token_ids: parallel to `requests`: the token of each.
        output_indices: parallel: its index among all outputs of the request, earlier submissions counted.
        logprobs: parallel, None where not asked for; empty when no row asked.
        endings: of requests that failed, which have no row, then of others in schedule order.
    """

    requests: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    output_indices: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests) + sum(ending.error is not None for ending in self.endings)

    @overload
    def __getitem__(self, index: int) -> RequestUpdate: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestUpdate]: ...

    def __getitem__(self, index: int | slice) -> RequestUpdate | list[RequestUpdate]:
        return self._unpack()[index]

    def __iter__(self) -> Iterator[RequestUpdate]:
        return iter(self._unpack())  # that of Sequence would unpack all rows once for each

    def _unpack(self) -> list[RequestUpdate]:
        """Failed ones first, then in schedule order."""
        updates = [self._failed(ending) for ending in self.endings if ending.error is not None]
        endings = {ending.request.req_id: ending for ending in self.endings}
        for row, request in enumerate(self.requests):
            update = RequestUpdate(request.req_id, self.output_indices[row], [self.token_ids[row]])
            entry = self.logprobs[row] if self.logprobs else None
            update.logprobs = None if entry is None else [entry]
            ending = endings.get(request.req_id)
            if ending is not None:
                update.finish_reason, update.stop_token_id = ending.finish_reason, ending.stop_token_id
            updates.append(update)
        return updates

    @staticmethod
    def _failed(ending: Ending) -> RequestUpdate:
        num_outputs = len(ending.request.output_token_ids)
        return RequestUpdate(
            ending.request.req_id, num_outputs, [], finish_reason=ending.finish_reason, error=ending.error
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The scheduler's own memory of a step in flight: results are attributed by it, never by who has a slot or id now.

    Attributes:
        step: number of the step.
        rows: in schedule order.
        sampling_rows: those that sample a token, in the same order.
        num_prefill_rows: 0 for a decode step, all rows for a prefill step.
        num_unbound: requests that had been unbound in the scheduler's life when the step was scheduled.
    """

    step: int
    rows: list[Request]
    sampling_rows: list[Request]
    num_prefill_rows: int
    num_unbound: int

    def to_update(self, runner_output: ModelRunnerOutput, num_unbound: int) -> StepUpdate:
        """The rows that are still bound, with their tokens. The others are thrown away (K8)."""
        rows, token_ids, logprobs = self.sampling_rows, runner_output.sampled_token_ids, runner_output.logprobs
        if num_unbound != self.num_unbound:
            bound = [row for row, request in enumerate(rows) if request.slot is not None]
            rows, token_ids = [rows[row] for row in bound], [token_ids[row] for row in bound]
            logprobs = [logprobs[row] for row in bound] if logprobs else []
        return StepUpdate(rows, token_ids, logprobs=logprobs)


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

    def to_record(self, step: int, num_unbound: int) -> StepRecord:
        """What must be remembered of the step; to be called once all counters are past it."""
        rows = self.rows + self.new_rows if self.new_rows else self.rows
        # A chunk that leaves tokens to compute samples nothing. Only a prefill step can have one.
        sampling_rows = [row for row in rows if not row.is_prefill] if self.num_prefill_rows else rows
        return StepRecord(step, rows, sampling_rows, self.num_prefill_rows, num_unbound)
