"""One request's state: outputs by index, merged updates, time waited, deadline and the rule that ends it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.submission import Ended, EndRule, OutOfOrderError, Submission, Update
from holdback.errors import DeadlineExceededError, InternalError
from holdback.types import FinishReason, RequestSpec, SamplingParams, TokenLogprobs


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Setting:
    clock: Clock = field(default_factory=Clock)
    closed: list[Submission] = field(default_factory=list)

    def submission(self, *, sampling: SamplingParams | None = None, **spec_fields: Any) -> Submission:
        spec = RequestSpec("r", [1, 2, 3], sampling or SamplingParams(max_tokens=100), **spec_fields)
        rule = EndRule.of(spec, (2,))
        return Submission(spec, "f", rule, self.clock, asyncio.Event(), self.closed.append)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_updates_that_nobody_takes_are_merged(setting: Setting) -> None:
    submission = setting.submission()
    submission.on_tokens(0, [7], [])
    submission.on_tokens(1, [8, 9], [])
    assert submission.take() == Update([7, 8, 9], [], None)
    assert submission.take() == Update([], [], None)
    submission.on_tokens(3, [10], [])
    submission.end(Ended(FinishReason.LENGTH))
    assert submission.take() == Update([10], [], Ended(FinishReason.LENGTH))


def test_outputs_that_are_known_are_dropped_and_a_gap_is_a_fault(setting: Setting) -> None:
    submission = setting.submission()
    submission.on_tokens(0, [7, 8], [])
    submission.on_tokens(0, [7, 8, 9], [])
    submission.on_tokens(1, [8], [])
    assert submission.output_token_ids == [7, 8, 9]
    with pytest.raises(OutOfOrderError, match="output 4 came after 3 outputs"):
        submission.on_tokens(4, [1], [])


def test_outputs_that_the_client_has_are_counted_and_not_given_out(setting: Setting) -> None:
    submission = setting.submission(output_token_ids=(7, 8))
    submission.on_tokens(2, [9], [])
    assert submission.take().token_ids == [9]
    assert submission.current_spec().output_token_ids == (7, 8, 9)


def test_log_probabilities_follow_their_tokens_and_a_missing_one_fails_the_request(setting: Setting) -> None:
    entries = [TokenLogprobs(token_id, -1.0) for token_id in (7, 8, 9)]
    submission = setting.submission(sampling=SamplingParams(max_tokens=100, num_logprobs=0))
    submission.on_tokens(0, [7, 8], entries[:2])
    submission.on_tokens(1, [8, 9], entries[1:])
    assert submission.take() == Update([7, 8, 9], entries, None)
    submission.on_tokens(3, [10], [None])
    ended = submission.take().ended
    assert ended is not None
    assert isinstance(ended.error, InternalError)


def test_the_first_end_counts(setting: Setting) -> None:
    submission = setting.submission()
    submission.end(Ended(FinishReason.STOP))
    submission.end(Ended(FinishReason.ABORT))
    assert submission.take().ended == Ended(FinishReason.STOP)


def test_the_time_waited_is_what_the_scheduler_said_and_every_wait_after_a_loss(setting: Setting) -> None:
    submission = setting.submission()
    setting.clock.now += 1.5
    assert submission.current_spec().queued_ms == 0  # a first submission has waited nowhere yet
    submission.was_sent = True
    assert submission.current_spec().queued_ms == 1500
    submission.on_started(num_cached_tokens=16, queued_ms=1400)
    setting.clock.now += 60  # it runs
    submission.on_lost()
    setting.clock.now += 2
    assert submission.current_spec().queued_ms == 3400
    submission.on_started(num_cached_tokens=0, queued_ms=3600)
    assert submission.current_spec().queued_ms == 3600
    assert submission.num_cached_tokens == 16


def test_the_deadline_shrinks_with_time_and_then_ends_the_request(setting: Setting) -> None:
    submission = setting.submission(deadline_ms=1000)
    setting.clock.now += 0.75
    assert submission.current_spec().deadline_ms == 250
    setting.clock.now += 0.25
    with pytest.raises(DeadlineExceededError):
        submission.current_spec()
    assert setting.submission().current_spec().deadline_ms is None


@pytest.mark.case("B37")
@pytest.mark.parametrize(
    ("sampling", "token_id", "num_outputs", "expected"),
    [
        ({}, 2, 1, Ended(FinishReason.STOP)),
        ({}, 5, 1, None),
        ({}, 5, 4, Ended(FinishReason.LENGTH)),
        ({}, 2, 4, Ended(FinishReason.STOP)),
        ({"ignore_eos": True}, 2, 3, None),
        ({"stop_token_ids": (9,), "ignore_eos": True}, 9, 1, Ended(FinishReason.STOP, stop_token_id=9)),
        ({"stop_token_ids": (2,)}, 2, 1, Ended(FinishReason.STOP)),
        ({"stop_token_ids": (9,), "min_tokens": 3}, 9, 2, None),
        ({"stop_token_ids": (9,), "min_tokens": 3}, 9, 3, Ended(FinishReason.STOP, stop_token_id=9)),
    ],
)
def test_the_rule_that_ends_a_request(
    sampling: dict[str, Any], token_id: int, num_outputs: int, expected: Ended | None
) -> None:
    spec = RequestSpec("r", [1], SamplingParams(max_tokens=4, **sampling))
    assert EndRule.of(spec, (2,)).after(token_id, num_outputs) == expected
