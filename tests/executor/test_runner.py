"""The runner: what a step does to what the executor knows, and which steps it refuses before anything runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, expected_tokens
from executor_svc.runner import NeuronModelRunner
from holdback.errors import InternalError
from holdback.types import NewRequestData, Phase, RequestSpec, SchedulerOutput
from tests.executor.builders import VOCAB_SIZE, Steps, build_runner, generate

PROMPT = [20, 21, 22]
ANSWER = [52, 72, 52]  # worked out in test_simulated


def memory(runner: NeuronModelRunner) -> bytes:
    device = runner.device
    assert isinstance(device, SimulatedDevice)
    return b"".join(array.tobytes() for array in (device.kv_token_ids, device.kv_positions, device.last_token))


def test_a_prompt_in_chunks_answers_as_in_one(steps: Steps) -> None:
    prompt = list(range(20, 31))
    runner = build_runner()
    assert runner.execute(steps.new("r", prompt, blocks=[4], num_tokens=4)).sampled_token_ids == []
    assert runner.execute(steps.chunk("r", 4, blocks=[9])).sampled_token_ids == []
    last = runner.execute(steps.chunk("r", 3, blocks=[2]))
    assert last.sampled_token_ids == expected_tokens(prompt, 1, VOCAB_SIZE)


@pytest.mark.case("B12")
def test_a_chunk_of_one_token_is_a_prefill_and_what_follows_is_a_decode(steps: Steps) -> None:
    prompt = list(range(20, 25))
    runner = build_runner()
    runner.execute(steps.new("r", prompt, blocks=[4, 5], num_tokens=4))
    first = runner.execute(steps.chunk("r", 1))
    second = runner.execute(steps.decode("r"))
    assert [*first.sampled_token_ids, *second.sampled_token_ids] == expected_tokens(prompt, 2, VOCAB_SIZE)


@pytest.mark.case("B18")
@pytest.mark.parametrize(("length", "hit"), [(64, 48), (65, 64), (16, 0), (15, 0)])
def test_a_prompt_sent_twice_answers_the_same_from_its_cached_blocks(length: int, hit: int, steps: Steps) -> None:
    prompt = [20 + i % 90 for i in range(length)]
    runner = build_runner(block_size=16, num_blocks=33, max_model_len=512, prefill_buckets=(128,))
    cold = steps.new("cold", prompt, slot=0, blocks=range(1, 7), padded=128)
    warm = steps.new("warm", prompt, slot=1, blocks=[*range(1, 1 + hit // 16), 10, 11, 12], computed=hit, padded=128)
    assert (
        generate(runner, steps, cold, 8) == generate(runner, steps, warm, 8) == expected_tokens(prompt, 8, VOCAB_SIZE)
    )


def test_a_batch_answers_each_row_as_alone_in_any_order(steps: Steps) -> None:
    runner = build_runner()
    prompts = {"a": [20, 21, 22], "b": [30, 31, 32, 33, 34], "c": [40]}
    for slot, (req_id, prompt) in enumerate(prompts.items()):
        blocks = [3 * slot + 1, 3 * slot + 2, 3 * slot + 3]
        runner.execute(steps.new(req_id, prompt, slot=slot, blocks=blocks, padded=8))
    expected = {req_id: expected_tokens(prompt, 4, VOCAB_SIZE) for req_id, prompt in prompts.items()}
    for index, order in enumerate((("a", "b", "c"), ("c", "a", "b"), ("b", "a", "c")), start=1):
        output = runner.execute(steps.decode(*order))
        assert output.sampled_token_ids == [expected[req_id][index] for req_id in order]


def test_a_request_continued_after_a_loss_goes_on_with_the_next_token(steps: Steps) -> None:
    first = steps.new("r", PROMPT, outputs=ANSWER[:2], blocks=[5, 6], padded=8)
    assert generate(build_runner(), steps, first, 1) == ANSWER[2:]


def test_a_slot_and_blocks_that_became_free_serve_the_next_request_in_the_same_step(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("old", [90, 91, 92], slot=0, blocks=[3]))
    first = steps.new("r", PROMPT, slot=0, blocks=[3], finished=["old"])
    assert generate(runner, steps, first, 2) == ANSWER[:2]


def test_two_steps_in_flight_answer_as_one_after_the_other(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, slot=0, blocks=[1, 2]))
    runner.execute(steps.new("b", [30, 31], slot=1, blocks=[3, 4]))
    first = runner.launch(steps.decode("a", "b"))
    second = runner.launch(steps.decode("b", "a"))
    b = expected_tokens([30, 31], 3, VOCAB_SIZE)
    assert runner.collect(first).sampled_token_ids == [ANSWER[1], b[1]]
    assert runner.collect(second).sampled_token_ids == [b[2], ANSWER[2]]


def test_a_slot_given_away_while_its_last_step_is_in_flight_harms_neither(steps: Steps) -> None:
    """The overrun of a request that ended: its late write lands before anything of the new owner."""
    runner = build_runner()
    runner.execute(steps.new("a", [90, 91, 92], slot=0, blocks=[1]))
    overrun = runner.launch(steps.decode("a"))
    taken = runner.launch(steps.new("b", PROMPT, slot=0, blocks=[1], finished=["a"]))
    assert runner.collect(overrun).sampled_token_ids == [expected_tokens([90, 91, 92], 2, VOCAB_SIZE)[1]]
    assert runner.collect(taken).sampled_token_ids == ANSWER[:1]
    assert runner.execute(steps.decode("b")).sampled_token_ids == ANSWER[1:2]


def test_a_name_that_comes_back_in_another_slot_is_another_request(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", [90, 91, 92], slot=0, blocks=[1, 2]))
    runner.execute(steps.decode("a"))
    runner.execute(steps.new("a", PROMPT, slot=1, blocks=[3, 4], finished=["a"]))
    assert runner.execute(steps.decode("a")).sampled_token_ids == ANSWER[1:2]


def test_a_prefill_between_two_decodes_of_the_same_rows_changes_neither(steps: Steps) -> None:
    """What is kept of the rows, and the buffers that the prefill used meanwhile, do not mix."""
    runner = build_runner()
    a, b, prompt = ANSWER, expected_tokens([30, 31], 6, VOCAB_SIZE), list(range(40, 48))
    runner.execute(steps.new("a", PROMPT, slot=0, blocks=[1, 2]))
    runner.execute(steps.new("b", [30, 31], slot=3, blocks=[3, 4]))
    assert runner.execute(steps.decode("a", "b")).sampled_token_ids == [a[1], b[1]]
    runner.execute(steps.new("c", prompt, slot=1, blocks=[5, 6], num_tokens=4))
    assert runner.execute(steps.decode("a", "b")).sampled_token_ids == [a[2], b[2]]
    assert runner.execute(steps.chunk("c", 4)).sampled_token_ids == expected_tokens(prompt, 1, VOCAB_SIZE)
    more = runner.execute(steps.decode("b", "a", blocks={"b": [7]}))
    assert more.sampled_token_ids == [b[3], expected_tokens(PROMPT, 4, VOCAB_SIZE)[3]]


def test_a_third_step_in_flight_and_a_collection_out_of_order_are_refused(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, blocks=[1, 2, 3]))
    first, second = runner.launch(steps.decode("a")), runner.launch(steps.decode("a"))
    with pytest.raises(InternalError, match="steps in flight is 3; allowed: 2"):
        runner.launch(steps.decode("a"))
    with pytest.raises(InternalError, match="step to collect is 2; allowed: the oldest one in flight"):
        runner.collect(second)
    assert runner.collect(first).sampled_token_ids == ANSWER[1:2]


def test_a_step_that_only_tells_the_end_of_a_request_runs_nothing(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT))
    before = memory(runner)
    output = runner.execute(steps.finish("a"))
    assert (output.step, output.sampled_token_ids, output.timings.device_us) == (1, [], 0)
    assert memory(runner) == before
    assert runner.requests.slots == {}


def test_a_reset_forgets_everything_and_what_is_in_flight(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, blocks=[1]))
    runner.launch(steps.decode("a"))
    runner.reset()
    assert generate(runner, Steps(), Steps().new("a", PROMPT, slot=0, blocks=[1]), 1) == ANSWER[:1]


def test_a_reset_comes_through_when_a_dropped_step_fails(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner()
    runner.launch(steps.new("a", PROMPT))
    monkeypatch.setattr(runner.device, "collect", lambda _ticket: 1 / 0)
    runner.reset()
    assert runner.requests.slots == {}


def test_timings_say_where_the_time_went(steps: Steps) -> None:
    ticks = iter([0, 5_000_000, 5_300_000, 9_000_000, 9_200_000])
    runner = build_runner()
    runner = NeuronModelRunner(runner.device, clock_ns=lambda: next(ticks))
    timings = runner.execute(steps.new("a", PROMPT), arrived_ns=1_000_000).timings
    assert (timings.queue_us, timings.device_us, timings.host_us) == (4000, 1, 500)


def test_failed_rows_are_counted_in_schedule_order(steps: Steps) -> None:
    runner = build_runner(faults=SimulatedFaults(nan_token_id=99))
    for slot, prompt in enumerate(([20], [99], [21])):
        runner.execute(steps.new(f"r{slot}", prompt, slot=slot, blocks=[slot + 1]))
    assert runner.execute(steps.decode("r2", "r0", "r1")).failed_rows == [2]


def test_the_context_bucket_of_a_step_is_the_smallest_that_holds_every_row(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(context_buckets=(4, 16, 32))
    keys: list[tuple[str, int, int]] = []
    launch = runner.device.launch

    def record(inputs: Any) -> object:
        keys.append((inputs.key.phase.value, inputs.key.size, inputs.key.context))
        return launch(inputs)

    monkeypatch.setattr(runner.device, "launch", record)
    runner.execute(steps.new("a", PROMPT, slot=0, blocks=[1]))
    runner.execute(steps.decode("a"))
    runner.execute(steps.new("b", list(range(20, 26)), slot=1, blocks=[2, 3], num_tokens=4))
    runner.execute(steps.chunk("b", 2))
    runner.execute(steps.decode("a", "b", blocks={"a": [4]}))
    assert keys == [
        ("prefill", 4, 0),
        ("decode", 1, 4),
        ("prefill", 4, 0),
        ("prefill", 4, 4),
        ("decode", 2, 16),
    ]


Change = Callable[[SchedulerOutput], SchedulerOutput]


def with_new(**changes: object) -> Change:
    """Changes the first new request of a step."""

    def change(output: SchedulerOutput) -> SchedulerOutput:
        new = output.scheduled_new_reqs[0]
        fields = {"req_id": new.req_id, "spec": new.spec, "slot": new.slot, "block_ids": new.block_ids} | changes
        return dataclasses.replace(output, scheduled_new_reqs=[NewRequestData(**fields)])  # type: ignore[arg-type]

    return change


def with_step(**changes: object) -> Change:
    return lambda output: dataclasses.replace(output, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_new(slot=4), "slot is 4; allowed: [0, 4)"),
        (with_new(slot=0), "slot is 0; allowed: one that no running request has"),
        (with_new(req_id="a"), "new request is 'a'; allowed: a name that no running request has"),
        (with_new(block_ids=[0]), "block is 0; allowed: [1, 17); block 0 is the null block"),
        (with_new(block_ids=[17]), "block is 17; allowed: [1, 17)"),
        (with_new(block_ids=[]), "tokens in row 0 is 3; allowed: at most 0, what its blocks hold"),
        (with_new(block_ids=[2] * 9), "blocks of one request is 9; allowed: at most 8"),
        (with_new(num_computed_tokens=2), "num_computed_tokens is 2; allowed: a multiple of 4 below 3"),
        (with_new(num_computed_tokens=4), "num_computed_tokens is 4; allowed: a multiple of 4 below 3"),
        (with_new(spec=RequestSpec("b", [])), "tokens to prefill is 0; allowed: at least one"),
        (with_new(spec=RequestSpec("b", [20] * 32)), "tokens to prefill is 32; allowed: at least one"),
        (with_new(spec=RequestSpec("b", [20, 116])), "token id is 116; allowed: [0, 116)"),
        (with_new(spec=RequestSpec("b", [-1])), "token id is -1; allowed: [0, 116)"),
        (with_step(finished_req_ids=["x"]), "request is 'x'; allowed: one that was told and has not finished"),
        (with_step(num_scheduled_tokens={"x": 3}), "request is 'x'; allowed: one that was told"),
        (with_step(num_scheduled_tokens={"b": 4}), "num_scheduled_tokens of 'b' is 4; allowed: [1, 3]"),
        (with_step(num_scheduled_tokens={"b": 0}), "num_scheduled_tokens of 'b' is 0; allowed: [1, 3]"),
        (with_step(num_scheduled_tokens_padded={"b": 5}), "prefill shape is 5; allowed: the declared buckets [4, 8]"),
        (with_step(num_scheduled_tokens_padded={}), "prefill shape is 0; allowed: the declared buckets [4, 8]"),
        (with_step(num_scheduled_tokens={"a": 1, "b": 3}), "requests told is 1; allowed: the 2 scheduled ones"),
        (with_step(num_scheduled_tokens={}), "requests told is 1; allowed: the 0 scheduled ones"),
        (with_step(phase=None), "phase is none; allowed: prefill or decode"),
        (
            with_step(phase=Phase.DECODE, num_scheduled_tokens={"b": 1}, num_scheduled_tokens_padded={"b": 1}),
            "phase of 'b' is decode; allowed: prefill",
        ),
    ],
)
def test_a_new_request_that_cannot_be_right_is_refused_and_nothing_runs(
    change: Change, message: str, steps: Steps
) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, slot=0, blocks=[1]))
    before = memory(runner)
    with pytest.raises(InternalError, match=re.escape(message)):
        runner.execute(change(steps.new("b", PROMPT, slot=1, blocks=[2])))
    assert memory(runner) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_step(num_scheduled_tokens={"a": 2, "b": 1}), "num_scheduled_tokens of a decode is [1, 2]; allowed: 1"),
        (with_step(num_scheduled_tokens_padded={"a": 4, "b": 4}), "num_scheduled_tokens_padded of a decode is [4]"),
        (with_step(phase=Phase.PREFILL), "rows of a prefill is 2; allowed: 1"),
    ],
)
def test_a_decode_that_cannot_be_right_is_refused_and_nothing_runs(change: Change, message: str, steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, slot=0, blocks=[1]))
    runner.execute(steps.new("b", PROMPT, slot=1, blocks=[2]))
    before = memory(runner)
    with pytest.raises(InternalError, match=re.escape(message)):
        runner.execute(change(steps.decode("a", "b")))
    assert memory(runner) == before


def test_a_count_that_differs_from_the_executors_is_refused(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT))
    output = steps.decode("a")
    output.scheduled_cached_reqs.num_computed_tokens = [4]
    with pytest.raises(InternalError, match="num_computed_tokens of 'a' is 4; allowed: 3, what this executor computed"):
        runner.execute(output)


def test_a_decode_beyond_its_blocks_is_refused(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, blocks=[1]))
    runner.execute(steps.decode("a"))
    with pytest.raises(InternalError, match="tokens in row 0 is 5; allowed: at most 4, what its blocks hold"):
        runner.execute(steps.decode("a"))


def test_a_prefill_of_what_is_computed_is_refused(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, blocks=[1]))
    with pytest.raises(InternalError, match="phase of 'a' is prefill; allowed: decode"):
        runner.execute(steps.chunk("a", 1))


@pytest.mark.case("B12")
def test_prefill_and_decode_in_one_step_are_refused(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("a", PROMPT, slot=0, blocks=[1]))
    runner.execute(steps.new("b", list(range(20, 28)), slot=1, blocks=[2, 3], num_tokens=4))
    with pytest.raises(InternalError, match="phase of 'b' is decode; allowed: prefill, for it has tokens left"):
        runner.execute(steps.decode("a", "b"))


def test_a_random_number_follows_the_output_index(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner()
    seen: list[tuple[list[int], list[float]]] = []
    launch = runner.device.launch

    def record(inputs: Any) -> object:
        if inputs.sampling is not None:
            seen.append((inputs.sampling.num_outputs.tolist(), inputs.sampling.uniform.tolist()))
        return launch(inputs)

    monkeypatch.setattr(runner.device, "launch", record)
    runner.execute(steps.new("a", list(range(20, 25)), blocks=[1, 2], num_tokens=4))
    runner.execute(steps.chunk("a", 1))
    runner.execute(steps.decode("a"))
    assert seen == [([0], [10946269 / 2**24]), ([1], [11764387 / 2**24])]  # seed 0, from test_inputs
    assert np.float32(seen[0][1][0]) == seen[0][1][0]
