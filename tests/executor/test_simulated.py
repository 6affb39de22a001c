"""The simulated device: its arithmetic on paper, its memory, its refusals, its time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from executor_svc.devices.base import GraphKey, SamplingInputs, StepInputs
from executor_svc.devices.simulated import SimulatedDevice, SimulatedFaults, SimulatedLatencies, expected_tokens
from executor_svc.runner import NeuronModelRunner
from holdback.errors import ConfigError
from holdback.types import Phase, SamplingParams, TokenLogprobs
from tests.executor.builders import VOCAB_SIZE, Steps, build_device, build_runner, generate

PROMPT = [20, 21, 22]
# 20*1 + 22*2 + 24*3 = 136: 16 + 36. Then (52 + 3)*4 more, 356: 16 + 56. Then (72 + 4)*5 more, 736: 16 + 36.
ANSWER = [52, 72, 52]


def test_the_answer_is_worked_out_on_paper() -> None:
    assert expected_tokens(PROMPT, 3, VOCAB_SIZE) == ANSWER


def test_the_device_gives_the_answer_of_paper(steps: Steps) -> None:
    first = steps.new("r", PROMPT, blocks=[5, 9])
    assert generate(build_runner(), steps, first, 3) == ANSWER


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_every_length_around_a_block_border_is_right(length: int, steps: Steps) -> None:
    prompt = list(range(30, 30 + length))
    first = steps.new("r", prompt, blocks=[7, 3, 11, 2, 9], padded=8)
    assert generate(build_runner(), steps, first, 10) == expected_tokens(prompt, 10, VOCAB_SIZE)


def one_decode(device: SimulatedDevice, table: list[int], *, context: int, place: int) -> int:
    """The token of one decode row by hand, with its input from row 0 of `last_token`."""
    key = GraphKey(Phase.DECODE, 1, 32)
    sampling = SamplingInputs([SamplingParams()], np.array([1], np.int32), np.array([0.5], np.float32))
    block_table = np.array([table + [0] * (8 - len(table))], np.int32)
    inputs = StepInputs(
        key=key,
        positions=np.array([context - 1], np.int32),
        slot_mapping=np.array([place], np.int32),
        block_tables=block_table,
        context_lens=np.array([context], np.int32),
        num_tokens=1,
        slots=np.array([0], np.int32),
        sampling=sampling,
    )
    return int(device.collect(device.launch(inputs)).token_ids[0])


@pytest.mark.parametrize(
    ("table", "why"),
    [([9, 5], "blocks in another order"), ([5, 5], "a block twice"), ([5, 6], "a block of somebody else's")],
)
def test_a_wrong_block_table_gives_a_wrong_answer(table: list[int], why: str, steps: Steps) -> None:
    prompt = [20, 21, 22, 23, 24]
    for blocks, right in (([5, 9], True), (table, False)):
        runner = build_runner()
        runner.execute(Steps().new("r", prompt, blocks=[5, 9], padded=8))
        token = one_decode(runner.device, blocks, context=6, place=9 * 4 + 1)  # type: ignore[arg-type]
        assert (token == expected_tokens(prompt, 2, VOCAB_SIZE)[1]) is right, why


@pytest.mark.case("B26")
def test_a_decode_changes_the_places_of_its_live_rows_and_nothing_else(steps: Steps) -> None:
    runner = build_runner(num_blocks=65, seqs_buckets=[8])
    device = runner.device
    assert isinstance(device, SimulatedDevice)
    for slot in range(8):
        runner.execute(steps.new(f"r{slot}", [20 + slot, 30], slot=slot, blocks=[64 - slot]))
    device.kv_token_ids[0] = 99  # so that a write of zeros would show
    device.kv_token_ids[1:, 3] = 98
    before = device.kv_token_ids.copy(), device.kv_positions.copy()
    runner.execute(steps.decode("r2", "r5", finished=[f"r{slot}" for slot in (0, 1, 3, 4, 6, 7)]))
    for now, was in zip((device.kv_token_ids, device.kv_positions), before, strict=True):
        changed = np.argwhere(now[:65] != was[:65])
        assert changed.tolist() == [[59, 2], [62, 2]]


def test_kv_memory_starts_zeroed_and_is_zeroed_by_a_reset(steps: Steps) -> None:
    runner = build_runner()
    device = runner.device
    assert isinstance(device, SimulatedDevice)
    assert not device.kv_token_ids.any()
    runner.execute(steps.new("r", PROMPT))
    assert device.kv_token_ids.any()
    assert device.last_token[0] == 52
    runner.reset()
    assert not device.kv_token_ids.any()
    assert not device.kv_positions.any()
    assert not device.last_token.any()
    assert generate(runner, Steps(), Steps().new("r", PROMPT), 1) == ANSWER[:1]


def test_old_content_behind_the_visible_tokens_does_not_count(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("old", [90, 91, 92, 93], blocks=[5]))
    first = steps.new("r", PROMPT, blocks=[5], finished=["old"])
    assert generate(runner, steps, first, 1) == ANSWER[:1]


@pytest.mark.parametrize("key", [GraphKey(Phase.DECODE, 3, 32), GraphKey(Phase.PREFILL, 4, 16)])
def test_a_graph_that_is_not_declared_is_refused(key: GraphKey) -> None:
    device = build_device()
    inputs = StepInputs(
        key=key,
        positions=np.zeros(key.size, np.int32),
        slot_mapping=np.zeros(key.size, np.int32),
        block_tables=np.zeros((1, 8), np.int32),
        context_lens=np.zeros(1, np.int32),
        num_tokens=1,
        slots=np.zeros(1, np.int32),
    )
    with pytest.raises(ValueError, match="allowed: one of the 5 declared"):
        device.launch(inputs)


def test_an_array_of_another_shape_or_type_is_refused() -> None:
    device = build_device()
    good = {
        "key": GraphKey(Phase.PREFILL, 4, 32),
        "input_ids": np.zeros(4, np.int32),
        "positions": np.zeros(4, np.int32),
        "slot_mapping": np.full(4, -1, np.int32),
        "block_tables": np.zeros((1, 8), np.int32),
        "context_lens": np.ones(1, np.int32),
        "num_tokens": 4,
        "slots": np.zeros(1, np.int32),
    }
    device.launch(StepInputs(**good))  # type: ignore[arg-type]
    for change in ({"positions": np.zeros(3, np.int32)}, {"slots": np.zeros(1, np.int64)}, {"input_ids": None}):
        with pytest.raises(ValueError, match=next(iter(change))):
            device.launch(StepInputs(**(good | change)))  # type: ignore[arg-type]


def test_context_buckets_multiply_the_graphs_and_prefills_have_one_without_context() -> None:
    keys = build_device(context_buckets=(16, 32)).declared_graphs()
    assert keys[:3] == [GraphKey(Phase.PREFILL, 4, 0), GraphKey(Phase.PREFILL, 4, 16), GraphKey(Phase.PREFILL, 4, 32)]
    assert len(keys) == 2 * 3 + 3 * 2


def test_a_vocabulary_that_leaves_no_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 16; allowed: at least 17"):
        build_device(vocab_size=16)


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 8, of which 7 are usable"):
        build_device(num_blocks=8)


def test_a_poisoned_row_fails_and_its_neighbours_do_not(steps: Steps) -> None:
    runner = build_runner(faults=SimulatedFaults(nan_token_id=99))
    bad = runner.execute(steps.new("bad", [20, 99], slot=0, blocks=[1]))
    assert (bad.sampled_token_ids, bad.failed_rows) == ([0], [0])
    runner.execute(steps.new("good", PROMPT, slot=1, blocks=[2]))
    both = runner.execute(steps.decode("good", "bad"))
    assert (both.sampled_token_ids, both.failed_rows) == ([ANSWER[1], 0], [1])


def test_a_step_fails_on_the_token_that_was_chosen_for_it(steps: Steps) -> None:
    runner = build_runner(faults=SimulatedFaults(error_token_id=ANSWER[1]))
    first = steps.new("r", PROMPT, blocks=[1, 2])
    assert generate(runner, steps, first, 2) == ANSWER[:2]
    with pytest.raises(RuntimeError, match="fails on token 72"):
        runner.execute(steps.decode("r"))


def test_a_step_behind_a_failed_one_fails_too_until_a_reset(steps: Steps) -> None:
    runner = build_runner(faults=SimulatedFaults(error_token_id=99))
    failed = runner.launch(steps.new("bad", [98, 99], slot=0, blocks=[1]))
    behind = runner.launch(steps.new("good", PROMPT, slot=1, blocks=[2]))
    with pytest.raises(RuntimeError, match="fails on token 99"):
        runner.collect(failed)
    with pytest.raises(RuntimeError, match="failed in a step before this one"):
        runner.collect(behind)
    runner.reset()
    assert generate(runner, Steps(), Steps().new("good", PROMPT), 1) == ANSWER[:1]


def test_a_step_reads_its_arrays_when_it_runs_and_not_when_it_is_launched() -> None:
    device = build_device()
    inputs = StepInputs(
        key=GraphKey(Phase.PREFILL, 4, 32),
        input_ids=np.array([*PROMPT, 0], np.int32),
        positions=np.array([0, 1, 2, 2], np.int32),
        slot_mapping=np.array([4, 5, 6, -1], np.int32),
        block_tables=np.array([[1, *[0] * 7]], np.int32),
        context_lens=np.array([3], np.int32),
        num_tokens=3,
        slots=np.zeros(1, np.int32),
        sampling=SamplingInputs([SamplingParams()], np.zeros(1, np.int32), np.zeros(1, np.float32)),
    )
    assert device.collect(device.launch(inputs)).token_ids.tolist() == ANSWER[:1]
    device.reset()
    ticket = device.launch(inputs)
    assert not device.kv_token_ids.any()
    inputs.slot_mapping[:] = [8, 9, 10, -1]  # as if it were the next step's
    assert device.collect(ticket).token_ids.tolist() != ANSWER[:1]


def test_a_count_of_outputs_that_is_not_the_devices_is_refused(steps: Steps) -> None:
    runner = build_runner()
    runner.execute(steps.new("r", PROMPT, outputs=[50], blocks=[1, 2]))
    runner.requests.num_outputs[0] = 1
    with pytest.raises(ValueError, match="num_outputs of slot 0 is 1; allowed: 2, what was sampled"):
        runner.execute(steps.decode("r"))


def test_a_ticket_out_of_order_or_used_twice_is_refused() -> None:
    runner = build_runner()
    device, steps = runner.device, Steps()
    first, second = runner.launch(steps.new("a", PROMPT)), runner.launch(steps.decode("a"))
    for ticket in (second.ticket, None):
        with pytest.raises((ValueError, TypeError), match="ticket is"):
            device.collect(ticket)
    device.collect(first.ticket)
    with pytest.raises(ValueError, match="ticket is not that of the oldest launched step"):
        device.collect(first.ticket)


def test_a_step_hangs_until_the_device_is_closed(steps: Steps) -> None:
    runner = build_runner(faults=SimulatedFaults(hang_token_id=21))
    thread = threading.Thread(target=runner.execute, args=(steps.new("r", PROMPT),), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    runner.device.close()
    thread.join(60)
    assert not thread.is_alive()


class FakeClock:
    """Time that passes only while somebody sleeps."""

    now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_steps_take_their_time_one_after_the_other(steps: Steps) -> None:
    clock = FakeClock()
    base = build_device()
    latencies = SimulatedLatencies(prefill_us_per_token=1000.0, table={GraphKey(Phase.DECODE, 1, 32): 20_000})
    device = SimulatedDevice(base.model, base.limits, latencies, clock_s=lambda: clock.now_s, sleep=clock.sleep)
    runner = NeuronModelRunner(device)
    assert runner.execute(steps.new("r", PROMPT, blocks=[1, 2])).timings.device_us == 4000
    assert clock.now_s == pytest.approx(100.004)
    first, second = runner.launch(steps.decode("r")), runner.launch(steps.decode("r"))
    assert clock.now_s == pytest.approx(100.004)  # neither launch waits
    clock.sleep(0.005)  # the host's own work happens while the device works
    assert runner.collect(first).timings.device_us == 20_000
    assert clock.now_s == pytest.approx(100.024)
    runner.collect(second)
    assert clock.now_s == pytest.approx(100.044)


def test_log_probabilities_are_given_to_the_rows_that_ask(steps: Steps) -> None:
    runner = build_runner()
    asking = runner.execute(steps.new("a", PROMPT, slot=0, sampling=SamplingParams(num_logprobs=1)))
    assert asking.logprobs == [TokenLogprobs(52, 0.0, (52,), (0.0,))]
    assert runner.execute(steps.new("b", PROMPT, slot=1, blocks=[2])).logprobs == []
    assert runner.execute(steps.decode("b", "a")).logprobs == [None, TokenLogprobs(72, 0.0, (72,), (0.0,))]


def test_a_full_decode_with_long_contexts_costs_little() -> None:
    device = build_device(
        block_size=16, num_blocks=20_001, max_model_len=1024, prefill_buckets=(512,), seqs_buckets=(256,)
    )
    tables = np.arange(1, 1 + 256 * 64, dtype=np.int32).reshape(256, 64)
    lengths = np.full(256, 1000, np.int64)
    fastest = min(_processor_seconds(lambda: device._context_sums(tables, lengths)) for _ in range(5))
    assert fastest < 0.005


def _processor_seconds(call: object) -> float:
    assert callable(call)
    started = time.thread_time()
    call()
    return time.thread_time() - started
