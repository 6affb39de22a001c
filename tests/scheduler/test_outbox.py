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
    outbox.tokens([3, 5], [13, 15], [103, 105])
    updates = take(outbox)
    assert list(updates.handles) == [3, 5]
    assert list(updates.output_indices) == [13, 15]
    assert list(updates.token_ids) == [103, 105]
    assert list(updates.num_new_tokens) == []
    assert outbox.take() is None


async def test_the_steps_of_several_lanes_go_in_one_message() -> None:
    outbox = Outbox()
    outbox.tokens([3, 5], [0, 7], [50, 60])
    outbox.tokens([4], [2], [70])
    outbox.tokens([3, 5], [1, 8], [51, 61])
    updates = take(outbox)
    assert list(updates.handles) == [3, 5, 4, 3, 5]
    assert list(updates.output_indices) == [0, 7, 2, 1, 8]
    assert list(updates.token_ids) == [50, 60, 70, 51, 61]
    assert list(updates.num_new_tokens) == []
    assert outbox.take() is None


async def test_steps_that_are_not_taken_are_merged_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_STEPS_KEPT", 2)
    outbox = Outbox()
    for index in range(3):
        outbox.tokens([1, 2], [index, 7 + index], [50 + index, 60 + index])
    outbox.tokens([3], [0], [70])
    outbox.tokens([2], [10], [63])
    updates = take(outbox)
    assert list(updates.handles) == [1, 2, 3]
    assert list(updates.output_indices) == [0, 7, 0]
    assert list(updates.num_new_tokens) == [3, 4, 1]
    assert list(updates.token_ids) == [50, 51, 52, 60, 61, 62, 63, 70]
    outbox.tokens([1], [3], [53])
    assert list(take(outbox).output_indices) == [3]


async def test_what_a_gateway_that_does_not_read_costs_is_bounded_by_the_answers() -> None:
    outbox = Outbox()
    for index in range(1000):
        outbox.tokens([1, 2], [index, index], [50, 60])
    assert len(outbox._steps) <= outbox_module.MAX_STEPS_KEPT
    assert [len(pending.token_ids) for pending in outbox._pending.values()] == [990, 990]
    assert len(take(outbox).token_ids) == 2000


@pytest.mark.parametrize("max_steps_kept", [0, 8], ids=["merged", "as they came"])
async def test_log_probabilities_name_the_token_that_they_belong_to(
    max_steps_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MAX_STEPS_KEPT", max_steps_kept)
    outbox = Outbox()
    outbox.tokens([1, 2], [0, 0], [50, 60], [None, TokenLogprobs(60, -0.5, (60, 61), (-0.5, -1.5))])
    outbox.tokens([2], [1], [61], [TokenLogprobs(61, -0.25)])
    outbox.tokens([1], [1], [51])
    updates = take(outbox)
    named = [(updates.token_ids[entry.token_index], entry.logprobs) for entry in updates.logprobs]
    assert [(token_id, entry.token_id, entry.logprob) for token_id, entry in named] == [(60, 60, -0.5), (61, 61, -0.25)]
    assert list(named[0][1].top_token_ids) == [60, 61]


async def test_a_request_starts_before_its_tokens_and_ends_after_them() -> None:
    outbox = Outbox()
    outbox.started(1, num_cached_tokens=16, queued_ms=20, executor_id="executor-0")
    outbox.tokens([1], [0], [50])
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
    for index in range(3):
        outbox.tokens([1, 2], [index, index], [50 + index, 60 + index])
    outbox.ended(1, FinishReason.LENGTH, Usage(1, 3))
    first, second = take(outbox), take(outbox)
    assert (list(first.token_ids), list(first.ended)) == ([50, 60, 51, 61], [])
    assert (list(second.token_ids), [entry.handle for entry in second.ended]) == ([52, 62], [1])


async def test_a_merged_message_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_TOKENS_PER_MESSAGE", 4)
    monkeypatch.setattr(outbox_module, "MAX_STEPS_KEPT", 0)
    outbox = Outbox()
    for index in range(6):
        outbox.tokens([1], [index], [50 + index], [TokenLogprobs(50 + index, -1.0)])
    outbox.tokens([2], [0], [60])
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


async def test_starts_and_ends_are_bounded_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_REQUESTS_PER_MESSAGE", 2)
    outbox = Outbox()
    for handle in range(5):
        outbox.started(handle, num_cached_tokens=0, queued_ms=0, executor_id="executor-0")
    outbox.tokens(range(5), [0] * 5, [50] * 5)
    for handle in range(5):
        outbox.ended(handle, FinishReason.LENGTH, Usage(1, 1))
    messages = [take(outbox) for _ in range(5)]
    told = [(len(message.started), len(message.token_ids), len(message.ended)) for message in messages]
    assert told == [(2, 0, 0), (2, 0, 0), (1, 5, 2), (0, 0, 2), (0, 0, 1)]
    assert outbox.take() is None


async def test_a_step_of_more_rows_than_a_message_may_have_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_TOKENS_PER_MESSAGE", 1)
    outbox = Outbox()
    outbox.tokens([1, 2], [0, 0], [50, 60])
    outbox.tokens([1], [1], [51])
    assert [list(take(outbox).token_ids) for _ in range(2)] == [[50, 60], [51]]
