"""What a gateway is told in one message, and what is merged while it does not read."""

from __future__ import annotations

import pytest

from holdback.errors import DeadlineExceededError
from holdback.types import FinishReason, TokenLogprobs, Usage
from holdback.v1 import scheduler_pb2
from scheduler_svc import outbox as outbox_module
from scheduler_svc.outbox import Outbox


def take(outbox: Outbox) -> scheduler_pb2.RequestUpdates:
    response = outbox.take()
    assert response is not None
    return response.updates


async def test_in_a_steady_step_each_request_costs_three_numbers() -> None:
    outbox = Outbox()
    for handle in (3, 5):
        outbox.tokens(handle, 10 + handle, [100 + handle], None)
    updates = take(outbox)
    assert list(updates.handles) == [3, 5]
    assert list(updates.output_indices) == [13, 15]
    assert list(updates.token_ids) == [103, 105]
    assert list(updates.num_new_tokens) == []
    assert outbox.take() is None


async def test_what_was_not_taken_is_merged_for_each_request() -> None:
    outbox = Outbox()
    for index in range(3):
        outbox.tokens(1, index, [50 + index], None)
        outbox.tokens(2, 7 + index, [60 + index], None)
    outbox.tokens(3, 0, [70], None)
    updates = take(outbox)
    assert list(updates.handles) == [1, 2, 3]
    assert list(updates.output_indices) == [0, 7, 0]
    assert list(updates.num_new_tokens) == [3, 3, 1]
    assert list(updates.token_ids) == [50, 51, 52, 60, 61, 62, 70]


async def test_log_probabilities_name_the_token_that_they_belong_to() -> None:
    outbox = Outbox()
    outbox.tokens(1, 0, [50], None)
    outbox.tokens(2, 0, [60], [TokenLogprobs(60, -0.5, (60, 61), (-0.5, -1.5))])
    outbox.tokens(2, 1, [61], [TokenLogprobs(61, -0.25)])
    updates = take(outbox)
    assert [(entry.token_index, entry.logprobs.token_id, entry.logprobs.logprob) for entry in updates.logprobs] == [
        (1, 60, -0.5),
        (2, 61, -0.25),
    ]


async def test_a_request_starts_before_its_tokens_and_ends_after_them() -> None:
    outbox = Outbox()
    outbox.started(1, num_cached_tokens=16, queued_ms=20, executor_id="executor-0")
    outbox.tokens(1, 0, [50], None)
    outbox.ended(1, FinishReason.STOP, Usage(3, 1, 2), stop_token_id=50)
    updates = take(outbox)
    [started], [ended] = updates.started, updates.ended
    assert (started.num_cached_tokens, started.queued_ms, started.executor_id) == (16, 20, "executor-0")
    assert list(updates.token_ids) == [50]
    assert (ended.stop_token_id, ended.usage.cached_tokens) == (50, 2)
    assert not ended.HasField("error")


async def test_an_error_goes_with_the_end() -> None:
    outbox = Outbox()
    outbox.ended(1, FinishReason.ABORT, Usage(3), error=DeadlineExceededError("deadline_ms is 5; it has passed"))
    [ended] = take(outbox).ended
    assert (ended.error.code, ended.error.message) == (4, "deadline_ms is 5; it has passed")
    assert not ended.HasField("stop_token_id")


async def test_a_message_is_bounded_and_an_end_waits_for_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_TOKENS_PER_MESSAGE", 4)
    outbox = Outbox()
    logprobs = [TokenLogprobs(50 + i, -1.0) for i in range(6)]
    outbox.tokens(1, 0, [50, 51, 52, 53, 54, 55], logprobs)
    outbox.tokens(2, 0, [60], None)
    outbox.ended(1, FinishReason.LENGTH, Usage(1, 6))
    first, second = take(outbox), take(outbox)
    assert (list(first.token_ids), list(first.num_new_tokens), list(first.ended)) == ([50, 51, 52, 53], [4], [])
    assert (list(second.handles), list(second.output_indices)) == ([2, 1], [0, 4])
    assert (list(second.token_ids), list(second.num_new_tokens)) == ([60, 54, 55], [1, 2])
    assert [(entry.token_index, entry.logprobs.token_id) for entry in second.logprobs] == [(1, 54), (2, 55)]
    assert [entry.handle for entry in second.ended] == [1]


async def test_only_the_latest_state_of_the_pool_is_sent() -> None:
    outbox = Outbox()
    outbox.set_pool(scheduler_pb2.PoolStatus(num_executors=1))
    outbox.set_pool(scheduler_pb2.PoolStatus(num_executors=2))
    response = outbox.take()
    assert response is not None
    assert response.pool.num_executors == 2
    assert outbox.take() is None
