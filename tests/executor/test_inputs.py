"""Static shapes: what is padded with what, and where each token's K and V go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.devices.base import GraphKey, StepInputs
from executor_svc.inputs import DecodeRows, InputBuilder
from executor_svc.random_numbers import mix_seed, uniform_numbers
from executor_svc.requests import RunningRequests
from holdback.types import NewRequestData, Phase, RequestSpec, SamplingParams
from tests.executor.builders import build_device

PADDING_SLOT = 4  # max_num_seqs of the device below


def builder_with(*requests: NewRequestData) -> tuple[InputBuilder, RunningRequests]:
    device = build_device()  # blocks of 4, 32 tokens at most, 4 slots
    running = RunningRequests(device.limits, device.model)
    for request in requests:
        running.add(request)
    return InputBuilder(device.limits, running), running


def request(
    prompt: list[int], slot: int, blocks: list[int], *, computed: int = 0, outputs: tuple[int, ...] = (), seed: int = 0
) -> NewRequestData:
    spec = RequestSpec(f"r{slot}", prompt, SamplingParams(seed=seed), output_token_ids=outputs)
    return NewRequestData(f"r{slot}", spec, slot, blocks, computed)


def prefill(builder: InputBuilder, slot: int, num_tokens: int, size: int) -> StepInputs:
    return builder.build_prefill(GraphKey(Phase.PREFILL, size, 32), slot, num_tokens)


def decode(builder: InputBuilder, rows: list[int], size: int) -> StepInputs:
    """A decode of the requests in these slots."""
    requests = builder._requests
    batch = DecodeRows(requests, [f"r{slot}" for slot in rows], size)
    return builder.build_decode(GraphKey(Phase.DECODE, size, 32), batch, requests.num_computed_tokens[rows])


def test_a_prefill_chunk_is_padded_to_its_bucket() -> None:
    builder, _ = builder_with(request([11, 12, 13, 14, 15], 2, [3, 7]))
    inputs = prefill(builder, slot=2, num_tokens=5, size=8)
    assert inputs.input_ids is not None
    assert inputs.input_ids.tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert inputs.slot_mapping.tolist() == [12, 13, 14, 15, 28, -1, -1, -1]
    assert inputs.block_tables.tolist() == [[3, 7, 0, 0, 0, 0, 0, 0]]
    assert inputs.context_lens.tolist() == [5]
    assert inputs.num_tokens == 5
    assert inputs.slots.tolist() == [2]


def test_a_chunk_that_leaves_tokens_samples_nothing_and_writes_no_token() -> None:
    builder, _ = builder_with(request([11, 12, 13, 14, 15], 2, [3, 7]))
    inputs = prefill(builder, slot=2, num_tokens=4, size=4)
    assert inputs.sampling is None
    assert inputs.slots.tolist() == [PADDING_SLOT]


def test_a_later_chunk_starts_where_the_one_before_ended() -> None:
    builder, running = builder_with(request([11, 12, 13, 14, 15, 16, 17], 0, [3, 5]))
    running.num_computed_tokens[0] = 4
    inputs = prefill(builder, slot=0, num_tokens=3, size=4)
    assert inputs.input_ids is not None
    assert inputs.input_ids.tolist() == [15, 16, 17, 0]
    assert inputs.positions.tolist() == [4, 5, 6, 6]
    assert inputs.slot_mapping.tolist() == [20, 21, 22, -1]
    assert inputs.context_lens.tolist() == [7]
    assert inputs.sampling is not None


@pytest.mark.case("B22")
def test_a_prefix_hit_starts_behind_what_is_computed() -> None:
    builder, _ = builder_with(request(list(range(20, 30)), 1, [6, 2, 9], computed=8))
    inputs = prefill(builder, slot=1, num_tokens=2, size=4)
    assert inputs.input_ids is not None
    assert inputs.input_ids.tolist() == [28, 29, 0, 0]
    assert inputs.positions.tolist() == [8, 9, 9, 9]
    assert inputs.slot_mapping.tolist() == [36, 37, -1, -1]
    assert inputs.block_tables[0, :4].tolist() == [6, 2, 9, 0]
    assert inputs.context_lens.tolist() == [10]


def test_outputs_of_an_earlier_run_are_prefilled_and_counted() -> None:
    builder, _ = builder_with(request([11, 12], 0, [1, 2], outputs=(50, 51, 52), seed=9))
    inputs = prefill(builder, slot=0, num_tokens=5, size=8)
    assert inputs.input_ids is not None
    assert inputs.input_ids.tolist() == [11, 12, 50, 51, 52, 0, 0, 0]
    assert inputs.sampling is not None
    assert inputs.sampling.num_outputs.tolist() == [3]
    assert (
        inputs.sampling.uniform.tolist() == uniform_numbers(np.array([mix_seed(9)], np.uint64), np.array([3])).tolist()
    )


@pytest.mark.case("B26")
def test_padding_rows_of_a_decode_write_nowhere_and_read_the_null_block() -> None:
    builder, running = builder_with(request([11, 12, 13], 3, [5]), request([21, 22, 23, 24, 25, 26], 1, [9, 4]))
    running.num_computed_tokens[[3, 1]] = (3, 6)
    running.num_outputs[[3, 1]] = 1
    inputs = decode(builder, [1, 3], size=4)
    assert inputs.input_ids is None
    assert inputs.positions.tolist() == [6, 3, 0, 0]
    assert inputs.slot_mapping.tolist() == [18, 23, -1, -1]
    assert inputs.block_tables.tolist() == [[9, 4, *[0] * 6], [5, *[0] * 7], [0] * 8, [0] * 8]
    assert inputs.context_lens.tolist() == [7, 4, 0, 0]
    assert inputs.slots.tolist() == [1, 3, PADDING_SLOT, PADDING_SLOT]
    assert inputs.num_tokens == 2
    assert inputs.sampling is not None
    assert inputs.sampling.num_outputs.tolist() == [1, 1, 0, 0]
    assert inputs.sampling.params[2:] == [None, None]


@pytest.mark.case("B26")
def test_nothing_of_a_larger_step_is_left_in_a_smaller_one() -> None:
    builder, running = builder_with(*(request([11, 12, 13], slot, [slot + 5]) for slot in range(4)))
    running.num_computed_tokens[:] = 3
    for _ in range(2):
        decode(builder, [0, 1, 2, 3], size=4)
    inputs = decode(builder, [2], size=4)
    assert inputs.slot_mapping.tolist() == [31, -1, -1, -1]
    assert inputs.block_tables[1:].tolist() == [[0] * 8] * 3
    assert inputs.context_lens.tolist() == [4, 0, 0, 0]
    assert inputs.positions.tolist() == [3, 0, 0, 0]


def test_nothing_of_a_finished_request_is_left_in_the_block_table_of_the_next() -> None:
    builder, running = builder_with(request([11, 12, 13, 14, 15], 0, [5, 6]))
    running.remove("r0")
    running.add(request([31, 32], 0, [7]))
    assert prefill(builder, slot=0, num_tokens=2, size=4).block_tables.tolist() == [[7, *[0] * 7]]


def test_every_shape_and_type_is_static() -> None:
    builder, running = builder_with(request([11, 12, 13], 0, [5]))
    inputs = prefill(builder, slot=0, num_tokens=3, size=8)
    running.num_computed_tokens[0] = 3
    batch = decode(builder, [0], size=2)
    assert inputs.block_tables.shape == (1, 8)
    assert batch.block_tables.shape == (2, 8)
    for step, size in ((inputs, 8), (batch, 2)):
        assert step.positions.shape == step.slot_mapping.shape == (size,)
        assert {step.positions.dtype, step.slot_mapping.dtype, step.block_tables.dtype} == {np.dtype(np.int32)}
        assert {step.context_lens.dtype, step.slots.dtype} == {np.dtype(np.int32)}


def test_the_arrays_of_one_step_stay_while_the_next_is_built_and_are_used_again_after() -> None:
    builder, running = builder_with(request([11, 12, 13], 0, [5]), request([21, 22], 1, [6]))
    running.num_computed_tokens[:2] = (3, 2)
    first = decode(builder, [0], size=1)
    kept = first.positions.copy(), first.slot_mapping.copy(), first.block_tables.copy()
    decode(builder, [1], size=1)
    assert (first.positions == kept[0]).all()
    assert (first.slot_mapping == kept[1]).all()
    assert (first.block_tables == kept[2]).all()
    assert decode(builder, [0], size=1).positions.base is first.positions.base


def test_a_row_given_to_another_request_does_not_reach_into_a_built_step() -> None:
    builder, running = builder_with(request([11, 12, 13], 0, [5]))
    running.num_computed_tokens[0] = 3
    inputs = decode(builder, [0], size=1)
    running.remove("r0")
    running.add(request([31, 32], 0, [7]))
    assert inputs.block_tables[0, 0] == 5
    assert inputs.slot_mapping.tolist() == [23]


def test_a_step_with_the_rows_of_the_one_before_gets_the_blocks_that_came_since() -> None:
    builder, running = builder_with(request([11, 12, 13], 0, [5]), request([21, 22, 23], 1, [6]))
    running.num_computed_tokens[:2] = 3
    rows = DecodeRows(running, ["r0", "r1"], 2)

    def step() -> list[list[int]]:
        inputs = builder.build_decode(GraphKey(Phase.DECODE, 2, 32), rows, running.num_computed_tokens[:2])
        running.num_computed_tokens[:2] += 1
        return [inputs.block_tables[:, :4].tolist(), inputs.slot_mapping.tolist()]

    assert step() == [[[5, 0, 0, 0], [6, 0, 0, 0]], [23, 27]]
    running.append_blocks(0, [7])
    running.append_blocks(1, [8, 9])
    assert step() == [[[5, 7, 0, 0], [6, 8, 9, 0]], [28, 32]]
    assert step() == [[[5, 7, 0, 0], [6, 8, 9, 0]], [29, 33]]
    running.append_blocks(0, [2])
    assert step() == [[[5, 7, 2, 0], [6, 8, 9, 0]], [30, 34]]
    assert step() == [[[5, 7, 2, 0], [6, 8, 9, 0]], [31, 35]]


def test_random_numbers_made_ahead_are_those_of_each_output() -> None:
    _, running = builder_with(request([11], 2, [5], seed=42), request([21], 0, [6], outputs=(50, 51), seed=7))
    rows = DecodeRows(running, ["r0", "r2"], 4)
    seeds = np.array([mix_seed(7), mix_seed(42)], np.uint64)
    for step in range(40):
        counted = np.array([2 + step, step], np.int64)
        assert rows.uniform(counted).tolist() == [*uniform_numbers(seeds, counted).tolist(), 0.0, 0.0]


Prefill = tuple[int]
Decode = tuple[list[int], list[int]]

prefills = st.tuples(st.integers(0, 3))
decodes = st.tuples(
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), st.lists(st.integers(0, 3), max_size=2)
)


@given(st.lists(st.one_of(prefills, decodes, st.just("again")), max_size=30))
def test_whatever_was_built_before_a_step_is_built_as_the_first_one(moves: list[Prefill | Decode | str]) -> None:
    """A move is a prefill of a slot, a decode of slots in that order after more blocks for some, or the same again."""
    device = build_device(max_model_len=256, num_blocks=257, block_size=4)
    running = RunningRequests(device.limits, device.model)
    for slot in range(4):
        running.add(request([11, 12, 13], slot, [slot + 1], seed=slot))
    builder, rows, blocks = InputBuilder(device.limits, running), None, iter(range(5, 257))
    for move in moves:
        if isinstance(move, tuple) and len(move) == 1:
            running.num_computed_tokens[move[0]] = 0
            built, first = (prefill(each, move[0], 3, 4) for each in (builder, InputBuilder(device.limits, running)))
            running.num_computed_tokens[move[0]], running.num_outputs[move[0]] = 3, 1
            assert_equal(built, first)
            rows = None
            continue
        if move != "again" or rows is None:
            slots, growing = move if isinstance(move, tuple) else ([2, 0], [])
            rows = DecodeRows(running, [f"r{slot}" for slot in slots], 4)
            for slot in growing:
                running.append_blocks(slot, [next(blocks)])
        for slot in rows.slots.tolist():
            if running.num_blocks[slot] * 4 <= running.num_computed_tokens[slot]:
                running.append_blocks(slot, [next(blocks)])
        key, computed = GraphKey(Phase.DECODE, 4, 256), running.num_computed_tokens[rows.slots]
        built = builder.build_decode(key, rows, computed)
        anew = DecodeRows(running, rows.req_ids, 4)
        assert_equal(built, InputBuilder(device.limits, running).build_decode(key, anew, computed))
        running.num_computed_tokens[rows.slots] += 1
        running.num_outputs[rows.slots] += 1


def assert_equal(built: StepInputs, first: StepInputs) -> None:
    for name in ("positions", "slot_mapping", "block_tables", "context_lens", "slots"):
        assert getattr(built, name).tolist() == getattr(first, name).tolist(), name
    assert built.sampling is not None
    assert first.sampling is not None
    assert built.sampling.params == first.sampling.params
    assert built.sampling.num_outputs.tolist() == first.sampling.num_outputs.tolist()
    assert built.sampling.uniform.tolist() == first.sampling.uniform.tolist()
