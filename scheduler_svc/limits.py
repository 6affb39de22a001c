"""How much may wait, for how long it will, and what is told to those who are refused for it.

A wait is what the requests ahead have to prefill over the rate at which the lanes do that, as measured. It leaves out
the decode steps in between, so it is the least that a request has to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdback.errors import DeadlineExceededError, ErrorReason, InvalidArgumentError, ResourceExhaustedError
from holdback.request_limits import MAX_CACHE_SALT_BYTES, MAX_TRACE_BYTES, check_bytes, check_sampling
from holdback.types import RequestSpec
from holdback.v1 import types_pb2
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.core.request import prompt_too_long

if TYPE_CHECKING:
    from scheduler_svc.lane import Lane

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0

MAX_QUEUED_MS = 10 * 365 * 24 * 3600 * 1000


def check_message(message: types_pb2.RequestSpec, max_model_len: int | None) -> None:
    """Lengths and values, before anything is decoded or copied. Raises InvalidArgumentError.

    Args:
        max_model_len: of the pool; None while it is not known.
    """
    num_prompt, num_outputs = len(message.prompt_token_ids), len(message.output_token_ids)
    if max_model_len is not None and num_prompt + num_outputs >= max_model_len:
        raise prompt_too_long(num_prompt, num_outputs, max_model_len)
    # Whatever is in a request travels in a step, and what is too long for a message would end the stream of a lane.
    check_bytes("spec.cache_salt", message.cache_salt, MAX_CACHE_SALT_BYTES)
    check_bytes("spec.trace_context.traceparent", message.trace_context.traceparent, MAX_TRACE_BYTES)
    check_bytes("spec.trace_context.tracestate", message.trace_context.tracestate, MAX_TRACE_BYTES)
    check_sampling(message.sampling)


def check_sizes(spec: RequestSpec) -> None:
    """Bounds of its times. Raises InvalidArgumentError."""
    if spec.deadline_ms is not None and spec.deadline_ms < 1:
        raise InvalidArgumentError.of("spec.deadline_ms", spec.deadline_ms, ">= 1")
    if spec.queued_ms > MAX_QUEUED_MS:
        raise InvalidArgumentError.of("spec.queued_ms", spec.queued_ms, f"[0, {MAX_QUEUED_MS}]")


def check_room(
    config: SchedulerServiceConfig, lanes: Sequence[Lane], num_waiting: int, num_waiting_tokens: int, num_tokens: int
) -> None:
    """Raises ResourceExhaustedError: a request of `num_tokens` is more than may wait."""
    if num_waiting >= config.max_num_queued_reqs:
        full = f"max_num_queued_reqs is {config.max_num_queued_reqs} and {num_waiting} requests wait"
    elif num_waiting_tokens + num_tokens > config.max_num_queued_tokens:
        limit = config.max_num_queued_tokens
        full = f"max_num_queued_tokens is {limit}; {num_waiting_tokens} wait and the request has {num_tokens}"
    else:
        return
    wait_s = expected_wait_s(lanes, num_waiting_tokens)
    retry_after_s = MAX_RETRY_AFTER_S if wait_s is None else min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    raise ResourceExhaustedError(f"the queue is full: {full}", retry_after_s=round(retry_after_s, 3))


def check_wait(lanes: Sequence[Lane], num_tokens_ahead: int, deadline_ms: int) -> None:
    """Raises DeadlineExceededError (QUEUE_LONGER_THAN_DEADLINE): what is ahead alone takes longer than the deadline."""
    wait_s = expected_wait_s(lanes, num_tokens_ahead)
    if wait_s is not None and wait_s * 1000 > deadline_ms:
        raise DeadlineExceededError(
            f"deadline_ms is {deadline_ms}; allowed: at least {wait_s * 1000:.0f}, in which the lanes prefill the "
            f"{num_tokens_ahead} tokens that wait ahead",
            reason=ErrorReason.QUEUE_LONGER_THAN_DEADLINE,
        )


def expected_wait_s(lanes: Sequence[Lane], num_tokens: int) -> float | None:
    """How long the lanes need to prefill `num_tokens`; None while there is none that takes requests."""
    tokens_per_us = sum(lane.prefill_rate.tokens_per_us for lane in lanes if not lane.is_draining)
    return num_tokens / tokens_per_us / 1e6 if tokens_per_us else None
