"""Rows of requests that ended: the scheduler's core drives the runner with two steps in flight, at every moment.

The simulated device runs a step when the one before it has ended and answers from what was written into the blocks, so
a late row that reached the next owner of its slot or of its blocks, or a count of outputs that a late row changed, is a
wrong answer or an error.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

import pytest

from executor_svc.devices.simulated import expected_tokens
from executor_svc.runner import LaunchedStep, NeuronModelRunner
from holdback.codec import StepDecoder, StepEncoder, decode_runner_output, encode_runner_output
from holdback.types import FinishReason, NewRequestData, RequestSpec, SamplingParams, SchedulerOutput
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import SchedulerConfig
from tests.executor.builders import VOCAB_SIZE, build_device

EOS = 2  # below 16, so the device never answers it
PROMPTS = {"a": [20, 21, 22, 23, 24], "b": [30, 31, 32], "c": [20, 21, 22, 23, 40, 41], "d": [50]}
MAX_TOKENS = 6
MOMENTS = range(20)


class Pair:
    """Core and runner, and between them the wire form of every step.

    Attributes:
        answers: tokens of each request, from the updates.
        ended: why, from the updates.
        num_reused: slots, and blocks, given to a request while a row of their last owner was in flight.
    """

    def __init__(self, *, enable_prefix_caching: bool) -> None:
        device = build_device(
            block_size=2, num_blocks=15, max_model_len=14, prefill_buckets=(4,), seqs_buckets=(1, 2), context_buckets=()
        )
        limits = device.limits
        config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=device.model.max_model_len,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            num_batched_tokens_buckets=limits.num_batched_tokens_buckets,
            num_seqs_buckets=limits.num_seqs_buckets,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.core = NeuronAsyncScheduler(config)
        self.runner = NeuronModelRunner(device)
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.num_reused = {"slots": 0, "blocks": 0}
        self._encoder, self._decoder = StepEncoder(), StepDecoder()
        self._in_flight: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()
        self._owned: dict[str, tuple[int, set[int]]] = {}

    def add(self, req_id: str, stop_at: int | None = None) -> None:
        """A request; with `stop_at` it ends with that output, or earlier where the same token comes earlier."""
        stops = () if stop_at is None else (answer_of(req_id)[stop_at],)
        params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=stops)
        self.core.add_request(Request(req_id, RequestSpec(req_id, PROMPTS[req_id], params), (EOS,)))

    def abort(self, req_id: str) -> None:
        request = self.core.finish_request(req_id, FinishReason.ABORT)
        if request is not None:
            self.ended[req_id] = FinishReason.ABORT

    def move(self) -> None:
        """Sends a step where one may be sent and there is one; otherwise applies the oldest result."""
        if len(self._in_flight) < 2:
            output = self.core.schedule()
            if output.num_scheduled_tokens or output.finished_req_ids:
                for new in output.scheduled_new_reqs:
                    self._note_reuse(new)
                message = self._encoder.encode(output)
                self._in_flight.append((output, self.runner.launch(self._decoder.decode(message))))
                return
        if self._in_flight:
            self._apply_oldest()

    @property
    def is_busy(self) -> bool:
        return bool(self.core.running or self.core.waiting or self._in_flight)

    def _apply_oldest(self) -> None:
        output, launched = self._in_flight.popleft()
        result = decode_runner_output(encode_runner_output(self.runner.collect(launched)))
        for update in self.core.update_from_output(output, result):
            assert update.req_id not in self.ended, "a token, or an end, after the end"
            tokens = self.answers.setdefault(update.req_id, [])
            assert update.output_index == len(tokens), "a token twice, or a gap"
            tokens += update.new_token_ids
            if update.finish_reason is not None:
                self.ended[update.req_id] = update.finish_reason

    def _note_reuse(self, new: NewRequestData) -> None:
        in_flight = {req_id for output, _ in self._in_flight for req_id in output.num_scheduled_tokens}
        for req_id in in_flight & self.ended.keys() & self._owned.keys():
            slot, blocks = self._owned[req_id]
            self.num_reused["slots"] += slot == new.slot
            self.num_reused["blocks"] += not blocks.isdisjoint(new.block_ids)
        self._owned[new.req_id] = (new.slot, set(new.block_ids))


def answer_of(req_id: str) -> list[int]:
    return expected_tokens(PROMPTS[req_id], MAX_TOKENS, VOCAB_SIZE)


def run(pair: Pair, events: Mapping[int, list[Callable[[], None]]]) -> None:
    """Moves until all is done; the events of a moment come before its move."""
    for moment in itertools.count():
        for event in events.get(moment, []):
            event()
        if moment > max(events) and not pair.is_busy:
            break
        assert moment < 200, "it never ends"
        pair.move()
    pair.core.check_integrity()
    assert pair.core.num_free_blocks == 14


def check(pair: Pair, stops: Mapping[str, int]) -> None:
    for req_id, reason in pair.ended.items():
        expected = answer_of(req_id)
        found = pair.answers.get(req_id, [])
        if reason is FinishReason.ABORT:
            assert found == expected[: len(found)]
        elif req_id in stops:
            assert found == expected[: expected.index(expected[stops[req_id]]) + 1]
            assert reason is FinishReason.STOP
        else:
            assert (found, reason) == (expected, FinishReason.LENGTH)


@pytest.mark.case("B13")
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_late_row_disturbs_nobody_whenever_its_request_ends_and_another_comes(enable_prefix_caching: bool) -> None:
    num_reused = {"slots": 0, "blocks": 0}
    for aborted_at, added_at in itertools.product(MOMENTS, MOMENTS):
        stop_at = 1 if (aborted_at + added_at) % 2 else 4
        pair = Pair(enable_prefix_caching=enable_prefix_caching)
        pair.add("a")
        pair.add("b", stop_at)
        events: dict[int, list[Callable[[], None]]] = {}
        events.setdefault(aborted_at, []).append(lambda pair=pair: pair.abort("a"))  # type: ignore[misc]
        events.setdefault(added_at, []).extend(
            [lambda pair=pair: pair.add("c"), lambda pair=pair: pair.add("d", 2)]  # type: ignore[misc]
        )
        run(pair, events)
        assert pair.ended.keys() == PROMPTS.keys()
        check(pair, {"b": stop_at, "d": 2})
        for kind, count in pair.num_reused.items():
            num_reused[kind] += count
    assert num_reused["slots"] > 100, num_reused
    assert num_reused["blocks"] > 50, num_reused


@pytest.mark.parametrize("stop_at", range(MAX_TOKENS))
def test_a_request_that_stops_at_any_output_leaves_its_slot_to_the_next(stop_at: int) -> None:
    """One slot after the other: each request takes what the one before has just left, its late row still in flight."""
    pair = Pair(enable_prefix_caching=True)
    for req_id in PROMPTS:
        pair.add(req_id, stop_at)
    run(pair, {0: []})
    assert set(pair.ended.values()) <= {FinishReason.STOP}
    check(pair, dict.fromkeys(PROMPTS, stop_at))
