"""What the result of a step must be before it is believed, and what its message must be before it is even decoded.

An executor is part of the pool, and still a process that can be broken. Whatever it sends costs the other lanes no more
than a look at some counts, and nothing of a result that does not fit is applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdback.errors import ErrorReason, FailedPreconditionError, InternalError
from holdback.request_limits import MAX_NUM_LOGPROBS
from holdback.types import ExecutorInfo, ModelRunnerOutput
from holdback.v1 import executor_pb2
from scheduler_svc.core.request import Request
from scheduler_svc.steps import StepInFlight

MAX_ROW_BYTES = 64 + 10 * MAX_NUM_LOGPROBS
"""Of one row of a result: its token, where it failed, and log-probabilities."""

SPARE_BYTES = 64 * 1024
"""Of a message, for everything else: timings, or why the executor drains or fails."""


def max_message_bytes(info: ExecutorInfo) -> int:
    """The largest message that this executor can have to send on its `Execute` stream."""
    return SPARE_BYTES + MAX_ROW_BYTES * info.limits.max_num_seqs


def check_message(message: executor_pb2.ModelRunnerOutput, info: ExecutorInfo, rows: Sequence[Request]) -> None:
    """What must hold before the message is decoded.

    Args:
        rows: requests that sample in the step, in schedule order; looked at only where there are log-probabilities.

    Raises:
        InternalError: more entries than the executor has rows, or log-probabilities that nobody asked for, of another
            token than the sampled one, or that are no numbers.
    """
    for name in ("sampled_token_ids", "logprobs", "failed_rows"):
        count, most = len(getattr(message, name)), info.limits.max_num_seqs
        if count > most:
            raise InternalError(f"{name} of step {message.step} has {count} entries; allowed: at most {most}")
    for entry in message.logprobs:
        _check_logprobs(message, entry, info.model.vocab_size, rows)


def _check_logprobs(
    message: executor_pb2.ModelRunnerOutput, entry: executor_pb2.RowLogprobs, vocab_size: int, rows: Sequence[Request]
) -> None:
    where, found = f"logprobs of step {message.step}, row {entry.row},", entry.logprobs
    if entry.row >= min(len(rows), len(message.sampled_token_ids)):
        raise InternalError(f"{where} has no row; allowed: rows below {len(rows)}")
    asked = rows[entry.row].spec.sampling.num_logprobs
    if asked is None:
        raise InternalError(f"{where} was not asked for")
    count = len(found.top_token_ids)
    if count > asked or count != len(found.top_logprobs):
        raise InternalError(f"{where} has {count} tokens with {len(found.top_logprobs)} numbers; allowed: {asked} each")
    sampled = message.sampled_token_ids[entry.row]
    if found.token_id != sampled:
        raise InternalError(f"{where} is of token {found.token_id}; allowed: {sampled}, the sampled one")
    if max(found.top_token_ids, default=0) >= vocab_size:
        raise InternalError(f"{where} has token {max(found.top_token_ids)}; allowed: [0, {vocab_size})")
    # One sum shows it: NaN stays, +inf with -inf gives NaN. -inf is the probability 0.
    if not sum(found.top_logprobs, found.logprob) < math.inf:
        raise InternalError(f"{where} has NaN or inf; allowed: numbers and -inf")


def check_output(
    output: ModelRunnerOutput, steps_in_flight: Sequence[StepInFlight], info: ExecutorInfo
) -> StepInFlight:
    """The step that `output` answers. The core checks numbers of tokens, and rows, before it changes anything.

    Raises:
        FailedPreconditionError: it is not the oldest one in flight (STEP_OUT_OF_ORDER).
        InternalError: tokens that are none, or of a step that ran no request.
    """
    if not steps_in_flight or steps_in_flight[0].record.step != output.step:
        expected = f"{steps_in_flight[0].record.step}" if steps_in_flight else "none"
        raise FailedPreconditionError(
            f"output.step is {output.step}; allowed: {expected}, the oldest step in flight",
            reason=ErrorReason.STEP_OUT_OF_ORDER,
        )
    step, token_ids = steps_in_flight[0], output.sampled_token_ids
    where, largest = f"of step {output.step}", max(token_ids, default=0)
    if largest >= info.model.vocab_size:
        raise InternalError(f"sampled_token_ids {where} has {largest}; allowed: [0, {info.model.vocab_size})")
    if token_ids and not step.output.num_scheduled_tokens:
        raise InternalError(f"sampled_token_ids {where} has tokens; allowed: none, the step ran no request")
    return step
